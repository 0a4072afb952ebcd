"""A run's metrics as series, for the rules; and the healthy range of each metric, for its last values."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rloo_kit.runs.files import is_number
from rloo_kit.system.problems import Problem

LONGEST_LOOK = 500  # values that a rule looks back over, so that the cost per step does not grow with the run

Row = Mapping[str, Any]  # metrics of one logged step, under the trainer's names


def logged(rows: Sequence[Row], *names: str) -> list[tuple[int, float]]:
    """Step and value of a metric in every row that has it; the metric is the first of `names` that any row has."""
    columns = ([(row["step"], row[name]) for row in rows if is_number(row.get(name))] for name in names)
    return next(filter(None, columns), [])


class LoggedValue(NamedTuple):
    """A metric at a logged step; `covered`: the number of steps since the previous row, which this row covers."""

    step: int
    value: float
    covered: int

    @property
    def begins(self) -> int:
        """The first step that the row covers."""
        return self.step - self.covered + 1


class Series:
    """The values of a run's rows by metric, in step order; the first row covers `logging_steps` steps."""

    def __init__(self, logging_steps: int = 1) -> None:
        self.step = 0
        self._covered = max(logging_steps, 1)
        self._rows = 0
        self._points: dict[str, list[LoggedValue]] = {}

    def add(self, row: Row) -> None:
        """Add a row; several rows may have the same step (a held-out evaluation)."""
        if not self._rows:
            self._covered = min(self._covered, row["step"])
        elif row["step"] > self.step:
            self._covered = row["step"] - self.step
        self._rows += 1
        self.step = row["step"]
        for name, value in row.items():
            if name != "step" and is_number(value):
                self._points.setdefault(name, []).append(LoggedValue(self.step, value, self._covered))

    def all(self, name: str) -> Sequence[LoggedValue]:
        """Every value of a metric; empty if it was never logged."""
        return self._points.get(name, ())

    def names(self) -> list[str]:
        """The metrics that were logged."""
        return list(self._points)

    def last(self, name: str, count: int) -> list[float]:
        """The last `count` values; empty if there are fewer."""
        points = self.all(name)
        return [point.value for point in points[-count:]] if len(points) >= count else []

    def first(self, name: str, count: int) -> list[float]:
        """The first `count` values, or as many as there are."""
        return [point.value for point in self.all(name)[:count]]

    def held(self, name: str, shows: Callable[[float], bool], steps: int) -> LoggedValue | None:
        """The first value of the unbroken series up to now that meets a condition, if the series covers `steps` steps
        or more. A step that reuses a rollout logs nothing about it and counts as covered."""
        points = self.all(name)
        begun = len(points)
        while begun and len(points) - begun < LONGEST_LOOK and shows(points[begun - 1].value):
            begun -= 1
        if begun == len(points):
            return None
        point = points[begun]
        return point if self.step - point.begins + 1 >= steps else None

    def lasting(self, name: str, shows: Callable[[float], bool], count: int) -> LoggedValue | None:
        """The same for `count` values, however many steps they cover."""
        points = self.all(name)
        if len(points) < count:
            return None
        point = self.held(name, shows, 1)
        return point if point is not None and point.step <= points[-count].step else None

    def begun(self, name: str, shows: Callable[[float], bool]) -> int:
        """The step since which the values have met a condition without a break; the current step if the last does
        not."""
        point = self.held(name, shows, 0)
        return self.step if point is None else point.step

    def best_mean(self, name: str, count: int, before: int) -> tuple[float, int] | None:
        """The highest mean of `count` consecutive values before the last `before` ones, and the step of the last of
        them; the mean of all of them if there are fewer than `count`."""
        points = self.all(name)[-LONGEST_LOOK - before : -before]
        if not points:
            return None
        count = min(count, len(points))
        sums = [sum(point.value for point in points[:count])]
        for gone, new in zip(points, points[count:], strict=False):
            sums.append(sums[-1] + new.value - gone.value)
        best = max(range(len(sums)), key=sums.__getitem__)
        return sums[best] / count, points[best + count - 1].step

    def mean_around(self, name: str, step: int, count: int) -> float | None:
        """The mean of the last `count` values up to a step; None without values."""
        points = [point.value for point in self.all(name)[-2 * LONGEST_LOOK :] if point.step <= step][-count:]
        return statistics.fmean(points) if points else None

    def noise(self, name: str) -> float:
        """The standard deviation of a single value around its trend, from differences of neighbours."""
        values = [point.value for point in self.all(name)[-60:]]
        differences = [abs(new - old) for old, new in zip(values, values[1:], strict=False)]
        return statistics.median(differences) / 0.954 if differences else 0.0  # 0.954: for normal values

    def since(self, name: str, after: int, shows: Callable[[float], bool]) -> int:
        """The first step after `after` whose value meets a condition; `after + 1` if none does."""
        points = self.all(name)[-2 * LONGEST_LOOK :]
        return next((point.step for point in points if point.step > after and shows(point.value)), after + 1)


LEVELS = ("healthy", "watch", "alarming")
LAST_ROWS = 10  # logged steps to average
EQUAL_REWARDS = 1e-6  # a standard deviation below this is rounding
CEILING = 0.95  # mean of a reward from which there is little left to learn


@dataclass(frozen=True)
class Range:
    """The limits of one metric.

    Attributes:
        metrics: names; the first one that was logged counts. rule: the health rule that watches it, if one does.
        low, high: the healthy range, ends included; if_low, if_high: what to change outside it.
        alarm_low, alarm_high: beyond these the level is alarming; between them and the range, watch.
        on_policy: applies only if a rollout is used up before the next optimizer step.
        unless_solved: does not apply to a run that has learnt its task.
    """

    metrics: tuple[str, ...]
    rule: str = ""
    low: float = -math.inf
    high: float = math.inf
    alarm_low: float = -math.inf
    alarm_high: float = math.inf
    if_low: str = ""
    if_high: str = ""
    on_policy: bool = False
    unless_solved: bool = False

    def judge(self, value: float) -> tuple[str, str]:
        """One of LEVELS, and what to change; nothing if the value is healthy.

        >>> Range(("x",), high=0.3, alarm_high=0.8, if_high="lower y").judge(0.5)
        ('watch', 'lower y')
        """
        if self.low <= value <= self.high:
            return "healthy", ""
        return "alarming" if self.is_alarming(value) else "watch", self.if_low if value < self.low else self.if_high

    def is_alarming(self, value: float) -> bool:
        """Whether a value is beyond the alarm limits."""
        return not self.alarm_low <= value <= self.alarm_high


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
    ("completions/repeated_ratio",), high=0.3, alarm_high=0.5,
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


def judge_metrics(
    rows: Sequence[Row], on_policy: bool = True, last: int = LAST_ROWS, solved: bool = False
) -> list[Judgement]:
    """Judge the last rows of a `metrics.jsonl`; metrics that were not logged are left out.

    >>> rows = [{"step": 1, "completions/clipped_ratio": 1.0, "grad_norm": 0.2}]
    >>> [(found.name, found.level) for found in judge_metrics(rows)]
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
