"""Whether a run fits this GPU: GiB by part from `config.json` and the run's keys; no torch, weights or network."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rloo_kit.config.checks import CLOSE_TOKENS
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan import parts
from rloo_kit.plan.corrections import correction, load_corrections
from rloo_kit.plan.parts import ELSEWHERE, Load
from rloo_kit.plan.result import Machine, Part, Remedy, VramPlan
from rloo_kit.plan.shapes import DYNAMIC_ENDING, find_shape, read_adapter, shape_of_config
from rloo_kit.system.environment import BACKEND_VARIABLE
from rloo_kit.system.gpu import GIB, find_gpus
from rloo_kit.system.memory import available_gib
from rloo_kit.system.processes import count_processes
from rloo_kit.system.versions import is_cpu_torch, is_importable

TOKENS_PER_PASS = (8192, 2048)  # on a GPU and on a CPU (`[is_cpu]`), where the file is silent and memory allows it
RESERVE_GIB = 0.8  # fragments of the allocator, and the desktop
CPU_RESERVE_GIB = 0.3
SHORTEST, STEP = 64, 64  # of the completions that are proposed, in tokens


def plan_vram(run: RunConfig, gpu_gib: float | None = None, config: Mapping[str, Any] | None = None) -> VramPlan:
    """Plan a run's memory.

    Args:
        gpu_gib: memory in GiB of another NVIDIA GPU to plan for; None takes this machine's GPU (its whole memory) or,
            without one, the memory that this process may use.
        config: the content of the model's `config.json`; None looks for it (`find_shape`).

    Returns:
        the plan; it prints as a table.

    Raises:
        ConfigError: nothing says what shape the model has, or gpu_gib is not above 0.
    """
    machine = find_machine(gpu_gib)
    load = read_load(run, machine, config)
    limit = machine.usable_gib
    rows = min(run.rollout.rows or largest_rows(load, limit), load.completions)
    if run.rloo.tokens_per_pass is None:
        load = replace(load, tokens_per_pass=largest_pass(load, limit))
    rollout, training = rollout_gib(load, rows), training_gib(load)
    fits = max(rollout, training) <= limit
    return VramPlan(
        run=run.run.name or "a run without a name",
        model=_describe(run, load),
        machine=machine,
        parts=tuple(_list_parts(load, rows)),
        rollout_gib=rollout,
        training_gib=training,
        rows=rows,
        completions=load.completions,
        tokens_per_pass=load.pass_tokens,
        changes=() if fits else tuple(_find_changes(run, load, rows, limit)),
        notes=tuple(_find_notes(run, load, rows, limit, machine)),
    )


def find_machine(gpu_gib: float | None = None) -> Machine:
    """This process's GPU, another one with `gpu_gib`, or the machine's memory; see `plan_vram`."""
    if gpu_gib is not None:
        if not 0 < gpu_gib < float("inf"):
            raise ConfigError(f"gpu_gib is {gpu_gib}; it is a GPU's memory in GiB, a number above 0")
        return Machine(f"a GPU with {gpu_gib:.4g} GiB", gpu_gib, RESERVE_GIB, True, is_here=False)
    gpu = None if is_cpu_torch() else find_gpus().gpu
    if gpu is not None:
        return Machine(gpu.name, gpu.memory_gib, RESERVE_GIB, True)
    return Machine("the CPU", available_gib(), CPU_RESERVE_GIB, False)


def read_load(run: RunConfig, machine: Machine, config: Mapping[str, Any] | None = None) -> Load:
    """What the arithmetic reads of a run; see `plan_vram`."""
    model, rloo = run.model, run.rloo
    shape = find_shape(run) if config is None else shape_of_config(config, "the loaded model")
    rank, targets, is_continued = _find_adapter(run)
    fused = _uses_unsloth(run, machine)
    weight, compute = _find_widths(run, machine)
    offloads = fused and model.gradient_checkpointing == "unsloth"
    reference = "none"
    if rloo.beta > 0:
        copies = is_continued and rloo.reference == "start"
        reference = "model" if rank is None else "adapter" if copies else "none"
    return Load(
        shape=shape,
        four_bit=model.load_in_4bit or shape.is_quantised,
        weight_bytes=weight,
        compute_bytes=compute,
        lora_rank=rank,
        lora_targets=targets,
        optim=rloo.optim,
        checkpointing="offloaded" if offloads else "on" if model.gradient_checkpointing else "off",
        fused=fused,
        tokens_per_pass=1 if rloo.memory == "low" else rloo.tokens_per_pass or TOKENS_PER_PASS[not machine.on_cuda],
        whole_groups=rloo.memory == "fast" and rloo.beta > 0,
        reference=reference,
        prompt_tokens=run.data.max_prompt_length,
        completion_tokens=_completion_tokens(run),
        num_generations=rloo.num_generations,
        completions=rloo.generation_batch_size // count_processes(),
        on_cuda=machine.on_cuda,
        cache=ELSEWHERE if _samples_elsewhere(run) else run.rollout.cache,
    )


def _samples_elsewhere(run: RunConfig) -> bool:
    """Whether a server's GPUs hold the rollout."""
    return run.rollout.engine == "server" or (run.rollout.engine == "vllm" and run.rollout.server_url is not None)


