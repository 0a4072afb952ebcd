"""95 % intervals for shares of right answers, mean rewards, their differences, and pass@k. Standard library only.

Several completions of a prompt are not independent: the prompts are the sample, and the interval is Wilson's with the
effective number of completions that the spread between prompts implies. Evaluations of the same prompts are compared
prompt by prompt. The methods and their sources: docs/results.md; pass@k: Chen et al. 2021, arXiv 2107.03374.
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
    differences = [new - old for old, new in zip(before, after, strict=True)]
    padded = [*differences, 1.0, -1.0]
    middle = math.fsum(padded) / len(padded)
    variance = math.fsum((value - middle) ** 2 for value in padded) / len(padded)
    half = Z_95 * math.sqrt(variance / len(padded))
    value = math.fsum(differences) / len(differences)
    return Estimate(value, max(-1.0, middle - half), min(1.0, middle + half))


def unpaired_difference(before: Estimate, after: Estimate) -> Estimate:
    """`after - before` of two independent samples, by Newcombe's method from their Wilson intervals.

    >>> [round(number, 4) for number in unpaired_difference(wilson(48 / 80, 80), wilson(56 / 70, 70))]
    [0.2, 0.0524, 0.3339]
    """
    value = after.value - before.value
    below = math.hypot(after.value - after.low, before.high - before.value)
    above = math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(value, value - below, value + above)


def t_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t: exact for 1 and 2 degrees of freedom, else to 0.2 % (Cornish and Fisher).

    >>> [round(t_quantile(freedom), 2) for freedom in (1, 2, 4, 63)]
    [12.71, 4.3, 2.78, 2.0]
    """
    if freedom <= 2:
        return math.tan(0.475 * math.pi) if freedom == 1 else 0.95 / math.sqrt(2 * 0.975 * 0.025)
    z = Z_95
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def mean_of_prompts(means: Sequence[float], num_samples: int) -> Estimate:
    """The mean of one mean reward per prompt, each over `num_samples` completions, with its interval.

    For rewards of 0 or 1 it is `clustered`. For others it is Student's t over the prompts, which has no bounds: open
    for one prompt, and of zero width if all prompts earn the same.

    >>> mean_of_prompts([1.0, 0.0], 1) == clustered([1.0, 0.0], 1)
    True
    >>> [round(number, 3) for number in mean_of_prompts([0.5, 2.5, 3.0], 1)]
    [2.0, -1.286, 5.286]
    """
    if _are_shares(means, num_samples):
        return clustered(means, num_samples)
    return _student(means)


def paired_mean_difference(before: Sequence[float], after: Sequence[float], num_samples: int) -> Estimate:
    """The mean of `after - before`, prompt by prompt: `paired_difference` for rewards of 0 or 1, else Student's t.

    >>> paired_mean_difference([0, 0, 1, 1], [1, 1, 1, 1], 1) == paired_difference([0, 0, 1, 1], [1, 1, 1, 1])
    True
    """
    if _are_shares([*before, *after], num_samples):
        return paired_difference(before, after)
    return _student([new - old for old, new in zip(before, after, strict=True)])


def _student(values: Sequence[float]) -> Estimate:
    num, mean = len(values), math.fsum(values) / len(values)
    if num == 1:
        return Estimate(mean, -math.inf, math.inf)
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    half = t_quantile(num - 1) * math.sqrt(variance / num)
    return Estimate(mean, mean - half, mean + half)


def _are_shares(means: Sequence[float], num_samples: int) -> bool:
    """Whether the means are possible for `num_samples` zeros and ones."""
    return all(0 <= mean <= 1 and abs(mean * num_samples - round(mean * num_samples)) < 1e-9 for mean in means)


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Unbiased estimate of the probability that one of `k` completions is right, from `num_right` of `num_samples`.

    >>> pass_at_k(1, 4, 2)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
