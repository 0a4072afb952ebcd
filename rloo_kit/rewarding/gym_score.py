"""Answers scored by the verifiers of reasoning-gym."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from rloo_kit.data.answers import GYM_REWARD
from rloo_kit.data.gym import GYM_COLUMN, INSTALL, load_library, score
from rloo_kit.errors import RlooKitError, WholeBatchError
from rloo_kit.rewarding.verifier import START_TIMEOUT_S, Verifier
from rloo_kit.rewards._binding import check_positive
from rloo_kit.rewards.answer import find_boxed
from rloo_kit.system.isolation import Worker
from rloo_kit.system.processes import say

NEEDS_GYM = f"{GYM_REWARD} needs the library reasoning-gym, which is not installed or does not work: {INSTALL}"
FINDERS = ("whole", "boxed", "answer_tag")
BUILD_TIMEOUT_S = 60.0  # to make a task's verifier


@dataclass
class ReasoningGymScore(Verifier):
    """The verifier's score of the answer, 0.0 to 1.0; None for a row that is not from reasoning-gym.

    0.0 if the thinking was never closed, there is no answer, or the verifier raises on it; failed if the verifier
    cannot be built (for a refused task, for example). `Verifier` describes the other arguments and limits.

    Args:
        threshold: above 0, at most 1; 1.0 if the score reaches it, else 0.0. None: the score itself, partial credit
            included.
        find: `whole` (everything after the tag), `boxed` (the content of its last \\boxed{}),
            `answer_tag` (the content of its last <answer></answer>, as the library's own prompts ask for it).
    """

    __name__: ClassVar[str] = GYM_REWARD
    caught = RlooKitError

    threshold: float | None = None
    find: str = "whole"
    _made: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_positive("threshold", self.threshold)
            if self.threshold > 1:
                raise ValueError(f"threshold is {self.threshold!r}; it must be above 0 and at most 1, or null")
        if self.find not in FINDERS:
            raise ValueError(f"find is {self.find!r}; it must be one of {', '.join(FINDERS)}")

    @cached_property
    def worker(self) -> Worker:
        """The process the verifiers run in."""
        return Worker(GYM_REWARD)

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] = (),
        reasoning_gym: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if reasoning_gym is None:
            raise ValueError(
                f"{GYM_REWARD} needs the column '{GYM_COLUMN}', which the rows of data.source=reasoning_gym/TASK have; "
                f"columns found: {', '.join(sorted(columns)) or 'none'}"
            )
        answers = self._answers(completions, completion_ids, columns.get("completion_mask"))
        rows = [None if row is None or row != row else str(row) for row in reasoning_gym]
        for row in filter(None, rows):
            self._prepare(row)
        ends_at = time.monotonic() + self.timeout_s
        pairs = zip(answers, rows, strict=True)
        return [None if row is None else self._score(answer, row, ends_at) for answer, row in pairs]

    def _score(self, answer: str, row: str, ends_at: float) -> float:
        if self.find == "boxed":
            answer = find_boxed(answer)
        elif self.find == "answer_tag":
            before, closed, _ = answer.rpartition("</answer>")
            answer = before.rpartition("<answer>")[2] if closed and "<answer>" in before else ""
        if not (answer := answer.strip()):
            return 0.0
        value = self._ask(self.worker, ends_at, score, row, answer) if self._prepare(row) else math.nan
        return float(value) if self.threshold is None or math.isnan(value) else float(value >= self.threshold)

    def _prepare(self, row: str) -> bool:
        """Load the library and make the row's verifier before a time limit counts, also after an answer that took too
        long. False if it cannot be made, which is attempted and reported once."""
        if not self.worker.running:
            self._made = {settings: False for settings, works in self._made.items() if not works}
            try:
                self.worker.call(load_library, timeout_s=START_TIMEOUT_S)
            except RlooKitError as error:
                raise WholeBatchError(f"{NEEDS_GYM} ({error})") from None
        settings = row.partition(', "entry": ')[0]  # one verifier scores all rows of these
        if settings not in self._made:
            self._made[settings] = True
            try:
                self.worker.call(score, row, None, timeout_s=BUILD_TIMEOUT_S)
            except RlooKitError as error:
                say(f"WARNING: {GYM_REWARD} cannot score rows of {settings}}}: {error}")
                self._made[settings] = False
        return self._made[settings]
