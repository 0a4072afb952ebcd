"""length_reward, soft_overlong_penalty, repetition_penalty and relative_length_penalty, at their edges."""

import math
from typing import Any

import pytest

from rewards import answer_reward, length_reward, relative_length_penalty, repetition_penalty, soft_overlong_penalty


@pytest.mark.parametrize(
    ("words", "reward"), [(0, -0.5), (1, -0.5), (9, -0.5), (10, 1.0), (50, 1.0), (51, 0.0), (1000, 0.0)]
)
def test_words_of_the_whole_completion(words: int, reward: float) -> None:
    """Guards against a band that begins a word early or late."""
    assert length_reward(completions=[" ".join(["word"] * words)]) == [reward]


@pytest.mark.parametrize("ending", [".", ".\n\n"])
def test_full_stop_is_seen_behind_whitespace(ending: str) -> None:
    """Guards against losing the bonus to the newline that models end on."""
    texts = ["word " * (words - 1) + "word" + ending for words in (9, 10, 50, 51)]
    assert length_reward(completions=texts) == [0.0, 1.5, 1.5, 0.5]


@pytest.mark.parametrize("text", ["stop.)", "stop. more", ""])
def test_no_bonus_without_a_full_stop_at_the_end(text: str) -> None:
    """Guards against looking for a full stop anywhere in the text."""
    assert length_reward(completions=[text]) == [-0.5]


def test_thinking_counts_as_words() -> None:
    """The whole completion is measured: six words of thinking, the tag and three of answer are ten."""
    assert length_reward(completions=["one two three four five six </think> the answer four"]) == [1.0]


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)]
)
def test_overlong_penalty_grows_over_the_cache(tokens: int, penalty: float) -> None:
    """Guards against a penalty of the wrong sign or slope; the values are equation 13 of DAPO."""
    reward = soft_overlong_penalty.with_(max_completion_length=100, cache_tokens=20)
    assert reward(completion_ids=[[5] * tokens]) == [pytest.approx(penalty)]
    assert soft_overlong_penalty.with_(max_completion_length=100)(completion_ids=[[5] * tokens]) == [
        pytest.approx(penalty)
    ]


def test_overlong_penalty_agrees_with_dapo_sizes_and_without_a_cache() -> None:
    """Guards against a division by zero, and against defaults other than the paper's 16384 + 4096."""
    assert soft_overlong_penalty(completion_ids=[[5] * 16384, [5] * 18432, [5] * 20480]) == [0.0, -0.5, -1.0]
    cliff = soft_overlong_penalty.with_(max_completion_length=10, cache_tokens=0)
    assert cliff(completion_ids=[[5] * 10, [5] * 11]) == [0.0, -1.0]


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    """Guards against counting over words: a model can repeat tokens inside one long word."""
    pairs = repetition_penalty.with_(ngram_size=2)
    found = pairs(completion_ids=[[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2], [9], []])
    assert found == [0.0, -0.75, pytest.approx(-1 / 3), 0.0, 0.0]
    assert pairs.with_(penalty=2.0)(completion_ids=[[5] * 5]) == [-1.5]


def group(lengths: list[int], right: str, prompt: str = "2+2=") -> dict[str, Any]:
    """Completions of so many tokens; `right` has a 1 for each right one."""
    texts = [f"..</think>{4 if mark == '1' else 5}" for mark in right]
    ids = [[7] * (length - 2) + [151668, 19] for length in lengths]
    return {"prompts": [prompt] * len(ids), "completions": texts, "completion_ids": ids, "answer": ["4"] * len(ids)}


def test_a_right_answer_pays_for_length_among_the_right_ones_of_its_prompt() -> None:
    """The sum with `answer_reward` is the paper's: accuracy x (1 - alpha x sigmoid((length - mean) / deviation))."""
    first, second = group([10, 20, 30, 900], "1110"), group([500, 700], "11", "3+1=")
    batch = {name: first[name] + second[name] for name in first}
    sums = [a + 0.4 * b for a, b in zip(answer_reward(**batch), relative_length_penalty(**batch), strict=True)]
    deviation = math.sqrt(200 / 3)
    expected = [1 - 0.4 / (1 + math.exp(-(length - 20) / deviation)) for length in (10, 20, 30)]
    expected += [0.0, *(1 - 0.4 / (1 + math.exp(-side)) for side in (-1, 1))]
    assert sums == [pytest.approx(value) for value in expected]
    assert relative_length_penalty.is_relative, "its held-out mean is the same whatever is learnt"


@pytest.mark.parametrize(("lengths", "right"), [([10], "1"), ([10, 10], "11"), ([10, 99], "10")])
def test_equal_lengths_and_a_single_right_answer_pay_half(lengths: list[int], right: str) -> None:
    """Guards against a division by a deviation of zero."""
    assert relative_length_penalty(**group(lengths, right)) == [-0.5 if mark == "1" else 0.0 for mark in right]


def test_a_row_without_an_answer_and_a_trainer_without_prompts() -> None:
    batch = group([10, 20], "11") | {"answer": [None, "4"]}
    assert relative_length_penalty(**batch) == [None, -0.5]
    with pytest.raises(ValueError, match="needs prompts"):
        relative_length_penalty(**{name: value for name, value in batch.items() if name != "prompts"})