def _find_adapter(run: RunConfig) -> tuple[int | None, tuple[str, ...], bool]:
    """Rank and matrices of the adapter, and whether it is continued; rank None where every parameter is trained."""
    if run.model.lora is None:
        return None, (), False
    settings = read_adapter(run.model.adapter or run.model.name)
    targets = settings.get("target_modules")
    if not isinstance(settings.get("r"), int) or not isinstance(targets, list):
        return run.model.lora.r, tuple(run.model.lora.target_modules), run.model.adapter is not None
    return settings["r"], tuple(targets), True


def _uses_unsloth(run: RunConfig, machine: Machine) -> bool:
    """Whether the Unsloth backend would run it; on a GPU elsewhere it is taken to be installed."""
    if not machine.on_cuda or run.model.lora is None or run.model.backend == "transformers":
        return False
    if run.model.backend == "auto" and os.environ.get(BACKEND_VARIABLE, "").strip().lower() == "transformers":
        return False
    return not machine.is_here or is_importable("unsloth")


def _find_widths(run: RunConfig, machine: Machine) -> tuple[int, int]:
    """Bytes of a weight that is not quantised, and of an activation."""
    by_machine = "float32" if run.model.lora is None or not machine.on_cuda else "bfloat16"
    wide = (by_machine if run.model.dtype == "auto" else run.model.dtype) == "float32"
    is_mixed = wide and machine.on_cuda and run.model.lora is None
    return (4 if wide else 2), (4 if wide and not is_mixed else 2)


def _completion_tokens(run: RunConfig) -> int:
    """Length of the longest possible completion."""
    rloo = run.rloo
    if rloo.thinking_budget is None or rloo.answer_budget is None:
        return int(rloo.max_completion_length)
    budgets = rloo.thinking_budget + CLOSE_TOKENS.get(rloo.thinking_close, 1) + rloo.answer_budget
    return int(min(budgets, rloo.max_completion_length))


def _resting_bytes(load: Load) -> int:
    """What is there in the rollout and in training alike."""
    return (
        parts.body_bytes(load)
        + parts.table_bytes(load)
        + _own_bytes(load)
        + parts.gradient_bytes(load)
        + parts.optimizer_bytes(load)
        + parts.reference_bytes(load)
        + parts.work_bytes(load)
        + parts.context_bytes(load)
    )


def _own_bytes(load: Load) -> int:
    """The adapter, in float32; without one what is trained is the model."""
    return 0 if load.lora_rank is None else parts.FLOAT * parts.trained_weights(load)


def rollout_gib(load: Load, rows: int) -> float:
    """Peak of a rollout with `rows` completions at once, each at its full length, in GiB."""
    return _corrected(load, "rollout", _rollout_bytes(load, rows))


def training_gib(load: Load) -> float:
    """Peak of the largest training pass, in GiB."""
    return _corrected(load, "training", _training_bytes(load))


def _rollout_bytes(load: Load, rows: int) -> int:
    if load.cache == ELSEWHERE:
        return _resting_bytes(load)
    cache = parts.cache_bytes(load, rows) + parts.decoding_bytes(load, rows) + parts.joined_bytes(load)
    return _resting_bytes(load) + cache + parts.sampling_bytes(load, rows)


def _training_bytes(load: Load) -> int:
    return _resting_bytes(load) + parts.activation_bytes(load) + parts.head_bytes(load)


def _corrected(load: Load, part: str, counted: int) -> float:
    """GiB of what was counted; on a GPU what is torch's of it is multiplied by what measurements have shown."""
    if not load.on_cuda:
        return counted / GIB
    context = parts.context_bytes(load)
    return (context + (counted - context) * correction("unsloth" if load.fused else "transformers", part)) / GIB


