"""Charts and bars of the report, the comparisons and the notebook: a run's curves, as coordinates.

`templates/parts.html.jinja` writes the coordinates as SVG; the page's style gives colours and fonts.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from rloo_kit.health.rules import REWARD_MEAN, RULES, Finding
from rloo_kit.health.series import Row, logged
from rloo_kit.results.changes import HeldOut
from rloo_kit.results.evaluation import Evaluation, name_of, named_sides, says_nothing
from rloo_kit.results.intervals import Measured
from rloo_kit.runs.files import is_number

WIDTH, HEIGHT = 360, 200  # of the viewBox; a panel is shown at about this size in pixels
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 14, 30
INSET = 6  # between the ends of the grid and the first and the last point
MOST_POINTS = 240  # of a line; longer ones show the minimum and maximum of each bin
SMOOTH_FROM = 20  # points from which a moving mean is drawn over the values
COLORS = 8  # for series of equal rank
MARGIN = 0.06  # share of the range beyond the values, so that no axis cuts a point
BAR_WIDTH, BAR_INSET = 200, 4  # of a bar's viewBox
SAME = 1e-9  # values that differ by less count as equal
FLAT = 0.02  # a share that moves by less over a whole run is listed, not drawn
PARTS = {"rollout": "rollout", "rewards": "reward", "gradient": "gradient", "evaluation": "evaluation"}  # time/PART_s
SPEED = {"time/decode_ms_per_token_step": "{:.1f} ms a token step", "time/tokens_per_s": "{:,.0f} tokens/s sampled"}


class Point(NamedTuple):
    """A value at a step, with its interval; None without one."""

    step: float
    value: float
    low: float | None = None
    high: float | None = None


@dataclass
class Chart:
    """One panel.

    Attributes:
        title: plain text. series: one line each, by name ("" for a single one); the last is drawn strongest. A series
            without points is not shown, but keeps its colour.
        form: "share" (0 to 1, shown in %), "count" or "number". labels: replace the numbers below points 0, 1, ...
        dots: whether each point is a dot with its interval (measurements); else a line with its moving mean.
        alike: the series are of equal rank, each with its own colour (`c0` to `c7` of the style).
        marks: drawn in the background. note: unit of the horizontal axis. ends_of: index of the series for `from_to`.
        metrics: names of those it shows.
    """

    title: str
    series: dict[str, list[Point]]
    form: str = "number"
    dots: bool = False
    alike: bool = False
    marks: list[Finding] = field(default_factory=list)
    labels: Sequence[str] = ()
    note: str = "step"
    ends_of: int = -1
    metrics: set[str] = field(default_factory=set)

    @property
    def values(self) -> list[float]:
        """Every value, without the intervals."""
        return [point.value for points in self.series.values() for point in points]

    def kind(self, number: int) -> str:
        """The style's class of a series."""
        if self.alike:
            return f"c{number % COLORS}"
        return "s1" if number == len(self.series) - 1 else "s0"


