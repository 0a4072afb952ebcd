"""What the KL penalty weighs next to the reward, metrics of the budget, and what repeats itself."""

import math

import pytest
import torch

from rloo_kit.loop.metrics import kl_share, kl_spread_ratio, repeated_share, thinking_metrics

NAN = float("nan")


def test_share_of_the_reward():
    """Signs must not cancel: half the completions charged and half paid back is not a penalty of 0."""
    assert kl_share(torch.tensor([3.0, -3.0]), torch.tensor([0.5, 0.5]), beta=0.1) == pytest.approx(0.3 / 0.8)
    assert kl_share(torch.tensor([3.0, 9.0]), torch.tensor([1.0, NAN]), beta=1.0) == pytest.approx(0.75)
    assert kl_share(torch.zeros(2), torch.zeros(2), beta=1.0) == 0.0
    assert math.isnan(kl_share(torch.ones(2), torch.tensor([NAN, NAN]), beta=1.0))


def test_spread_within_groups():
    """Long thoughts everywhere cost everyone the same, which a baseline takes out; what counts is the difference."""
    scores = torch.tensor([0.0, 1.0, 1.0, 0.0])
    alike = torch.tensor([100.0, 100.0, 7.0, 7.0])
    assert kl_spread_ratio(alike, scores, beta=0.05, num_generations=2) == 0.0
    unlike = torch.tensor([0.0, 40.0, 7.0, 7.0])
    assert kl_spread_ratio(unlike, scores, beta=0.05, num_generations=2) == pytest.approx(1.0)
    unscored = torch.tensor([0.0, 1.0, 1.0, NAN])
    assert kl_spread_ratio(unlike, unscored, beta=0.05, num_generations=2) == pytest.approx(2.0)


def test_spread_where_there_is_nothing_to_divide_by():
    """A ratio of 0/0 logged as 0 would say that all is well where nothing is known."""
    tied = torch.ones(4)
    assert kl_spread_ratio(torch.tensor([1.0, 2.0, 1.0, 1.0]), tied, 0.1, 2) == math.inf
    assert kl_spread_ratio(tied, tied, 0.1, 2) is None
    assert kl_spread_ratio(tied, torch.tensor([1.0, NAN, NAN, NAN]), 0.1, 2) is None


def test_accuracies_are_over_their_own_side():
    """One accuracy over both hides that every cut-off thought is wrong; half a point is not a right answer. A row
    of another task, to which the answer reward does not apply, is not a wrong one."""
    forced = torch.tensor([True, True, False, False, False, False])
    found = thinking_metrics(forced, torch.tensor([1.0, 0.5, 1.0, NAN, 1.0, 0.0]))
    assert found["thinking/forced_ratio"] == torch.tensor(2 / 6).item()
    assert found["thinking/forced_accuracy"] == 0.5
    assert math.isclose(found["thinking/unforced_accuracy"], 2 / 3, rel_tol=1e-6)
    # a run that never needs its budget has no forced accuracy; a 0.0 would look like an alarm
    found = thinking_metrics(torch.zeros(3, dtype=torch.bool), torch.ones(3))
    assert found["thinking/forced_ratio"] == 0.0 and found["thinking/unforced_accuracy"] == 1.0
    assert math.isnan(found["thinking/forced_accuracy"])
    everyone = thinking_metrics(torch.ones(3, dtype=torch.bool), torch.ones(3))
    assert math.isnan(everyone["thinking/unforced_accuracy"]) and everyone["thinking/forced_accuracy"] == 1.0


def test_what_a_completion_repeats():
    """Text that goes in circles and a step that is written twice are different things."""
    assert repeated_share([5] * 40) == pytest.approx(1 - 1 / 33)
    assert repeated_share(list(range(20)) * 2) == pytest.approx(1 - 20 / 33)
    assert repeated_share([1, 2, 3] * 2 + list(range(10, 40))) == 0.0, "three tokens come again in any text"
    assert repeated_share([]) == repeated_share([5] * 7) == 0.0


def test_one_completion_to_every_prompt(make_trainer):
    """A policy that has settled on one answer looks like a solved task: a high reward, tied groups, a low entropy."""
    rows = {"same": [[1, 2, 3]] * 8, "solved": [[1, 2, 3]] * 4 + [[4, 5]] * 4, "apart": [[n, n] for n in range(8)]}
    found = {}
    for name, completions in rows.items():
        trainer = make_trainer(lambda completion_ids, **_: [0.5] * len(completion_ids), completions=completions)
        trainer.train()
        found[name] = trainer.state.log_history[0]["completions/most_common_ratio"]
    assert found == {"same": 1.0, "solved": 0.5, "apart": 0.125}
