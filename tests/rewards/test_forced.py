"""A close that the thinking budget forced: what each reward returns for it, and no change without the column.

The completions have the same ids, closed once by the model and once by the budget.
"""

from typing import Any

import pytest

import rewards
from rewards import Reward, answer_reward, think_format_reward, thinking_budget_reward, thinking_reward

END, EOS = 151668, 151645
ALL = [value for value in vars(rewards).values() if isinstance(value, Reward)]
CLOSED = {"completions": ["why?</think>4"], "completion_ids": [[7] * 31 + [END, 19, EOS]], "answer": ["4"]}
CLOSED["prompts"] = ["2+2="]
OPEN = {"completions": ["why? 4"], "completion_ids": [[7] * 33 + [19, EOS]], "answer": ["4"]}
READS_THE_CLOSE = [thinking_reward, thinking_budget_reward, think_format_reward]


def value_of(reward: Reward, batch: dict[str, Any], forced: Any = None) -> float | None:
    (value,) = reward(**batch | ({} if forced is None else {"thinking_forced": forced}))
    return value


@pytest.mark.parametrize(
    ("reward", "own", "forced"),
    [(thinking_reward, 1.1, -1.0), (thinking_budget_reward, 1.0, 0.0), (think_format_reward, 1.0, 0.0)],
)
def test_a_forced_close_earns_what_an_open_thought_does(reward: Any, own: float, forced: float) -> None:
    """Guards against a policy that is paid for the budget's work: it would never learn to close by itself."""
    assert value_of(reward, CLOSED) == own
    assert value_of(reward, CLOSED, [False]) == own
    assert value_of(reward, CLOSED, [True]) == forced == value_of(reward, OPEN)
    by_choice = reward.with_(forced_counts_as_closed=True)
    assert value_of(by_choice, CLOSED, [True]) == own
    assert value_of(by_choice, OPEN) == forced, "the choice does not close what is open"


def test_the_answer_behind_a_forced_close_is_scored() -> None:
    """Guards against a batch of cut-off thoughts: a forced close is there so that every completion can be right."""
    assert value_of(answer_reward, CLOSED, [True]) == 1.0
    assert value_of(answer_reward, CLOSED | {"answer": ["5"]}, [True]) == 0.0


@pytest.mark.parametrize(
    "reward", [reward for reward in ALL if reward not in READS_THE_CLOSE], ids=lambda r: r.__name__
)
def test_rewards_that_do_not_read_the_close_do_not_read_the_column(reward: Reward) -> None:
    """Guards against a missing end, a length or a repetition judged by who closed the thought."""
    for batch in (CLOSED, CLOSED | {"completion_ids": [[7] * 31 + [END, 19]]}):
        assert value_of(reward, batch, [True]) == value_of(reward, batch)


def test_each_completion_has_its_own_flag() -> None:
    """Guards against one flag for the batch, and against a column that comes as an array or with None in it."""
    import torch

    batch = {key: values * 3 for key, values in CLOSED.items()}
    for flags in ([False, True, False], (0, 1, 0), torch.tensor([False, True, False]), [None, True, None]):
        assert thinking_reward(**batch, thinking_forced=flags) == [1.1, -1.0, 1.1]
    with pytest.raises(ValueError, match="thinking_reward got 3 completions, 2 thinking_forced"):
        thinking_reward(**batch, thinking_forced=[True, False])
