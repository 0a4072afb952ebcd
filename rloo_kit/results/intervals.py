"""Measured values with 95 % intervals: shares of right answers, mean rewards, their differences; and pass@k.

Several completions of a prompt are not independent: the prompts are the sample, and the interval is Wilson's with the
effective number of completions that the spread between prompts implies. Evaluations of the same prompts are compared
prompt by prompt, with pseudo-prompts at the ends of the range. The methods and their sources: docs/results.md; pass@k:
Chen et al. 2021, arXiv 2107.03374.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

Finite = Annotated[float, Field(allow_inf_nan=False)]
Scores = Sequence[Sequence[float | None]]  # of the completions of each prompt; None: not scored
Z_95 = 1.959963984540054  # the 0.975 quantile of the normal distribution


@dataclass(frozen=True)
class Measured:
    """A mean or a difference with its 95 % interval.

    As text, it is the value with the interval behind it; a format applies to all three numbers:

    >>> f"{Measured(0.5, 0.25, 0.75, 12)}, {Measured(0.5, 0.25, 0.75, 12):+.1f}"
    '0.500 [0.250, 0.750], +0.5 [+0.2, +0.8]'

    Attributes:
        low, high: the interval.
        count: the number of prompts that it is a mean of.
        per_prompt: the mean of each prompt, None where nothing was scored. Without it, prompts cannot be paired.
    """

    value: Finite
    low: Finite
    high: Finite
    count: Annotated[int, Field(ge=0)]
    per_prompt: list[Finite | None] | None = None

    @property
    def ends(self) -> tuple[float, float, float]:
        """Value, low and high."""
        return self.value, self.low, self.high

    def __format__(self, form: str) -> str:
        value, low, high = (format(one, form or ".3f") for one in self.ends)
        return f"{value} [{low}, {high}]"

    def __str__(self) -> str:
        return format(self)


def wilson(share: float, num: float) -> Measured:
    """Wilson's interval for a share in [0, 1] of `num` independent trials (`num` may be an effective number).

    >>> f"{wilson(0.2, 10):.4f}"
    '0.2000 [0.0567, 0.5098]'
    """
    z2 = Z_95**2
    middle = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2)) / (1 + z2 / num)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    low, high = min(low, share), max(high, share)  # at 0 and 1, rounding may put the share outside
    return Measured(share, low, high, int(num))


def clustered(shares: Sequence[float], num_samples: int) -> Measured:
    """The mean of one share per prompt, each over `num_samples` completions, with its interval.

    >>> clustered([1.0, 0.0], 1).ends == wilson(0.5, 2).ends
    True
    """
    num = len(shares)
    mean = math.fsum(shares) / num
    variance = math.fsum((share - mean) ** 2 for share in shares) / num**2  # of the mean
    effective = mean * (1 - mean) / variance if variance > 0 else num
    found = wilson(mean, min(max(effective, num), num * num_samples))
    return replace(found, count=num)


def mean_of_prompts(means: Sequence[float], num_samples: int) -> Measured:
    """The mean of one mean per prompt, each over `num_samples` completions, with its interval.

    For values of 0 or 1 it is `clustered`. Others are padded with one prompt at each end of their range.

    >>> mean_of_prompts([1.0, 0.0], 1) == clustered([1.0, 0.0], 1)
    True
    >>> f"{mean_of_prompts([0.5, 2.5, 3.0], 1)}"
    '2.000 [0.671, 2.929]'
    """
    return clustered(means, num_samples) if _are_shares(means, num_samples) else _padded(means, *_find_range(means))


def mean_of_completions(values: Scores, num_samples: int) -> Measured | None:
    """The mean over prompts of their completions' scores (None: not scored), `num_samples` each; None without any.

    >>> mean_of_completions([[1.0, 0.0], [None, 1.0], [None, None]], 2).per_prompt
    [0.5, 1.0, None]
    """
    scored = [[value for value in one if value is not None] for one in values]
    means = [math.fsum(one) / len(one) if one else None for one in scored]
    known = [mean for mean in means if mean is not None]
    return replace(mean_of_prompts(known, num_samples), per_prompt=means) if known else None


def paired_difference(before: Sequence[float], after: Sequence[float], num_samples: int = 1) -> Measured:
    """The mean of `after - before`, prompt by prompt, with the interval of Bonett and Price; its two pseudo-prompts are
    as far apart as the range of the means, each over `num_samples` completions, allows.

    >>> f"{paired_difference([0, 0, 1, 1], [1, 1, 1, 1])}"
    '0.500 [-0.263, 0.930]'
    """
    both = [*before, *after]
    low, high = (0.0, 1.0) if _are_shares(both, num_samples) else _find_range(both)
    return _padded([new - old for old, new in zip(before, after, strict=True)], low - high, high - low)


def unpaired_difference(before: Measured, after: Measured) -> Measured:
    """`after - before` of two independent samples, by Newcombe's method from their intervals.

    >>> f"{unpaired_difference(wilson(48 / 80, 80), wilson(56 / 70, 70)):.4f}"
    '0.2000 [0.0524, 0.3339]'
    """
    value, count = after.value - before.value, min(before.count, after.count)
    below = math.hypot(after.value - after.low, before.high - before.value)
    above = math.hypot(after.high - after.value, before.value - before.low)
    return Measured(value, value - below, value + above, count)


def _padded(values: Sequence[float], low: float, high: float) -> Measured:
    """The mean of values in [low, high], with the normal interval of them and two pseudo-values, `low` and `high`."""
    padded = [*values, high, low]
    middle = math.fsum(padded) / len(padded)
    variance = math.fsum((value - middle) ** 2 for value in padded) / len(padded)
    half = Z_95 * math.sqrt(variance / len(padded))
    value = math.fsum(values) / len(values)
    return Measured(value, min(value, max(low, middle - half)), max(value, min(high, middle + half)), len(values))


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
