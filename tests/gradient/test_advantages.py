"""Advantages against plain Python: penalties, baselines, normalising, and the KL as an affine part of them."""

import itertools
import json
import random
import statistics

import pytest
import torch

from rloo_kit.config.schema import BASELINES, KL_FORMS
from rloo_kit.gradient.advantages import (
    RunningMoments,
    affine_kl,
    baseline_advantages,
    find_moments,
    kl_penalty,
    kl_penalty_rows,
    leave_one_out,
    merge_moments,
    normalize_by,
    standardize,
    tied_groups,
    zero_unscored,
)
from tests.oracles import leave_one_out_advantages

NAN = float("nan")


def test_tensor_code_equals_the_oracle_with_unscored_samples():
    """An unscored sample once counted as reward 0, which lifted its siblings and was itself pushed down."""
    generator = random.Random(0)
    for _ in range(200):
        group = generator.choice([2, 3, 4, 8])
        rewards = [generator.choice([None, generator.gauss(0, 3)]) for _ in range(group * 3)]
        tensor = torch.tensor([NAN if reward is None else reward for reward in rewards], dtype=torch.float64)
        ours = zero_unscored(leave_one_out(tensor, group))
        assert ours.tolist() == pytest.approx(leave_one_out_advantages(rewards, group), abs=1e-12)


def test_tied_groups():
    """A group whose scored rewards are equal teaches nothing, and neither does one that nobody scored."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0, NAN, NAN])
    assert tied_groups(rewards, 2).tolist() == [True, False, True, True]


@pytest.mark.parametrize("form", KL_FORMS)
def test_flat_penalties_equal_padded_ones(form):
    """Two ways to lay out the same tokens are two chances to charge the wrong ones."""
    generator = torch.Generator().manual_seed(0)
    lengths, width = [5, 0, 1, 8, 3], 8
    kl = torch.randn(len(lengths), width, generator=generator)
    filled = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    mask = filled & (torch.rand(kl.shape, generator=generator) > 0.3)
    mask[4] = False  # a wholly masked completion
    padded = kl_penalty(kl * filled, mask.float(), form)
    flat = kl_penalty_rows(kl[filled], mask[filled], lengths, form)
    assert flat.dtype == kl.dtype
    assert flat.tolist() == pytest.approx((padded[filled] if form == "per_token" else padded).tolist(), abs=1e-6)
    assert kl_penalty_rows(kl[filled][:0], mask[filled][:0], [], form).shape == (0,)
    with pytest.raises(ValueError, match="kl_form must be one of"):
        kl_penalty_rows(kl[filled], mask[filled], lengths, "k3")


def test_penalties_of_long_thoughts_keep_their_digits():
    """Adding 5e-3 nats 100,000 times in float32 is off in the fourth digit; the spread of a group is smaller."""
    kl = torch.full((100_000,), 5e-3)
    assert kl_penalty_rows(kl, torch.ones_like(kl), [100_000], "sum").item() == pytest.approx(500.0, rel=1e-6)
    to_go = kl_penalty_rows(kl, torch.ones_like(kl), [100_000], "per_token")
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


@pytest.mark.parametrize("baseline", BASELINES)
def test_baselines_equal_plain_python(baseline):
    """REINFORCE++-baseline compares with the whole group, RLOO with the siblings; unscored rows are in neither."""
    generator = random.Random(1)
    for _ in range(100):
        group = generator.choice([2, 3, 8])
        rewards = [generator.choice([NAN, generator.gauss(0, 2)]) for _ in range(3 * group)]
        ours = zero_unscored(baseline_advantages(torch.tensor(rewards, dtype=torch.float64), group, baseline))
        assert ours.tolist() == pytest.approx(oracle_baseline(rewards, group, baseline), abs=1e-12)
    with pytest.raises(ValueError, match="baseline must be one of"):
        baseline_advantages(torch.zeros(2), 2, "mean")


@pytest.mark.parametrize(("baseline", "group"), list(itertools.product(BASELINES, [2, 3, 5])))
def test_advantages_are_affine_in_the_kl(baseline, group):
    """One sequence at a time there is no sum over siblings yet; wrong coefficients would be a wrong gradient in `low`
    alone, on the GPUs that cannot run the other modes to compare."""
    generator = random.Random(2)
    for _ in range(50):
        task = torch.tensor([generator.choice([NAN, generator.gauss(0, 1), 1.0]) for _ in range(group)])
        kl = torch.tensor([generator.gauss(0.5, 1) for _ in range(group)])
        beta, scored = 0.3, ~task.isnan()
        own, others = affine_kl(baseline, scored, group)
        direct = zero_unscored(baseline_advantages(task - beta * kl, group, baseline))
        parts = zero_unscored(baseline_advantages(task, group, baseline))
        parts = parts - beta * (own * kl - others * kl[scored].sum()) * scored
        assert parts.tolist() == pytest.approx(direct.tolist(), abs=1e-5)
    with pytest.raises(ValueError, match="not one group"):
        affine_kl(baseline, torch.ones(2 * group, dtype=torch.bool), group)


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


def test_moments_of_parts_are_those_of_the_whole():
    """Each process has its own rewards; adding their deviations up would forget how their means differ."""
    values = torch.tensor([1.0, 2.0, NAN, 7.0, 7.5, 9.0])
    merged = merge_moments(torch.stack([find_moments(values[:2]), find_moments(values[2:3]), find_moments(values[3:])]))
    assert merged.tolist() == pytest.approx(find_moments(values).tolist())


def test_standardised_tokens_count_the_scored_ones_only():
    """With the penalty paid token by token only the task's part was standardised, so beta meant something else from
    rollout to rollout, and padding and forced tokens were zeros in the mean."""
    advantages = torch.tensor([[1.0, 2.0, 50.0], [4.0, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    present = advantages.masked_fill(~mask.bool(), NAN)
    found = normalize_by(present, find_moments(present), eps=0.0)
    wanted = standardize(torch.tensor([1.0, 2.0, 4.0]), eps=0.0)
    assert standardize(torch.tensor([1.0, NAN, 3.0]), eps=0.0)[::2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert found[mask.bool() & ~advantages.isnan()].tolist() == pytest.approx(wanted.tolist())
    assert found.isnan().tolist() == [[False, False, True], [False, True, True]]
    single = normalize_by(torch.tensor([3.0, NAN]), find_moments(torch.tensor([3.0, NAN])), eps=0.0)
    assert single[0] == 3.0 and single[1].isnan(), "one token has no deviation"


def test_plain_reinforce_plus_plus():
    """baseline none, the penalty a token, advantages over all tokens: the estimator of arXiv 2501.03262 by hand."""
    rewards, beta, lengths = torch.tensor([1.0, 0.0]), 0.5, [2, 1]
    kl, mask = torch.tensor([0.2, 0.4, 0.6]), torch.ones(3)
    task = baseline_advantages(rewards, 2, "none").repeat_interleave(torch.tensor(lengths))
    advantages = task - beta * kl_penalty_rows(kl, mask, lengths, "per_token")
    assert advantages.tolist() == pytest.approx([0.7, 0.8, -0.3])
    mean, deviation = statistics.fmean([0.7, 0.8, -0.3]), statistics.stdev([0.7, 0.8, -0.3])
    found = normalize_by(advantages, find_moments(advantages), eps=0.0)
    assert found.tolist() == pytest.approx([(value - mean) / deviation for value in (0.7, 0.8, -0.3)], rel=1e-5)
