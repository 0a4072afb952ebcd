"""The two peaks of a run as sums of its parts, and the largest rollout and training pass below a limit."""

from collections.abc import Callable
from dataclasses import replace

from rloo_kit.plan import parts, vllm_memory
from rloo_kit.plan.parts import Load
from rloo_kit.system.gpu import GIB


def resting_bytes(load: Load) -> int:
    """Memory in a rollout before its cache; training has the same, plus gradients if a rollout has none."""
    return (
        parts.body_bytes(load)
        + parts.table_bytes(load)
        + own_bytes(load)
        + gradients_in_rollout(load)
        + parts.optimizer_bytes(load)
        + parts.reference_bytes(load)
        + parts.work_bytes(load)
        + parts.context_bytes(load)
    )


def gradients_in_rollout(load: Load) -> int:
    """Gradients in memory while completions are sampled."""
    return parts.gradient_bytes(load) if load.keeps_gradients else 0


def own_bytes(load: Load) -> int:
    """The adapter in float32; 0 without one, since the model itself is trained."""
    return 0 if load.lora_rank is None else parts.FLOAT * parts.trained_weights(load)


def rollout_gib(load: Load, rows: int) -> float:
    """Peak of a rollout in GiB, with `rows` completions at once at full length."""
    factor = 1.0 if load.engine == "vllm" else load.factors[0]  # vLLM enforces its share itself
    return _corrected(load, factor, rollout_bytes(load, rows))


def training_gib(load: Load, rows: int = 1) -> float:
    """Peak of the largest training pass, in GiB; `rows` as in `training_bytes`."""
    return _corrected(load, load.factors[1], training_bytes(load, rows))


def rollout_bytes(load: Load, rows: int) -> int:
    """The sum of the parts of a rollout."""
    if load.engine == "server":
        return resting_bytes(load)
    if load.engine == "vllm":
        return resting_bytes(load) + vllm_memory.added_bytes(load, rows)
    cache = parts.cache_bytes(load, rows) + parts.decoding_bytes(load, rows) + parts.joined_bytes(load)
    return resting_bytes(load) + cache + parts.sampling_bytes(load, rows)


def training_bytes(load: Load, rows: int = 1) -> int:
    """The sum of the parts of a training pass; `rows` are those of vLLM's rollout, which sleeps meanwhile."""
    asleep = vllm_memory.asleep_bytes(load, rows) if load.engine == "vllm" else 0
    gradients = parts.gradient_bytes(load) - gradients_in_rollout(load)
    return resting_bytes(load) + gradients + parts.activation_bytes(load) + parts.head_bytes(load) + asleep


def _corrected(load: Load, factor: float, counted: int) -> float:
    """GiB of the counted bytes, with all but the context multiplied by the measured factor."""
    context = parts.context_bytes(load)
    return (context + (counted - context) * factor) / GIB


def unmeasured_gib(load: Load, peak_gib: float, part: str) -> float:
    """By how much a measurement may exceed this peak; for vLLM's rollout only outside its share."""
    if part == "rollout" and load.engine == "vllm":
        peak_gib = resting_bytes(load) / GIB
    return load.unmeasured * (peak_gib - parts.context_bytes(load) / GIB)


def comfortable_gib(load: Load, limit_gib: float, part: str) -> float:
    """The largest peak that leaves the margin free below a limit; rows and passes are chosen by it."""
    limit_gib -= load.unknown_bytes / GIB
    if part == "rollout" and load.engine == "vllm":
        return limit_gib - unmeasured_gib(load, limit_gib, part)
    return (limit_gib + load.unmeasured * parts.context_bytes(load) / GIB) / (1 + load.unmeasured)


def rows_at_once(load: Load, limit_gib: float, wanted: int | None = None) -> int:
    """Completions of a rollout at once: `wanted`, else as many as fit at full length and leave the margin free.

    `generate` samples in batches: rows that do not save a batch are left out, so that batches have equal size.
    """
    if wanted is not None:
        return min(wanted, load.completions)
    if load.engine == "generate":
        batches = -(-load.completions // largest_rows(load, limit_gib))
        return -(-load.completions // batches)
    if load.engine != "vllm" or load.vllm_bytes is None:
        return largest_rows(load, limit_gib)
    held = vllm_memory.pool_bytes(load, load.completions) // vllm_memory.row_bytes(load)
    return min(max(held, 1), load.completions)


def largest_rows(load: Load, limit_gib: float) -> int:
    """Completions of a rollout that fit at once with the margin left free, from 1 to the whole rollout."""
    most = comfortable_gib(load, limit_gib, "rollout")
    return largest(1, load.completions, lambda rows: rollout_gib(load, rows) <= most)


def largest_pass(load: Load, limit_gib: float, rows: int = 1) -> int:
    """Tokens of a training pass that fit, up to those of `load`; a pass always has one row or group."""
    most = comfortable_gib(load, limit_gib, "training")
    return largest(1, load.tokens_per_pass, lambda n: training_gib(replace(load, tokens_per_pass=n), rows) <= most)


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from low to high that fits; low if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
