"""The reward for the right answer: the text after the last closing tag, compared with the dataset's `answer` column.

Two answers agree if they are the same text or the same number (42 and 42.0, 1,000 and 1000, 1/2 and 0.5), compared
exactly as fractions. `math_answer_reward` in `rloo_kit.rewarding.models` compares mathematics beyond numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, ClassVar

from ._binding import Reward, Sample, check_bool, check_int
from .text import THINK_END_ID, Decode, answer_text

LONGEST_NUMBER = 64  # characters; anything longer is not an answer, and exact arithmetic on it is slow
LARGEST_EXPONENT = 400  # "1e999999999" as a fraction would exhaust memory
WRAPPERS = " \t\r\n*`$"  # markup around an answer
BOX = "\\boxed{"
_NARROW = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x2212: "-"}  # full-width forms, the minus sign


def _bare(text: str) -> str:
    """`text` without markup, a box around all of it and a final full stop."""
    text = text.strip(WRAPPERS).removesuffix(".").strip(WRAPPERS)
    box = find_boxed(text)
    return box.strip(WRAPPERS) if text == f"{BOX}{box}}}" else text


def parse_number(text: str) -> Fraction | None:
    """`text` as an exact fraction; None if it is not a number.

    Accepts signs, decimals, exponents, thousands separators, a/b and full-width characters; ignores surrounding markup,
    a box and a final full stop.

    >>> parse_number(" **1,234.50** "), parse_number("-3/4"), parse_number("42 apples")
    (Fraction(2469, 2), Fraction(-3, 4), None)
    """
    text = _bare(text.translate(_NARROW))
    if not text or len(text) > LONGEST_NUMBER or not text.isascii() or "_" in text:
        return None
    numerator, slash, denominator = text.partition("/")
    top = _parse_decimal(numerator)
    if not slash or top is None:
        return top
    bottom = _parse_decimal(denominator)
    return top / bottom if bottom else None


def _parse_decimal(text: str) -> Fraction | None:
    whole, point, decimals = text.strip().partition(".")
    if "," in whole:
        first, *groups = whole.lstrip("+-").split(",")
        if not 1 <= len(first) <= 3 or any(len(group) != 3 or not group.isdigit() for group in groups):
            return None
        whole = whole.replace(",", "")
    try:
        number = Decimal(whole + point + decimals)
    except InvalidOperation:
        return None
    if not number.is_finite() or abs(number.adjusted()) > LARGEST_EXPONENT:
        return None
    return Fraction(number)


def answers_agree(given: str, expected: str) -> bool:
    """Whether two answers are the same number, or the same text up to surrounding markup and a final full stop.

    >>> answers_agree("**Paris**.", " Paris\\n"), answers_agree("42.0", "42"), answers_agree("42", "43")
    (True, True, False)
    """
    if given.strip() == expected.strip() or _bare(given) == _bare(expected) != "":
        return True
    number = parse_number(given)
    return number is not None and number == parse_number(expected)


def find_boxed(text: str) -> str:
    """The content of the last `\\boxed{...}`, braces balanced; empty if there is none.

    >>> find_boxed(r"so \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    _, opening, rest = text.rpartition(BOX)
    depth = 1 if opening else 0
    for end, character in enumerate(rest if opening else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:end]
    return ""


def find_last_number(text: str) -> str:
    """The last word of `text` that is a number; empty if there is none.

    >>> find_last_number("2 apples = **1,200** grams.")
    '1,200'
    """
    for word in reversed(text.replace("=", " ").replace(BOX, " ").split()):
        word = word.strip("()[]{}<>.,;:!?\"'%。，" + WRAPPERS)
        if parse_number(word) is not None:
            return word
    return ""


FINDERS: dict[str, Callable[[str], str]] = {"whole": str.strip, "boxed": find_boxed, "last_number": find_last_number}


@dataclass(frozen=True)
class AnswerReward(Reward):
    """1.0 for the right answer; 0.0 for a wrong or missing one, or if the thinking was never closed.

    An answer after a close that the thinking budget forced counts like any other.

    None if the sample has no reference answer: None, blank, or not a number (NaN) in a numeric column.

    Args:
        think_end_id: id of `</think>`; what follows its last occurrence is the answer.
        thinking: False for a model that never thinks: the whole completion is the answer.
        find: `whole` (everything after the tag), `boxed` (the content of its last \\boxed{}), `last_number`.
        decode: a tokenizer's `decode`, used only if the text alone does not show which tag is the real one.

    >>> answer_reward(completions=["2+2</think>4"], completion_ids=[[17, 10, 17, 151668, 19]], answer=["4.0"])
    [1.0]
    """

    __name__: ClassVar[str] = "answer_reward"
    needs: ClassVar[tuple[str, ...]] = ("completions", "completion_ids", "answer")

    think_end_id: int = THINK_END_ID
    thinking: bool = True
    find: str = "whole"
    decode: Decode | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("think_end_id", self.think_end_id, 0)
        check_bool("thinking", self.thinking)
        if self.find not in FINDERS:
            raise ValueError(f"find is {self.find!r}; it must be one of {', '.join(FINDERS)}")

    def score(self, sample: Sample) -> float | None:
        if has_no_answer(sample.answer):
            return None
        given = answer_text(
            sample.text, sample.token_ids, self.think_end_id, thinking=self.thinking, decode=self.decode
        )
        if given is None:
            return 0.0
        return 1.0 if answers_agree(FINDERS[self.find](given), str(sample.answer)) else 0.0


def has_no_answer(answer: Any) -> bool:
    """Whether the `answer` column has nothing to compare with: None, blank text, or NaN."""
    return answer is None or answer != answer or (isinstance(answer, str) and not answer.strip())


answer_reward = AnswerReward()
