"""Plan whether a run fits a GPU: GiB by part from `config.json` and the run's keys, without torch, weights, network.

First the machine and the workload, then the engine that samples, then the plan with its changes.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rloo_kit.config.checks import CLOSE_TOKENS
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan.parts import (
    Workload,
    body_bytes,
    largest,
    largest_pass,
    least_pool_bytes,
    list_parts,
    pool_bytes,
    rollout_gib,
    rows_at_once,
    share_bytes,
    table_bytes,
    training_gib,
    unmeasured_gib,
)
from rloo_kit.plan.shapes import DYNAMIC_ENDING, ModelShape, find_shape, shape_of_config
from rloo_kit.plan.speed import find_gpu, hours_on_cpu, run_time, step_completions
from rloo_kit.plan.tower import Tower
from rloo_kit.plan.vram_plan import EngineChoice, Machine, Remedy, VllmPlan, VramPlan
from rloo_kit.runs.find import read_adapter
from rloo_kit.sizes import TOKENS_PER_PASS
from rloo_kit.system.environment import BACKEND_VARIABLE
from rloo_kit.system.gpu import GIB, find_gpus
from rloo_kit.system.memory import available_gib
from rloo_kit.system.problems import Problem
from rloo_kit.system.processes import count_processes
from rloo_kit.system.versions import VLLM_INSTALL, in_range, installed_version, is_cpu_torch, is_importable

RESERVE_GIB = 0.8  # fragments of the allocator, and the desktop
CPU_RESERVE_GIB = 0.3
# Largest extra size of dynamic copies, as a share of the 4-bit model: Unsloth's blog "Dynamic 4-bit Quantization".
DYNAMIC_SHARE = 0.1
FLOAT8_CAPABILITY = (8, 0)  # from which vLLM has a KV cache in 8 bits
BITSANDBYTES_PLUGIN = "vllm_bnb_plugin"  # since vLLM 0.28 a separate package loads its 4-bit weights
STEP = 64  # tokens between proposed lengths of a completion, and of the shortest
# Shipped configs and the GB of the GPU that each is for, largest first. The wheel does not include them.
ON_GPU = (
    ("configs/qwen3_4b_thinking.yaml", 40),
    *((f"configs/evening_{size}gb.yaml", size) for size in (24, 16, 12, 8)),
)
MOST_WEIGHTS = 0.5e9  # on a CPU: 32 completions of 512 tokens, 200 times, take ten hours at 0.3 TFLOPS
MOST_HOURS = 24.0  # of a run without a GPU; a short test of two steps passes
ON_CPU = "configs/arithmetic_thinking.yaml"


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


def read_workload(
    run: RunConfig, machine: Machine, config: Mapping[str, Any] | None = None, engine: str | None = None
) -> Workload:
    """The inputs of the arithmetic for a run; see `plan_vram`. `engine` overrides `rollout.engine`; auto is read as the
    backend's engine without vLLM."""
    model, rloo, vllm = run.model, run.rloo, run.rollout.vllm
    shape = find_shape(run) if config is None else shape_of_config(config, "the loaded model")
    shape = replace(shape, tower=_loaded_tower(run, shape))
    on_cuda, fused, processes = machine.on_cuda, uses_unsloth(run, machine), count_processes()
    dtype = model.dtype if model.dtype != "auto" else "bfloat16" if on_cuda and model.lora else "float32"
    rank, targets, reference = _read_trained(run, shape)
    longest = int(rloo.max_completion_length)
    if rloo.thinking_budget is not None and rloo.answer_budget is not None and not rloo.has_tools:
        closing = CLOSE_TOKENS.get(rloo.thinking_close, 1)
        longest = min(rloo.thinking_budget + closing + rloo.answer_budget, longest)
    engine = engine or run.rollout.engine
    if engine == "auto":
        is_walked = not (shape.is_hybrid or shape.is_gemma3 or (fused and not shape.has_kernels))
        engine = "native" if is_walked else "generate"
    checkpointing = "on" if model.gradient_checkpointing else "off"
    share = vllm.gpu_memory_utilization
    work = Workload(
        shape=shape,
        four_bit=model.load_in_4bit or shape.is_quantised,
        weight_bytes=4 if dtype == "float32" else 2,
        compute_bytes=4 if dtype == "float32" and not (on_cuda and model.lora is None) else 2,
        lora_rank=rank,
        lora_targets=tuple(targets),
        optim=rloo.optim,
        checkpointing="offloaded" if fused and model.gradient_checkpointing == "unsloth" else checkpointing,
        fused=fused,
        tokens_per_pass=1 if rloo.memory == "low" else rloo.tokens_per_pass or TOKENS_PER_PASS[not on_cuda],
        whole_groups=rloo.memory == "fast" and rloo.beta > 0,
        reference=reference if rloo.beta > 0 else "none",
        prompt_tokens=run.data.max_prompt_length,
        completion_tokens=longest,
        num_generations=rloo.num_generations,
        completions=rloo.generation_batch_size // processes,
        on_cuda=on_cuda,
        engine=engine,
        float8_cache=engine == "vllm" and vllm.float8_kv_cache,
        max_length=model.max_seq_length,
        enforce_eager=vllm.enforce_eager,
        vllm_bytes=None if share is None else int(share * machine.total_gib * GIB),
        keeps_gradients=rloo.generation_batch_size < step_completions(run) * processes,
        max_pixels=run.data.max_pixels,
        trains_tower=model.lora is not None and model.lora.vision,
    )
    if model.name.endswith(DYNAMIC_ENDING):
        return replace(work, unknown_bytes=int(DYNAMIC_SHARE * (body_bytes(work) + table_bytes(work))))
    return work


