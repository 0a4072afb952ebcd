"""The drawing of a batch: each run a row; accuracy with its interval, thinking length and time beside each other."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rloo_kit.results.figures import BLUE, GREY, STYLE, to_svg

LONGEST_LABEL = 48


def draw_runs(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> str | None:
    """One SVG with a row for each run, the first on top; None where no run has a figure yet.

    Args:
        rows: as `batch_report.collect_rows` makes them.
        labels: one a row.
    """
    panels: list[tuple[str, Any]] = []
    if _has(rows, "accuracy"):
        panels.append(("Accuracy, 95 % interval", _draw_accuracy))
    if _has(rows, "thinking_tokens"):
        panels.append(("Thinking tokens", _draw_thinking))
    if any(row["seconds"] for row in rows):
        panels.append(("Time, minutes", _draw_time))
    if not panels:
        return None
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(10.4, 1.0 + 0.42 * len(rows)), layout="constrained")
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, draw) in zip(all_axes, panels, strict=True):
            draw(axes, rows)
            axes.set_title(title)
            axes.tick_params(length=0)
        all_axes[0].set_yticks(range(len(rows)), [_shorten(label) for label in labels])
        all_axes[0].set_ylim(len(rows) - 0.5, -0.5)
        handles = [matplotlib.lines.Line2D([], [], color=color, marker="o", linestyle="none") for color in (GREY, BLUE)]
        figure.legend(handles, ["before training", "after"], loc="outside lower right", ncols=2)
        return to_svg(figure, "runs", "Accuracy, thinking tokens and time of each run")


def _draw_accuracy(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for y, row in enumerate(rows):
        for when, shift, color in (("before", -0.13, GREY), ("after", 0.13, BLUE)):
            value, low, high = (row[f"accuracy{end}_{when}"] for end in ("", "_low", "_high"))
            if value is None:
                continue
            if low is not None and high is not None:
                axes.plot([low, high], [y + shift] * 2, color=color, linewidth=2, solid_capstyle="round")
            axes.plot([value], [y + shift], "o", color=color, markersize=6)
        _note_state(axes, y, row, row["accuracy_after"] is None)
    axes.set_xlim(0, 1)


def _draw_thinking(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for y, row in enumerate(rows):
        values = [row["thinking_tokens_before"], row["thinking_tokens_after"]]
        if None not in values:
            axes.plot(values, [y, y], color=GREY, linewidth=1)
        for value, color in zip(values, (GREY, BLUE), strict=True):
            if value is not None:
                axes.plot([value], [y], "o", color=color, markersize=6)
    longest = max(row[f"thinking_tokens_{when}"] or 0.0 for row in rows for when in ("before", "after"))
    axes.set_xlim(0, 1.08 * longest or 1.0)


def _draw_time(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    minutes = [(row["seconds"] or 0) / 60 for row in rows]
    colors = [BLUE if row["state"] == "done" else GREY for row in rows]
    axes.barh(range(len(rows)), minutes, height=0.5, color=colors)
    axes.set_xlim(left=0)


def _note_state(axes: Axes, y: int, row: dict[str, Any], is_missing: bool) -> None:
    if is_missing:
        axes.annotate(row["state"], (0.98, y), ha="right", va="center", fontsize=9, fontstyle="italic")


def _has(rows: Sequence[dict[str, Any]], name: str) -> bool:
    return any(row[f"{name}_{when}"] is not None for row in rows for when in ("before", "after"))


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 3]}..."
