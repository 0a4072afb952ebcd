"""The drawings of a report: inline SVG that follows the page's colours, light or dark.

Lines and dots have colours that are legible on both grounds; everything else (text, axes, grid) is drawn in placeholder
colours that become `currentColor` in the SVG. Text stays text. Nothing is written to disk and pyplot, which keeps state
and picks a backend, is not used.
"""

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rloo_kit.results.evaluation import Evaluation

INK, GRID = "#010101", "#020202"  # placeholders
BLUE, GREY = "#3b82f6", "#8b8f98"
SMOOTH_FROM = 20  # rows of metrics from which a moving mean is drawn over the values
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rloo-kit",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}
# Panels of the learning curve: title, the metrics to take (the first that was logged), lower and upper end of the axis.
PANELS: tuple[tuple[str, tuple[str, ...], float | None, float | None], ...] = (
    ("Reward", ("reward",), None, None),
    ("Accuracy of the rollouts", ("rewards/answer_reward/mean", "rewards/math_answer_reward/mean"), 0.0, 1.0),
    ("KL to the reference, nats a token", ("kl",), None, None),
    ("Thinking tokens", ("thinking/mean_length",), 0.0, None),
    ("Share that closes its thinking", ("thinking/closed_ratio",), 0.0, 1.0),
    ("Share closed by the budget", ("thinking/forced_ratio",), 0.0, 1.0),
    ("Share truncated", ("completions/clipped_ratio",), 0.0, 1.0),
    ("Groups without signal", ("frac_reward_zero_std",), 0.0, 1.0),
    ("Gradient norm", ("grad_norm",), 0.0, None),
)