def _loaded_tower(run: RunConfig, shape: ModelShape) -> Tower | None:
    """The vision tower that the run loads; None without one. Raises ConfigError if its shape is unknown."""
    wanted, tower = run.model.vision, shape.tower
    if wanted and tower is None:
        raise ConfigError(
            f"model.vision is true, but no vision tower of {run.model.name} is known ({shape.source}), so its memory "
            f"cannot be planned. Download its config.json: hf download {run.model.name} config.json, or set "
            "model.vision=null"
        )
    return tower if wanted or (wanted is None and tower and not tower.is_optional) else None


def _read_trained(run: RunConfig, shape: ModelShape) -> tuple[int | None, Iterable[str], str]:
    """The adapter's rank (None: every parameter is trained) and matrices, and what a KL penalty needs a copy of."""
    model = run.model
    if model.lora is None:
        return None, (), "model"
    targets = model.lora.target_modules or [name.rpartition(".")[2] for name in shape.matrices]
    rank, is_continued, settings = model.lora.r, model.adapter is not None, read_adapter(model.adapter or model.name)
    if isinstance(settings.get("r"), int) and isinstance(settings.get("target_modules"), list):
        rank, targets, is_continued = settings["r"], settings["target_modules"], True
    return rank, targets, "adapter" if is_continued and run.rloo.reference == "start" else "none"


def uses_unsloth(run: RunConfig, machine: Machine) -> bool:
    """Whether the Unsloth backend would run it; on a GPU elsewhere it is assumed to be installed."""
    if not machine.on_cuda or run.model.lora is None or run.model.backend == "transformers":
        return False
    if run.model.backend == "auto" and os.environ.get(BACKEND_VARIABLE, "").strip().lower() == "transformers":
        return False
    return not machine.is_here or is_importable("unsloth")


# ------------------------------------------------------------------------------------------ the engine


