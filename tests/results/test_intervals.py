"""Intervals against published examples and simulation; the doctests have their formulas. No torch."""

import random
import statistics
from collections.abc import Callable

import pytest

from rloo_kit.results.intervals import clustered, mean_of_prompts, paired_difference, wilson


def test_completions_of_a_prompt_are_no_independent_trials() -> None:
    """100 prompts x 8 completions that all agree are 100 observations; counted as 800, the interval was too narrow."""
    for right in range(8):  # with one completion per prompt it is the plain interval
        shares = [1.0] * right + [0.0] * (7 - right)
        assert clustered(shares, 1).ends == pytest.approx(wilson(right / 7, 7).ends, abs=1e-12)
    agreeing = clustered([1.0] * 30 + [0.0] * 70, 8)
    assert agreeing.ends == pytest.approx(wilson(0.3, 100).ends, abs=1e-12)
    assert clustered([0.25] * 100, 8) == wilson(0.25, 100)  # no spread at all: as cautious as can be
    assert (wilson(0.0, 20).low, round(wilson(0.0, 20).high, 4)) == (0.0, 0.1611)  # Newcombe 1998, table I, method 3
    rng = random.Random(0)
    independent = clustered([sum(rng.random() < 0.3 for _ in range(8)) / 8 for _ in range(2000)], 8)
    as_trials = wilson(independent.value, 16000)
    assert (independent.high - independent.low) == pytest.approx(as_trials.high - as_trials.low, rel=0.1)


def test_an_equal_change_of_two_prompts_is_no_certainty() -> None:
    """Two prompts that rose by 0.2 each gave +0.200 [+0.200, +0.200] and the verdict "learnt". The unit of the reward
    decides nothing: as points out of 100, or as hundredths, the same change has the same interval in that unit."""
    few, many = ([0.3 + 0.01 * number for number in range(size)] for size in (2, 60))
    for unit in (1.0, 0.01, 100.0):
        changes = []
        for values in (few, many):
            before, after = [unit * value for value in values], [unit * (value + 0.1) for value in values]
            changes.append(paired_difference(before, after, 1))
        assert changes[0].low < 0 < changes[0].high and changes[0].value == pytest.approx(unit / 10)
        assert changes[1].low > 0 and changes[1].high < unit
    assert paired_difference([0.1, 0.1], [1.0, 0.9], 1).high == 1.0
    assert paired_difference([-0.9, -1.0], [0.9, 1.0], 1).high == 2.0


REWARDS: dict[str, Callable[[random.Random], tuple[float, float]]] = {
    "right or wrong": lambda rng: (float(rng.random() < 0.3), float(rng.random() < 0.6)),
    "graded": lambda rng: (rng.random(), rng.random()),
    "penalty": lambda rng: (-rng.betavariate(1, 3), -rng.betavariate(1, 4)),
    "mean of four, skewed": lambda rng: tuple(
        sum(rng.choice((-0.5, 0.1, 2.0)) if rng.random() < ease else -0.5 for _ in range(4)) / 4
        for ease in [rng.random()] * 2
    ),
}


@pytest.mark.parametrize("name", REWARDS)
def test_interval_of_a_mean_reward_covers(name: str) -> None:
    """A 95 % interval has to cover 95 %: the mean reward after, and its change on the same prompts. Student's, with 5
    prompts, rarely covers where most earn the same."""
    rng = random.Random(name)
    draws = [REWARDS[name](rng) for _ in range(15_000)]
    truths = statistics.fmean(new for _, new in draws), statistics.fmean(new - old for old, new in draws)
    for num, trials in ((5, 400), (20, 250), (200, 100)):
        hits = [0, 0]
        for _ in range(trials):
            before, after = zip(*rng.choices(draws, k=num), strict=True)
            found = mean_of_prompts(after, 1), paired_difference(before, after, 1)
            for place, estimate in enumerate(found):
                hits[place] += estimate.low <= truths[place] <= estimate.high
        assert min(hits) / trials >= (0.92 if num < 200 else 0.89)
