"""answer_reward: what follows the last closing tag, exact or numeric."""

import time

import pytest

from rewards import answer_reward
from rewards.answer import find_last_number, parse_number

END = 151668


def reward_of(text: str, answer: object, ids: tuple[int, ...] = (7, END, 19, 151645), **params: object) -> float | None:
    return answer_reward.with_(**params)(completions=[text], completion_ids=[ids], answer=[answer])[0]


EQUAL = [("42", "42"), ("\n\n42\n", " 42 "), ("42.0", "42"), ("42.", "42"), ("+42", "42"), ("42", 42)]
EQUAL += [("-0.5", "\N{MINUS SIGN}1/2"), ("1,234,567", "1234567"), ("1e3", "1000"), ("**$1,000$**", "1000.00")]
EQUAL += [("0.30", "3/10"), ("2.5", 2.5), ("Paris", "Paris")]
OTHER = [("43", "42"), ("4 2", "42"), ("12", "1,2"), ("1,2345", "12345"), ("0.3333333333", "1/3"), ("1/0", "0")]
OTHER += [("paris", "Paris"), ("The answer is 42", "42"), ("", "42"), ("nan", "7"), ("inf", "7"), ("1_000", "1000")]
OTHER += [("0.1" + "0" * 70 + "1", "0.1"), ("4²", "42"), (r"\boxed{4} or \boxed{2}", "42"), ("**", "$")]
EQUAL += [("**Paris**", "Paris"), ("Paris.", "Paris"), (r"\boxed{Paris}", "Paris"), (r"\text{Paris}", "Paris")]
EQUAL += [("'Paris'.", "Paris"), ("**'Paris.'**", "Paris"), ("'42'", "42"), ("'It's'", "It's"), ("''42''", "42")]
EQUAL += [("f''", "f''")]
OTHER += [("f''", "f"), ("y'", "y"), ("A'", "A"), ("'A", "A"), ("90'", "90°"), ("84", "7 dozen"), ("€18", "£18")]


@pytest.mark.parametrize(
    ("given", "expected", "reward"), [(*pair, 1.0) for pair in EQUAL] + [(*pair, 0.0) for pair in OTHER]
)
def test_equal_as_text_or_as_numbers(given: str, expected: object, reward: float) -> None:
    """Guards against failing a right answer for its form, and against paying for anything near: numbers are compared
    exactly."""
    assert reward_of(f"so</think>{given}", expected) == reward


# How models write a right answer; each list is one number.
SPELLINGS = {
    "18": r"""\$18 | $18 | 18$ | US$18 | \boxed{18} | $\boxed{\text{\$18}}$. | \(18\) | \[ 18 \] | $$18$$ | \text{18}
        | \mathbf{18} | **18** | `18` | 「18」 | 18. | 18。 | 18.0 | +18 | $18.00 | 1.8e1 | 1.8 \times 10^1 | 36/2
        | 1.8 × 10^{1} | \dfrac{36}{2} | １８ | ١٨ | १८ | __UNITS__""",
    "1200": r"""1,200 | 1{,}200 | 1,\!200 | 1,\! 200 | 1\,200 | 1~200 | １，２００ | \$1{,}200.00 | 1.2e3 | 1.2 x 10^3
        | 1.2 thousand | 12 hundred | 0.12万 | 1,200円""",
    "100000": "1,00,000 | 100,000 | 10^5 | 10^{5} | 10⁵ | 1e5 | 1×10⁵ | 10万 | 100 thousand",
    "18000000": "18 million | $18 million | 18 Million | 1,800万 | 0.18亿",
    "3e8": "3.0×10⁸ | 3 × 10⁸ m/s",
    "0.003": "3 × 10⁻³",
    "1/2": r"0.5 | .5 | 1 / 2 | 2/4 | \frac{1}{2} | \frac12 | \tfrac1{2} | \frac 1 2 | ½ | 5 \cdot 10^{-1}",
    "-3/4": r"-\frac{3}{4} | \frac{-3}{4} | -\dfrac34 | −3/4 | –0.75 | 3/-4 | -$0.75 | $-0.75",
    "9/5": r"1\frac{4}{5} | 1 \tfrac45 | 1 4/5 | 1.8 | \frac{9}{5}",
    r"137 \frac{1}{2}": "137.5 | 137½ | 275/2",
    r"\frac{270}7\text{ degrees}": r"270/7 | 38\frac47 | \frac{270}{7}^\circ",
}
UNITS = r"""18\% | 18% | 18 percent | 18 \text{ eggs} | 18 eggs | 18kg | 18\,\text{kg} | 18 \, \text{kg}
    | 18~\mathrm{cm} | 18 \mathrm{~m} | 18 g | 18 cm² | 18\text{ cm}^2 | 18 square feet | 18 km/h | 18 miles per hour
    | 18 m/s² | 18 meters per second² | 18 per day | 18 dozen | 18 dozen eggs | 18° | 18 USD | €18 | 18 € | 18^\circ
    | 18^{\circ} | 18 °C | 18\degree | 18元 | 18 年 | 18 个苹果 | 18個です | 18개"""