def plan_vllm(run: RunConfig, machine: Machine | None = None, config: Mapping[str, Any] | None = None) -> VllmPlan:
    """Divide the GPU between vLLM and training; a plan also if there is an obstacle. Keys of `rollout.vllm` and
    `rollout.rows` that are set are kept.

    Args:
        machine: what the run has to fit; None: this machine. config: see `plan_vram`, also for what is raised.
    """
    machine = machine or find_machine()
    work = read_workload(run, machine, config, engine="vllm")
    rows = rows_at_once(work, machine.usable_gib, run.rollout.rows)
    return VllmPlan(
        gpu_memory_utilization=min(share_bytes(work, rows) / GIB / machine.total_gib, 1.0),
        max_num_seqs=rows,
        pool_gib=pool_bytes(work, rows) / GIB,
        obstacle=_find_obstacle(run, work, rows, machine),
    )


def _find_obstacle(run: RunConfig, work: Workload, rows: int, machine: Machine) -> str | None:
    """Why vLLM cannot sample this run on this machine, or does not fit next to training, and the fix."""
    if (tower := work.shape.tower) is not None:
        has_grid = tower.image_size is None and not tower.is_optional  # Qwen3-VL, Qwen2.5-VL
        if run.rollout.engine != "vllm" or work.fused or run.model.load_in_4bit or work.trains_tower or not has_grid:
            return (
                "the run loads a vision tower, and images were tried with vLLM only for rollout.engine=vllm, Qwen3-VL "
                "and Qwen2.5-VL, model.backend=transformers, model.load_in_4bit=false and model.lora.vision=false; set "
                "rollout.engine=generate"
            )
    if machine.is_here and not is_importable("vllm"):
        return f"vLLM is not installed: {VLLM_INSTALL}"
    if problems := run.find_vllm_problems("vllm"):
        return problems[0]
    has_float8 = machine.capability is None or machine.capability >= FLOAT8_CAPABILITY
    if work.float8_cache and not has_float8:
        needed, found = (".".join(map(str, one or ())) for one in (FLOAT8_CAPABILITY, machine.capability))
        return (
            f"rollout.vllm.float8_kv_cache is true, which needs compute capability {needed}, and {machine.name} has "
            f"{found}; set rollout.vllm.float8_kv_cache=false"
        )
    version = installed_version("vllm") if work.four_bit and machine.is_here else None
    if version is not None and in_range(version, ">=0.28") and not is_importable(BITSANDBYTES_PLUGIN):
        return (
            f"vLLM {version} reads 4-bit weights through {BITSANDBYTES_PLUGIN}, which is not "
            f"installed: {VLLM_INSTALL}, or set model.load_in_4bit=false"
        )
    lean = work if run.rloo.tokens_per_pass else replace(work, tokens_per_pass=1)  # the pass is as small as needed
    share, pool, least = run.rollout.vllm.gpu_memory_utilization, pool_bytes(work, rows), least_pool_bytes(work)
    if pool < least:
        smaller = "" if work.float8_cache or not has_float8 else "rollout.vllm.float8_kv_cache=true or "
        return (
            f"rollout.vllm.gpu_memory_utilization is {share}, which leaves {pool / GIB:.2f} GiB for the KV cache, and "
            f"one row of {work.max_length} tokens takes {least / GIB:.2f}; set a larger share, {smaller}"
            "rollout.vllm.gpu_memory_utilization=null"
        )
    limit, rollout, training = machine.usable_gib, rollout_gib(work, 1), training_gib(lean, rows)
    if rollout <= limit and not training > limit >= training_gib(replace(lean, engine="generate")):
        return None
    fixes = [
        ("rollout.vllm.gpu_memory_utilization=null", rollout > limit and share is not None),
        ("rollout.vllm.float8_kv_cache=true", rollout > limit and not work.float8_cache and has_float8),
        ("rollout.vllm.enforce_eager=true", work.on_cuda and not work.enforce_eager),
        ("model.load_in_4bit=true", not work.four_bit),
        ("rloo.memory=low", training > limit and run.rloo.memory != "low"),
        ("rollout.engine=auto", True),
    ]
    helping = " or ".join(fix for fix, helps in fixes if helps)
    given = "" if share is None else f"rollout.vllm.gpu_memory_utilization is {share}; "
    return (
        f"{given}with one row of {work.max_length} tokens a rollout takes {rollout:.2f} GiB, and training while vLLM "
        f"{'sleeps' if work.on_cuda else 'stays'} {training:.2f}, of {limit:.2f} on {machine.name}; set {helping}"
    )


