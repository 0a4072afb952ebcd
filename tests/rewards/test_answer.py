"""answer_reward: what follows the last closing tag, exact or numeric."""

import time

import pytest

from rewards import answer_reward

END = 151668


def reward_of(text: str, answer: object, ids: tuple[int, ...] = (7, END, 19, 151645), **params: object) -> float | None:
    return answer_reward.with_(**params)(completions=[text], completion_ids=[ids], answer=[answer])[0]


EQUAL = [
    ("42", "42"),
    ("\n\n42\n", " 42 "),
    ("42.0", "42"),
    ("42.", "42"),
    ("+42", "42"),
    ("Paris", "Paris"),
    ("42", 42),
]
EQUAL += [("-0.5", "\N{MINUS SIGN}1/2"), ("1,234,567", "1234567"), ("1e3", "1000"), ("**$1,000$**", "1000.00")]
EQUAL += [("0.30", "3/10"), ("2.5", 2.5)]
# The forms that real models write around a right answer.
EQUAL += [("**42**", "42"), ("$42", "42"), ("４２", "42"), ("１，２３４．５", "1234.5"), (r"\boxed{42}", "42")]
EQUAL += [(r"$\boxed{1,234}$.", "1234"), ("**Paris**", "Paris"), ("Paris.", "Paris"), (r"\boxed{Paris}", "Paris")]
OTHER = [("43", "42"), ("4 2", "42"), ("12", "1,2"), ("1,2345", "12345"), ("0.3333333333", "1/3"), ("1/0", "0")]
OTHER += [("paris", "Paris"), ("The answer is 42", "42"), ("", "42"), ("nan", "7"), ("inf", "7"), ("1_000", "1000")]
OTHER += [("0.1" + "0" * 70 + "1", "0.1"), ("4²", "42"), (r"\boxed{4} or \boxed{2}", "42"), ("**", "$")]


@pytest.mark.parametrize(
    ("given", "expected", "reward"), [(*pair, 1.0) for pair in EQUAL] + [(*pair, 0.0) for pair in OTHER]
)
def test_equal_as_text_or_as_numbers(given: str, expected: object, reward: float) -> None:
    """Guards against failing a right answer for its form, and against paying for anything near: numbers are compared
    exactly."""
    assert reward_of(f"so</think>{given}", expected) == reward


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
        ("last_number", r"The sum is $\boxed{42}$.", 1.0),
        ("last_number", "It is ４２。", 1.0),
        ("last_number", "none", 0.0),
    ],
)
def test_finding_the_answer_in_a_sentence(find: str, text: str, reward: float) -> None:
    """Guards against braces that do not balance and against markup around the number."""
    assert reward_of(f"so</think>{text}", "42", find=find) == reward


@pytest.mark.parametrize(
    ("params", "words"), [({"find": "regex"}, "find is 'regex'.*whole, boxed"), ({"thinking": 1}, "thinking is 1")]
)
def test_impossible_parameters_are_refused(params: dict, words: str) -> None:
    """Guards against a typing error in a config that would silently compare the whole text."""
    with pytest.raises(ValueError, match=words):
        answer_reward.with_(**params)
