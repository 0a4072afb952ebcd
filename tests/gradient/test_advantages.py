"""Advantages against plain Python: penalties, baselines, normalising, and the three together."""

import itertools
import json
import random
import statistics

import pytest
import torch

from rloo_kit.gradient.advantages import (
    AdvantageSettings,
    RunningMoments,
    combine_rewards,
    kl_charge,
    kl_to_go,
    make_advantages,
)
from tests.choices import choices

BASELINES, KL_FORMS = choices("baseline"), choices("kl_form")
NAN = float("nan")


def test_a_reward_that_is_only_logged_scores_nothing():
    """With `weight: 0.0` for a reward that always applies, a completion without another reward had the score 0 in the
    baselines of its group: 14 of 64 completions moved the policy by it."""
    rewards = torch.tensor([[NAN, 1.0], [-1.0, 1.0], [NAN, NAN], [1.0, NAN]])
    found = combine_rewards(rewards, torch.tensor([2.0, 0.0]))
    assert found.isnan().tolist() == [True, False, True, False] and found[[1, 3]].tolist() == [-2.0, 2.0]


def test_penalties_of_long_thoughts_keep_their_digits():
    """Adding 5e-3 nats 100,000 times in float32 is off in the fourth digit; the spread of a group is smaller."""
    kl = torch.full((100_000,), 5e-3)
    assert kl_charge(kl, torch.ones_like(kl), [100_000], "sum").item() == pytest.approx(500.0, rel=1e-6)
    to_go = kl_to_go(kl, torch.ones_like(kl), [100_000])
    assert to_go[0].item() == pytest.approx(500.0, rel=1e-6) and to_go[-1].item() == pytest.approx(5e-3)


def oracle_baseline(rewards, group, baseline):
    found = []
    for start in range(0, len(rewards), group):
        rows = rewards[start : start + group]
        for index, reward in enumerate(rows):
            others = [r for place, r in enumerate(rows) if r == r and (place != index or baseline == "group_mean")]
            if baseline == "none":
                found.append(reward if reward == reward else 0.0)
            else:
                found.append(reward - statistics.fmean(others) if reward == reward and others else 0.0)
    return found


@pytest.mark.parametrize(("baseline", "form", "normalize"), list(itertools.product(BASELINES, KL_FORMS, [False, True])))
def test_advantages_equal_plain_python(baseline, form, normalize):
    """Penalty, baseline and normalising meet in one place, which trains and is logged; each alone is easily right."""
    generator = random.Random(2)
    for _ in range(20):
        group, beta = generator.choice([2, 3, 5]), 0.3
        scores = [generator.choice([NAN, generator.gauss(0, 1), 1.0]) for _ in range(2 * group)]
        lengths = [generator.randint(0, 4) for _ in scores]
        rows = [[(generator.gauss(0.1, 0.5), generator.random() > 0.2) for _ in range(length)] for length in lengths]
        rows[1] = [(value, False) for value, _ in rows[1]]
        kl, mask = (torch.tensor([float(token[part]) for row in rows for token in row]) for part in (0, 1))
        charge = [sum(value for value, kept in row if kept) for row in rows]
        if form == "length_normalized":
            charge = [total / max(sum(kept for _, kept in row), 1) for total, row in zip(charge, rows, strict=True)]
        rewards = [score - beta * total for score, total in zip(scores, charge, strict=True)]
        settings = AdvantageSettings(beta, form, baseline, normalize)
        found = make_advantages(torch.tensor(scores), kl, mask, lengths, group, settings)
        assert found.rewards.tolist() == pytest.approx(rewards, abs=1e-5, nan_ok=True)
        compared = rewards if form != "per_token" else scores
        has_baseline = [
            value if found == found else NAN
            for value, found in zip(
                oracle_baseline(compared, group, baseline), _present(compared, group, baseline), strict=True
            )
        ]
        if form != "per_token":
            wanted = _standardised(has_baseline) if normalize else has_baseline
            wanted = [0.0 if value != value else value for value in wanted]
            assert found.trained.tolist() == pytest.approx(wanted, abs=1e-4)
            assert torch.equal(found.per_row, found.trained) and not found.per_token
            continue
        tokens = [
            task - beta * sum(value for value, kept in row[place:] if kept) if row[place][1] else NAN
            for task, row in zip(has_baseline, rows, strict=True)
            for place in range(len(row))
        ]
        wanted = [0.0 if value != value else value for value in (_standardised(tokens) if normalize else tokens)]
        assert found.per_token and found.trained.tolist() == pytest.approx(wanted, abs=1e-4)
        means = [
            part.sum().item() / max(sum(kept for _, kept in row), 1)
            for part, row in zip(found.trained.split(lengths), rows, strict=True)
        ]
        assert found.per_row.tolist() == pytest.approx(means, abs=1e-5)


def _present(values, group, baseline):
    """NaN where a reward has nothing to be compared with."""
    found = []
    for start in range(0, len(values), group):
        rows = values[start : start + group]
        scored = sum(value == value for value in rows)
        found += [value if baseline != "leave_one_out" or scored > 1 else NAN for value in rows]
    return found


def _standardised(values):
    present = [value for value in values if value == value]
    if len(present) < 2:
        return values
    mean, deviation = statistics.fmean(present), statistics.stdev(present)
    return [(value - mean) / (deviation + 1e-4) for value in values]


def oracle_scale(values, rewards, group):
    """GRPO's: over the unbiased deviation of the group's scored rewards plus 1e-4; 0 where they do not differ."""
    found = []
    for start in range(0, len(rewards), group):
        scored = [reward for reward in rewards[start : start + group] if reward == reward]
        tied = len(set(scored)) < 2
        deviation = 1.0 if tied else statistics.stdev(scored)
        own = values[start : start + group]
        found += [value if value != value else 0.0 if tied else value / (deviation + 1e-4) for value in own]
    return found