def largest_rows(load: Load, limit_gib: float) -> int:
    """Completions of a rollout that fit at once: 1 at least, and the whole rollout at most."""
    return _largest(1, load.completions, lambda rows: rollout_gib(load, rows) <= limit_gib)


def largest_pass(load: Load, limit_gib: float) -> int:
    """Tokens of a training pass that fit, up to those of `load`; a pass holds one row or group in any case."""
    return _largest(1, load.tokens_per_pass, lambda n: training_gib(replace(load, tokens_per_pass=n)) <= limit_gib)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from low to high that fits, and low where none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _find_changes(run: RunConfig, load: Load, rows: int, limit: float) -> Iterator[Remedy]:
    """What brings the run below the limit, cheapest first, up to where it fits; without what does not help."""
    wanted: int | None = run.rollout.rows  # of the file; None is planned again after each change
    rollout, training = rollout_gib(load, rows), training_gib(load)
    for key, value, changed in _candidates(run, load, limit):
        if key == "rollout.rows":
            wanted = None
            value = largest_rows(changed, limit)
        rows = min(wanted or largest_rows(changed, limit), changed.completions)
        after = rollout_gib(changed, rows), training_gib(changed)
        helps = (rollout > limit and after[0] < rollout) or (training > limit and after[1] < training)
        if not helps:
            continue
        rollout, training = after
        yield Remedy(key, value, rollout, training, max(after) <= limit)
        if max(after) <= limit:
            return


def _candidates(run: RunConfig, load: Load, limit: float) -> Iterator[tuple[str, Any, Load]]:
    """(key, value, load with it and all before it), cheapest first: time, then precision, then what is learned."""
    if run.rollout.rows is not None:
        yield "rollout.rows", 1, load
    if run.rloo.memory != "low":
        load = replace(load, tokens_per_pass=1, whole_groups=False)
        yield "rloo.memory", "low", load
    if load.checkpointing == "off" or (load.checkpointing == "on" and load.fused):
        load = replace(load, checkpointing="offloaded" if load.fused else "on")
        yield "model.gradient_checkpointing", "unsloth", load
    if "8bit" not in load.optim and load.optim.startswith(("adamw", "paged")) and load.on_cuda:
        load = replace(load, optim="adamw_8bit")
        yield "rloo.optim", "adamw_8bit", load
    for is_last in (False, True):
        if _keeps_8_bits(run, load) and training_gib(load) <= limit:  # else it is the length that has to give way
            load = replace(load, cache="int8")
            yield "rollout.cache", "int8", load
        if not is_last and not load.four_bit and load.lora_rank is not None:
            load = replace(load, four_bit=True)
            yield "model.load_in_4bit", True, load
    tokens = _fitting_completion(load, limit)
    if tokens is not None:
        shorter = replace(load, completion_tokens=tokens)
        thinking = None if run.rloo.answer_budget is None else run.rloo.thinking_budget
        less = 0 if thinking is None else thinking - (load.completion_tokens - tokens)
        yield ("rloo.thinking_budget", less, shorter) if less > 0 else ("rloo.max_completion_length", tokens, shorter)
        load = shorter
    if load.whole_groups and load.num_generations > 2:
        load = replace(load, num_generations=2)
        yield "rloo.num_generations", 2, load


def _keeps_8_bits(run: RunConfig, load: Load) -> bool:
    """Whether the run's engine could keep its cache in 8 bits, and does not yet."""
    return load.cache == "plain" and not load.fused and run.rollout.engine in ("auto", "native")


