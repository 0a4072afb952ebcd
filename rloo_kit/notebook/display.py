"""A run's curves, and completions side by side, for a notebook; as text in a terminal or a log."""

import base64
import html
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rloo_kit.health.series import logged
from rloo_kit.results.evaluation import Evaluation, SamplePair, describe_sample, is_thinking, pair_samples
from rloo_kit.results.pages import render
from rloo_kit.results.plots import SMOOTH_FROM, Chart, Point, draw_chart, first_and_last, in_order, mean_window
from rloo_kit.results.samples import cut_middle, list_steps, plain
from rloo_kit.system.console import picture_controls, print_text

PANELS = {  # metric: title, form of its chart (see `Chart`), format of a value in the text
    "reward": ("Reward", "number", ".3f"),
    "eval/accuracy": ("Held-out accuracy", "share", ".3f"),
    "eval/reward": ("Held-out reward", "number", ".3f"),
    "kl": ("KL to the reference, nats a token", "number", ".4f"),
    "thinking/mean_length": ("Thinking tokens", "count", ".1f"),
    "thinking/closed_ratio": ("Share that closes its thinking", "share", ".1%"),
    "completions/mean_length": ("Completion tokens", "count", ".1f"),
    "completions/clipped_ratio": ("Share truncated", "share", ".1%"),
}
PANEL_WIDTH, PANEL_HEIGHT, GAP = 360, 224, 20  # in the image; two panels in a row
WIDTH = 432  # of a panel, as shown, in pixels
_Display = TypeVar("_Display")