def draw_learning_curve(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """One SVG for each panel whose metric was logged.

    Args:
        metrics: rows with a `step` and numbers under TRL's names; other values are passed over.
    """
    drawings = []
    for title, names, low, high in PANELS:
        name = next((name for name in names if any(is_number(row.get(name)) for row in metrics)), None)
        if name is not None:
            rows = [(row["step"], row[name]) for row in metrics if "step" in row and is_number(row.get(name))]
            drawings.append(_draw_panel(title, rows, low, high))
    return drawings


def draw_accuracies(before: Evaluation | None, after: Evaluation | None) -> str | None:
    """Accuracies with their intervals, before and after one above the other; None where nothing was measured."""
    measured = [(evaluation, _accuracies(evaluation)) for evaluation in (before, after) if evaluation is not None]
    names = list(dict.fromkeys(name for _, values in measured for name in values))
    if not names:
        return None
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(7.2, 0.9 + 0.55 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        for evaluation, values in measured:
            is_after = evaluation is after
            for row, name in enumerate(names):
                if name in values:
                    _draw_interval(axes, row + (0.14 if is_after else -0.14), values[name], is_after, row == 0)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of right answers, 95 % interval")
        axes.tick_params(length=0)
        figure.legend(loc="outside upper right", ncols=2)
        return to_svg(figure, "accuracies", "Accuracy before and after training with 95 % intervals")


def _accuracies(evaluation: Evaluation) -> dict[str, tuple[float, float, float]]:
    entries = [
        (f"temperature {evaluation.temperature:g}", evaluation.accuracy, evaluation.low, evaluation.high),
        ("greedy", evaluation.greedy_accuracy, evaluation.greedy_low, evaluation.greedy_high),
        *((f"thinking ≤ {at['budget']}", at["accuracy"], at["low"], at["high"]) for at in evaluation.budgets),
    ]
    return {name: (value, low, high) for name, value, low, high in entries if None not in (value, low, high)}


def _draw_interval(
    axes: Axes, y: float, estimate: tuple[float, float, float], is_after: bool, is_labelled: bool
) -> None:
    value, low, high = estimate
    color = BLUE if is_after else GREY
    label = ("after" if is_after else "before") if is_labelled else None
    axes.plot([low, high], [y, y], color=color, linewidth=2, solid_capstyle="round")
    axes.plot([value], [y], "o", color=color, markersize=6.5, label=label, linestyle="none")
    if value < 0.8:
        axes.annotate(f"{value:.3f}", (high, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
    else:
        axes.annotate(
            f"{value:.3f}", (low, y), (-5, 0), textcoords="offset points", va="center", ha="right", fontsize=9
        )


def _draw_panel(title: str, rows: list[tuple[int, float]], low: float | None, high: float | None) -> str:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6, 2.3), layout="constrained")
        draw_curve(figure.add_subplot(), title, rows, low, high, BLUE)
        return to_svg(figure, re.sub(r"\W+", "-", title.lower()), f"{title} over the steps of the run")


def draw_curve(
    axes: Axes, title: str, rows: list[tuple[int, float]], low: float | None, high: float | None, color: str
) -> None:
    """A metric over the steps, with a moving mean over it from `SMOOTH_FROM` rows on.

    Args:
        rows: at least one pair of step and value. low, high: ends of the axis where it has fixed ones.
    """
    steps, values = [step for step, _ in rows], [value for _, value in rows]
    smooth = len(rows) >= SMOOTH_FROM
    if smooth:
        axes.plot(steps, values, color=color, linewidth=1.0, alpha=0.45)
        window = mean_window(len(rows))
        axes.plot(steps, _moving_mean(values, window), color=color, linewidth=2.0)
    elif len(rows) > 1:
        axes.plot(steps, values, color=color, linewidth=1.5)
    else:
        axes.plot(steps, values, "o", color=color, clip_on=False)
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    axes.set_title(title)
    axes.set_xlabel(f"step (line: mean of the last {window})" if smooth else "step", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.02)
    if low is not None:
        axes.set_ylim(bottom=low - (0.02 if high is not None else 0))
    if high is not None:
        axes.set_ylim(top=high + 0.02)


def mean_window(rows: int) -> int:
    """Rows of the moving mean over so many."""
    return max(5, rows // 10)


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(math.fsum(part) / len(part))
    return means


def to_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an SVG element for a page: its own ids, the page's colours and font."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)  # a style element would rule the whole page
    svg = re.sub(r'\b(id=|href="#|url\(#)("?)', rf"\1\2{name}-", svg)  # two drawings of a page must not share ids
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    svg = svg.replace(f"stroke: {GRID}", "stroke: currentColor; stroke-opacity: 0.15").replace(INK, "currentColor")
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)  # the page decides; the viewBox keeps the shape
    return f'{head} role="img" aria-label="{description}">{rest}'


def is_number(value: Any) -> bool:
    """Whether a metric's value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


MID_INK, LINE = "#797979", "#2878e0"
WIDTH_PX = 864  # as shown; the image has twice as many, for dense screens
_DPI, _SCALE = 96, 2
_INKED = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
_PNG_STYLE = STYLE | dict.fromkeys(_INKED, MID_INK)
_PNG_STYLE |= {"grid.color": MID_INK, "grid.alpha": 0.3, "axes.linewidth": 0.8, "font.size": 10}

Curve = tuple[str, list[tuple[int, float]], float | None, float | None]  # title, step and value, ends of the axis


def draw_curves(curves: Sequence[Curve], note: str = "") -> bytes:
    """A PNG with one panel for each curve, three in a row or two where there are four, and a note below.

    Args:
        curves: at least one. note: one line; empty for none.
    """
    columns = 2 if len(curves) == 4 else min(len(curves), 3)
    rows = -(-len(curves) // columns)
    width = WIDTH_PX / _DPI if columns > 1 else 0.6 * WIDTH_PX / _DPI
    with matplotlib.rc_context(_PNG_STYLE):
        figure = Figure(figsize=(width, 2.5 * rows + (0.3 if note else 0)), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.08)
        if note:
            figure.supxlabel(note, x=0.01, ha="left", fontsize=9)
        for number, curve in enumerate(curves, 1):
            draw_curve(figure.add_subplot(rows, columns, number), *curve, LINE)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI * _SCALE, transparent=True, metadata={"Software": None})
    return buffer.getvalue()


def shown_width(png: bytes) -> int:
    """Pixels at which an image of `draw_curves` is to be shown."""
    return int.from_bytes(png[16:20], "big") // _SCALE  # PNG's header holds the width there
