"""Evaluations with known means."""

from collections.abc import Sequence
from dataclasses import replace

from rloo_kit.results.intervals import Measured, mean_of_prompts


def mean_of(values: Sequence[float], num_samples: int = 1) -> Measured:
    """A measure from the mean of each prompt."""
    return replace(mean_of_prompts(values, num_samples), per_prompt=list(values))


def around(value: float, half: float = 0.1, shares: list[float | None] | None = None) -> Measured:
    """A measure over 100 prompts with an interval of a given half width."""
    return Measured(value, value - half, value + half, 100, shares)
