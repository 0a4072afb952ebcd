"""The report's charts: small SVGs in the page's colours and font, for any number of steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rloo_kit.results.figures import SMOOTH_FROM, first_and_last, mean_window, moving_mean
from rloo_kit.results.pages import escape_text

WIDTH, HEIGHT = 360, 200  # of the viewBox; a panel is shown at about this size in pixels
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 14, 30
INSET = 6  # between the ends of the grid and the first and the last point
MOST_POINTS = 240  # of a line; longer ones show the minimum and maximum of each bin
COLORS = 8  # for series of equal rank
MARGIN = 0.06  # share of the range beyond the values, so that no axis cuts a point


class Point(NamedTuple):
    """A value at a step, with its interval; None without one."""

    step: float
    value: float
    low: float | None = None
    high: float | None = None


class Mark(NamedTuple):
    """The first and last step of a finding, and its name."""

    since: float
    last: float
    name: str


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
    """

    title: str
    series: dict[str, list[Point]]
    form: str = "number"
    dots: bool = False
    alike: bool = False
    marks: list[Mark] = field(default_factory=list)
    labels: Sequence[str] = ()
    note: str = "step"
    ends_of: int = -1

    @property
    def values(self) -> list[float]:
        """Every value and every interval end."""
        ends = (end for points in self.series.values() for one in points for end in one[1:])
        return [end for end in ends if end is not None]


def draw_chart(chart: Chart) -> str:
    """The chart as an SVG element; a screen reader reads it as one sentence."""
    scale = _Scale.of(chart)
    parts = [_grid(chart, scale), *(_mark(one, scale, row) for row, one in enumerate(chart.marks))]
    lines = [
        _line(points, scale, series_class(chart, number), chart.dots)
        for number, points in enumerate(chart.series.values())
        if points
    ]
    parts += lines[::-1] if chart.dots else lines  # the strong line in front, but behind another's dots
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape_text(describe_chart(chart))}">'
        f"{''.join(parts)}</svg>"
    )


def series_class(chart: Chart, number: int) -> str:
    """The CSS class of a series, for its line and its legend entry."""
    if chart.alike:
        return f"c{number % COLORS}"
    return "s1" if number == len(chart.series) - 1 else "s0"


def describe_chart(chart: Chart) -> str:
    """A sentence that describes the chart."""
    texts = []
    for name, points in chart.series.items():
        if not points:
            continue
        first, last = points[0], points[-1]
        ends = [format_value(one.value, chart.form) for one in (first, last)]
        at = [chart.labels[int(one.step)] if chart.labels else f"{chart.note} {one.step:g}" for one in (first, last)]
        whole = f"{ends[0]} at {at[0]}" + (f", {ends[1]} at {at[1]}" if len(points) > 1 else "")
        texts.append(f"{name} {whole}".strip())
    text = f"{chart.title}: {'; '.join(texts)}"
    return text + "".join(f"; {one.name} from step {one.since:g}" for one in chart.marks)


def from_to(chart: Chart) -> str:
    """The start and end of a line, as means if it is smoothed; empty if the points are not steps."""
    if chart.labels:
        return ""
    points = list(chart.series.values())[chart.ends_of]
    if len(points) == 1:
        return format_value(points[0].value, chart.form)
    values = [one.value for one in points]
    ends = (values[0], values[-1]) if chart.dots else first_and_last(values)
    return " → ".join(format_value(end, chart.form) for end in ends)


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