def plan_engine(
    run: RunConfig, machine: Machine | None = None, config: Mapping[str, Any] | None = None
) -> EngineChoice:
    """The engine of `rollout.engine`; auto takes vLLM on a CUDA GPU if it is installed and fits.

    A GPU elsewhere is assumed to have what `make setup` installs: Unsloth, not vLLM. Arguments and errors as in
    `plan_vllm`. An explicit `vllm` is returned even if `VllmPlan.obstacle` is set.
    """
    if run.rollout.engine != "auto":
        return EngineChoice(run.rollout.engine, f"rollout.engine is {run.rollout.engine}")
    machine = machine or find_machine()
    name = read_workload(run, machine, config).engine
    if not machine.on_cuda:
        return EngineChoice(name, "without a CUDA GPU")
    plan = plan_vllm(run, machine, config)
    obstacle = plan.obstacle
    if obstacle is None and not machine.is_here:
        obstacle = "assumed not installed on another machine, rollout.engine=vllm plans for it"
    if obstacle is None:
        return EngineChoice("vllm", f"installed, and {plan.max_num_seqs} completions at once fit")
    backend = "Unsloth" if uses_unsloth(run, machine) else "transformers"
    return EngineChoice(name, f"{backend}; not vLLM: {obstacle.partition('; set ')[0]}")


# ------------------------------------------------------------------------------------------ the plan


def plan_vram(
    run: RunConfig, gpu_gib: float | None = None, config: Mapping[str, Any] | None = None, engine: str | None = None
) -> VramPlan:
    """Plan a run's memory.

    Args:
        gpu_gib: memory in GiB of another NVIDIA GPU to plan for; None takes this machine's GPU (its whole memory) or,
            without one, the memory that this process may use.
        config: the content of the model's `config.json`; None looks for it (`find_shape`).
        engine: of a policy that is already loaded; None takes `rollout.engine`, where auto chooses by what fits.

    Raises ConfigError if the model's shape is unknown, or gpu_gib is not above 0.
    """
    machine = find_machine(gpu_gib)
    choice = EngineChoice(engine, "the loaded model's") if engine else plan_engine(run, machine, config)
    work = read_workload(run, machine, config, choice.name)
    limit = machine.usable_gib
    rows = rows_at_once(work, limit, run.rollout.rows)
    if run.rloo.tokens_per_pass is None:
        work = replace(work, tokens_per_pass=largest_pass(work, limit, rows))
    rollout, training = rollout_gib(work, rows), training_gib(work, rows)
    peak, part = max((rollout, "rollout"), (training, "training"))
    no_gpu = None
    if not machine.on_cuda and work.shape.num_weights > MOST_WEIGHTS:
        no_gpu = Problem(
            "machine",
            f"No GPU: {run.model.name} has {work.shape.size}, and a step takes minutes to hours on a CPU",
            f"take a machine with a GPU (`rloo-kit plan FILE --gpu-gib N` says what fits), or {_instead(machine)}",
            level="error" if hours_on_cpu(run, work) > MOST_HOURS or peak > limit else "warning",
        )
    gpu = find_gpu(machine.name, machine.total_gib) if machine.on_cuda and work.engine != "server" else None
    return VramPlan(
        run=run.run.name or "a run without a name",
        model=f"{run.model.name}, {work.shape.size} in {4 if work.four_bit else 8 * work.weight_bytes}-bit",
        machine=machine,
        engine=choice,
        vllm=plan_vllm(run, machine, config) if choice.name == "vllm" else None,
        step=None if gpu is None else run_time(run, work, rows, gpu),
        parts=tuple(list_parts(work, rows)),
        rollout_gib=rollout,
        training_gib=training,
        rows=rows,
        completions=work.completions,
        tokens_per_pass=work.pass_tokens,
        margin_gib=unmeasured_gib(work, peak, part) + work.unknown_bytes / GIB,
        no_gpu=no_gpu,
        changes=() if peak <= limit else tuple(find_remedies(run, work, rows, limit)),
    )


