"""Base classes of rewards that read an answer, and of those that ask a library about it.

A verifier can hang on a completion, and math-verify returns 0 outside the main thread, so both run in a `Worker` with a
time limit.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rloo_kit.errors import RlooKitError, WholeBatchError
from rloo_kit.rewards._binding import check_positive
from rloo_kit.rewards.text import THINK_END_ID, Decode, answer_text, as_ids, as_text, cut_turns, refuse_assumed
from rloo_kit.system.isolation import Worker

START_TIMEOUT_S = 120.0  # to start the worker and load math-verify, or reasoning-gym


@dataclass
class AnswerReader:
    """A reward that reads answers, without the thinking before them.

    Args:
        think_end_id, thinking, decode: as for `rewards.AnswerReward`.
    """

    __name__: ClassVar[str] = "answer_reader"
    think_end_id: int = THINK_END_ID
    thinking: bool = True
    decode: Decode | None = field(default=None, repr=False, compare=False)

    def _answers(self, completions: Sequence[Any], completion_ids: Sequence[Any], masks: Any) -> list[str]:
        """What follows the thinking of each completion, with `masks` (None without tools) of its last turn; empty if it
        was never closed."""
        if self.thinking:
            refuse_assumed(self.__name__, self.think_end_id, completions, completion_ids)
        options: dict[str, Any] = {"think_end_id": self.think_end_id, "thinking": self.thinking, "decode": self.decode}
        return [
            answer_text(as_text(text, last=mask is not None), cut_turns(as_ids(ids), mask)[-1], **options) or ""
            for text, ids, mask in zip(completions, completion_ids, masks or [None] * len(completions), strict=True)
        ]


@dataclass
class Verifier(AnswerReader):
    """A reward that asks a library in a `Worker`, within two time limits.

    If the library takes longer than `answer_timeout_s`, the answer counts as wrong. If its process dies, or the batch
    has taken `timeout_s`, the sample counts as failed (NaN, which the guard reports).

    Args:
        answer_timeout_s: limit for one answer, in seconds. timeout_s: limit for a batch.

    Raises:
        RewardError: the library is not installed or does not work.
    """

    caught: ClassVar[type[RlooKitError]] = WholeBatchError  # the guard asks again, sample by sample, after any other

    __name__: ClassVar[str] = "verifier"
    answer_timeout_s: float = 5.0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_positive("answer_timeout_s", self.answer_timeout_s)
        check_positive("timeout_s", self.timeout_s)

    def _ask(self, worker: Worker, ends_at: float, function: Callable[..., Any], *arguments: str) -> Any:
        """What the library says of one answer: 0.0 after its limit, NaN if it cannot say."""
        started = time.monotonic()
        if (left_s := ends_at - started) <= 0:
            return math.nan
        try:
            return worker.call(function, *arguments, timeout_s=min(left_s, self.answer_timeout_s))
        except self.caught:
            return 0.0 if time.monotonic() - started >= self.answer_timeout_s else math.nan