def thin_out(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points of a line: the minimum and maximum of each bin, in step order."""
    if len(points) <= most:
        return list(points)
    bins = max(most // 2, 1)
    kept: list[Point] = []
    for number in range(bins):
        part = points[number * len(points) // bins : (number + 1) * len(points) // bins]
        ends = min(part, key=lambda one: one.value), max(part, key=lambda one: one.value)
        kept += sorted(set(ends), key=lambda one: one.step)
    return kept


# ------------------------------------------------------------------------------------------------ parts


@dataclass
class _Scale:
    """Maps steps and values to the viewBox."""

    first: float
    last: float
    low: float
    high: float
    ticks: list[float]

    @classmethod
    def of(cls, chart: Chart) -> "_Scale":
        steps = [one.step for points in chart.series.values() for one in points]
        first, last = min(steps), max(steps)
        if chart.labels or first == last:
            first, last = (-0.5, len(chart.labels) - 0.5) if chart.labels else (first - 1, last + 1)
        low, high = min(chart.values), max(chart.values)
        if chart.form == "share" and high - low > 0.25:
            low, high = 0.0, 1.0
        elif chart.form != "share" and 0 <= low <= 0.6 * high:
            low = 0.0
        elif chart.form == "share" and high - low < 0.1:
            low, high = (max(high - 0.1, 0.0), high) if high > 0.5 else (low, min(low + 0.1, 1.0))
        spread = (high - low) or abs(high) or 1.0
        ticks = nice_ticks(low, high) if high > low else [low]
        return cls(first, last, low - MARGIN * spread, high + MARGIN * spread, ticks)

    def x(self, step: float) -> float:
        return LEFT + INSET + (WIDTH - LEFT - RIGHT - 2 * INSET) * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low) / (self.high - self.low)


def nice_ticks(low: float, high: float, wanted: int = 4, whole: bool = False) -> list[float]:
    """Round tick values within a range.

    >>> nice_ticks(0.0, 1.0), nice_ticks(1, 44, whole=True)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [10.0, 20.0, 30.0, 40.0])
    """
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    if whole:
        power = max(power, 1.0)
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = min((factor * power for factor in factors), key=lambda one: abs(one - rough))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(chart: Chart, scale: _Scale) -> str:
    parts = []
    for tick in scale.ticks:
        y = scale.y(tick)
        text = _tick_text(tick, chart.form, scale.ticks)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    if chart.labels:
        below = [(float(place), label) for place, label in enumerate(chart.labels)]
    else:
        ticks = nice_ticks(scale.first, scale.last, 5, whole=True)
        below = [(tick, f"{tick:,.0f}") for tick in ticks]
    places = [(scale.x(place), HEIGHT - 15, label) for place, label in below]
    places.append(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 2, chart.note))
    parts += [
        f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{escape_text(label)}</text>'
        for x, y, label in places
    ]
    return "".join(parts)


def _tick_text(tick: float, form: str, ticks: Sequence[float]) -> str:
    apart = ticks[1] - ticks[0] if len(ticks) > 1 else abs(tick)
    shown, apart, unit = (100 * tick, 100 * apart, " %") if form == "share" else (tick, apart, "")
    if abs(shown) >= 10_000:
        return f"{shown / 1000:,.{0 if apart >= 1000 else 1}f}k{unit}"
    decimals = 0 if not apart else max(0, -math.floor(math.log10(apart) + 1e-9))
    decimals += abs(round(apart, decimals) - apart) > 1e-9 * abs(apart)  # a spacing such as 2.5 needs one more
    return f"{shown + 0.0:,.{min(decimals, 6)}f}{unit}"


def _mark(mark: Mark, scale: _Scale, row: int) -> str:
    since, last = (scale.x(min(max(step, scale.first), scale.last)) for step in (mark.since, mark.last))
    top, bottom = TOP - 8, HEIGHT - BOTTOM
    is_right = since > WIDTH * 0.55
    x, anchor = (since - 4, "end") if is_right else (since + 4, "start")
    return (
        f'<rect class="band" x="{since:.1f}" y="{top}" width="{max(last - since, 1):.1f}" height="{bottom - top}"/>'
        f'<line class="mark" x1="{since:.1f}" x2="{since:.1f}" y1="{top}" y2="{bottom}"/>'
        f'<text class="flag" x="{x:.1f}" y="{top + 10 + 12 * row}" text-anchor="{anchor}">'
        f"{escape_text(mark.name)}</text>"
    )


def _line(points: Sequence[Point], scale: _Scale, kind: str, dots: bool) -> str:
    if dots or len(points) == 1:
        return _dots(points, scale, kind)
    raw = _path(thin_out(points), scale)
    if len(points) < SMOOTH_FROM:
        return f'<path class="line {kind}" d="{raw}"/>'
    means = moving_mean([one.value for one in points], mean_window(len(points)))
    smooth = [Point(one.step, mean) for one, mean in zip(points, means, strict=True)]
    return f'<path class="raw {kind}" d="{raw}"/><path class="line {kind}" d="{_path(thin_out(smooth), scale)}"/>'


def _dots(points: Sequence[Point], scale: _Scale, kind: str) -> str:
    points = thin_out(points, MOST_POINTS // 2)
    known = [one for one in points if one.low is not None and one.high is not None]
    parts = []
    if len(known) > 2 and kind == "s1":
        upper = [(one.step, one.high) for one in known]
        lower = [(one.step, one.low) for one in reversed(known)]
        edge = " ".join(f"{scale.x(step):.1f},{scale.y(end or 0.0):.1f}" for step, end in [*upper, *lower])
        parts.append(f'<polygon class="area {kind}" points="{edge}"/>')
    if len(points) > 2 or (len(points) == 2 and kind != "s0"):
        way = " sparse" if len(points) == 2 else ""  # nothing was measured between the two
        parts.append(f'<path class="line {kind}{way}" d="{_path(points, scale)}"/>')
    for one in known:
        x = scale.x(one.step)
        low, high = scale.y(one.low or 0.0), scale.y(one.high or 0.0)
        parts.append(f'<line class="ends {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
    size = 3.5 if len(points) <= 40 else 2
    for one in points:
        x, y = scale.x(one.step), scale.y(one.value)
        parts.append(f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>')
    return "".join(parts)


def _path(points: Sequence[Point], scale: _Scale) -> str:
    return "M" + "L".join(f"{scale.x(one.step):.1f} {scale.y(one.value):.1f}" for one in points)
