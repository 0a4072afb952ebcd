"""The metrics of the thinking budget: shares over the right completions, and nothing where there is nothing."""

import math

import torch

from rloo_kit.loop.metrics import find_answer_column, thinking_metrics

NAN = float("nan")


def test_accuracies_are_over_their_own_side() -> None:
    """One accuracy over both hides that every cut-off thought is wrong; half a point is not a right answer."""
    forced = torch.tensor([True, True, False, False, False])
    found = thinking_metrics(forced, torch.tensor([1.0, 0.5, 1.0, NAN, 1.0]))
    assert found["thinking/forced_ratio"] == torch.tensor(0.4).item()
    assert found["thinking/forced_accuracy"] == 0.5
    assert math.isclose(found["thinking/unforced_accuracy"], 2 / 3, rel_tol=1e-6)


def test_an_empty_side_is_not_zero() -> None:
    """A run that never needs its budget has no forced accuracy; a 0.0 would look like an alarm."""
    found = thinking_metrics(torch.zeros(3, dtype=torch.bool), torch.ones(3))
    assert found["thinking/forced_ratio"] == 0.0 and found["thinking/unforced_accuracy"] == 1.0
    assert math.isnan(found["thinking/forced_accuracy"])
    everyone = thinking_metrics(torch.ones(3, dtype=torch.bool), torch.ones(3))
    assert math.isnan(everyone["thinking/unforced_accuracy"]) and everyone["thinking/forced_accuracy"] == 1.0


def test_without_answers_only_the_share_is_there() -> None:
    """A run on prompts without answers is a run too."""
    rewards = torch.tensor([[0.1, 1.0], [0.2, 0.0]])
    assert find_answer_column(rewards, ["length_reward", "thinking_reward"]) is None
    assert set(thinking_metrics(torch.tensor([True, False]), None)) == {"thinking/forced_ratio"}
    column = find_answer_column(rewards, ["length_reward", "math_answer_reward"])
    assert column is not None and column.tolist() == [1.0, 0.0]
