"""95 % intervals for shares of right answers, mean rewards, their differences, and pass@k. Standard library only.

Several completions of a prompt are not independent: the prompts are the sample, and the interval is Wilson's with the
effective number of completions that the spread between prompts implies. Evaluations of the same prompts are compared
prompt by prompt, with pseudo-prompts at the ends of the range. The methods and their sources: docs/results.md; pass@k:
Chen et al. 2021, arXiv 2107.03374.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

Z_95 = 1.959963984540054  # the 0.975 quantile of the normal distribution


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(share: float, num: float) -> Estimate:
    """Wilson's interval for a share in [0, 1] of `num` independent trials (`num` may be an effective number).

    >>> [round(number, 4) for number in wilson(0.2, 10)]
    [0.2, 0.0567, 0.5098]
    """
    z2 = Z_95**2
    middle = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2)) / (1 + z2 / num)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Estimate(share, min(low, share), max(high, share))  # at 0 and 1, rounding may put the share outside


def clustered(shares: Sequence[float], num_samples: int) -> Estimate:
    """The mean of one share per prompt, each over `num_samples` completions, with its interval.

    >>> clustered([1.0, 0.0], 1) == wilson(0.5, 2)
    True
    """
    num = len(shares)
    mean = math.fsum(shares) / num
    variance = math.fsum((share - mean) ** 2 for share in shares) / num**2  # of the mean
    effective = mean * (1 - mean) / variance if variance > 0 else num
    return wilson(mean, min(max(effective, num), num * num_samples))


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """The mean of `after - before`, prompt by prompt (each in [0, 1]), with the interval of Bonett and Price.

    >>> [round(number, 3) for number in paired_difference([0, 0, 1, 1], [1, 1, 1, 1])]
    [0.5, -0.263, 0.93]
    """
    return _padded([new - old for old, new in zip(before, after, strict=True)], -1.0, 1.0)


def unpaired_difference(before: Estimate, after: Estimate) -> Estimate:
    """`after - before` of two independent samples, by Newcombe's method from their Wilson intervals.

    >>> [round(number, 4) for number in unpaired_difference(wilson(48 / 80, 80), wilson(56 / 70, 70))]
    [0.2, 0.0524, 0.3339]
    """
    value = after.value - before.value
    below = math.hypot(after.value - after.low, before.high - before.value)
    above = math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(value, value - below, value + above)


def mean_of_prompts(means: Sequence[float], num_samples: int) -> Estimate:
    """The mean of one mean reward per prompt, each over `num_samples` completions, with its interval.

    For rewards of 0 or 1 it is `clustered`. Others are padded with one prompt at each end of their range.

    >>> mean_of_prompts([1.0, 0.0], 1) == clustered([1.0, 0.0], 1)
    True
    >>> [round(number, 3) for number in mean_of_prompts([0.5, 2.5, 3.0], 1)]
    [2.0, 0.671, 2.929]
    """
    return clustered(means, num_samples) if _are_shares(means, num_samples) else _padded(means, *_find_range(means))


def paired_mean_difference(before: Sequence[float], after: Sequence[float], num_samples: int) -> Estimate:
    """The mean of `after - before`, prompt by prompt: `paired_difference`, its pseudo-prompts as far apart as the
    rewards' range allows.

    >>> paired_mean_difference([0, 0, 1, 1], [1, 1, 1, 1], 1) == paired_difference([0, 0, 1, 1], [1, 1, 1, 1])
    True
    """
    if _are_shares([*before, *after], num_samples):
        return paired_difference(before, after)
    low, high = _find_range([*before, *after])
    return _padded([new - old for old, new in zip(before, after, strict=True)], low - high, high - low)


def _padded(values: Sequence[float], low: float, high: float) -> Estimate:
    """The mean of values in [low, high], with the normal interval of them and two pseudo-values, `low` and `high`."""
    padded = [*values, high, low]
    middle = math.fsum(padded) / len(padded)
    variance = math.fsum((value - middle) ** 2 for value in padded) / len(padded)
    half = Z_95 * math.sqrt(variance / len(padded))
    value = math.fsum(values) / len(values)
    return Estimate(value, min(value, max(low, middle - half)), max(value, min(high, middle + half)))


def _find_range(values: Sequence[float]) -> tuple[float, float]:
    """The range assumed for a reward with these values, not all 0: on each side of 0 that has values, to the power of
    ten that holds them; if some are beyond 1, from 0 to the values."""
    low, high = min(0.0, *values), max(0.0, *values)
    return (low, high) if max(-low, high) > 1 else (-_power_of_ten(-low), _power_of_ten(high))


def _power_of_ten(number: float) -> float:
    """The smallest that is not below the number, but for rounding; 0 for 0."""
    return 10.0 ** math.ceil(math.log10(number) - 1e-9) if number else 0.0


def _are_shares(means: Sequence[float], num_samples: int) -> bool:
    """Whether the means are possible for `num_samples` zeros and ones."""
    return all(0 <= mean <= 1 and abs(mean * num_samples - round(mean * num_samples)) < 1e-9 for mean in means)


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Unbiased estimate of the probability that one of `k` completions is right, from `num_right` of `num_samples`.

    >>> pass_at_k(1, 4, 2)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