@dataclass(frozen=True)
class Scale:
    """The coordinates of steps from `first` to `last` and of values from `low` to `high` in the viewBox."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        inner = WIDTH - LEFT - RIGHT - 2 * INSET
        return round(LEFT + INSET + inner * (step - self.first) / (self.last - self.first), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low) / (self.high - self.low), 1)

    def path(self, points: Sequence[Point]) -> str:
        """Of more than MOST_POINTS the minimum and maximum of each bin, in step order."""
        bins, kept = MOST_POINTS // 2, points
        if len(points) > MOST_POINTS:
            parts = [points[n * len(points) // bins : (n + 1) * len(points) // bins] for n in range(bins)]
            ends = [{end(part, key=lambda point: point.value) for end in (min, max)} for part in parts]
            kept = [point for both in ends for point in sorted(both, key=lambda point: point.step)]
        return "M" + "L".join(f"{self.x(point.step)} {self.y(point.value)}" for point in kept)


@dataclass
class Line:
    """A series in coordinates; what is empty is not drawn.

    Attributes:
        kind: class of the style. path: the line. raw: the values behind a moving mean. area: of the intervals.
        ends: x, low and high of each interval. dots: centre of each point.
        sparse: nothing was measured between the two points.
    """

    kind: str
    path: str = ""
    raw: str = ""
    area: str = ""
    ends: list[tuple[float, float, float]] = field(default_factory=list)
    dots: list[tuple[float, float]] = field(default_factory=list)
    sparse: bool = False

    @classmethod
    def of(cls, points: Sequence[Point], kind: str, scale: Scale, dots: bool) -> "Line":
        """The line of a series; `dots`: of measurements, each with its interval."""
        if not dots and len(points) > 1:
            if len(points) < SMOOTH_FROM:
                return cls(kind, scale.path(points))
            return cls(kind, scale.path(moving_mean(points)), scale.path(points))
        line = cls(kind, dots=[(scale.x(point.step), scale.y(point.value)) for point in points])
        for step, _, low, high in points:
            if low is not None and high is not None:
                line.ends.append((scale.x(step), scale.y(low), scale.y(high)))
        if len(line.ends) > 2 and kind == "s1":
            edge = [*((at, top) for at, _, top in line.ends), *((at, foot) for at, foot, _ in reversed(line.ends))]
            line.area = " ".join(f"{at},{end}" for at, end in edge)
        if len(points) > 2 or (len(points) == 2 and kind != "s0"):
            line.path, line.sparse = scale.path(points), len(points) == 2
        return line


@dataclass
class Drawing:
    """A figure in coordinates of the viewBox.

    Attributes:
        title, from_to: above the figure. text: the chart as a sentence, for screen readers.
        ticks: height and text of each horizontal line. below: x, y and text of the horizontal axis.
        bands: start, width, x, y and anchor of the name, name. legend: class and name. found: rules and their names.
    """

    title: str
    from_to: str
    text: str
    ticks: list[tuple[float, str]]
    below: list[tuple[float, float, str]]
    bands: list[tuple[float, float, float, float, str, str]]
    lines: list[Line]
    legend: list[tuple[str, str]]
    found: dict[str, str]


def draw_chart(chart: Chart) -> Drawing:
    """The coordinates of a chart with at least one point."""
    steps = [point.step for points in chart.series.values() for point in points]
    first, last = (-0.5, len(chart.labels) - 0.5) if chart.labels else (min(steps), max(steps))
    if first == last:
        first, last = first - 1, last + 1
    low, high, heights = _values_shown(chart)
    scale = Scale(first, last, low, high)
    shown = [(chart.kind(number), name, points) for number, (name, points) in enumerate(chart.series.items()) if points]
    lines = [Line.of(points, kind, scale, chart.dots) for kind, _, points in shown]
    labels: list[tuple[float, str]] = [*enumerate(chart.labels)]
    labels = labels or [(tick, f"{tick:,.0f}") for tick in nice_ticks(first, last, 5, whole=True)]
    bands: list[tuple[float, float, float, float, str, str]] = []
    for row, mark in enumerate(chart.marks):
        start, end = (scale.x(min(max(step, first), last)) for step in (mark.since, mark.last))
        at, anchor = (start - 4, "end") if start > WIDTH * 0.55 else (start + 4, "start")
        bands.append((start, round(max(end - start, 1), 1), at, TOP + 2 + 12 * row, anchor, mark.title))
    return Drawing(
        title=chart.title,
        from_to="" if chart.alike else from_to(chart),
        text=describe_chart(chart),
        ticks=[(scale.y(tick), _tick_text(tick, chart.form, heights)) for tick in heights],
        below=[*((scale.x(at), HEIGHT - 15, text) for at, text in labels),
               ((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 2, chart.note)],
        bands=bands,
        lines=lines[::-1] if chart.dots else lines,  # the strong line in front, but behind another's dots
        legend=[(kind, name) for kind, name, _ in shown if name],
        found={mark.name: mark.title for mark in chart.marks},
    )  # fmt: skip


def draw_bar(shares: Mapping[str, Measured]) -> list[tuple[str, ...]]:
    """Class of the style, dot, left and right end of each share, by class, in the bar's viewBox."""

    def x(share: float) -> str:
        return f"{BAR_INSET + (BAR_WIDTH - 2 * BAR_INSET) * min(max(share, 0.0), 1.0):.1f}"

    return [(kind, *map(x, measured.ends)) for kind, measured in shares.items()]