def find_machine_problem(run: RunConfig) -> Problem | None:
    """A large model without a GPU, or too little memory; None if there is no problem or the model's shape is unknown.

    An error if the run cannot fit, whatever is changed, or takes too long. Takes a fraction of a second, without torch.
    """
    try:
        plan = plan_vram(run)
    except ConfigError:
        return None
    if plan.no_gpu is not None or plan.headroom_gib >= 0:
        return plan.no_gpu
    takes = f"{plan.model} does not fit: {plan.binds} takes {plan.peak_gib:.1f} GiB at full length, and "
    found = f"{takes}{plan.machine.name} has {plan.machine.usable_gib:.1f}"
    if plan.changes and plan.changes[-1].fits:
        changes = " ".join(change.override for change in plan.changes)
        return Problem("machine", found, f"set {changes}", level="warning")
    return Problem("machine", found, _instead(plan.machine))


# ------------------------------------------------------------------------------------------ what to change


def find_remedies(run: RunConfig, work: Workload, rows: int, limit: float) -> Iterator[Remedy]:
    """Changes that bring the run below the limit, cheapest first, until it fits; without those that do not help."""
    wanted = run.rollout.rows  # from the file; None is planned again after each change
    rollout, training = rollout_gib(work, rows), training_gib(work, rows)
    for key, value, changed in _candidates(run, work, limit):
        if key == "rollout.rows":
            wanted = None
            value = rows_at_once(changed, limit)
        rows = rows_at_once(changed, limit, wanted)
        after = rollout_gib(changed, rows), training_gib(changed, rows)
        if (rollout > limit and after[0] < rollout) or (training > limit and after[1] < training):
            rollout, training = after
            yield Remedy(key, value, rollout, training, max(after) <= limit)
            if max(after) <= limit:
                return


def _candidates(run: RunConfig, work: Workload, limit: float) -> Iterator[tuple[str, Any, Workload]]:
    """(key, value, work with this and all earlier changes): what costs time, precision, then what is learnt."""
    if run.rollout.rows is not None:
        yield "rollout.rows", 1, work
    if run.rloo.memory != "low":
        work = replace(work, tokens_per_pass=1, whole_groups=False)
        yield "rloo.memory", "low", work
    if not work.four_bit and work.lora_rank is not None:
        work = replace(work, four_bit=True)
        yield "model.load_in_4bit", True, work

    def fits(steps: int) -> bool:
        """Whether a completion of so many STEPs fits, one row at a time."""
        cut = replace(work, completion_tokens=steps * STEP)
        return max(rollout_gib(cut, 1), training_gib(cut)) <= limit

    tokens = largest(1, max(work.completion_tokens // STEP, 1), fits) * STEP
    less = (run.rloo.thinking_budget or 0) - (work.completion_tokens - tokens)
    if tokens < work.completion_tokens:
        is_budget = run.rloo.answer_budget is not None and not run.rloo.has_tools and less > 0
        key, value = ("rloo.thinking_budget", less) if is_budget else ("rloo.max_completion_length", tokens)
        yield key, value, replace(work, completion_tokens=tokens)


def _instead(machine: Machine) -> str:
    """What else to train: the largest shipped config that fits this GPU, without a GPU the embedded model's."""
    config = fitting_config(machine)
    return f"train {config}, which fits this machine" if config else "take a smaller model or a larger GPU"


def fitting_config(machine: Machine) -> str | None:
    """The shipped config for this machine: the largest that fits its GPU; without a GPU the embedded model's."""
    if not machine.on_cuda:
        return ON_CPU
    return next((file for file, size in ON_GPU if size * 1e9 / GIB <= 1.01 * machine.total_gib), None)
