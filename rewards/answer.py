"""The reward for the right answer: the text after the last closing tag, compared with the dataset's `answer` column.

Two answers agree if they are the same text or the same number in any spelling (42 and 42.0, 1,000 and 1000, 1/2
and 0.5, $18 and 18 dollars; LaTeX too), compared exactly as fractions. `math_answer_reward` in
`rloo_kit.graders.verifier` compares mathematics beyond numbers.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from ._binding import Reward, Sample, check_bool, check_int
from .text import THINK_END_ID, Decode, answer_text

LONGEST_NUMBER = 64  # characters; anything longer is not an answer, and exact arithmetic on it is slow
LARGEST_EXPONENT = 400  # "1e999999999" as a fraction would exhaust memory
WRAPPERS = ' \t\r\n*`"“”「」『』'  # markup around an answer; a ' could be a prime: only as a pair
BOX = "\\boxed{"

# One spelling for each character, then for each form of LaTeX. All patterns take linear time.
_CHARACTERS: dict[int, Any] = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width forms
_CHARACTERS |= {ord(a): b for a, b in zip("−–×·⋅∕⁄٫٬٪。", "--***//.,%.", strict=True)}
_CHARACTERS |= {ord(a): f" {b} " for a, b in zip("½⅓⅔¼¾", ("1/2", "1/3", "2/3", "1/4", "3/4"), strict=True)}
_SPACE, _SIDE = r"(?:\\[,;: ]|\\q?quad\b|[~\u00a0\u2007\u2009\u202f])", r"(?:\{ ?([+-]?[\d.,]+) ?\}|(\d))"
_UNWRAP = r"\\(?:boxed|fbox|mbox|text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf)|operatorname) ?\{([^{}]*)\}", r" \1 "
_SPELLINGS: list[tuple[str, Any]] = [
    (r"(?![0-9])\d", lambda digit: str(int(digit[0]))),  # of other scripts
    ("[⁺⁻]?[⁰¹²³⁴-⁹]+", lambda power: "^" + power[0].translate(str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789"))),
    (r"\\! ?", ""),
    (rf"\{{,\}}|(?<=\d){_SPACE}(?=\d{{3}}(?!\d))", ","),
    (rf"(?!~){_SPACE}|(?<=\S)~|\\[()\[\]]", " "),
    (r"\\([$%])", r"\1"),
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ\b)|\\degree\b", "°"),
    (r"\\(?:times|cdot)\b", "*"),
    (r"\^ ?\{ ?([+-]?\d+) ?\}", r"^\1"),
    (r"(?<=\d)(?=\\[cdt]?frac)", " "),
    (rf"\\[cdt]?frac ?{_SIDE} ?{_SIDE}(?! ?\d)", r"\1\2/\3\4"),
    *[_UNWRAP] * 3,  # one in another; the innermost first
    (r"([+-]?)(?:\bUS)?\$ ?(?=[+-]?[.\d])", r" \1"),  # $ is a currency or a delimiter
    (r"([+-]?)([¢£¥€₩₹]) ?(\d(?:[\d.,]*\d)?)", r"\1\3\2"),
    (r"(?:[^\S\n]|\$)+", " "),
]

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= dict.fromkeys("万萬만", 10**4) | dict.fromkeys("亿億억", 10**8)
_VALUE = rf"""(?P<sign>[+-]?)
    (?:(?P<whole>\d+)[ ](?P<part>\d+/0*[1-9]\d*)
    |(?P<top>(?:\d{{1,3}}(?:,\d{{3}})+|\d{{1,2}}(?:,\d\d)+,\d{{3}}|\d+)(?:\.\d+)?|(?<!\.)\.\d+)
        (?:[eE](?P<e>[+-]?\d+)|[ ]?[*x][ ]?10\^(?P<tens>[+-]?\d+))?
        (?:[ ]?/[ ]?(?P<bottom>[+-]?(?=[0.]*[1-9])\d+(?:\.\d+)?))?
    |10\^(?P<power>[+-]?\d+))
    (?:[ ]?(?P<scale>(?i:{"|".join(_SCALES)}))(?i:s?(?![a-z])))?"""
# A word that makes another number of it, as in `3 quarters`, 18不对 and `18 wrong`.
_NO_UNIT = rf"""(?!(?i:{"|".join(_SCALES)}|hal(?:f|ves)|third|quarter|fourth|squared|cubed
    |(?:fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]{{3,}}(?:teen|tie))th|(?:and|but|cos|factorial|false|incorrect|log|maybe
    |minus|mod(?:ulo)?|none|not|over|plus|root|sin|sqrt|tan|the|times|wrong)\b)
    |[^\W\d_]*[兆千百十不非错錯無没和或半多余之천백])"""
_SYMBOL = r"(?:[kcm]m|k?g|m[gil]|mL|lbs?|oz|ft|in|yd|hrs?|mins?|secs?|mph|k?Wh?|[MG]B)"
_UNIT = rf"""(?P<unit>[ ]?[%°¢£¥€₩₹][CF]?
    |(?:[ ]?{_SYMBOL}|[ ](?:[gmLhs]|(?:(?:square|cubic|dozen)[ ])?{_NO_UNIT}[^\W\d_]{{3,}}))
        (?:[ ]?\^[23])?(?:[ ]?(?:per[ ]|/)[^\W\d_]+(?:\^[23])?)?|[ ]per[ ][^\W\d_]+
    |[ ]?{_NO_UNIT}[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{{1,4}})"""
_SAME_UNIT = {"percent": "%", "degree": "°", "meter": "m", "centimeter": "cm", "inche": "in", "inch": "in"}
_SAME_UNIT |= {"feet": "ft", "foot": "ft", "gram": "g", "kilogram": "kg", "pound": "lb", "ounce": "oz", "liter": "l"}
_SAME_UNIT |= {"hour": "h", "hr": "h", "minute": "min", "second": "s", "sec": "s", "kilometer": "km", "metre": "m"}
_SAME_UNIT |= {"euro": "€", "£": "lb", "元": "¥", "円": "¥", "yuan": "¥", "yen": "¥", "rupee": "₹", "cent": "¢"}
_NUMBER = re.compile(f"{_VALUE}(?:{_UNIT})?", re.VERBOSE)
_NUMBER_IN_TEXT = re.compile(
    rf"""(?:(?<=\\boxed\{{)
    |(?<![A-Za-z0-9^\\√])(?<!\^[+-])(?<!(?<!\.)\.)(?<!\\sqrt[ \[])(?<![A-Za-z0-9)}}\]][,/*+({{_-])(?<!\d[:'])
        (?<![_^]\{{)){_VALUE}(?:(?={_SYMBOL}(?![A-Za-z]))|(?![A-Za-z0-9^π√]|[.,:'][0-9]|[-/*+_][A-Za-z0-9{{]
        |[ ]?\\(?:sqrt|pi|[cdt]?frac|l(?:n|og)|sin|cos|tan)))""",
    re.VERBOSE,
)


def _plain(text: str) -> str:
    """`text` with one spelling for what numbers have several for."""
    text = text.translate(_CHARACTERS)
    for pattern, to in _SPELLINGS:
        text = re.sub(pattern, to, text)
    return text


def _bare(text: str) -> str:
    """`_plain` text without markup around it and a final full stop."""
    bare = _plain(text).strip(WRAPPERS).removesuffix(".").strip(WRAPPERS)
    return re.sub(r"(?s)\A(''?)(.+?)\.?\1\Z", r"\2", bare).strip(WRAPPERS)


def _read_number(bare: str) -> tuple[Fraction | None, str]:
    """The number that `_bare` text is, and its unit, "" without one; None if it is not a number."""
    found = _NUMBER.fullmatch(bare) if len(bare) <= LONGEST_NUMBER else None
    exponent = int(found["e"] or found["tens"] or found["power"] or 0) if found else 0
    if found is None or abs(exponent) > LARGEST_EXPONENT:
        return None, ""
    number = Fraction((found["part"] or found["top"] or "1").replace(",", "")) / Fraction(found["bottom"] or 1)
    number = int(found["whole"] or 0) + number * Fraction(10) ** exponent
    number *= _SCALES.get((found["scale"] or "").lower(), 1)
    unit = re.sub(r"(?<=\w)s\b", "", (found["unit"] or "").strip().lower())
    return -number if found["sign"] == "-" else number, _SAME_UNIT.get(unit, unit)


def parse_number(text: str) -> Fraction | None:
    """`text` as an exact fraction; None if it is not one number and nothing else.

    Accepts signs, decimals, exponents and powers of ten, thousands separators, a/b, mixed numbers, `million`, LaTeX,
    digits of any script; ignores markup, a box, a final full stop, currency and one unit. The percent sign is a unit:
    25% is 25, not 1/4. Not a number: `3 or 4`, `18 of 20`, `5x`, `52_8`, `3:30`, `1.234,56`.

    >>> parse_number(" **1,234.50** "), parse_number(r"-\\frac34"), parse_number("42 apples"), parse_number("4 or 2")
    (Fraction(2469, 2), Fraction(-3, 4), Fraction(42, 1), None)
    """
    return _read_number(_bare(text))[0]


def answers_agree(given: str, expected: str) -> bool:
    """Whether two answers are the same text up to markup and a final full stop, or the same number, in the same unit if
    both have one. Of an expected text with a box, as a worked solution has, only the last box counts.

    >>> answers_agree("**Paris**.", " Paris\\n"), answers_agree("42.0", "42"), answers_agree("42 cm", "42 m")
    (True, True, False)
    """
    bare, bare_expected = _bare(given), _bare(find_boxed(expected) or expected)
    if given.strip() == expected.strip() or bare == bare_expected != "":
        return True
    (number, unit), (gold, gold_unit) = _read_number(bare), _read_number(bare_expected)
    return number is not None and number == gold and (unit == gold_unit or not (unit and gold_unit))


def find_boxed(text: str) -> str:
    """The content of the last `\\boxed{...}`, braces balanced; empty if there is none.

    >>> find_boxed(r"so \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    _, opening, rest = text.rpartition(BOX)
    depth = 1
    for end, character in enumerate(rest if opening else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:end]
    return ""


def find_last_number(text: str) -> str:
    """The last number in `text`, without its unit, in plain spelling; empty if there is none.

    >>> find_last_number("2 apples = **1,200** grams."), find_last_number(r"so $3\\sqrt{2}$ or 18kg")
    ('1,200', '18')
    """
    return ["", *(found[0] for found in _NUMBER_IN_TEXT.finditer(_plain(text)))][-1]


FINDERS: dict[str, Callable[[str], str]] = {"whole": str.strip, "boxed": find_boxed, "last_number": find_last_number}


@dataclass(frozen=True)
class AnswerReward(Reward):
    """1.0 for the right answer; 0.0 for a wrong or missing one, or if the thinking was never closed.

    With tools only the last turn counts. An answer after a close that the thinking budget forced counts like any other.

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
            sample.text, sample.turns[-1], self.think_end_id, thinking=self.thinking, decode=self.decode
        )
        if given is None:
            return 0.0
        return 1.0 if answers_agree(FINDERS[self.find](given), str(sample.answer)) else 0.0


def has_no_answer(answer: Any) -> bool:
    """Whether the `answer` column has nothing to compare with: None, blank text, or NaN."""
    return answer is None or answer != answer or (isinstance(answer, str) and not answer.strip())


answer_reward = AnswerReward()
