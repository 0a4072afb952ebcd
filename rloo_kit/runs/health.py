"""What the rules of a run's health are made of: the logged numbers by metric, healthy ranges, a rule, what it finds. No
torch."""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LEVELS = ("healthy", "watch", "alarming")
LARGEST = sys.float_info.max
LONGEST_LOOK = 500  # values that a rule looks back over, so that a long run costs no more a step

Row = Mapping[str, Any]  # metrics of one logged step, under the trainer's names


def is_number(value: Any) -> bool:
    """Whether a metric's value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -LARGEST <= value <= LARGEST  # false for NaN; math.isfinite raises for an integer of 400 digits


@dataclass(frozen=True)
class Threshold:
    """The limits of one metric; None where there is none.

    Attributes:
        metrics: names; the first one that was logged counts.
        low, high: the healthy range, ends included; if_low, if_high: what to change outside of it.
        alarm_low, alarm_high: below or above these it is alarming; between them and the range, watch.
        on_policy: holds only where a rollout is used up before the next optimizer step.
        unless_solved: a run that has learnt its task leaves the range.
    """

    metrics: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    alarm_low: float | None = None
    alarm_high: float | None = None
    if_low: str = ""
    if_high: str = ""
    on_policy: bool = False
    unless_solved: bool = False

    def level(self, value: float) -> str:
        """One of LEVELS.

        >>> limits = Threshold(("x",), high=0.3, alarm_high=0.8)
        >>> limits.level(0.1), limits.level(0.5), limits.level(0.9)
        ('healthy', 'watch', 'alarming')
        """
        if _is_outside(value, self.alarm_low, self.alarm_high):
            return "alarming"
        return "watch" if _is_outside(value, self.low, self.high) else "healthy"

    def action(self, value: float) -> str:
        """What to change at this value; empty where it is healthy."""
        if self.level(value) == "healthy":
            return ""
        return self.if_low if _is_outside(value, self.low, None) else self.if_high


def _is_outside(value: float, low: float | None, high: float | None) -> bool:
    return (low is not None and value < low) or (high is not None and value > high)


class Point(NamedTuple):
    """A metric at a logged step; `covered`: the steps since the row before, which the row stands for."""

    step: int
    value: float
    covered: int


class Series:
    """The numbers of a run's rows by metric, in the order of their steps.

    Args:
        logging_steps: that the first row stands for.
    """

    def __init__(self, logging_steps: int = 1) -> None:
        self.step = 0
        self._covered = max(logging_steps, 1)
        self._rows = 0
        self._points: dict[str, list[Point]] = {}

    def add(self, row: Row) -> None:
        """Take in a row; several may have one step (a measurement of held-out accuracy)."""
        if self._rows and row["step"] > self.step:
            self._covered = row["step"] - self.step
        self._rows += 1
        self.step = row["step"]
        for name, value in row.items():
            if name != "step" and is_number(value):
                self._points.setdefault(name, []).append(Point(self.step, value, self._covered))

    def all(self, name: str) -> Sequence[Point]:
        """Every value of a metric; empty where it was never logged."""
        return self._points.get(name, ())

    def names(self) -> list[str]:
        """The metrics that were logged."""
        return list(self._points)

    def last(self, name: str, count: int) -> list[float]:
        """The last `count` values; empty where there are fewer."""
        points = self.all(name)
        return [point.value for point in points[-count:]] if len(points) >= count else []

    def first(self, name: str, count: int) -> list[float]:
        """The first `count` values, or those that there are."""
        return [point.value for point in self.all(name)[:count]]

    def held(self, name: str, shows: Callable[[float], bool], steps: int) -> Point | None:
        """The first of the values that show a condition up to now without a break, where they stand for `steps` steps
        or more. A step that reuses a rollout logs nothing about it and counts with it."""
        points = self.all(name)
        begun = len(points)
        while begun and len(points) - begun < LONGEST_LOOK and shows(points[begun - 1].value):
            begun -= 1
        if begun == len(points):
            return None
        point = points[begun]
        return point if self.step - (point.step - point.covered) >= steps else None

    def lasting(self, name: str, shows: Callable[[float], bool], count: int) -> Point | None:
        """The same for `count` values, whatever number of steps they stand for."""
        points = self.all(name)
        if len(points) < count:
            return None
        point = self.held(name, shows, 1)
        return point if point is not None and point.step <= points[-count].step else None

    def begun(self, name: str, shows: Callable[[float], bool]) -> int:
        """The step since which the values show a condition without a break; the present one where the last does not."""
        point = self.held(name, shows, 0)
        return self.step if point is None else point.step

    def best_mean(self, name: str, count: int, before: int) -> tuple[float, int] | None:
        """The highest mean of `count` values in a row among those before the last `before` ones, and the step of the
        last of them; of the first values where there are fewer than `count`."""
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
        """The mean of the last `count` values up to a step; None where there are none."""
        points = [point.value for point in self.all(name)[-2 * LONGEST_LOOK :] if point.step <= step][-count:]
        return statistics.fmean(points) if points else None

    def noise(self, name: str) -> float:
        """The standard deviation of one value around its trend, from the differences of neighbours."""
        values = [point.value for point in self.all(name)[-60:]]
        differences = [abs(new - old) for old, new in zip(values, values[1:], strict=False)]
        return statistics.median(differences) / 0.954 if differences else 0.0  # of normal values

    def since(self, name: str, after: int, shows: Callable[[float], bool]) -> int:
        """The first step behind `after` at which the values show a condition; `after + 1` where none does."""
        points = self.all(name)[-2 * LONGEST_LOOK :]
        return next((point.step for point in points if point.step > after and shows(point.value)), after + 1)

    def trend(self, name: str) -> float:
        """How far a metric's slope over the whole run is from 0, in its standard errors; 0 for fewer than 3 values."""
        points = self.all(name)
        points = points[:: max(len(points) // 200, 1)]
        if len(points) < 3:
            return 0.0
        steps, values = [float(point.step) for point in points], [point.value for point in points]
        mean_step, mean_value = statistics.fmean(steps), statistics.fmean(values)
        spread = sum((step - mean_step) ** 2 for step in steps)
        slope = sum((step - mean_step) * (value - mean_value) for step, value in zip(steps, values, strict=True))
        slope /= spread
        errors = [value - mean_value - slope * (step - mean_step) for step, value in zip(steps, values, strict=True)]
        error = math.sqrt(sum(one**2 for one in errors) / (len(points) - 2) / spread)
        return slope / error if error else math.copysign(math.inf, slope) if slope else 0.0


@dataclass(frozen=True)
class Context:
    """What the rules know of a run besides its rows.

    Attributes:
        rloo: the values of the `rloo:` section. modes: "warn", "stop" or "off" by a rule's name; "warn" if missing.
        no_signal_steps: steps in a row without signal before the run reports it. max_steps: planned; None: unknown.
        answers: names of the rewards whose mean is the accuracy on the training prompts.
    """

    rloo: Mapping[str, Any]
    modes: Mapping[str, str] = field(default_factory=dict)
    no_signal_steps: int = 5
    max_steps: int | None = None
    answers: tuple[str, ...] = ("answer_reward", "math_answer_reward")

    @classmethod
    def of(cls, run: Any, max_steps: int | None = None) -> "Context":
        """Of a `RunConfig`; `max_steps`: what an unset `rloo.max_steps` came to."""
        modes = run.health.model_dump()
        steps = modes.pop("no_signal_steps")
        return cls(run.rloo.model_dump(), modes, steps, max_steps or run.rloo.max_steps)

    @property
    def on_policy(self) -> bool:
        """Whether a rollout is used up before the next optimizer step."""
        accumulation = self.rloo.get("gradient_accumulation_steps", 1)
        return (
            self.rloo.get("num_iterations", 1) == 1
            and (self.rloo.get("steps_per_generation") or accumulation) <= accumulation
        )


class Evidence(NamedTuple):
    """What a rule has seen: the first step that shows it, in words, and cause and fix where they are not the rule's."""

    since: int
    text: str
    cause: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Rule:
    """One way in which a run goes wrong.

    Attributes:
        name: the key of `health:` that says whether it warns, stops the run or is off.
        metrics: that it reads; without the first one it is silent.
        window: values that it looks at, or None for `health.no_signal_steps` steps.
        detect: from the series, the run's context and the window to the evidence, or None.
        cause, fix: in words; {key} stands for the value of rloo.key.
        follows: rules whose finding, if it began no later, is the cause of this one, which then is not reported.
        level: "alarming" or "watch". thresholds: healthy ranges of single metrics.
    """

    name: str
    metrics: tuple[str, ...]
    window: int | None
    detect: Callable[[Series, Context, int], Evidence | None]
    cause: str
    fix: str
    follows: tuple[str, ...] = ()
    level: str = "alarming"
    thresholds: tuple[Threshold, ...] = ()


@dataclass
class Finding:
    """What a rule has found in a run.

    Attributes:
        rule: its name. step: at which it was found. since: the first step that shows it. last: the last one so far.
        evidence, cause, fix: in words. level: "alarming" or "watch". explains: rules that fired as its consequences.
    """

    rule: str
    step: int
    since: int
    last: int
    evidence: str
    cause: str
    fix: str
    level: str
    explains: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The rule's name in words."""
        return self.rule.replace("_", " ")

    def __str__(self) -> str:
        return f"{self.title} since step {self.since}: {self.evidence}. {self.cause}. To do: {self.fix}"
