"""Answers compared by math-verify."""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rloo_kit.errors import RewardError, WholeBatchError
from rloo_kit.rewarding.verifier import START_TIMEOUT_S, Verifier
from rloo_kit.rewards.answer import BOX, answers_agree, find_boxed, has_no_answer, parse_number
from rloo_kit.system.isolation import Worker

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
    """What the last line of `text` says after `is`, a colon or the like; `text` if that is no number, but a formula is
    marked."""
    mark = r"\b(?<!which )(?:is|are|be|equals)\b:?|\b(?i:therefore|thus|hence|so),?\s|[A-Za-z]:\**\s"
    end = re.split(mark, text.splitlines()[-1])[-1].strip(" *").rstrip(".*")
    return text if _FORMULA.search(text) and parse_number(end) is None else end


def verify_answer(expected: str, given: str) -> bool | None:
    """Whether math-verify finds `given` equal to `expected`; None if it cannot parse `expected`.

    Runs in the worker. math-verify's own time limits are off: they need the main thread and miss hangs in C code.
    """
    from math_verify import verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its limits are off
    gold = _parse(expected)
    return bool(verify(gold, _parse(given), float_rounding=12, timeout_seconds=None)) if gold else None


def _parse(text: str) -> list[Any]:
    """What math-verify reads in `text`: the last box, else the last formula, else all of it. In text without markup it
    would take a part of the answer, as the 2 of `(1, 2)`."""
    from math_verify import LatexExtractionConfig, parse

    for pattern, to in _UNREAD:
        text = re.sub(pattern, to, text)
    box = find_boxed(text)
    if box or not _FORMULA.search(text):
        text = f"{BOX}{box or text}}}"
    return parse(text, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)
