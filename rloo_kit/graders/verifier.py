"""Rewards that read an answer, and those that ask a library about it: math-verify, or reasoning-gym.

A verifier can hang on a completion, and math-verify returns 0 outside the main thread, so both run in a `Worker` with a
time limit.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from rloo_kit.data.answers import GYM_REWARD
from rloo_kit.errors import RewardError, RlooKitError, WholeBatchError
from rloo_kit.rewards._binding import check_positive
from rloo_kit.rewards.answer import BOX, answers_agree, find_boxed, has_no_answer, parse_number
from rloo_kit.rewards.text import THINK_END_ID, Decode, answer_text, as_ids, as_text, cut_turns, refuse_assumed
from rloo_kit.system.isolation import Worker
from rloo_kit.system.processes import say
from rloo_kit.tasks.gym import GYM_COLUMN, INSTALL, load_library, score

START_TIMEOUT_S = 120.0  # to start the worker and load math-verify, or reasoning-gym


@dataclass
class AnswerReader:
    """A reward that reads answers, without the thinking before them; arguments as for `rewards.AnswerReward`."""

    __name__: ClassVar[str] = "answer_reader"
    think_end_id: int = THINK_END_ID
    thinking: bool = True
    decode: Decode | None = field(default=None, repr=False, compare=False)

    def _answers(self, completions: Sequence[Any], completion_ids: Sequence[Any], masks: Any) -> list[str]:
        """What follows the thinking of each completion, with `masks` (None without tools) of its last turn; empty if
        that was never closed."""
        if self.thinking:
            refuse_assumed(self.__name__, self.think_end_id, completions, completion_ids)
        options: dict[str, Any] = {"think_end_id": self.think_end_id, "thinking": self.thinking, "decode": self.decode}
        return [
            answer_text(as_text(text, last=mask is not None), cut_turns(as_ids(ids), mask)[-1], **options) or ""
            for text, ids, mask in zip(completions, completion_ids, masks or [None] * len(completions), strict=True)
        ]


@dataclass
class Verifier(AnswerReader):
    """A reward that asks a library in a `Worker`, within two time limits; RewardError if the library does not work.

    An answer that takes longer than `answer_timeout_s` is wrong. If the process dies, or the batch has taken
    `timeout_s`, the sample counts as failed (NaN, which the guard reports).
    """

    caught: ClassVar[type[RlooKitError]] = WholeBatchError  # the guard asks again, sample by sample, after any other
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


NEEDS_MATH_VERIFY = "math_answer_reward needs math-verify: pip install 'rloo-kit[math]'"
WARM_UP = ("$\\frac{1}{2}$", "0.5")  # equal: shows that the worker works, and loads its modules
_FORMULA = re.compile(r"(?<!\\)\$[^$]+\$|\\[(\[]")
# Words, which it would multiply by their letters, so that TTH is HTT; but xyz, abc and inf are what it reads in them.
_WORDS = r"(?!(?:[a-d]+|[b-df-hj-np-tv-z]+|inf(?:inity)?)(?![A-Za-z ]))[A-Za-z]{3}[A-Za-z ]*"
_UNREAD = (  # by math-verify: a number's base, separators of thousands, i after it, degrees, primes, a full stop, words
    (r"(?<=\d)_\{? ?(\d+) ?\}?", r" b_{\1}"),
    (r"(?<=\d)(?:\{,\}|,?\\! ?|\\,)(?=\d{3}(?!\d))", ""),
    (r"(?<=\d)i\b", " i"),
    ("°", r"^\\circ"),
    ("'", r"^{\\prime}"),
    (r"\.(?=\s*(?:\$|\\[)\]]))", ""),
    (rf"(?<=\\boxed\{{){_WORDS}(?=\}})|(?<=\$){_WORDS}(?=\$)|\A{_WORDS}\Z", r"\\text{\g<0>}"),
)


@dataclass
class MathAnswerReward(Verifier):
    """1.0 if math-verify finds the answer equal to the `answer` column, else 0.0; None without a reference answer.

    The answer is the last box after the last closing tag, else the number that the last line ends with, else the last
    formula, else the end of the last line; all of it has to be equal. `Verifier` describes arguments and limits.
    """

    __name__: ClassVar[str] = "math_answer_reward"

    @cached_property
    def worker(self) -> Worker:
        """The process that math-verify runs in; started and checked on first use."""
        worker = Worker("math-verify")
        try:
            works = worker.call(verify_answer, *WARM_UP, timeout_s=START_TIMEOUT_S)
        except RewardError as error:
            raise WholeBatchError(f"{NEEDS_MATH_VERIFY} ({error})") from None
        if not works:
            raise WholeBatchError(f"math-verify does not find {WARM_UP[0]} equal to {WARM_UP[1]}; reinstall it")
        return worker

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] = (),
        answer: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if answer is None:
            raise ValueError(
                "math_answer_reward needs a column 'answer' next to the prompts (data.answer_column names its source); "
                f"columns found: {', '.join(sorted(columns)) or 'none'}"
            )
        answers = self._answers(completions, completion_ids, columns.get("completion_mask"))
        worker, scores = self.worker, list[float | None]()
        ends_at = time.monotonic() + self.timeout_s
        for given, gold in zip(answers, answer, strict=True):
            final, expected = find_boxed(given) or (given and _ending(given)), str(gold)
            if has_no_answer(gold) or not given:
                scores.append(None if has_no_answer(gold) else 0.0)
            elif answers_agree(given, expected) or answers_agree(final, expected):
                scores.append(1.0)
            else:
                if not worker.running:  # after an answer that took too long: the next one's limit is not for the import
                    worker.call(verify_answer, *WARM_UP, timeout_s=START_TIMEOUT_S)
                verdict = self._ask(worker, ends_at, verify_answer, expected, final)
                scores.append(None if verdict is None else float(verdict))
        return scores


def _ending(text: str) -> str:
    """What the last line says after `is`, a colon or the like; `text` if that is no number, but a formula is marked."""
    mark = r"\b(?<!which )(?:is|are|be|equals)\b:?|\b(?i:therefore|thus|hence|so),?\s|[A-Za-z]:\**\s"
    end = re.split(mark, text.splitlines()[-1])[-1].strip(" *").rstrip(".*")
    return text if _FORMULA.search(text) and parse_number(end) is None else end


def verify_answer(expected: str, given: str) -> bool | None:
    """Whether math-verify finds `given` equal to `expected`; None if it cannot parse `expected`.

    In the worker. Its own time limits are off: they need the main thread and miss hangs in C code.
    """
    from math_verify import verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its limits are off
    gold = _parse(expected)
    return bool(verify(gold, _parse(given), float_rounding=12, timeout_seconds=None)) if gold else None


def _parse(text: str) -> list[Any]:
    """What math-verify reads in `text`: the last box, else the last formula, else all of it, never a part of text
    without markup, as the 2 of `(1, 2)`."""
    from math_verify import LatexExtractionConfig, parse

    for pattern, to in _UNREAD:
        text = re.sub(pattern, to, text)
    box = find_boxed(text)
    if box or not _FORMULA.search(text):
        text = f"{BOX}{box or text}}}"
    return parse(text, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)


NEEDS_GYM = f"{GYM_REWARD} needs the library reasoning-gym, which is not installed or does not work: {INSTALL}"
FINDERS = ("whole", "boxed", "answer_tag")
BUILD_TIMEOUT_S = 60.0  # to make a task's verifier


@dataclass
class ReasoningGymScore(Verifier):
    """The verifier's score of the answer, 0.0 to 1.0; None for a row that is not from reasoning-gym.

    0.0 if the thinking was never closed, there is no answer, or the verifier raises on it; failed if there is no
    verifier (of a refused task, for example). `Verifier` describes the other arguments and limits.

    Args:
        threshold: above 0, at most 1; 1.0 if the score reaches it, else 0.0. None: the score, partial credit included.
        find: `whole` (everything after the tag), `boxed` (the last \\boxed{}), `answer_tag` (the last
            <answer></answer>, as the library's own prompts ask for it).
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
        """Load the library and make the row's verifier before a time limit counts. False if it cannot be made, which is
        tried and reported once."""
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
