"""Intervals and pass@k against published examples, brute force and simulation. No torch."""

import itertools
import math
import random

import pytest

from rloo_kit.results.intervals import (
    clustered,
    mean_of_prompts,
    paired_difference,
    paired_mean_difference,
    pass_at_k,
    t_quantile,
    unpaired_difference,
    wilson,
)


@pytest.mark.parametrize(
    ("right", "num", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(right: int, num: int, low: float, high: float) -> None:
    """The textbook interval (p +- 1.96 se) has no width at 0 of 20 and leaves [0, 1] near its ends."""
    estimate = wilson(right / num, num)
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)


@pytest.mark.parametrize(
    ("after", "before", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, 873-890, table II, method 10.
    [((56, 70), (48, 80), 0.0524, 0.3339), ((9, 10), (3, 10), 0.1705, 0.8090), ((10, 10), (0, 20), 0.6791, 1.0)],
)
def test_unpaired_difference_as_published(
    after: tuple[int, int], before: tuple[int, int], low: float, high: float
) -> None:
    """Two evaluations of different prompts: the square-and-add interval."""
    estimate = unpaired_difference(wilson(before[0] / before[1], before[1]), wilson(after[0] / after[1], after[1]))
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)


def test_one_completion_a_prompt_is_wilsons() -> None:
    """With one completion per prompt, the clustered interval has to equal the plain one exactly."""
    for right in range(8):
        shares = [1.0] * right + [0.0] * (7 - right)
        assert clustered(shares, 1) == pytest.approx(wilson(right / 7, 7), abs=1e-12)


def test_completions_of_a_prompt_are_no_independent_trials() -> None:
    """100 prompts x 8 completions that all agree are 100 observations; counted as 800, the interval was too narrow."""
    agreeing = clustered([1.0] * 30 + [0.0] * 70, 8)
    assert agreeing == pytest.approx(wilson(0.3, 100), abs=1e-12)
    assert clustered([0.25] * 100, 8) == wilson(0.25, 100)  # no spread at all: as cautious as can be
    rng = random.Random(0)
    independent = clustered([sum(rng.random() < 0.3 for _ in range(8)) / 8 for _ in range(2000)], 8)
    as_trials = wilson(independent.value, 16000)
    assert (independent.high - independent.low) == pytest.approx(as_trials.high - as_trials.low, rel=0.1)


def test_clustered_interval_covers() -> None:
    """A 95 % interval has to cover 95 %: simulated runs on prompts of different difficulty, 4 completions each."""
    rng = random.Random(1)
    hits = 0
    for _ in range(1500):
        shares = [
            sum(rng.random() < ease for _ in range(4)) / 4 for ease in (rng.betavariate(0.5, 1.0) for _ in range(60))
        ]
        estimate = clustered(shares, 4)
        hits += estimate.low <= 1 / 3 <= estimate.high
    assert 0.93 <= hits / 1500 <= 0.97


def test_paired_difference_is_bonett_and_prices() -> None:
    """Their formula for matched pairs, written out from the counts of the pairs that changed."""
    better, worse, num = 9, 3, 40
    before = [0.0] * better + [1.0] * worse + [1.0] * 20 + [0.0] * (num - better - worse - 20)
    after = [1.0] * better + [0.0] * worse + [1.0] * 20 + [0.0] * (num - better - worse - 20)
    p_better, p_worse = (better + 1) / (num + 2), (worse + 1) / (num + 2)
    half = 1.959964 * math.sqrt((p_better + p_worse - (p_better - p_worse) ** 2) / (num + 2))
    estimate = paired_difference(before, after)
    assert estimate.value == pytest.approx((better - worse) / num)
    assert (estimate.low, estimate.high) == pytest.approx(
        (p_better - p_worse - half, p_better - p_worse + half), abs=1e-6
    )


def test_no_change_on_few_prompts_is_not_certainty() -> None:
    """Ten unchanged prompts prove little, but a standard error of 0 gave the interval [0, 0]."""
    estimate = paired_difference([1.0] * 10, [1.0] * 10)
    assert estimate.value == 0 and estimate.low < -0.1 and estimate.high > 0.1
    everything = paired_difference([0.0] * 10, [1.0] * 10)
    assert everything.low < 0.7 and everything.high == 1.0


def test_t_quantile_as_tabulated() -> None:
    """With few prompts the tails are heavy: 1.96 with 4 prompts covers the truth in only 86 %."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 63: 1.998, 1000: 1.962}
    for freedom, value in table.items():
        assert t_quantile(freedom) == pytest.approx(value, rel=2e-3), freedom


def test_interval_of_a_mean_reward() -> None:
    """Rewards have no bounds, so Wilson's interval does not apply: Student's t over prompts. Rewards of 0 and 1 keep
    Wilson's, which has a width even if all prompts earn the same. One prompt has no interval."""
    values = [0.5, -1.0, 2.0, 3.5]
    found = mean_of_prompts(values, 1)
    spread = math.sqrt(sum((value - 1.25) ** 2 for value in values) / 3 / 4)
    assert found == pytest.approx((1.25, 1.25 - 3.182 * spread, 1.25 + 3.182 * spread), rel=2e-3)
    assert mean_of_prompts([0.5, 1.0, 0.0], 2) == clustered([0.5, 1.0, 0.0], 2)
    assert mean_of_prompts([0.5, 1.0, 0.0], 1) != clustered([0.5, 1.0, 0.0], 1)
    assert mean_of_prompts([0.3], 1)[1:] == (-math.inf, math.inf)
    difference = paired_mean_difference([1.0, 10.0, 100.0], [1.5, 10.5, 101.0], 1)
    assert difference.value == pytest.approx(2 / 3) and 0 < 2 / 3 - difference.low < 1


def test_interval_of_a_mean_reward_covers() -> None:
    """A 95 % interval has to cover 95 %: graded, skewed rewards on 20 prompts of different difficulty, 4 completions
    each."""
    rng = random.Random(2)
    hits = 0
    for _ in range(1500):
        means = [
            sum(rng.choice((-0.5, 0.1, 2.0)) if rng.random() < ease else -0.5 for _ in range(4)) / 4
            for ease in (rng.random() for _ in range(20))
        ]
        estimate = mean_of_prompts(means, 4)
        hits += estimate.low <= 0.5 * (1.6 / 3) + 0.5 * -0.5 <= estimate.high
    assert 0.92 <= hits / 1500 <= 0.97


def test_pass_at_k_is_the_mean_over_all_draws() -> None:
    """1 - (1 - c/n)^k is biased: the estimate has to be the share of all k-subsets that contain a right completion."""
    for num, right, k in itertools.product((1, 4, 6), range(7), (1, 2, 4, 6)):
        if right <= num and k <= num:
            draws = list(itertools.combinations([True] * right + [False] * (num - right), k))
            assert pass_at_k(right, num, k) == pytest.approx(sum(map(any, draws)) / len(draws))
