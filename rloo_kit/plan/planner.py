"""Plan whether a run fits a GPU: GiB by part from `config.json` and the run's keys, without torch, weights, network."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan import parts, vllm_memory
from rloo_kit.plan.changes import find_changes
from rloo_kit.plan.corrections import PARTS, load_corrections
from rloo_kit.plan.engines import choose_engine, plan_vllm
from rloo_kit.plan.load import find_machine, keeps_unknown_layers, read_load, step_completions, wanted_rows
from rloo_kit.plan.parts import Load
from rloo_kit.plan.peaks import (
    gradients_in_rollout,
    largest_pass,
    own_bytes,
    rollout_bytes,
    rollout_gib,
    rows_at_once,
    training_bytes,
    training_gib,
    unmeasured_gib,
)
from rloo_kit.plan.result import EngineChoice, Machine, Margin, Part, VramPlan
from rloo_kit.plan.shapes import BNB_ENDING
from rloo_kit.plan.speed import find_gpu, step_time
from rloo_kit.plan.without_gpu import find_lack_of_gpu, fitting_config
from rloo_kit.system.gpu import GIB
from rloo_kit.system.problems import Problem
from rloo_kit.system.versions import VLLM_INSTALL


def plan_vram(
    run: RunConfig, gpu_gib: float | None = None, config: Mapping[str, Any] | None = None, engine: str | None = None
) -> VramPlan:
    """Plan a run's memory.

    Args:
        gpu_gib: memory in GiB of another NVIDIA GPU to plan for; None takes this machine's GPU (its whole memory) or,
            without one, the memory that this process may use.
        config: the content of the model's `config.json`; None looks for it (`find_shape`).
        engine: of a policy that is already loaded; None takes `rollout.engine`, where auto chooses by what fits.

    Returns:
        The plan, which prints as a table.

    Raises:
        ConfigError: the model's shape is unknown, or gpu_gib is not above 0.
    """
    machine = find_machine(gpu_gib)
    choice = EngineChoice(engine, "the loaded model's") if engine else choose_engine(run, machine, config)
    load = read_load(run, machine, config, choice.name)
    limit = machine.usable_gib
    rows = rows_at_once(load, limit, wanted_rows(run, load))
    if run.rloo.tokens_per_pass is None:
        load = replace(load, tokens_per_pass=largest_pass(load, limit, rows))
    rollout, training = rollout_gib(load, rows), training_gib(load, rows)
    fits = max(rollout, training) <= limit
    gpu = find_gpu(machine.name, machine.total_gib) if machine.on_cuda and load.engine != "server" else None
    return VramPlan(
        run=run.run.name or "a run without a name",
        model=f"{run.model.name}, {load.shape.size} in {4 if load.four_bit else 8 * load.weight_bytes}-bit",
        machine=machine,
        engine=choice,
        vllm=plan_vllm(run, machine, config) if choice.name == "vllm" else None,
        step=None if gpu is None else step_time(load, rows, step_completions(run), gpu, run.rloo.max_steps),
        parts=tuple(_list_parts(load, rows)),
        rollout_gib=rollout,
        training_gib=training,
        rows=rows,
        completions=load.completions,
        tokens_per_pass=load.pass_tokens,
        margins=tuple(_find_margins(run, load, rows, machine)),
        no_gpu=find_lack_of_gpu(run, load, machine),
        changes=() if fits else tuple(find_changes(run, load, rows, limit)),
        notes=tuple(_find_notes(run, load, rows, machine, config)),
    )


def find_machine_problem(run: RunConfig) -> Problem | None:
    """A large model without a GPU, or too little memory; None if there is no problem or the model's shape is unknown.

    An error if the run cannot fit, whatever is changed, or takes too long. Takes a fraction of a second, without torch.
    """
    try:
        plan = plan_vram(run)
    except ConfigError:
        return None
    config = fitting_config(plan.machine)
    other = f"train {config}, which fits this machine" if config else "take a smaller model or a larger GPU"
    if plan.no_gpu is not None:
        fix = f"take a machine with a GPU (`rloo-kit plan FILE --gpu-gib N` says what fits), or {other}"
        return replace(plan.no_gpu, fix=fix, level="error" if plan.headroom_gib < 0 else plan.no_gpu.level)
    if plan.headroom_gib >= 0:
        return None
    takes = f"{plan.model} does not fit: {plan.binds} takes {plan.peak_gib:.1f} GiB at full length, and "
    found = f"{takes}{plan.machine.name} has {plan.machine.usable_gib:.1f}"
    if plan.changes and plan.changes[-1].fits:
        changes = " ".join(change.override for change in plan.changes)
        return Problem("machine", found, f"set {changes}", level="warning")
    return Problem("machine", found, other)


def _find_margins(run: RunConfig, load: Load, rows: int, machine: Machine) -> Iterator[Margin]:
    """What the peaks do not count; docs/plan.md has the source of each figure."""
    rollout, training = rollout_gib(load, rows), training_gib(load, rows)
    if load.unknown_bytes:
        reason = (
            "layers that this dynamic 4-bit model keeps in 16 bit: at most 10% of the weights, according to Unsloth"
        )
        yield Margin(load.unknown_bytes / GIB, reason)
    if run.eval.batch_size > load.completions and load.engine in ("native", "generate"):
        tokens = run.eval.max_completion_length or load.completion_tokens
        batch = replace(load, completions=run.eval.batch_size, completion_tokens=tokens)
        more = rollout_gib(batch, run.eval.batch_size) - max(rollout, training)
        if more > 0:
            yield Margin(more, f"the evaluation, with eval.batch_size = {run.eval.batch_size} completions at once")
    part, peak = ("training", training) if training > rollout else ("rollout", rollout)
    if (unmeasured := unmeasured_gib(load, peak, part)) > 0:
        here = "on this machine" if machine.is_here else "on that GPU"
        yield Margin(unmeasured, f"not measured {here}: {load.unmeasured:.0%} of the computed peak")


def _list_parts(load: Load, rows: int) -> Iterator[Part]:
    """The lines of the table, which add up to the two peaks."""
    shape = load.shape

    def both(name: str, number: int, detail: str) -> Part:
        return Part(name, number / GIB, number / GIB, detail)

    kind = "NF4, double quantisation" if load.four_bit else f"{8 * load.weight_bytes} bits"
    yield both("weights: layers", parts.body_bytes(load), f"{shape.body_weights / 1e6:,.4g} M in {kind}")
    tables = "embedding, tied with the head" if shape.tied else "embedding and head"
    tables += f", {shape.vocab_size} x {shape.hidden_size}; norms"
    yield both("weights: tables", parts.table_bytes(load), f"{tables}; {8 * load.weight_bytes} bits")
    trained = parts.trained_weights(load)
    if load.lora_rank is not None:
        yield both("adapter", own_bytes(load), f"{trained / 1e6:,.4g} M in float32, r = {load.lora_rank}")
    gradients = gradients_in_rollout(load) / GIB, parts.gradient_bytes(load) / GIB
    yield Part("gradients", *gradients, "float32")
    yield both("optimizer", parts.optimizer_bytes(load), load.optim)
    if load.reference != "none":
        yield both("reference", parts.reference_bytes(load), f"a copy of the {load.reference}")
    if load.four_bit:
        yield both("unpacking", parts.work_bytes(load), "the largest matrix, unpacked")
    yield both("context", parts.context_bytes(load), "CUDA" if load.on_cuda else "Python and its libraries")
    yield from _list_rollout_parts(load, rows)
    detail = f"{load.pass_tokens} tokens in a pass, checkpointing {load.checkpointing}"
    yield Part("activations", 0.0, parts.activation_bytes(load) / GIB, detail)
    yield Part("head", 0.0, parts.head_bytes(load) / GIB, "scored states, one tile of logits")
    more = (
        rollout_gib(load, rows) - rollout_bytes(load, rows) / GIB,
        training_gib(load, rows) - training_bytes(load, rows) / GIB,
    )
    if any(more):
        source = load_corrections()["source"]
        found = (f"{part} x {load.factors[at]:.2f} ({source})" for at, part in enumerate(PARTS) if more[at])
        yield Part("correction", *more, f"measured: {', '.join(found)}")


def _list_rollout_parts(load: Load, rows: int) -> Iterator[Part]:
    """The lines of the rollout. What stays of vLLM while the policy trains also counts in training."""
    kib = parts.cache_bytes_per_token(load) / 1024
    if load.engine == "server":
        yield Part("cache", 0.0, 0.0, "on the server")
    elif load.engine == "vllm":
        if not vllm_memory.is_shared(load):
            weights = vllm_memory.weight_bytes(load) / GIB
            detail = f"vLLM's own copy{', in host memory while it sleeps' if load.on_cuda else ''}"
            yield Part("vLLM: weights", weights, 0.0 if load.on_cuda else weights, detail)
        pool, buffers = vllm_memory.pool_bytes(load, rows) / GIB, vllm_memory.buffer_bytes(load, rows) / GIB
        detail = f"{rows} x {load.row_tokens} tokens x {kib:.4g} KiB{', in 8 bits' if load.float8_cache else ''}"
        yield Part("vLLM: pool", pool, 0.0 if load.on_cuda else pool, detail)
        kept = vllm_memory.asleep_bytes(load, rows) / GIB if load.on_cuda else buffers
        yield Part("vLLM: buffers", buffers, kept, "adapter, one forward pass, CUDA graphs; assumed, not measured")
    else:
        detail = f"{rows} x {load.cache_tokens} tokens x {kib:.4g} KiB"
        if load.shape.delta is not None:
            states = parts.state_bytes(load) / 2**20
            detail = f"{rows} x ({load.cache_tokens} tokens x {kib:.4g} KiB + {states:.4g} MiB)"
        yield Part("cache", parts.cache_bytes(load, rows) / GIB, 0.0, detail)
        detail = "one layer's keys and values, once per query head"
        yield Part("decoding", parts.decoding_bytes(load, rows) / GIB, 0.0, detail)
        if joined := parts.joined_bytes(load):
            yield Part("joined matrices", joined / GIB, 0.0, "a copy of the layers, for faster decoding")
        detail = "logits of the rows, prefill of the prompts"
        yield Part("sampling", parts.sampling_bytes(load, rows) / GIB, 0.0, detail)


def _find_notes(
    run: RunConfig, load: Load, rows: int, machine: Machine, config: Mapping[str, Any] | None
) -> Iterator[str]:
    """What the figures assume, and what else would fit."""
    if keeps_unknown_layers(run, load.shape):
        yield (
            f"{run.model.name} keeps some layers in 16 bit, listed in its config.json, which is not on this machine. "
            "All are counted in 4 bit; the margin allows for the difference"
        )
    if load.shape.delta is not None:
        layers = f"{len(load.shape.delta.layers)} of {load.shape.num_layers} layers"
        yield f"{layers} have a state in place of a KV cache; the activations of these are an estimate on the high side"
    if machine.on_cuda:
        backend = "Unsloth" if load.fused and load.shape.has_kernels else "transformers"
        why = "; Unsloth has no kernels for this type of model" if load.fused and backend == "transformers" else ""
        yield f"activations are computed for the {backend} backend{why}"
    # A faster rollout that fits: vLLM, and weights that need no unpacking.
    if not machine.on_cuda or load.engine == "server":
        return
    if not machine.is_here and run.rollout.engine == "auto":
        there = plan_vllm(run, machine, config)
        if there.obstacle is None:
            yield f"rollout.engine=vllm would sample {there.max_num_seqs} at once; to install it: {VLLM_INSTALL}"
    shape = replace(load.shape, is_quantised=False, kept=())
    wide = replace(load, four_bit=False, shape=shape)
    peak = max(rollout_gib(wide, rows), training_gib(wide, rows))
    if load.four_bit and load.lora_rank is not None and load.vllm_bytes is None and peak <= machine.usable_gib:
        words = "model.load_in_4bit=false"
        if load.shape.is_quantised:
            words += f" with a model.name that does not end in {BNB_ENDING}"
        yield (
            "4-bit is the slower rollout, because every token step unpacks the weights: "
            f"{words} fits with {machine.usable_gib - peak:.1f} GiB to spare and as many completions at once"
        )
