"""The drawings of a report (inline SVG, in the page's `currentColor`) and of a notebook (PNG); never through pyplot."""

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rloo_kit.health.series import is_number
from rloo_kit.results.evaluation import Evaluation, Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#010101", "#020202"  # placeholders in an SVG
BLUE, GREY = "#3b82f6", "#8b8f98"
MID_INK, LINE = "#797979", "#2878e0"  # of a PNG, which cannot follow the page
SMOOTH_FROM = 20  # rows of metrics from which a moving mean is drawn over the values
WIDTH_PX = 864  # of a PNG as shown; the image has twice as many, for dense screens
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
    """One SVG for each panel whose metric was logged, from rows with a `step` and numbers under TRL's names."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawings = []
    for title, names, low, high in PANELS:
        name = next((name for name in names if any(is_number(row.get(name)) for row in metrics)), None)
        if name is not None:
            points = [(row["step"], row[name]) for row in metrics if "step" in row and is_number(row.get(name))]
            with rc_context(STYLE):
                figure = Figure(figsize=(3.6, 2.3), layout="constrained")
                _draw_curve(figure.add_subplot(), (title, points, low, high), BLUE)
                drawings.append(
                    to_svg(figure, re.sub(r"\W+", "-", title.lower()), f"{title} over the steps of the run")
                )
    return drawings


def draw_curves(curves: Sequence[Curve], note: str = "") -> bytes:
    """A PNG with one panel for each curve, three in a row or two where there are four, and a note below.

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
    """Pixels at which an image of `draw_curves` is to be shown."""
    return int.from_bytes(png[16:20], "big") // SCALE  # PNG's header holds the width there


def _draw_curve(axes: "Axes", curve: Curve, color: str) -> None:
    """A metric over the steps, with a moving mean over it from `SMOOTH_FROM` rows on; at least one point."""
    from matplotlib.ticker import MaxNLocator

    title, points, low, high = curve
    steps, values = [step for step, _ in points], [value for _, value in points]
    window = mean_window(len(points)) if len(points) >= SMOOTH_FROM else None
    if window is not None:
        axes.plot(steps, values, color=color, linewidth=1.0, alpha=0.45)
        axes.plot(steps, _moving_mean(values, window), color=color, linewidth=2.0)
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
    """The number of rows that the moving mean of `rows` rows covers."""
    return max(5, rows // 10)


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` before it."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [math.fsum(part) / len(part) for part in parts]


def draw_accuracies(before: Evaluation | None, after: Evaluation | None) -> str | None:
    """Accuracies with their intervals, before above after; None where nothing was measured."""
    old, new = (None if evaluation is None else _accuracies(evaluation) for evaluation in (before, after))
    description = "Accuracy before and after training with 95 % intervals"
    return _draw_pairs(old, new, "accuracies", "share of right answers, 95 % interval", description, (0, 1))


def draw_rewards(before: Evaluation | None, after: Evaluation | None) -> str | None:
    """Mean rewards likewise, the weighted sum first; None without any, and where the only reward is the accuracy."""
    if all(evaluation is None or evaluation.reward == evaluation.accuracy for evaluation in (before, after)):
        return None
    old, new = (None if evaluation is None else _rewards(evaluation) for evaluation in (before, after))
    description = "Mean reward before and after training with 95 % intervals"
    return _draw_pairs(old, new, "rewards", "mean reward, 95 % interval", description)


def draw_held_out(points: Sequence[tuple[int, Measured]], measure: str, best: int | None) -> str | None:
    """The evaluations during training over the steps, with intervals, that of the step `best` marked; None without
    any."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not points:
        return None
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for step, found in points:
            if found.low is not None and found.high is not None:
                axes.plot([step, step], [found.low, found.high], color=GREY, linewidth=1.5, alpha=0.6)
        values = [found.value for _, found in points]
        axes.plot([step for step, _ in points], values, "o-", color=BLUE, linewidth=1.5, markersize=4)
        for step, found in points:
            if step == best:
                label = f"best: {found.value:.3f} at step {step}"
                axes.plot([step], [found.value], "o", color=BLUE, markersize=9, label=label, linestyle="none")
                figure.legend(loc="outside upper right")
        axes.set_title(f"Held-out {measure}")
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        return to_svg(figure, "held-out", "The held-out measure over the steps of the run with 95 % intervals")


Intervals = dict[str, tuple[float, float, float]]


def _draw_pairs(
    before: Intervals | None,
    after: Intervals | None,
    name: str,
    label: str,
    description: str,
    ends: tuple[float, float] | None = None,
) -> str | None:
    """A row for each name, with the values before above those after."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    measured = [(values, values is after) for values in (before, after) if values is not None]
    names = list(dict.fromkeys(one for values, _ in measured for one in values))
    if not names:
        return None
    with rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(7.2, 0.9 + 0.55 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        for values, is_after in measured:
            for row, one in enumerate(names):
                if one in values:
                    _draw_interval(axes, row + (0.14 if is_after else -0.14), values[one], is_after, row == 0)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        if ends is not None:
            axes.set_xlim(*ends)
        else:
            axes.margins(x=0.15)
        axes.set_xlabel(label)
        axes.tick_params(length=0)
        figure.legend(loc="outside upper right", ncols=2)
        return to_svg(figure, name, description)


def _rewards(evaluation: Evaluation) -> Intervals:
    entries = [("weighted sum", evaluation.measure("reward"))]
    entries += [(name, evaluation.measure(name)) for name in evaluation.rewards if len(evaluation.rewards) > 1]
    return {
        name: (found.value, found.low, found.high)
        for name, found in entries
        if found is not None and found.low is not None and found.high is not None
    }


def _accuracies(evaluation: Evaluation) -> Intervals:
    entries = [
        (f"temperature {evaluation.temperature:g}", evaluation.accuracy, evaluation.low, evaluation.high),
        ("greedy", evaluation.greedy_accuracy, evaluation.greedy_low, evaluation.greedy_high),
        *((f"thinking ≤ {at['budget']}", at["accuracy"], at["low"], at["high"]) for at in evaluation.budgets),
    ]
    return {name: (value, low, high) for name, value, low, high in entries if None not in (value, low, high)}


def _draw_interval(
    axes: "Axes", y: float, estimate: tuple[float, float, float], is_after: bool, is_labelled: bool
) -> None:
    value, low, high = estimate
    color = BLUE if is_after else GREY
    label = ("after" if is_after else "before") if is_labelled else None
    axes.plot([low, high], [y, y], color=color, linewidth=2, solid_capstyle="round")
    axes.plot([value], [y], "o", color=color, markersize=6.5, label=label, linestyle="none")
    x, shift, align = (high, 5, "left") if value < 0.8 else (low, -5, "right")
    axes.annotate(f"{value:.3f}", (x, y), (shift, 0), textcoords="offset points", va="center", ha=align, fontsize=9)


def to_svg(figure: "Figure", name: str, description: str) -> str:
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