@pytest.mark.parametrize(("baseline", "form"), list(itertools.product(BASELINES, KL_FORMS)))
def test_scaled_advantages_equal_plain_python(baseline, form):
    """The deviation is that of the task's part alone, so that beta counts in deviations as it does in GRPO, whose KL is
    no part of the advantage. Divided with it, the KL's noise in a solved group was trained as advantages of 1."""
    generator, settings = random.Random(4), AdvantageSettings(0.3, form, baseline, scale_rewards="group")
    for _ in range(30):
        group = generator.choice([2, 3, 5])
        scores = [generator.choice([NAN, generator.gauss(0, 1), 1.0, 1.0]) for _ in range(3 * group)]
        scores[:group] = [0.1] * group  # tied, and their mean is not 0.1 in float32
        rows = [[generator.gauss(0.1, 0.5) for _ in range(generator.randint(1, 4))] for _ in scores]
        lengths, kl = [len(row) for row in rows], torch.tensor([value for row in rows for value in row])
        charge = [sum(row) / (len(row) if form == "length_normalized" else 1) for row in rows]
        known = _present(scores, group, baseline)

        def compare(values, group=group, known=known):
            found = oracle_baseline(values, group, baseline)
            return [value if one == one else NAN for value, one in zip(found, known, strict=True)]

        task = oracle_scale(compare(scores), scores, group)
        penalty = compare([-0.3 * c if s == s else NAN for s, c in zip(scores, charge, strict=True)])
        found = make_advantages(torch.tensor(scores), kl, torch.ones_like(kl), lengths, group, settings)
        if form == "per_token":
            wanted = [
                a - 0.3 * sum(row[place:]) for a, row in zip(task, rows, strict=True) for place in range(len(row))
            ]
        else:
            wanted = [one + other for one, other in zip(task, penalty, strict=True)]
        wanted = [0.0 if value != value else value for value in wanted]
        assert found.trained.tolist() == pytest.approx(wanted, rel=1e-3, abs=1e-3)
        if form != "per_token" and baseline != "none":
            alone = make_advantages(torch.tensor(scores), None, torch.ones_like(kl), lengths, group, settings)
            assert alone.trained[:group].tolist() == [0.0] * group, "tied: exactly 0, or it is trained on rounding"


def test_a_solved_group_is_trained_on_its_penalty_alone():
    """With beta 0.01 and 0.02 nats of KL, more or less, K equal rewards had advantages of up to 0.8."""
    generator = random.Random(5)
    kl = torch.tensor([generator.gauss(0.02, 0.01) for _ in range(8)])
    settings = AdvantageSettings(0.01, "sum", "group_mean", scale_rewards="group")
    found = make_advantages(torch.ones(8), kl, torch.ones(8), [1] * 8, 8, settings)
    assert found.trained.tolist() == pytest.approx((-0.01 * (kl - kl.mean())).tolist(), abs=1e-6)


def test_moments_of_tokens_do_not_wait_for_a_penalty():
    """REINFORCE++ at beta 0 standardized over completions, and at beta 1e-9 over tokens: two methods."""
    lengths, scores = [2, 2, 30, 30], torch.tensor([0.0, 0.0, 1.0, 1.0])
    settings = [AdvantageSettings(beta, "per_token", "none", normalize_advantages=True) for beta in (0.0, 1e-9)]
    ones = torch.ones(sum(lengths))
    without = make_advantages(scores, None, ones, lengths, 2, settings[0])
    tiny = make_advantages(scores, torch.zeros_like(ones), ones, lengths, 2, settings[1])
    assert without.per_token and without.trained.tolist() == pytest.approx(tiny.trained.tolist(), abs=1e-6)
    assert abs(without.trained.mean().item()) < 1e-5 and without.per_row[0].item() == pytest.approx(-3.84, abs=0.01)


def test_an_infinite_kl_does_not_reach_the_siblings():
    """One token that the reference rules out gave its whole group infinite advantages."""
    kl = torch.tensor([0.1, float("inf"), 0.2, 0.3])
    for form in KL_FORMS:
        settings = AdvantageSettings(beta=0.5, kl_form=form)
        found = make_advantages(torch.tensor([1.0, 0.0, 0.0]), kl, torch.ones(4), [1, 1, 2], 3, settings)
        assert found.rewards.isnan().tolist() == [False, True, False]
        assert found.of([1]).tolist() == [0.0] and found.trained.isfinite().all()


def test_running_moments_are_those_of_all_rewards_so_far():
    """The mean of the batches' deviations is not the deviation of all; a resumed run must go on with the same scale."""
    generator = random.Random(3)
    running, everything = RunningMoments(), []
    first = torch.tensor([2.0])
    running.update(first)
    everything.append(2.0)
    assert torch.equal(running.normalize(first, 1e-8), first), "one reward has no deviation"
    for size in (4, 1, 64, 8):
        batch = [generator.gauss(1e4, 2) for _ in range(size)]
        running.update(torch.tensor([*batch, NAN, float("inf")], dtype=torch.float64))
        everything += batch
        running = RunningMoments.from_dict(json.loads(json.dumps(running.to_dict())))
    mean, deviation = statistics.fmean(everything), statistics.stdev(everything)
    values = torch.tensor([mean, mean + deviation, NAN], dtype=torch.float64)
    found = running.normalize(values, eps=0.0)
    assert found[:2].tolist() == pytest.approx([0.0, 1.0], abs=1e-9) and found[2].isnan()
