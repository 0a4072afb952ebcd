"""Healthy and alarming values of the metrics of a run, each with the key to change: a table and a judge, no torch.

`health` says what teaches nothing at all; here is what others watch besides. The limits are starting points, not
laws: a run that learns with a number out of its range is fine. Values are means over the last logged steps, so that
one odd step raises no alarm. docs/10-metrics.md explains each metric. Left out: what needs more than `metrics.jsonl`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVELS = ("healthy", "watch", "alarming")
LAST_ROWS = 10  # logged steps that are averaged


@dataclass(frozen=True)
class Threshold:
    """The limits of one metric; None where there is none.

    Attributes:
        metrics: names, of which the first one that was logged counts.
        low, high: the healthy range, both ends in it.
        alarm_low, alarm_high: below the first and above the second it is alarming; between it and the range, watch.
        if_low, if_high: what to change.
        on_policy: holds only where a rollout is used up before the next optimizer step.
    """

    metrics: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    alarm_low: float | None = None
    alarm_high: float | None = None
    if_low: str = ""
    if_high: str = ""
    on_policy: bool = False

    def level(self, value: float) -> str:
        """One of LEVELS.

        >>> THRESHOLDS[0].level(0.1), THRESHOLDS[0].level(0.5), THRESHOLDS[0].level(0.9)
        ('healthy', 'watch', 'alarming')
        """
        if (self.alarm_low is not None and value < self.alarm_low) or (
            self.alarm_high is not None and value > self.alarm_high
        ):
            return "alarming"
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            return "watch"
        return "healthy"

    def action(self, value: float) -> str:
        """What to change at this value; empty where it is healthy."""
        if self.level(value) == "healthy":
            return ""
        below = self.low is not None and value < self.low
        return self.if_low if below else self.if_high


@dataclass(frozen=True)
class Judgement:
    """One metric of one run: its mean over the last rows, how that is, and what to change (empty if nothing)."""

    metric: str
    value: float
    level: str
    action: str


THRESHOLDS = (
    Threshold(
        ("completions/clipped_ratio",),
        high=0.3,
        alarm_high=0.8,
        if_high="raise rloo.max_completion_length, or add soft_overlong_penalty to rewards",
    ),
    Threshold(
        ("frac_score_zero_std", "frac_reward_zero_std"),
        high=0.8,
        alarm_high=0.8,
        if_high="solved (reward near its highest): harder prompts in data.source; else easier prompts, a graded reward "
        "in rewards, more rloo.num_generations or a higher rloo.temperature",
    ),
    Threshold(
        ("entropy",),
        low=0.05,
        high=0.5,
        alarm_low=0.01,
        if_low="lower rloo.learning_rate, raise rloo.beta or rloo.temperature; at the end of a run that has learnt its "
        "task this is normal",
        if_high="normal at the start; if it keeps rising, lower rloo.learning_rate",
    ),
    Threshold(("kl",), high=0.5, alarm_high=2.0, if_high="raise rloo.beta or lower rloo.learning_rate"),
    Threshold(
        ("kl/spread_ratio",),
        high=1.0,
        if_high="the KL penalty decides more than the reward: lower rloo.beta or set rloo.kl_form=length_normalized",
    ),
    Threshold(
        ("grad_norm",),
        low=0.001,
        high=1.0,
        alarm_high=10.0,
        if_low="no signal: see frac_score_zero_std and completions/clipped_ratio; or raise rloo.learning_rate",
        if_high="lower rloo.learning_rate",
    ),
    Threshold(
        ("clip_ratio/region_mean",),
        high=0.0,
        alarm_high=0.0,
        if_high="a bug on-policy: the ratio has to be exactly 1; see references/troubleshooting.md",
        on_policy=True,
    ),
    Threshold(
        ("rewards/failed_ratio",),
        high=0.0,
        alarm_high=0.5,
        if_high="mend the reward: the run's output names it and the first sample it failed on",
    ),
)


def judge(rows: Sequence[Mapping[str, Any]], on_policy: bool = True, last: int = LAST_ROWS) -> list[Judgement]:
    """Judge the last rows of a `metrics.jsonl`; a metric that was not logged is left out.

    >>> rows = [{"step": 1, "completions/clipped_ratio": 1.0, "grad_norm": 0.2}]
    >>> [(found.metric, found.level) for found in judge(rows)]
    [('completions/clipped_ratio', 'alarming'), ('grad_norm', 'healthy')]

    Args:
        rows: one mapping a logged step, in order. on_policy: whether rules that hold only on-policy count.
        last: rows that are averaged, at least 1.
    """
    found = []
    for threshold in THRESHOLDS:
        if threshold.on_policy and not on_policy:
            continue
        for metric in threshold.metrics:
            values = [row[metric] for row in rows[-last:] if _is_number(row.get(metric))]
            if values:
                value = sum(values) / len(values)
                found.append(Judgement(metric, value, threshold.level(value), threshold.action(value)))
                break
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