SENTENCES = ["{}", "So it is {}.", "**{}**", "2 apples: **{}**!", "答案是{}。", "2 = {}</b>\n", "2: {} …"]
SENTENCES.append(r"thus $\boxed{{{}}}$")
# What contains the number, or looks like it, and is another one or none.
NOT = {
    "18": r"""18 is wrong | 18 wrong | 18 not | 18不对 | 18 of 20 | 18 or 20 | 17 18 | 18, 19 | 18,19 | 18 and a half
        | 18x | 18 x | 18i | 18ab | 18pi | 18\pi | 18 \pi | 18\sqrt{2} | \sqrt{18} | 18_8 | 18^2 | 18² | 18!
        | 18:00 | 18-20 | 18–20 | 18 thousand | 18万 | 18多 | 18k | 18 million | 18 half | 18/20 | 18.5 | 1 8
        | 18 squared | 18² m | -18 | 118 | 181 | 0.18 | 18e | 18th | 1.8.0 | ≈18 | ~18 | <18 | (18, 2) | x18 | eighteen
        | 18分之1 | 18 sevenths | 18 ninths | 18 twelfths
        | 18 sixteenths | 18 twentieths | 18 thirtieths | 18 fiftieths | 18 modulo | 18 none | √18 | 18π | 18 km 5 m
        | 18\text{ is wrong} | 18 \text{ or } 19 | 18 dollars and 50 cents""",
    "3": r"3 or 4 | 3\sqrt{13} | 3:30 | 3-4 | 3 to 4 | 3 quarters | 3/4 | 3 4/5 | 2\frac{1}{3}x",
    "52": "52_8 | 52_{8} | 528",
    "0": r"1/0 | \frac{1}{0} | 1 1/0 | 0x",
    "1200": "1 200 300 | 1,20 | 12,00 | 1.200 | 1,200,3 | 1,2000",
    "1234.56": "1.234,56 | 1234,56",
    "14/5": r"1\frac{4}{5} | 14 5",
    "1/23": r"\frac{1}{2}3 | \frac12 3 | ½3",
    "18 kg": "18 g | 18% | 18 pounds | $18 eggs",
    "18 s": "18 m | 18 hours | 18%",
    "1/4": "25% | 0.250001",
}
UNITS_BY_NAME = """18 in = 18 inches = 18 inch; 18 ft = 18 feet = 18 foot; 18 s = 18 secs = 18 seconds; 18 L = 18 liters
; 18 kg = 18 kilograms; 18 h = 18 hours = 18 hrs; 18 cm = 18 centimeters; 18 lbs = 18 pounds; 18 min = 18 minutes
; 18 mile per hour = 18 miles per hour; €18 = 18 euros; £18 = 18 pounds; ¥18 = 18元 = 18 yuan; 18 cm² = 18 cm^2"""


@pytest.mark.parametrize("gold", SPELLINGS)
def test_every_spelling_of_a_number_is_the_same_number(gold: str) -> None:
    r"""Of `\$18`, `1{,}200`, `25\%`, `18 \text{ eggs}`, none was right where the gold is a bare number. A number in a
    sentence was passed over if markup followed it, or a script without spaces surrounded it."""
    for text in map(str.strip, SPELLINGS[gold].replace("__UNITS__", UNITS).split(" | ")):
        assert reward_of(f"so</think>{text}", gold) == 1.0, text
        assert reward_of(rf"so</think>It is \boxed{{{text}}}.", gold, find="boxed") == 1.0, text
        for sentence in SENTENCES:
            assert reward_of(f"</think>{sentence.format(text)}", gold, find="last_number") == 1.0, (sentence, text)


@pytest.mark.parametrize("units", UNITS_BY_NAME.split(";"))
def test_a_unit_is_the_same_by_its_name_and_its_symbol(units: str) -> None:
    """Guards against `18 inches` scored 0 for `18 in`, and against `s` read as a plural, so as no unit."""
    assert {reward_of(f"so</think>{a}", b) for a in units.split(" = ") for b in units.split(" = ")} == {1.0}


@pytest.mark.parametrize("gold", NOT)
def test_what_only_contains_a_number_is_not_that_number(gold: str) -> None:
    """Guards against paying for a part of a wrong answer, for two answers at once, and for another unit."""
    for text in map(str.strip, NOT[gold].split(" | ")):
        assert reward_of(f"so</think>{text}", gold) == 0.0, text
        assert reward_of(rf"so</think>\boxed{{{text}}}", gold, find="boxed") == 0.0, text


