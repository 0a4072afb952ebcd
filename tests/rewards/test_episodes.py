"""Rewards of an episode with tools (the column `completion_mask`): what a tool returned is never the model's merit.

The result in the middle has all that a reward looks for: the right answer, closing tags, an end token, repetition.
"""

from typing import Any

import pytest

import rewards
from rewards import (
    Reward,
    Sample,
    answer_reward,
    length_reward,
    missing_eos_penalty,
    repetition_penalty,
    soft_overlong_penalty,
    think_format_reward,
    thinking_budget_reward,
    thinking_reward,
)

END, EOS, CALL = 151668, 151645, 90
ALL = [value for value in vars(rewards).values() if isinstance(value, Reward)]
FIRST = [*range(100, 112), END, CALL, EOS]  # 12 tokens of thinking
RESULT = [40, END, 19, EOS, *[41] * 30, END, 42]
LAST = [*range(200, 220), END, 20, EOS]  # 20 tokens of thinking


def episode(last: list[int] = LAST, text: str = "so</think>5", first: list[int] = FIRST) -> dict[str, Any]:
    mask = [1] * len(first) + [0] * len(RESULT) + [1] * len(last)
    ids = [*first, *RESULT, *last]
    found = {"completions": [text], "completion_ids": [ids], "completion_mask": [mask], "answer": ["4"]}
    return found | {"prompts": ["2+2="]}


def test_an_episode_is_cut_into_its_turns() -> None:
    """Guards against a turn that begins with a token of the result, or ends without its last."""
    (mask,) = episode()["completion_mask"]
    assert Sample(ids=FIRST + RESULT + LAST, mask=mask).turns == [FIRST, LAST]
    assert Sample(ids=LAST).turns == [LAST] and Sample(ids=RESULT, mask=[0] * len(RESULT)).turns == [[]]


@pytest.mark.parametrize(
    ("wrong", "reward", "batch", "value", "without_mask"),
    [
        ("the first turn's thinking alone", thinking_reward, episode(), 1.0, 0.7),
        ("the first turn's thinking alone", thinking_budget_reward.with_(max_tokens=32), episode(), 1.0, 0.0),
        ("tags of the result are the model's", think_format_reward, episode(), 1.0, 0.0),
        ("a turn without thinking is closed by the result", thinking_reward, episode(LAST[:20]), -1.0, 0.7),
        ("the result ends the last turn", think_format_reward, episode([END, 20]), 0.0, 0.0),
        ("a turn closes for another", think_format_reward, episode([*LAST[:9], *LAST[-2:]]), 0.0, 0.0),
        ("a turn of thinking alone is whole", think_format_reward, episode(first=[*FIRST[:13], EOS]), 0.0, 0.0),
        ("the result is read as the answer", answer_reward, episode(LAST[:20], "4"), 0.0, 1.0),
        ("the last turn is not read", answer_reward, episode(text="so</think>4"), 1.0, 1.0),
        ("the result has a length", soft_overlong_penalty.with_(max_completion_length=50), episode(), 0.0, -1.0),
        ("the result's repetition counts", repetition_penalty.with_(ngram_size=2), episode(), 0.0, -28 / 73),
        ("the result's end token ends it", missing_eos_penalty, episode(LAST[:-1]), -1.0, -1.0),
    ],
)
def test_only_what_the_model_wrote_counts(
    wrong: str, reward: Reward, batch: dict[str, Any], value: float, without_mask: float
) -> None:
    """Each case names the mistake it guards against; the last value is what a reward that reads all ids gives."""
    assert reward(**batch) == [pytest.approx(value)], wrong
    unmasked = {key: values for key, values in batch.items() if key != "completion_mask"}
    assert reward(**unmasked) == [pytest.approx(without_mask)]


def test_messages_give_what_the_last_turn_gives() -> None:
    """Guards against an answer read from a tool's message or an earlier turn, and against their words in a length."""
    call = {"role": "assistant", "reasoning_content": "so", "content": "4 " * 60, "tool_calls": [{"name": "add"}]}
    result = {"role": "tool", "name": "add", "content": "so</think>4 " * 60}
    talk = [call, result, {"role": "assistant", "reasoning_content": "so", "content": "one two three " * 4 + "."}]
    for reward in ALL:
        text = episode(text="so</think>" + talk[-1]["content"])
        assert reward(**text | {"completions": [talk]}) == reward(**text), reward.__name__
    assert length_reward(**episode() | {"completions": [talk]}) == [1.5]


def test_a_question_in_any_turn_is_found_by_decode() -> None:
    """Guards against a bonus for the last turn's questions only, and for one that a tool asked."""
    decode = {100: "why?", 40: "?", END: "</think>"}.get
    exact = thinking_reward.with_(decode=lambda ids: "".join(str(decode(token, "a")) for token in ids))
    assert exact(**episode()) == [1.1]
    assert exact(**episode(first=FIRST[1:])) == [1.0]


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: reward.__name__)
def test_a_completion_without_a_call_is_judged_as_ever(reward: Reward) -> None:
    """Guards against a mask that changes the reward of a completion of one turn, and against masks as tensors."""
    import torch

    batch: dict[str, Any] = {
        "completions": ["why?</think>4", "no tag", ""],
        "completion_ids": [FIRST, LAST[:15], []],
        "prompts": ["2+2="] * 3,
        "answer": ["4"] * 3,
    }
    masks = [[1] * len(ids) for ids in batch["completion_ids"]]
    for form in (masks, [torch.tensor(mask) for mask in masks]):
        assert reward(**batch, completion_mask=form) == reward(**batch)
    with pytest.raises(ValueError, match="got 3 completions, 2 completion_mask"):
        reward(**batch, completion_mask=masks[:2])
