"""Advantages against plain Python: penalties, baselines, normalising, and the three together."""

import itertools
import random
import statistics
from dataclasses import replace

import pytest
import torch

from rloo_kit.gradient.advantages import AdvantageSettings, combine_rewards, kl_charge, kl_to_go, make_advantages
from tests.choices import choices

BASELINES, KL_FORMS = choices("baseline"), choices("kl_form")
NAN = float("nan")


def test_a_reward_that_is_only_logged_scores_nothing():
    """With a reward of `weight: 0.0`, 14 of 64 completions without another reward moved the policy."""
    rewards = torch.tensor([[NAN, 1.0], [-1.0, 1.0], [NAN, NAN], [1.0, NAN]])
    found = combine_rewards(rewards, torch.tensor([2.0, 0.0]))
    assert found.isnan().tolist() == [True, False, True, False] and found[[1, 3]].tolist() == [-2.0, 2.0]


def test_penalties_of_long_thoughts_keep_their_digits():
    """Adding 5e-3 nats 100,000 times in float32 is off in the fourth digit; the spread of a group is smaller."""
    kl = torch.full((100_000,), 5e-3)
    assert kl_charge(kl, torch.ones_like(kl), [100_000], "sum").item() == pytest.approx(500.0, rel=1e-6)
    to_go = kl_to_go(kl, torch.ones_like(kl), [100_000])
    assert to_go[0].item() == pytest.approx(500.0, rel=1e-6) and to_go[-1].item() == pytest.approx(5e-3)


def compare(values, group, baseline):
    """Each value against its group; NaN where it has nothing to be compared with."""
    found = []
    for start in range(0, len(values), group):
        rows = values[start : start + group]
        for index, value in enumerate(rows):
            others = [r for place, r in enumerate(rows) if r == r and (place != index or baseline == "group_mean")]
            if baseline == "none":
                found.append(value)
            else:
                found.append(value - statistics.fmean(others) if value == value and others else NAN)
    return found


def scale(values, rewards, group):
    """GRPO's: over the unbiased deviation of the group's scored rewards plus 1e-4; 0 where they do not differ."""
    found = []
    for start in range(0, len(rewards), group):
        scored = [reward for reward in rewards[start : start + group] if reward == reward]
        tied = len(set(scored)) < 2
        deviation = 1.0 if tied else statistics.stdev(scored)
        own = values[start : start + group]
        found += [value if value != value else 0.0 if tied else value / (deviation + 1e-4) for value in own]
    return found


def standardise(values):
    present = [value for value in values if value == value]
    if len(present) < 2:
        return values
    mean, deviation = statistics.fmean(present), statistics.stdev(present)
    return [(value - mean) / (deviation + 1e-4) for value in values]


@pytest.mark.parametrize("option", ["plain", "normalize_advantages", "scale_rewards"])
@pytest.mark.parametrize(("baseline", "form"), list(itertools.product(BASELINES, KL_FORMS)))
def test_advantages_equal_plain_python(baseline, form, option):
    """Penalty, baseline, deviation and normalising meet in one place; the deviation is of the task's part alone."""
    generator, beta = random.Random(2), 0.3
    settings = AdvantageSettings(beta, form, baseline)
    if option != "plain":
        settings = replace(settings, **{option: True if option == "normalize_advantages" else "group"})
    for _ in range(20):
        group = generator.choice([2, 3, 5])
        scores = [generator.choice([NAN, generator.gauss(0, 1), 1.0, 1.0]) for _ in range(3 * group)]
        scores[:group] = [0.1] * group  # tied, and their mean is not 0.1 in float32
        lengths = [generator.randint(0, 4) for _ in scores]
        rows = [[(generator.gauss(0.1, 0.5), generator.random() > 0.2) for _ in range(length)] for length in lengths]
        rows[1] = [(value, False) for value, _ in rows[1]]
        kl, mask = (torch.tensor([float(token[part]) for row in rows for token in row]) for part in (0, 1))
        charge = [sum(value for value, kept in row if kept) for row in rows]
        if form == "length_normalized":
            charge = [total / max(sum(kept for _, kept in row), 1) for total, row in zip(charge, rows, strict=True)]
        found = make_advantages(torch.tensor(scores), kl, mask, lengths, group, settings)
        rewards = [score - beta * total for score, total in zip(scores, charge, strict=True)]
        assert found.rewards.tolist() == pytest.approx(rewards, abs=1e-5, nan_ok=True)
        wanted = compare(scores, group, baseline)
        if option == "scale_rewards":
            wanted = scale(wanted, scores, group)
        if form == "per_token":
            wanted = [
                task - beta * sum(value for value, kept in row[place:] if kept) if row[place][1] else NAN
                for task, row in zip(wanted, rows, strict=True)
                for place in range(len(row))
            ]
        else:
            penalty = compare([reward - score for reward, score in zip(rewards, scores, strict=True)], group, baseline)
            wanted = [task + paid for task, paid in zip(wanted, penalty, strict=True)]
        if option == "normalize_advantages":
            wanted = standardise(wanted)
        wanted = [0.0 if value != value else value for value in wanted]
        near = {"rel": 1e-3, "abs": 1e-3} if option == "scale_rewards" else {"abs": 1e-4}
        assert found.per_token == (form == "per_token") and found.trained.tolist() == pytest.approx(wanted, **near)
        if form == "per_token":
            means = [
                part.sum().item() / max(sum(kept for _, kept in row), 1)
                for part, row in zip(found.trained.split(lengths), rows, strict=True)
            ]
            assert found.per_row.tolist() == pytest.approx(means, abs=1e-5)
            continue
        assert torch.equal(found.per_row, found.trained)
        if option == "scale_rewards" and baseline != "none":
            alone = make_advantages(torch.tensor(scores), torch.zeros_like(kl), mask, lengths, group, settings)
            assert alone.trained[:group].tolist() == [0.0] * group, "tied: exactly 0, or it is trained on rounding"


def test_moments_of_tokens_do_not_wait_for_a_penalty():
    """REINFORCE++ at beta 0 standardized over completions, and at beta 1e-9 over tokens: two methods."""
    lengths, scores = [2, 2, 30, 30], torch.tensor([0.0, 0.0, 1.0, 1.0])
    settings = [AdvantageSettings(beta, "per_token", "none", normalize_advantages=True) for beta in (0.0, 1e-9)]
    ones = torch.ones(sum(lengths))
    without, tiny = (make_advantages(scores, torch.zeros_like(ones), ones, lengths, 2, each) for each in settings)
    assert without.per_token and without.trained.tolist() == pytest.approx(tiny.trained.tolist(), abs=1e-6)
    assert abs(without.trained.mean().item()) < 1e-5 and without.per_row[0].item() == pytest.approx(-3.84, abs=0.01)