def _fitting_completion(load: Load, limit: float) -> int | None:
    """The longest completion that fits, one row at a time, in steps of 64 tokens; None where none is shorter."""

    def fits(steps: int) -> bool:
        shorter = replace(load, completion_tokens=steps * STEP)
        return max(rollout_gib(shorter, 1), training_gib(shorter)) <= limit

    tokens = _largest(SHORTEST // STEP, max(load.completion_tokens // STEP, 1), fits) * STEP
    return tokens if tokens < load.completion_tokens else None


def _describe(run: RunConfig, load: Load) -> str:
    bits = "4-bit" if load.four_bit else f"{8 * load.weight_bytes}-bit"
    return f"{run.model.name}, {load.shape.num_weights / 1e9:.3g} G weights in {bits}"


def _list_parts(load: Load, rows: int) -> Iterator[Part]:
    """The lines of the table; they add up to the two peaks."""
    shape = load.shape

    def both(name: str, number: int, detail: str) -> Part:
        return Part(name, number / GIB, number / GIB, detail)

    kind = "NF4, double quantisation" if load.four_bit else f"{8 * load.weight_bytes} bits"
    yield both("weights: layers", parts.body_bytes(load), f"{shape.body_weights / 1e6:,.4g} M in {kind}")
    tables = "embedding, which is the head too" if shape.tied else "embedding and head"
    tables += f", {shape.vocab_size} x {shape.hidden_size}; norms"
    yield both("weights: tables", parts.table_bytes(load), f"{tables}; {8 * load.weight_bytes} bits")
    trained = parts.trained_weights(load)
    if load.lora_rank is not None:
        yield both("adapter", _own_bytes(load), f"{trained / 1e6:,.4g} M in float32, r = {load.lora_rank}")
    yield both("gradients", parts.gradient_bytes(load), "float32")
    yield both("optimizer", parts.optimizer_bytes(load), load.optim)
    if load.reference != "none":
        yield both("reference", parts.reference_bytes(load), f"a copy of the {load.reference}")
    if load.four_bit:
        yield both("unpacking", parts.work_bytes(load), "the largest matrix, while it multiplies")
    yield both("context", parts.context_bytes(load), "CUDA" if load.on_cuda else "Python and its libraries")
    yield from _list_rollout_parts(load, rows)
    detail = f"{load.pass_tokens} tokens in a pass, checkpointing {load.checkpointing}"
    yield Part("activations", 0.0, parts.activation_bytes(load) / GIB, detail)
    yield Part("head", 0.0, parts.head_bytes(load) / GIB, "scored states, one tile of logits")
    more = rollout_gib(load, rows) - _rollout_bytes(load, rows) / GIB, training_gib(load) - _training_bytes(load) / GIB
    if max(more) > 0:
        yield Part("correction", *more, f"peaks measured on {load_corrections()['source']} were larger")


def _list_rollout_parts(load: Load, rows: int) -> Iterator[Part]:
    """The lines of the rollout alone."""
    if load.cache == ELSEWHERE:
        yield Part("cache", 0.0, 0.0, "the server has it")
        return
    kib = parts.cache_bytes_per_token(load) / 1024
    detail = f"{rows} x {load.cache_tokens} tokens x {kib:.4g} KiB{', in 8 bits' if load.cache == 'int8' else ''}"
    if parts.host_cache_bytes(load, rows):
        detail += f" = {parts.host_cache_bytes(load, rows) / GIB:.2f} GiB of the machine's memory"
    yield Part("cache", parts.cache_bytes(load, rows) / GIB, 0.0, detail)
    back = "back in full and " if load.cache != "plain" else ""
    detail = f"a layer's keys and values {back}for each query head"
    yield Part("decoding", parts.decoding_bytes(load, rows) / GIB, 0.0, detail)
    if parts.joined_bytes(load):
        yield Part("joined matrices", parts.joined_bytes(load) / GIB, 0.0, "a copy of the layers that decodes faster")
    yield Part("sampling", parts.sampling_bytes(load, rows) / GIB, 0.0, "logits of the rows, prefill of the prompts")


def _find_notes(run: RunConfig, load: Load, rows: int, limit: float, machine: Machine) -> Iterator[str]:
    """What the figures assume."""
    if load.shape.source.startswith("the published") and run.model.name.endswith(DYNAMIC_ENDING):
        yield (
            f"{run.model.name} keeps some layers in 16 bit; which, its config.json says. It is not on this machine, so "
            "all are counted in 4 bit: the true figure is larger"
        )
    if machine.on_cuda:
        backend = "Unsloth" if load.fused else "transformers"
        yield f"activations are those of the {backend} backend"
    if load.fused and load.cache not in ("plain", ELSEWHERE):
        yield f"rollout.cache is {load.cache}, which Unsloth's engine refuses: see docs/plan.md"
    more = largest_rows(replace(load, cache="int8"), limit)
    if _keeps_8_bits(run, load) and run.rollout.rows is None and rows < more:
        yield f"rollout.cache=int8 would hold {more} completions at once, sampled from 8-bit keys and values"
    if run.eval.batch_size > load.completions:
        yield f"the evaluation generates eval.batch_size = {run.eval.batch_size} completions at once; it is not planned"
