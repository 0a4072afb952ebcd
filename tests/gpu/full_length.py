"""Rollouts of full length without the hours that they take: all but the last tokens of each row are put there.

Random weights do not stop by themselves, and memory is largest at the end. Within `full_length_rollouts` an engine
samples as it always does, but up to the last `tail` tokens of its thinking a row is made up, and its cache filled as
`rloo_kit.vram_measure` fills it, without a prefill that no run makes. The rest is computed, and so is the answer after
a spent budget: under `generate` that is a second call, whose prefill is whole rows.
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
    stage: str = ""


@contextmanager
def full_length_rollouts(
    tail: int, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> Iterator[Watch]:
    """Both engines make completions of full length; `before` and `after` are called around each rollout."""
    from rloo_kit.rollout_generate import GenerateEngine
    from rloo_kit.rollout_native import NativeEngine
    from rloo_kit.vram_measure import _fill_slots

    watch = Watch()
    with ExitStack() as patches:
        for kind in (GenerateEngine, NativeEngine):
            patches.enter_context(mock.patch.object(kind, "sample", _watched(kind.sample, watch, before, after)))
            patches.enter_context(mock.patch.object(kind, "_halve", _noted(kind._halve, watch)))
        extend = _long_rows(GenerateEngine._extend, watch, tail)
        patches.enter_context(mock.patch.object(GenerateEngine, "_extend", extend))
        patches.enter_context(mock.patch.object(NativeEngine, "_run", _aged_rows(NativeEngine._run, tail)))
        patches.enter_context(mock.patch.object(NativeEngine, "_fill", staticmethod(_fill_slots)))
        yield watch


def _watched(plain: Any, watch: Watch, before: Callable[[], None], after: Callable[[], None]) -> Any:
    def sample(self: Any, prompt_ids: Any, *arguments: Any, **keywords: Any) -> Any:
        before()
        watch.stage = ""
        found = plain(self, prompt_ids, *arguments, **keywords)
        after()
        lengths = [len(ids) for ids in found.completion_ids]
        watch.rows.append({"completions": len(lengths), "limit": self.rows, "tokens": [min(lengths), max(lengths)]})
        return found

    return sample


def _noted(plain: Any, watch: Watch) -> Any:
    def halve(self: Any, tried: int, left: int) -> None:
        plain(self, tried, left)
        watch.ran_out.append(f"{watch.stage or 'decoding'} with {tried} rows; {self.rows} from there on")

    return halve


def fillers(count: int, number: int) -> list[int]:
    """Token ids, the same for the same row."""
    return random.Random(number).choices(FILLERS, k=count)


# ------------------------------------------------------------------------------------------------- generate


def _long_rows(plain: Any, watch: Watch, tail: int) -> Any:
    """`GenerateEngine._extend`: its first call in a rollout begins `tail` tokens before its end, the second is real."""
    from rloo_kit.thinking_budget import Continued
    from rloo_kit.vram_measure import _fill_cache

    def extend(self: Any, prefixes: Any, rooms: list[int], stops: Any, expected: Any, on_progress: Any) -> Any:
        if watch.stage:
            watch.stage = "answering after a spent budget (a prefill of whole rows)"
            found = plain(self, prefixes, rooms, stops, expected, on_progress)
            return Continued(*_filled_up(found, rooms))
        watch.stage = "thinking"
        begun = [fillers(max(room - tail, 0), number) for number, room in enumerate(rooms)]
        rests = [room - len(row) for room, row in zip(rooms, begun, strict=True)]
        long = [prefix + row for prefix, row in zip(prefixes, begun, strict=True)]
        self._cache_options = lambda rows, width: {"past_key_values": _fill_cache(self, rows, width)}
        try:
            found = plain(self, long, rests, stops, expected, on_progress)
        finally:
            del self._cache_options
        ids, logps = _filled_up(found, rests)
        whole = [row + more for row, more in zip(begun, ids, strict=True)]
        if logps is None:
            return Continued(whole, None)
        return Continued(whole, [[math.nan] * len(row) + more for row, more in zip(begun, logps, strict=True)])

    return extend


def _filled_up(found: Any, rooms: list[int]) -> tuple[list[list[int]], list[list[float]] | None]:
    """Rows that drew an end or a tag by chance go on as if they had not."""
    ids = [row[:-1] + fillers(room - len(row) + 1, room) for row, room in zip(found.ids, rooms, strict=True)]
    if found.logps is None:
        return ids, None
    short = zip(found.logps, rooms, strict=True)
    return ids, [row[:-1] + [math.nan] * (room - len(row) + 1) for row, room in short]


# --------------------------------------------------------------------------------------------------- native


def _aged_rows(plain: Any, tail: int) -> Any:
    """`NativeEngine._run`: its rows have all their tokens but the last `tail`."""

    def run(self: Any, decoder: Any, waiting: Any, *more: Any) -> Any:
        for row in waiting:
            limits, turn = row.turn._limits, row.turn
            length = limits.max_completion_length
            if limits.thinking_budget is not None:
                length = min(length, limits.thinking_budget + len(limits.close_ids) + limits.answer_limit)
            for token in fillers(max(length - tail - len(turn.ids), 0), row.number):
                turn.take(token, 0.0)
        return plain(self, decoder, waiting, *more)

    return run
