"""What to change if a run does not fit: keys and values, cheapest first."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.plan.load import wanted_rows
from rloo_kit.plan.parts import Load
from rloo_kit.plan.peaks import largest, rollout_gib, rows_at_once, training_gib
from rloo_kit.plan.result import Remedy

ROWS = ("rollout.rows", "rollout.vllm.max_num_seqs")
SHORTEST, STEP = 64, 64  # tokens: shortest proposed completion, step between proposals


def find_changes(run: RunConfig, load: Load, rows: int, limit: float) -> Iterator[Remedy]:
    """Changes that bring the run below the limit, cheapest first, until it fits; without those that do not help."""
    wanted = wanted_rows(run, load)  # from the file; None is planned again after each change
    rollout, training = rollout_gib(load, rows), training_gib(load, rows)
    for key, value, changed in _candidates(run, load, limit):
        if key in ROWS:
            wanted = None
            value = rows_at_once(changed, limit)
        rows = rows_at_once(changed, limit, wanted)
        after = rollout_gib(changed, rows), training_gib(changed, rows)
        helps = (rollout > limit and after[0] < rollout) or (training > limit and after[1] < training)
        if not helps:
            continue
        rollout, training = after
        yield Remedy(key, value, rollout, training, max(after) <= limit)
        if max(after) <= limit:
            return


def _candidates(run: RunConfig, load: Load, limit: float) -> Iterator[tuple[str, Any, Load]]:
    """(key, value, load with this and all earlier changes), cheapest first: time, precision, then what is learnt."""
    if load.engine == "vllm" and load.vllm_bytes is not None:
        load = replace(load, vllm_bytes=None)
        yield "rollout.vllm.gpu_memory_utilization", None, load
    if wanted_rows(run, load) is not None:
        yield ROWS[run.rollout.rows is None], 1, load
    if run.rloo.memory != "low":
        load = replace(load, tokens_per_pass=1, whole_groups=False)
        yield "rloo.memory", "low", load
    if load.checkpointing == "off" or (load.checkpointing == "on" and load.fused):
        load = replace(load, checkpointing="offloaded" if load.fused else "on")
        yield "model.gradient_checkpointing", "unsloth", load
    if "8bit" not in load.optim and load.optim.startswith(("adamw", "paged")) and load.on_cuda:
        load = replace(load, optim="adamw_8bit")
        yield "rloo.optim", "adamw_8bit", load
    if load.engine == "vllm" and not load.float8_cache:
        load = replace(load, float8_cache=True)
        yield "rollout.vllm.float8_kv_cache", True, load
    if not load.four_bit and load.lora_rank is not None:
        load = replace(load, four_bit=True)
        yield "model.load_in_4bit", True, load
    whole = load

    def fits(steps: int) -> bool:
        """Whether a completion of so many STEPs fits, one row at a time."""
        cut = replace(whole, completion_tokens=steps * STEP)
        return max(rollout_gib(cut, 1), training_gib(cut)) <= limit

    tokens = largest(SHORTEST // STEP, max(load.completion_tokens // STEP, 1), fits) * STEP
    if tokens < load.completion_tokens:
        shorter = replace(load, completion_tokens=tokens)
        thinking = None if run.rloo.answer_budget is None else run.rloo.thinking_budget
        less = 0 if thinking is None else thinking - (load.completion_tokens - tokens)
        yield ("rloo.thinking_budget", less, shorter) if less > 0 else ("rloo.max_completion_length", tokens, shorter)
        load = shorter
    if load.whole_groups and load.num_generations > 2:
        load = replace(load, num_generations=2)
        yield "rloo.num_generations", 2, load