def test_reading_numbers_takes_linear_time() -> None:
    """Guards against patterns that backtrack: a reward reads completions of tens of thousands of tokens."""
    pieces = r"1 | 1,111 | 1, | 1/ | 1 1/ | 1e | 1 * 10^ | ¥1 | \boxed{ | \frac{1 | \text{ | ~ | 18 a | 年 | ^{ | ٣"
    pieces += r" | 1\! | ' | 10⁸ | ."
    for piece in [*pieces.split(" | "), "1 billion ", "\n "]:
        started = time.process_time()
        find_last_number(piece * 10_000 + "x")
        assert parse_number(piece * 10_000 + "x") is None
        assert time.process_time() - started < 1.0, piece


def test_huge_exponents_cost_no_time() -> None:
    """Guards against a completion of ten characters that would expand to gigabytes of digits."""
    started = time.process_time()
    assert reward_of("so</think>1e999999999", "1e999999998") == 0.0
    assert time.process_time() - started < 1.0


def test_last_closing_tag_counts() -> None:
    """Guards against reading an answer that the model took back by thinking on."""
    ids = (7, END, 19, END, 20)
    assert reward_of("so</think>4</think>5", "5", ids) == 1.0
    assert reward_of("so</think>5</think>4", "5", ids) == 0.0


def test_ids_decide_whether_the_thinking_closed() -> None:
    """Guards against paying for a spelled-out tag: without the id there is no answer yet."""
    assert reward_of("so</think>42", "42", (7, 19, 151645)) == 0.0
    assert reward_of("42", "42", ()) == 0.0


def test_decode_finds_the_answer_before_a_spelled_out_tag() -> None:
    """Guards against cutting the answer at a tag that was spelled in ordinary tokens."""
    decoded = {7: "so", 8: "</think>", END: "</think>", 9: "a", 19: "4"}
    ids = (7, END, 9, 8, 19)
    text = "".join(decoded[token] for token in ids)
    assert reward_of(text, "a</think>4", ids, decode=lambda row: "".join(decoded[token] for token in row)) == 1.0


def test_without_thinking_the_whole_completion_is_the_answer() -> None:
    """Guards against a non-thinking model that can never score because it has no tag."""
    assert reward_of("42\n", "42", (19, 151645), thinking=False) == 1.0
    assert reward_of("41", "42", (19, 151645), thinking=False) == 0.0


@pytest.mark.parametrize("answer", [None, "", "  ", float("nan")])
def test_samples_without_an_answer_are_not_judged(answer: object) -> None:
    """Guards against a mixed dataset: a prompt without an answer gives None, not a wrong answer."""
    assert reward_of("so</think>42", answer) is None


def test_a_missing_column_is_an_error_that_names_what_there_is() -> None:
    """Guards against a silent zero for every sample when the dataset calls its column otherwise."""
    with pytest.raises(ValueError, match="needs a column 'answer'.*columns found: solution"):
        answer_reward(prompts=["p"], completions=["x"], completion_ids=[[1]], solution=["4"])


@pytest.mark.parametrize(
    ("find", "text", "reward"),
    [
        ("boxed", r"First \boxed{1}, then \boxed{\frac{84}{2}} or \boxed{42}.", 1.0),
        ("boxed", r"\boxed{{42}", 0.0),
        ("boxed", "42", 0.0),
        ("last_number", "There are 7 boxes, so the total is 6*7 = **42** apples.", 1.0),
        ("last_number", "It is 42, not 43.", 0.0),
        ("last_number", "It is 42, at 3:30 on 2024-01-05, for 52_8, 5x, 3-4, v1.2.3 and 18-year-olds.", 1.0),
        ("last_number", r"\begin{aligned} x &= 6 * 7 \\ &= 42 \end{aligned}", 1.0),
        ("last_number", "3 and __42__ <br>", 1.0),
        ("last_number", r"the box \boxed{42", 1.0),
        ("last_number", "42 million", 0.0),
        ("last_number", "none", 0.0),
        ("last_number", "x = √42", 0.0),
        ("last_number", r"\sqrt 42", 0.0),
        ("last_number", r"\sqrt[3]{42}", 0.0),
        ("last_number", r"\sqrt[42]{x}", 0.0),
        ("last_number", "The answer is ...42", 1.0),
        ("last_number", "The answer is .42", 0.0),
        ("last_number", "42π", 0.0),
        ("last_number", "The acceleration is 42 m s⁻².", 1.0),
    ],
)
def test_finding_the_answer_in_a_sentence(find: str, text: str, reward: float) -> None:
    """Guards against braces that do not balance and against markup around the number."""
    assert reward_of(f"so</think>{text}", "42", find=find) == reward