def describe_chart(chart: Chart) -> str:
    """A sentence that describes the chart."""
    texts = []
    for name, points in chart.series.items():
        ends = []
        for point in dict.fromkeys([*points[:1], *points[-1:]]):
            place = chart.labels[int(point.step)] if chart.labels else f"{chart.note} {point.step:g}"
            ends.append(f"{format_value(point.value, chart.form)} at {place}")
        texts += [f"{name} {', '.join(ends)}".strip()] if points else []
    marks = "".join(f"; {mark.title} from step {mark.since:g}" for mark in chart.marks)
    return f"{chart.title}: {'; '.join(texts)}{marks}"


def from_to(chart: Chart) -> str:
    """The start and end of a line, as means if it is smoothed; empty if the points are not steps."""
    if chart.labels:
        return ""
    values = [point.value for point in list(chart.series.values())[chart.ends_of]]
    ends = (values[0], values[-1]) if chart.dots else first_and_last(values)
    return " → ".join(format_value(end, chart.form) for end in ends[: len(values)])


def format_value(value: float, form: str) -> str:
    """A value formatted for its axis.

    >>> format_value(0.934, "share"), format_value(21.92, "count"), format_value(0.0012, "number")
    ('93.4 %', '21.9', '0.0012')
    """
    if form == "share":
        return f"{100 * value:.1f} %"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if form == "count" else f"{value:.3g}"


