"""Matplotlib figures for notebooks (PNG) and pages (SVG in `currentColor`), without pyplot."""

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#010101", "#020202"  # placeholders, replaced in the SVG
BLUE, GREY = "#3b82f6", "#8b8f98"
MID_INK, LINE = "#797979", "#2878e0"  # for a PNG, which cannot follow the page's theme
SMOOTH_FROM = 20  # number of rows from which a moving mean is drawn over the values
WIDTH_PX = 864  # displayed width of a PNG; the image has twice as many pixels, for dense screens
DPI, SCALE = 96, 2
_INKED = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: dict[Any, Any] = dict.fromkeys(_INKED, INK) | {
    "svg.fonttype": "none",
    "svg.hashsalt": "rloo-kit",
    "font.size": 10,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
PNG_STYLE = STYLE | dict.fromkeys(_INKED, MID_INK) | {"grid.color": MID_INK, "grid.alpha": 0.3, "axes.linewidth": 0.8}

Curve = tuple[str, list[tuple[int, float]], float | None, float | None]  # title, step and value, ends of the axis


def draw_curves(curves: Sequence[Curve], note: str = "") -> bytes:
    """A PNG with one panel per curve, three in a row (two if there are four), and a note below.

    Args:
        curves: at least one. note: one line; empty for none.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = 2 if len(curves) == 4 else min(len(curves), 3)
    rows = -(-len(curves) // columns)
    width = WIDTH_PX / DPI if columns > 1 else 0.6 * WIDTH_PX / DPI
    with rc_context(PNG_STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.08)
        figure = Figure(figsize=(width, 2.5 * rows + (0.3 if note else 0)), layout=layout)
        if note:
            figure.supxlabel(note, x=0.01, ha="left", fontsize=9)
        for number, curve in enumerate(curves, 1):
            _draw_curve(figure.add_subplot(rows, columns, number), curve, LINE)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI * SCALE, transparent=True, metadata={"Software": None})
    return buffer.getvalue()


def shown_width(png: bytes) -> int:
    """The display width of an image from `draw_curves`, in pixels."""
    return int.from_bytes(png[16:20], "big") // SCALE  # the offset of the width in a PNG header


def _draw_curve(axes: "Axes", curve: Curve, color: str) -> None:
    """A metric over the steps, at least one point; from `SMOOTH_FROM` rows on with a moving mean."""
    from matplotlib.ticker import MaxNLocator

    title, points, low, high = curve
    steps, values = [step for step, _ in points], [value for _, value in points]
    window = mean_window(len(points)) if len(points) >= SMOOTH_FROM else None
    if window is not None:
        axes.plot(steps, values, color=color, linewidth=1.0, alpha=0.45)
        axes.plot(steps, moving_mean(values, window), color=color, linewidth=2.0)
    elif len(points) > 1:
        axes.plot(steps, values, color=color, linewidth=1.5)
    else:
        axes.plot(steps, values, "o", color=color, clip_on=False)
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    axes.set_title(title)
    axes.set_xlabel("step" if window is None else f"step (line: mean of the last {window})", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.02)
    if low is not None:
        axes.set_ylim(bottom=low - (0.02 if high is not None else 0))
    if high is not None:
        axes.set_ylim(top=high + 0.02)


def mean_window(rows: int) -> int:
    """The window of the moving mean for `rows` rows."""
    return max(5, rows // 10)


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """The start and the end of a curve of at least one value: from `SMOOTH_FROM` values on, means over the window."""
    window = mean_window(len(values)) if len(values) >= SMOOTH_FROM else 1
    return math.fsum(values[:window]) / window, math.fsum(values[-window:]) / window


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` before it, in linear time.

    The running sum is compensated (Neumaier 1974), so that a spike leaves no rounding error after it leaves the window.
    """
    means: list[float] = []
    total = rest = 0.0
    for place, value in enumerate(values):
        for one in [value] if place < window else [value, -values[place - window]]:
            new = total + one
            rest += (total - new) + one if abs(total) >= abs(one) else (one - new) + total
            total = new
        means.append((total + rest) / min(place + 1, window))
    return means


def to_svg(figure: "Figure", name: str, description: str) -> str:
    """The figure as an SVG element for a page, with unique ids and the page's colours and font."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)  # style would apply to the whole page
    svg = re.sub(r'\b(id=|href="#|url\(#)("?)', rf"\1\2{name}-", svg)  # two figures on a page must not share ids
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    svg = svg.replace(f"stroke: {GRID}", "stroke: currentColor; stroke-opacity: 0.15").replace(INK, "currentColor")
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)  # the page sets the size; the viewBox keeps the aspect ratio
    return f'{head} role="img" aria-label="{description}">{rest}'
