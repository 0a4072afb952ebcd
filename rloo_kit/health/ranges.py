"""Healthy ranges of single metrics (docs/metrics.md), and a run's last rows judged by them. Never torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloo_kit.health.series import Row, is_number
from rloo_kit.system.problems import Problem

LEVELS = ("healthy", "watch", "alarming")
LAST_ROWS = 10  # logged steps to average
EQUAL_REWARDS = 1e-6  # a standard deviation below this is rounding
CEILING = 0.95  # mean of a reward from which there is little left to learn


@dataclass(frozen=True)
class Range:
    """The limits of one metric; None means no limit.

    Attributes:
        metrics: names; the first one that was logged counts. rule: the health rule that watches it, if one does.
        low, high: the healthy range, ends included; if_low, if_high: what to change outside it.
        alarm_low, alarm_high: beyond these the level is alarming; between them and the range, watch.
        on_policy: applies only if a rollout is used up before the next optimizer step.
        unless_solved: does not apply to a run that has learnt its task.
    """

    metrics: tuple[str, ...]
    rule: str = ""
    low: float | None = None
    high: float | None = None
    alarm_low: float | None = None
    alarm_high: float | None = None
    if_low: str = ""
    if_high: str = ""
    on_policy: bool = False
    unless_solved: bool = False

    def judge(self, value: float) -> tuple[str, str]:
        """One of LEVELS, and what to change; nothing if the value is healthy.

        >>> Range(("x",), high=0.3, alarm_high=0.8, if_high="lower y").judge(0.5)
        ('watch', 'lower y')
        """
        if not _is_outside(value, self.low, self.high):
            return "healthy", ""
        action = self.if_low if _is_outside(value, self.low, None) else self.if_high
        return "alarming" if self.is_alarming(value) else "watch", action

    def is_alarming(self, value: float) -> bool:
        """Whether a value is beyond the alarm limits."""
        return _is_outside(value, self.alarm_low, self.alarm_high)


def _is_outside(value: float, low: float | None, high: float | None) -> bool:
    return (low is not None and value < low) or (high is not None and value > high)


FAILED = Range(
    ("rewards/failed_ratio",), "reward_failures", high=0.0, alarm_high=0.5,
    if_high="fix the reward: the run's output names it and the first sample it failed on",
)  # fmt: skip
CLIPPED = Range(
    ("completions/clipped_ratio",), "truncation", high=0.3, alarm_high=0.8,
    if_high="raise rloo.max_completion_length, or add soft_overlong_penalty to rewards",
)  # fmt: skip
TIED = Range(
    ("frac_score_zero_std", "frac_reward_zero_std"), "no_signal", high=0.8, alarm_high=0.8, unless_solved=True,
    if_high="if solved (reward near its maximum): harder prompts in data.source; else easier prompts, a graded reward "
    "in rewards, more rloo.num_generations or a higher rloo.temperature",
)  # fmt: skip
GRADIENT = Range(
    ("grad_norm",), low=0.001, high=1.0, alarm_high=10.0, unless_solved=True,
    if_low="no signal: see frac_score_zero_std and completions/clipped_ratio; or raise rloo.learning_rate",
    if_high="lower rloo.learning_rate",
)  # fmt: skip
KL = Range(
    ("kl",), "kl_explosion", high=0.5, alarm_high=2.0, if_high="raise rloo.beta or lower rloo.learning_rate",
)  # fmt: skip
SPREAD = Range(
    ("kl/spread_ratio",), high=1.0, unless_solved=True,
    if_high="the KL penalty outweighs the reward: lower rloo.beta or set rloo.kl_form=length_normalized",
)  # fmt: skip
ENTROPY = Range(
    ("entropy",), "entropy_collapse", low=0.05, high=0.5, alarm_low=0.01, unless_solved=True,
    if_low="lower rloo.learning_rate, raise rloo.beta or rloo.temperature; normal at the end of a run that has learnt "
    "its task",
    if_high="normal at the start; if it keeps rising, lower rloo.learning_rate",
)  # fmt: skip
REPEATED = Range(
    ("completions/repeated_ratio",), "repetition", high=0.3, alarm_high=0.5,
    if_high="read rollouts/: a reward pays for repetition, or rloo.learning_rate is too high",
)  # fmt: skip
CLOSED = Range(
    ("thinking/closed_ratio",), "never_closed", low=0.5, alarm_low=0.2,
    if_low="raise rloo.max_completion_length, or add think_format_reward to rewards",
)  # fmt: skip
GAP = Range(
    ("sampling/logp_difference_mean",), "sampler_gap", high=0.1, alarm_high=0.1,
    if_high="sampler and trainer are two policies: set rloo.sampler_correction=token",
)  # fmt: skip
RATIO = Range(
    ("clip_ratio/region_mean",), high=0.0, alarm_high=0.0, on_policy=True,
    if_high="on-policy this is a bug, because the ratio has to be exactly 1; see references/troubleshooting.md",
)  # fmt: skip
RANGES = (FAILED, CLIPPED, TIED, GRADIENT, KL, SPREAD, ENTROPY, REPEATED, CLOSED, GAP, RATIO)


@dataclass
class Judgement(Problem):
    """One metric of a run, `name`: its mean over the last rows, its level, what to change (empty if nothing), and the
    rule that watches it."""

    value: float = 0.0
    rule: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = {"metric": self.name, "value": self.value, "level": self.level}
        return found | {"action": self.fix, "rule": self.rule}


def judge(rows: Sequence[Row], on_policy: bool = True, last: int = LAST_ROWS, solved: bool = False) -> list[Judgement]:
    """Judge the last rows of a `metrics.jsonl`; metrics that were not logged are left out.

    >>> rows = [{"step": 1, "completions/clipped_ratio": 1.0, "grad_norm": 0.2}]
    >>> [(found.name, found.level) for found in judge(rows)]
    [('completions/clipped_ratio', 'alarming'), ('grad_norm', 'healthy')]

    Args:
        rows: one mapping per logged step, in order. on_policy: whether to apply limits that need on-policy training.
        last: number of rows to average, at least 1. solved: whether the run has learnt its task.
    """
    found = []
    for one in RANGES:
        values = {name: [row[name] for row in rows[-last:] if is_number(row.get(name))] for name in one.metrics}
        metric = next((name for name in one.metrics if values[name]), None)
        if metric is None or (one.on_policy and not on_policy):
            continue
        value = sum(values[metric]) / len(values[metric])
        level, action = ("healthy", "") if solved and one.unless_solved else one.judge(value)
        found.append(Judgement(metric, "", action, level=level, value=value, rule=one.rule))
    return found


def at_ceiling(weights: Mapping[str, float], *values: Mapping[str, Sequence[float]], share: float = CEILING) -> bool:
    """Whether no reward with a weight can rise much: its first values have a mean of `share` or above, if all are in
    [0, 1]; else that share of them is the highest value, and there is a lower one.

    >>> at_ceiling({}, {"a": [0.9, 1.0]}), at_ceiling({}, {"a": [5.0, 5.0]}), at_ceiling({}, {"a": [5.0]}, {"a": [3.0]})
    (True, False, True)

    Args:
        weights: by name; 1 for a reward without. A negative one turns the reward around; a penalty is in [-1, 0].
        values: of each reward by name, of the measurement to judge first.
    """

    def is_high(name: str) -> bool:
        sign, best = (-1, 1) if weights.get(name, 1) < 0 else (1, 1 if name.endswith("penalty") else 0)
        first, *others = [[best + sign * value for value in one.get(name, ())] for one in values]
        seen = [*first, *(value for one in others for value in one)]
        if first and min(seen) >= 0 and max(seen) <= 1:
            return statistics.fmean(first) >= share
        return bool(first) and min(seen) < max(seen) and first.count(max(seen)) >= share * len(first)

    weighted = [name for name in values[0] if weights.get(name, 1)]
    return bool(weighted) and all(map(is_high, weighted))