def mean_window(rows: int) -> int:
    """The window of the moving mean."""
    return max(5, rows // 10)


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """The start and the end of a curve of at least one value: from `SMOOTH_FROM` values on, means over the window."""
    window = mean_window(len(values)) if len(values) >= SMOOTH_FROM else 1
    return math.fsum(values[:window]) / window, math.fsum(values[-window:]) / window


def moving_mean(points: Sequence[Point]) -> list[Point]:
    """The mean of points and of up to `mean_window - 1` before each, at MOST_POINTS steps at most."""
    window, each = mean_window(len(points)), -(-len(points) // MOST_POINTS)
    means = []
    for place in range((len(points) - 1) % each, len(points), each):  # the last one is there
        values = [point.value for point in points[max(0, place - window + 1) : place + 1]]
        means.append(Point(points[place].step, math.fsum(values) / len(values)))
    return means


def nice_ticks(low: float, high: float, wanted: int = 4, whole: bool = False) -> list[float]:
    """Round tick values within a range.

    >>> nice_ticks(0.0, 1.0), nice_ticks(1, 44, whole=True)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [10.0, 20.0, 30.0, 40.0])
    """
    rough = (high - low) / wanted
    if rough == 0.0:  # of two numbers next to 0
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    if whole:
        power = max(power, 1.0)
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = min((factor * power for factor in factors), key=lambda size: abs(size - rough))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _values_shown(chart: Chart) -> tuple[float, float, list[float]]:
    """The ends of the vertical axis, and its ticks: all of a share that moves much, 0 where it is near."""
    ends = [end for points in chart.series.values() for point in points for end in point[1:] if end is not None]
    low, high = min(ends), max(ends)
    if chart.form != "share":
        low = 0.0 if 0 <= low <= 0.6 * high else low
    elif high - low > 0.25:
        low, high = 0.0, 1.0
    elif high - low < 0.1:
        low, high = (max(high - 0.1, 0.0), high) if high > 0.5 else (low, min(low + 0.1, 1.0))
    margin = MARGIN * ((high - low) or abs(high) or 1.0)
    return low - margin, high + margin, nice_ticks(low, high) if high > low else [low]


def _tick_text(tick: float, form: str, ticks: Sequence[float]) -> str:
    apart = ticks[1] - ticks[0] if len(ticks) > 1 else abs(tick)
    shown, apart, unit = (100 * tick, 100 * apart, " %") if form == "share" else (tick, apart, "")
    if abs(shown) >= 10_000:
        return f"{shown / 1000:,.{0 if apart >= 1000 else 1}f}k{unit}"
    decimals = 0 if not apart else max(0, -math.floor(math.log10(apart) + 1e-9))
    decimals += abs(round(apart, decimals) - apart) > 1e-9 * abs(apart)  # a spacing such as 2.5 needs one more
    return f"{shown + 0.0:,.{min(decimals, 6)}f}{unit}"


def choose_curves(
    metrics: Sequence[Row], findings: Sequence[Finding], held_out: Chart | None = None
) -> tuple[list[Drawing], list[str]]:
    """The figures of the curves that change, with the findings marked, and each other curve in words.

    Args:
        metrics: rows with a `step`; if several have the same step, the last counts. held_out: its chart, shown first.
    """

    rows = in_order(metrics)
    charts = [] if held_out is None else [held_out]
    for chart in select_charts(rows):
        if is_flat(chart) or not any(_are_equal(chart, other) for other in charts):
            charts.append(chart)
    reads = {rule.name: rule.metrics for rule in RULES.values()}
    drawn, constant = [], []
    for chart in charts:
        chart.marks += [finding for finding in findings if chart.metrics & {"reward", *reads.get(finding.name, ())}]
        of_finding = any(reads.get(finding.name, ("",))[0] in chart.metrics for finding in findings) and len(rows) > 1
        if chart is held_out or of_finding or not is_flat(chart):
            drawn.append(draw_chart(chart))
        else:
            ends = dict.fromkeys(format_value(end, chart.form) for end in (min(chart.values), max(chart.values)))
            title = chart.title if chart.title.startswith("KL") else chart.title[:1].lower() + chart.title[1:]
            constant.append(f"{title} {' to '.join(ends)}")
    return drawn, constant


def _are_equal(chart: Chart, other: Chart) -> bool:
    mine, its = ([point for points in one.series.values() for point in points] for one in (chart, other))
    if [point.step for point in mine] != [point.step for point in its]:
        return False
    return all(abs(point.value - twin.value) <= SAME for point, twin in zip(mine, its, strict=True))


def is_flat(chart: Chart) -> bool:
    """Whether all values are nearly equal, so that a curve would show no more than the value."""
    values = chart.values
    return max(values) - min(values) <= (FLAT if chart.form == "share" else SAME * max(1.0, abs(values[0])))


def held_out_chart(
    before: Evaluation | None, after: Evaluation | None, during: Sequence[HeldOut], measure: str, last: int
) -> Chart | None:
    """The held-out measure over the steps: before at 0, after at `last`, and evaluations during training; None with
    fewer than two points."""
    ends = [HeldOut(step, one) for step, one in ((0, before), (last, after)) if one is not None]
    whole, parts = measured_points(ends, measure), measured_points(during, measure)
    if len(whole) + len(parts) < 2:
        return None
    series = {}
    if whole:
        series[f"before and after, {ends[-1].evaluation.num_prompts:,} prompts" if parts else ""] = whole
    if parts:
        series[f"during training, {during[0].evaluation.num_prompts:,} prompts"] = parts
    name = name_of(measure, *(one.evaluation for one in [*ends, *during]))
    form = "share" if measure.endswith("accuracy") else "number"
    return Chart(f"Held-out {name}", series, form, dots=True, ends_of=0, metrics={"eval/accuracy"})


def measured_points(evaluations: Sequence[HeldOut], measure: str) -> list[Point]:
    """A measure in evaluations, at their steps."""
    measured = ((one.step, one.evaluation.measure(measure)) for one in evaluations)
    return [Point(step, *mean.ends) for step, mean in measured if mean is not None]


def budget_chart(before: Evaluation | None, after: Evaluation | None) -> Chart | None:
    """Accuracy by thinking budget, before and after; None if none was measured."""
    sides = {name: side for name, side in named_sides(before, after).items() if side.budgets}
    budgets = sorted({budget.tokens for side in sides.values() for budget in side.budgets})
    series: dict[str, list[Point]] = {}
    for name, side in sides.items():
        measured = sorted((budgets.index(one.tokens), *one.accuracy.ends) for one in side.budgets if one.accuracy)
        if measured and (whole := side.measure("accuracy")) is not None:
            measured.append((len(budgets), *whole.ends))
        if measured:
            series[name] = [Point(*point) for point in measured]
    if not series or says_nothing(before, after):
        return None
    labels = [*(f"{budget:,}" for budget in budgets), "no budget"]
    title = f"{name_of('accuracy', before, after).capitalize()} by thinking budget"
    return Chart(title, series, "share", dots=True, labels=labels, note="thinking budget, tokens")


def tokens_generated(metrics: Sequence[Row]) -> float:
    """Total completion tokens of a run's rollouts, from the mean lengths of its logged steps."""
    return sum(tokens for _, tokens, _ in read_sampled(metrics))


def tokens_per_second(metrics: Sequence[Row], after: int = 0) -> float | None:
    """Completion tokens generated per second of `step_time` (rollout, forward, backward) in the steps later than
    `after`: evaluations and saves do not count. None without a rollout."""
    sampled = [(tokens, seconds) for step, tokens, seconds in read_sampled(metrics) if step > after]
    return sum(tokens for tokens, _ in sampled) / sum(seconds for _, seconds in sampled) if sampled else None


@dataclass(frozen=True)
class StepTime:
    """Mean seconds of a step, of each of PARTS and of "the rest"; and the speed of sampling in words, if known."""

    seconds: dict[str, float]
    speed: str

    @property
    def bar(self) -> list[tuple[str, float, float, str]]:
        """Class of the style, start and width in percent, and text of each part."""
        drawn, start, total = [], 0.0, sum(self.seconds.values()) or 1.0
        for name, seconds in self.seconds.items():
            kind, width = f"c{[*PARTS].index(name)}" if name in PARTS else "s0", 100 * seconds / total
            text = f"{name} {format_value(seconds, 'number')} s ({width:.0f} %)"
            drawn.append((kind, round(start, 2), round(width, 2), text))
            start += width
        return drawn

    def __str__(self) -> str:
        parts = filter(None, [", ".join(text for *_, text in self.bar), self.speed])
        return f"A step takes {format_value(sum(self.seconds.values()), 'number')} s: {'; '.join(parts)}"


def split_time(metrics: Sequence[Row]) -> StepTime | None:
    """Where the time of steps goes whose rows have `time/*`, saves and evaluations included; None without any."""
    numbers = ({name: value for name, value in row.items() if is_number(value)} for row in ({}, *in_order(metrics)))
    pairs = pairwise(defaultdict[str, float](float, row) for row in numbers)
    spans = [(row["step"] - old["step"], row["seconds"] - old["seconds"], row) for old, row in pairs]
    spans = [span for span in spans if "time/reward_s" in span[-1]]
    steps = sum(count for count, _, _ in spans)
    if not steps:
        return None
    seconds = {name: sum(n * row[f"time/{part}_s"] for n, _, row in spans) / steps for name, part in PARTS.items()}
    seconds["the rest"] = max(0.0, sum(took for _, took, _ in spans) / steps - sum(seconds.values()))
    seconds = {name: mean for name, mean in seconds.items() if mean or name != "evaluation"}
    speed = {text: [row[name] for _, _, row in spans if name in row] for name, text in SPEED.items()}
    return StepTime(seconds, ", ".join(text.format(fmean(values)) for text, values in speed.items() if values))


def signal_shares(metrics: Sequence[Row]) -> list[Point]:
    """The share of groups with signal over the steps: with different scores, before any KL penalty."""
    return [Point(step, 1 - tied) for step, tied in logged(metrics, "frac_score_zero_std", "frac_reward_zero_std")]


def points_of(rows: Sequence[Row], *metrics: str) -> list[Point]:
    """Of the first of these metrics that was logged."""
    return [Point(*point) for point in logged(rows, *metrics)]


def in_order(metrics: Sequence[Row]) -> list[Row]:
    """The rows of a run's logged steps, each step once; of several rows of one step the last counts."""
    by_step = {row["step"]: row for row in metrics if is_number(row.get("step"))}
    return [by_step[step] for step in sorted(by_step)]


def read_sampled(metrics: Sequence[Row]) -> Iterable[tuple[int, float, float]]:
    """Of each row with a rollout: its step, and the completion tokens and the `step_time` since the one before it."""
    episode, step, seconds = 0.0, 0, 0.0
    for row in in_order(metrics):
        found: list[Any] = [row.get(name) for name in ("step", "step_time", "completions/mean_length", "episode")]
        now, each, length, count = (one if is_number(one) else 0 for one in found)
        seconds, step = seconds + each * (now - step), now
        if length and count > episode and seconds:
            yield now, length * (count - episode), seconds
            episode, seconds = count, 0.0


def select_charts(metrics: Sequence[Row]) -> Iterable[Chart]:
    """The curves of a run, the most important first; of several rows of one step the last counts."""
    rows = in_order(metrics)

    def chart(title: str, form: str, *metrics: str) -> Iterable[Chart]:
        if points := points_of(rows, *metrics):
            yield Chart(title, {"": points}, form, metrics={*metrics})

    matches = filter(None, (REWARD_MEAN.fullmatch(name) for row in rows[:50] for name in row))
    rewards = list(dict.fromkeys(match[1] for match in matches))
    if len(rewards) == 1:
        yield from chart(f"Reward: {rewards[0]}", "number", "reward", f"rewards/{rewards[0]}/mean")
    else:
        yield from chart("Reward, weighted sum", "number", "reward")
        for name in rewards:
            yield from chart(f"Reward: {name}", "number", f"rewards/{name}/mean")
    if signal := signal_shares(rows):
        tied = {"frac_score_zero_std", "frac_reward_zero_std"}
        yield Chart("Groups with signal", {"": signal}, "share", metrics=tied)
    names = {"completion": "completions/mean_length", "thinking": "thinking/mean_length"}
    if lengths := {name: points for name, metric in names.items() if (points := points_of(rows, metric))}:
        title = "Tokens" if len(lengths) > 1 else f"{next(iter(lengths)).title()} tokens"
        yield Chart(title, lengths, "count", metrics={*names.values()})
    yield from chart("Thinking closed", "share", "thinking/closed_ratio")
    yield from chart("Closed by the budget", "share", "thinking/forced_ratio")
    yield from chart("Truncated at the limit", "share", "completions/clipped_ratio")
    yield from chart("Tool calls per completion", "count", "tools/call_frequency")
    metric_of = {"the tool failed": "tools/failure_frequency", "no valid call": "tools/invalid_frequency"}
    wrong = {name: points_of(rows, metric) for name, metric in metric_of.items()}
    if any(wrong.values()):
        yield Chart("Tool calls gone wrong", wrong, "share", metrics={*metric_of.values()})
    yield from chart("Turns per completion", "count", "tools/turns")
    yield from chart("Entropy, nats", "number", "entropy")
    yield from chart("KL to the reference, nats", "number", "kl")
    yield from chart("Gradient norm", "number", "grad_norm")
    if speed := [Point(step, tokens / seconds) for step, tokens, seconds in read_sampled(rows)]:
        yield Chart("Tokens per second", {"": speed}, "count")
