"""The plain-Python oracle, by hand-computed cases, and the tensor code against it."""

import random

import pytest
import torch

from rloo_kit.errors import ConfigError
from rloo_kit.gradient.advantages import (
    combine_rewards,
    kl_penalty,
    leave_one_out,
    standardize,
    tied_groups,
    zero_unscored,
)
from tests.oracles import leave_one_out_advantages

FOUR_BY_THREE = [1, 2, 5, 8, 2, 3, 6, 9, 3, 4, 7, 10]  # three prompts, four rounds, as in TRL's documentation


def test_four_by_three_example():
    """TRL once grouped rounds instead of prompts; the columns (1, 2, 5, 8), ... are the groups."""
    advantages = leave_one_out_advantages(FOUR_BY_THREE, 4)
    assert advantages[0] == -4.0
    assert advantages[6] == pytest.approx(6 - (2 + 3 + 9) / 3)
    assert sum(advantages) == pytest.approx(0.0)


@pytest.mark.parametrize(("rewards", "group", "text"), [([1.0], 1, "at least 2"), ([1.0] * 5, 2, "5 rewards do not")])
def test_refuses_impossible_groups(rewards, group, text):
    """A group of one has no sibling: the advantage would be the reward itself, with no baseline at all."""
    with pytest.raises(ConfigError, match=text):
        leave_one_out_advantages(rewards, group)


def test_tensor_code_equals_the_oracle_with_unscored_samples():
    """An unscored sample once counted as reward 0, which lifted its siblings and was itself pushed down."""
    generator = random.Random(0)
    for _ in range(200):
        group = generator.choice([2, 3, 4, 8])
        rewards = [generator.choice([None, generator.gauss(0, 3)]) for _ in range(group * 3)]
        tensor = torch.tensor([float("nan") if reward is None else reward for reward in rewards], dtype=torch.float64)
        ours = zero_unscored(leave_one_out(tensor, group))
        assert ours.tolist() == pytest.approx(leave_one_out_advantages(rewards, group), abs=1e-12)


def test_combined_rewards_drop_what_does_not_apply():
    """None from one reward drops that term only; None from all means that the sample is not scored."""
    nan = float("nan")
    combined = combine_rewards(torch.tensor([[1.0, 2.0], [nan, 2.0], [nan, nan]]), torch.tensor([1.0, 0.5]))
    assert combined[:2].tolist() == [2.0, 1.0]
    assert combined[2].isnan()


def test_standardize_leaves_unscored_samples_out():
    """A NaN in the mean would unscore the whole batch."""
    values = standardize(torch.tensor([1.0, float("nan"), 3.0]), eps=0.0)
    assert values[[0, 2]].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert values[1].isnan()


def test_kl_forms():
    """The sum grows with the length of a thought; the normalised form does not; the reward-to-go only looks ahead."""
    kl = torch.tensor([[0.1, 0.2, 0.3, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert kl_penalty(kl, mask, "sum").item() == pytest.approx(0.6)
    assert kl_penalty(kl, mask, "length_normalized").item() == pytest.approx(0.2)
    assert kl_penalty(kl, mask, "per_token")[0].tolist() == pytest.approx([0.6, 0.5, 0.3, 0.0])
    with pytest.raises(ValueError, match="kl_form must be one of"):
        kl_penalty(kl, mask, "k3")


def test_tied_groups():
    """A group whose scored rewards are equal teaches nothing, and neither does one that nobody scored."""
    nan = float("nan")
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, nan, 1.0, nan, nan])
    assert tied_groups(rewards, 2).tolist() == [True, False, True, True]
