"""Rollouts of full length without the hours that they take: all but the last tokens of each row are put there.

Random weights do not stop by themselves, and memory is largest at the end. Within `full_length_rollouts` an engine
samples as it always does, but up to its last `tail` tokens a row is made up, and its cache filled as
`rloo_kit.measure.stand_ins` fills it, without a prefill that no run makes. The rest is computed.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

FILLERS = range(10, 200)  # bytes: no end, no tag


@dataclass
class Watch:
    """What happened in the rollouts.

    Attributes:
        rows: of each call of `sample`, completions and the limit of those at once that it ended with.
        ran_out: what an engine was doing when memory ran out, and how many rows it then took.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    ran_out: list[str] = field(default_factory=list)


class Parts:
    """Peaks of the rollouts and of the passes between them, in GiB that torch held.

    Args:
        memory: with torch's counters as `cuda`. tell: gets the peaks so far when a part has ended, since the next one
            may not fit.
    """

    def __init__(self, memory: Any, tell: Callable[[dict[str, float]], None]) -> None:
        self.memory, self.tell = memory, tell
        self.peaks, self.part = {"rollout": 0.0, "training": 0.0}, "training"

    def close(self) -> None:
        """The part that has just ended."""
        taken = self.memory.cuda.max_memory_allocated() / 2**30
        self.peaks[self.part] = round(max(self.peaks[self.part], taken), 3)
        self.tell(self.peaks)
        self.memory.cuda.reset_peak_memory_stats()

    def begin_rollout(self) -> None:
        self.close()
        self.part = "rollout"

    def end_rollout(self) -> None:
        self.close()
        self.part = "training"


@contextmanager
def full_length_rollouts(
    tail: int, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> Iterator[Watch]:
    """Both engines make completions of full length; `before` and `after` are called around each rollout."""
    from rloo_kit.measure.stand_ins import fill_cache, fill_slots
    from rloo_kit.rollout.generate import GenerateEngine
    from rloo_kit.rollout.native import NativeEngine

    def cache_options(engine: Any, rows: int, width: int) -> dict[str, Any]:
        return {"past_key_values": fill_cache(engine, rows, width)}

    watch = Watch()
    with ExitStack() as patches:
        for kind in (GenerateEngine, NativeEngine):
            patches.enter_context(mock.patch.object(kind, "sample", _watched(kind.sample, watch, before, after)))
            patches.enter_context(mock.patch.object(kind, "_halve", _noted(kind._halve, watch)))
        patches.enter_context(mock.patch.object(GenerateEngine, "_begin", _aged_state(GenerateEngine._begin, tail)))
        patches.enter_context(mock.patch.object(GenerateEngine, "_cache_options", cache_options))
        patches.enter_context(mock.patch.object(NativeEngine, "_run", _aged_rows(NativeEngine._run, tail)))
        patches.enter_context(mock.patch.object(NativeEngine, "_fill", staticmethod(fill_slots)))
        yield watch


def _watched(plain: Any, watch: Watch, before: Callable[[], None], after: Callable[[], None]) -> Any:
    def sample(self: Any, prompt_ids: Any, limits: Any, *arguments: Any, **keywords: Any) -> Any:
        before()
        found = plain(self, prompt_ids, limits, *arguments, **keywords)
        after()
        _fill_up(found, _full_length(limits))
        lengths = [len(ids) for ids in found.completion_ids]
        watch.rows.append({"completions": len(lengths), "limit": self.rows, "tokens": [min(lengths), max(lengths)]})
        return found

    return sample


def _noted(plain: Any, watch: Watch) -> Any:
    def halve(self: Any, tried: int, left: int) -> None:
        plain(self, tried, left)
        watch.ran_out.append(f"{tried} rows; {self.rows} from there on")

    return halve


def fillers(count: int, number: int) -> list[int]:
    """Token ids, the same for the same row."""
    return random.Random(number).choices(FILLERS, k=count)


def _full_length(limits: Any) -> int:
    """Tokens of the longest completion within the limits."""
    if limits.thinking_budget is None:
        return limits.max_completion_length
    return min(limits.max_completion_length, limits.thinking_budget + len(limits.close_ids) + limits.answer_limit)


def _age(state: Any, tail: int, number: int) -> None:
    """All the tokens of a completion but the last `tail`; at its budget its thinking is closed as always."""
    for token in fillers(max(_full_length(state._limits) - tail - len(state.ids), 0), number):
        state.take(token, 0.0)


def _aged_state(plain: Any, tail: int) -> Any:
    """`GenerateEngine._begin`."""

    def begin(self: Any, row: int, limits: Any) -> Any:
        state = plain(self, row, limits)
        _age(state, tail, row)
        return state

    return begin


def _aged_rows(plain: Any, tail: int) -> Any:
    """`NativeEngine._run`."""

    def run(self: Any, decoder: Any, waiting: Any, *more: Any) -> Any:
        for row in waiting:
            _age(row.state, tail, row.number)
        return plain(self, decoder, waiting, *more)

    return run


def _fill_up(found: Any, length: int) -> None:
    """Rows that drew an end by chance go on as if they had not."""
    for number, row in enumerate(found.completion_ids):
        missing = length - len(row)
        if missing > 0:
            row[-1:] = fillers(missing + 1, number)
            if found.sampler_logps is not None:
                found.sampler_logps[number][-1:] = [math.nan] * (missing + 1)
