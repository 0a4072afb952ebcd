"""A run's metrics as series, for the rules."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rloo_kit.runs.files import is_number

LONGEST_LOOK = 500  # values that a rule looks back over, so that the cost per step does not grow with the run

EQUAL_REWARDS = 1e-6  # a standard deviation below this is rounding
CEILING = 0.95  # mean of a reward from which there is little left to learn
TIED = ("frac_score_zero_std", "frac_reward_zero_std")  # the first one that was logged counts

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
    """The values of a run's rows by metric, in step order."""

    def __init__(self) -> None:
        self.step = 0
        self._covered = 1
        self._rows = 0
        self._points: dict[str, list[LoggedValue]] = {}

    def add(self, row: Row) -> None:
        """Add a row; several rows may have the same step (a held-out evaluation)."""
        if self._rows and row["step"] > self.step:
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
