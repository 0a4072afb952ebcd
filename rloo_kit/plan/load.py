"""The inputs of the arithmetic: from a run, and from the machine that it has to fit."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rloo_kit.config.checks import CLOSE_TOKENS
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan.corrections import UNMEASURED, find_factors
from rloo_kit.plan.parts import Load, body_bytes, table_bytes
from rloo_kit.plan.result import Machine
from rloo_kit.plan.shapes import DYNAMIC_ENDING, ModelShape, find_shape, read_adapter, shape_of_config
from rloo_kit.system.environment import BACKEND_VARIABLE
from rloo_kit.system.gpu import GIB, find_gpus
from rloo_kit.system.memory import available_gib
from rloo_kit.system.processes import count_processes
from rloo_kit.system.versions import is_cpu_torch, is_importable

TOKENS_PER_PASS = (8192, 2048)  # on a GPU and on a CPU (`[is_cpu]`), if the file sets none and memory allows it
RESERVE_GIB = 0.8  # fragments of the allocator, and the desktop
CPU_RESERVE_GIB = 0.3
# Largest extra size of dynamic copies, as a share of the 4-bit model: Unsloth's blog "Dynamic 4-bit Quantization".
DYNAMIC_SHARE = 0.1


def find_machine(gpu_gib: float | None = None) -> Machine:
    """This process's GPU, another one with `gpu_gib`, or the machine's memory; see `plan_vram`."""
    if gpu_gib is not None:
        if not 0 < gpu_gib < float("inf"):
            raise ConfigError(f"gpu_gib is {gpu_gib}; set a GPU's memory in GiB, above 0")
        return Machine(f"a GPU with {gpu_gib:.4g} GiB", gpu_gib, RESERVE_GIB, True, is_here=False)
    gpu = None if is_cpu_torch() else find_gpus().gpu
    if gpu is not None:
        return Machine(gpu.name, gpu.memory_gib, RESERVE_GIB, True, capability=gpu.capability)
    return Machine("the CPU", available_gib(), CPU_RESERVE_GIB, False)


def read_load(
    run: RunConfig, machine: Machine, config: Mapping[str, Any] | None = None, engine: str | None = None
) -> Load:
    """The inputs of the arithmetic for a run; see `plan_vram`. `engine` overrides `rollout.engine`; auto is read as the
    backend's engine without vLLM."""
    model, rloo = run.model, run.rloo
    shape = find_shape(run) if config is None else shape_of_config(config, "the loaded model")
    rank, targets, is_continued = _find_adapter(run, shape)
    fused = uses_unsloth(run, machine)
    by_machine = "float32" if model.lora is None or not machine.on_cuda else "bfloat16"
    is_wide = (by_machine if model.dtype == "auto" else model.dtype) == "float32"
    is_mixed = is_wide and machine.on_cuda and model.lora is None
    longest = rloo.max_completion_length
    if rloo.thinking_budget is not None and rloo.answer_budget is not None:
        budgets = rloo.thinking_budget + CLOSE_TOKENS.get(rloo.thinking_close, 1) + rloo.answer_budget
        longest = min(budgets, longest)
    engine = engine or run.rollout.engine
    if engine == "auto":
        engine = "generate" if fused or shape.delta else "native"
    vllm, share = run.rollout.vllm, run.rollout.vllm.gpu_memory_utilization
    offloads = fused and model.gradient_checkpointing == "unsloth"
    reference = "none"
    if rloo.beta > 0:
        copies = is_continued and rloo.reference == "start"
        reference = "model" if rank is None else "adapter" if copies else "none"
    load = Load(
        shape=shape,
        four_bit=model.load_in_4bit or shape.is_quantised,
        weight_bytes=4 if is_wide else 2,
        compute_bytes=4 if is_wide and not is_mixed else 2,
        lora_rank=rank,
        lora_targets=targets,
        optim=rloo.optim,
        checkpointing="offloaded" if offloads else "on" if model.gradient_checkpointing else "off",
        fused=fused,
        tokens_per_pass=1 if rloo.memory == "low" else rloo.tokens_per_pass or TOKENS_PER_PASS[not machine.on_cuda],
        whole_groups=rloo.memory == "fast" and rloo.beta > 0,
        reference=reference,
        prompt_tokens=run.data.max_prompt_length,
        completion_tokens=int(longest),
        num_generations=rloo.num_generations,
        completions=run.rloo.generation_batch_size // count_processes(),
        keeps_gradients=run.rloo.generation_batch_size < step_completions(run) * count_processes(),
        on_cuda=machine.on_cuda,
        engine=engine,
        float8_cache=engine == "vllm" and vllm.float8_kv_cache,
        max_length=model.max_seq_length,
        enforce_eager=vllm.enforce_eager,
        vllm_bytes=None if share is None else int(share * machine.total_gib * GIB),
        factors=find_factors(machine.on_cuda, fused),
        unmeasured=UNMEASURED,
    )
    unknown = int(DYNAMIC_SHARE * (body_bytes(load) + table_bytes(load))) if keeps_unknown_layers(run, shape) else 0
    return replace(load, unknown_bytes=unknown)


def keeps_unknown_layers(run: RunConfig, shape: ModelShape) -> bool:
    """Whether the checkpoint keeps layers in 16 bit, and the `config.json` that lists them is not on this machine."""
    return shape.source.startswith("the published") and run.model.name.endswith(DYNAMIC_ENDING)


def step_completions(run: RunConfig) -> int:
    """Completions per optimizer step in this process."""
    return run.rloo.per_device_train_batch_size * run.rloo.gradient_accumulation_steps


def _find_adapter(run: RunConfig, shape: ModelShape) -> tuple[int | None, tuple[str, ...], bool]:
    """Rank and matrices of the adapter, and whether it is continued; rank None if every parameter is trained."""
    if run.model.lora is None:
        return None, (), False
    settings = read_adapter(run.model.adapter or run.model.name)
    targets = settings.get("target_modules")
    if not isinstance(settings.get("r"), int) or not isinstance(targets, list):
        every = {name.rpartition(".")[2]: None for _, matrices in shape.matrices for name in matrices}
        return run.model.lora.r, tuple(run.model.lora.target_modules or every), run.model.adapter is not None
    return settings["r"], tuple(targets), True


def wanted_rows(run: RunConfig, load: Load) -> int | None:
    """Completions at once, as set in the file; with vLLM `rollout.rows` is another name for `max_num_seqs`."""
    wanted = run.rollout.vllm.max_num_seqs if load.engine == "vllm" else None
    return run.rollout.rows if wanted is None else wanted


def uses_unsloth(run: RunConfig, machine: Machine) -> bool:
    """Whether the Unsloth backend would run it; on a GPU elsewhere it is assumed to be installed."""
    if not machine.on_cuda or run.model.lora is None or run.model.backend == "transformers":
        return False
    if run.model.backend == "auto" and os.environ.get(BACKEND_VARIABLE, "").strip().lower() == "transformers":
        return False
    return not machine.is_here or is_importable("unsloth")