def _shown(display: _Display) -> _Display:
    """Return the object; print it if no IPython will display it."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        print_text(str(display))
    return display


@dataclass(repr=False)
class TrainingPlot:
    """The curves of a run; displays itself in a notebook."""

    summary: str  # one line with the steps, and each metric at the start and the end
    curves: list[Chart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was not drawn, and why

    @property
    def svg(self) -> str | None:
        """The image, to save to a file; None if there is nothing to draw."""
        if not self.curves:
            return None
        columns, step = min(len(self.curves), 2), PANEL_WIDTH + GAP
        panels = [
            (number % columns * step, number // columns * (PANEL_HEIGHT + GAP), draw_chart(chart))
            for number, chart in enumerate(self.curves)
        ]
        most = max(len(chart.values) for chart in self.curves)
        smooth = [f"thick: mean of the last {mean_window(most)} steps"] if most >= SMOOTH_FROM else []
        notes = textwrap.wrap("; ".join([*smooth, *self.notes]), 58 * columns)
        height = panels[-1][1] + PANEL_HEIGHT + GAP + 16 * max(len(notes) - 1, 0)
        return render("curves.svg.jinja", panels=panels, width=columns * step, height=height, notes=notes)

    def __repr__(self) -> str:
        return self.summary

    def _repr_html_(self) -> str | None:
        svg = self.svg
        if svg is None:
            return None
        image = base64.b64encode(svg.encode()).decode("ascii")
        alt, width = html.escape(f"Training curves, {self.summary}"), WIDTH * min(len(self.curves), 2)
        # an <img>, because JupyterLab shows an SVG only in trusted notebooks
        return f'<img src="data:image/svg+xml;base64,{image}" width="{width}" alt="{alt}">'


def plot_training(result: Any) -> TrainingPlot:
    """Plot reward, KL, thinking length and the share that closes its thinking over the steps of a run.

    For a model that does not think: completion length and the share truncated instead. Without a KL (`rloo.beta` 0) its
    panel is left out, with a note. Evaluations during training (`eval.every_steps`) add held-out accuracy, or held-out
    reward if there are no answers. From 20 logged steps on, a moving mean is drawn.

    Returns an object that displays itself: an image without a background, and one line of text. A script prints the
    line. Of `result`, which `train` returned, only `metrics` is read.
    """
    rows = in_order(result.metrics)
    if not rows:
        return _shown(TrainingPlot("no step was logged, so there is nothing to plot"))
    # Other models log it too, if a completion happens to contain a tag.
    thinks = sum("thinking/mean_length" in row for row in rows) > len(rows) / 2
    lengths = [name for name in PANELS if name.startswith("thinking/" if thinks else "completions/")]
    held_out = [name for name in ("eval/accuracy", "eval/reward") if logged(rows, name)]
    curves, parts, notes = [], [], []
    for metric in ("reward", *held_out[:1], "kl", *lengths):
        title, form, text = PANELS[metric]
        points = [Point(*pair) for pair in logged(rows, metric)]
        count = sum(metric in row for row in rows) if metric[:5] != "eval/" else len(points)
        if points:
            curves.append(Chart(title, {"": points}, form))
            name = title.split(",")[0].lower().replace("kl", "KL")
            ends = first_and_last([point.value for point in points])
            parts.append(f"{name} {' -> '.join(format(end, text) for end in ends[: len(points)])}")
        elif not count:
            notes.append("KL not measured: rloo.beta is 0" if metric == "kl" else f"{title.lower()} not logged")
        if len(points) < count:
            notes.append(f"{title}: {count - len(points)} of {count} steps without a finite number")
    steps = f"step {rows[-1]['step']}" if len(rows) == 1 else f"steps {rows[0]['step']} to {rows[-1]['step']}"
    if len(rows) >= SMOOTH_FROM:
        steps += f" (means of the first and the last {mean_window(len(rows))})"
    summary = f"{steps}: {'; '.join([', '.join(parts), *notes] if parts else notes)}"
    return _shown(TrainingPlot(summary, curves, notes))


MUTED, RIGHT, WRONG = "#797979", "#1a8a4a", "#c9510c"  # legible on light and dark backgrounds
MAX_HTML, MAX_TEXT = 6000, 600  # characters shown per part
TEXT_WIDTH = 100  # columns
_MARKS = {True: ("✓ right", RIGHT), False: ("✗ wrong", WRONG), None: ("not judged", MUTED)}


@dataclass(repr=False)
class CompletionPairs:
    """Completions of the same prompts side by side, under a one-line note; displays itself in a notebook."""

    note: str
    pairs: list[SamplePair]

    def __repr__(self) -> str:
        lines = [self.note]
        for number, pair in enumerate(self.pairs, 1):
            gold = "" if pair.gold is None else f"   (right answer: {pair.gold})"
            lines += ["", *_wrap(f"{number}. ", f"{plain(pair.prompt)}{gold}")]
            for title, sample in pair.samples.items():
                lines.append(f"   {title}: {_mark(sample)[0].lstrip('✓✗ ')}, {describe_sample(sample)}")
                for label, text in _parts(sample):
                    lines += _wrap(f"      {label + ':':<10}", text or "(none)")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        boxes = []
        for pair in self.pairs:
            sides = [
                (title, *_mark(sample), [(label, cut_middle(text, MAX_HTML)) for label, text in _parts(sample)],
                 describe_sample(sample))
                for title, sample in pair.samples.items()
            ]  # fmt: skip
            boxes.append((cut_middle(plain(pair.prompt), MAX_HTML), pair.gold, sides))
        return render("completions.html.jinja", note=self.note, boxes=boxes)


def show_completions(before: Evaluation, after: Evaluation | None = None, num: int = 4) -> CompletionPairs:
    """Show completions that evaluations kept, side by side, with thinking and answer separate, and right or wrong.

    Each evaluation keeps one completion of the first ten prompts; `num` of these prompts are shown.
    Returns an object that displays itself: HTML without scripts or style sheets, in the page's colours, and text. A
    script prints the text.
    """
    evaluations = {before.label or "completion": before} if after is None else {"before": before, "after": after}
    # stable; prompts that only one side has come last
    pairs = sorted(pair_samples(**evaluations), key=lambda pair: -len(pair.samples))
    if not pairs:
        return _shown(CompletionPairs("no completions were kept", []))
    shown = pairs[:num]
    note = f"{len(shown)} of {len(pairs)} kept prompts, one completion of each"
    if any(len(pair.samples) < len(evaluations) for pair in shown):
        note += "; the two evaluations are of different prompts"
    return _shown(CompletionPairs(note, shown))


def _mark(sample: dict[str, Any]) -> tuple[str, str]:
    is_scored = sample["correct"] is None and sample.get("reward") is not None
    return (f"reward {sample['reward']:.3g}", MUTED) if is_scored else _MARKS[sample["correct"]]


def _parts(sample: dict[str, Any]) -> list[tuple[str, str]]:
    thinking = [("thinking", sample["thinking"])] if is_thinking(sample) else []
    return [*list_steps(sample.get("turns", ())), *thinking, ("answer", sample["answer"])]


def _wrap(head: str, text: str) -> list[str]:
    """Text with `head` before its first line and an equal indent before the others; line breaks are kept."""
    lines: list[str] = []
    for line in picture_controls(cut_middle(text, MAX_TEXT)).splitlines():
        lines += textwrap.wrap(line, TEXT_WIDTH - len(head)) or [""]
    return [f"{head if number == 0 else ' ' * len(head)}{line}".rstrip() for number, line in enumerate(lines)]
