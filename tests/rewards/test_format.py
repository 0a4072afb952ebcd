"""think_format_reward and missing_eos_penalty: closed once, an answer, an end."""

import pytest

from rewards import missing_eos_penalty, think_format_reward

END, EOS, END_OF_TEXT = 151668, 151645, 151643


@pytest.mark.parametrize(
    ("text", "ids", "reward"),
    [
        ("so</think>4", [7, END, 19, EOS], 1.0),
        ("so</think>4", [7, END, 19, END_OF_TEXT], 1.0),
        ("</think>4", [END, 19, EOS], 1.0),
        ("so 4", [7, END, 19, EOS], 1.0),  # decoded without the tag: the ids decide
        ("so</think>4", [7, END, 19], 0.0),  # cut off
        ("so</think>", [7, END, EOS], 0.0),  # nothing after it
        ("so</think>", [7, END], 0.0),
        ("so</think>", [7, END, EOS, EOS], 0.0),
        ("so</think>\n\n", [7, END, 198, EOS], 0.0),  # only whitespace after it
        ("so</think>4</think>5", [7, END, 19, END, 20, EOS], 0.0),  # closed twice
        ("so</think>4", [7, 8, 19, EOS], 0.0),  # only spelled
        ("", [], 0.0),
    ],
)
def test_whole_completions_only(text: str, ids: list[int], reward: float) -> None:
    """Guards against paying for a form that only looks right in the text."""
    assert think_format_reward(completions=[text], completion_ids=[ids]) == [reward]


def test_end_tokens_are_a_parameter() -> None:
    """Guards against the embedded model's compact ids: 151645 never occurs there, so all would look cut off."""
    compact = think_format_reward.with_(think_end_id=260, eos_token_ids=[258])
    assert compact(completions=["so</think>4"], completion_ids=[[7, 260, 19, 258]]) == [1.0]
    assert missing_eos_penalty.with_(eos_token_ids=(258,))(completion_ids=[[7, 258], [7, EOS]]) == [0.0, -1.0]


def test_missing_eos_costs_its_penalty() -> None:
    """Guards against a wrong sign, and against an IndexError on an empty completion."""
    batch = [[7, EOS], [7, END_OF_TEXT], [7, EOS, 7], []]
    assert missing_eos_penalty(completion_ids=batch) == [0.0, 0.0, -1.0, -1.0]
    assert missing_eos_penalty.with_(penalty=0.25)(completion_ids=batch) == [0.0, 0.0, -0.25, -0.25]
