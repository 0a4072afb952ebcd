"""A run's curves, and completions side by side, for a notebook; as text in a terminal or a log."""

import base64
import html
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rloo_kit.errors import ConfigError
from rloo_kit.health.series import is_number
from rloo_kit.results.evaluation import Evaluation, SamplePair, describe_sample, is_thinking, pair_samples
from rloo_kit.results.figures import SMOOTH_FROM, Curve, draw_curves, first_and_last, mean_window, shown_width
from rloo_kit.system.console import picture_controls, plain_prompt

# Metric, title, lower and upper end of the axis, and the format of a value in the text.
_Panel = tuple[str, str, float | None, float | None, str]
_REWARD: _Panel = ("reward", "Reward", None, None, ".3f")
_KL: _Panel = ("kl", "KL to the reference, nats a token", None, None, ".4f")
_THINKING: list[_Panel] = [
    ("thinking/mean_length", "Thinking tokens", 0.0, None, ".1f"),
    ("thinking/closed_ratio", "Share that closes its thinking", 0.0, 1.0, ".1%"),
]
_ANSWERING: list[_Panel] = [
    ("completions/mean_length", "Completion tokens", 0.0, None, ".1f"),
    ("completions/clipped_ratio", "Share truncated", 0.0, 1.0, ".1%"),
]
_HELD_OUT: list[_Panel] = [
    ("eval/accuracy", "Held-out accuracy", 0.0, 1.0, ".3f"),
    ("eval/reward", "Held-out reward", None, None, ".3f"),
]
_Display = TypeVar("_Display")


def _shown(display: _Display) -> _Display:
    """Return the object; print it if no IPython will display it."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(str(display).encode(encoding, "replace").decode(encoding), flush=True)  # missing characters: ?
    return display


# ------------------------------------------------------------------------------------------------ curves


@dataclass(repr=False)
class TrainingPlot:
    """The curves of a run; displays itself in a notebook.

    Attributes:
        summary: one line with the steps, and each metric at the start and the end.
        curves: the curves drawn.
        notes: what was not drawn, and why.
    """

    summary: str
    curves: list[Curve] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _png: bytes | None = None

    @property
    def png(self) -> bytes | None:
        """The image, to save to a file; None if there is nothing to draw."""
        if self._png is None and self.curves:
            self._png = draw_curves(self.curves, "; ".join(self.notes))
        return self._png

    def __repr__(self) -> str:
        return self.summary

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        data: dict[str, Any] = {"text/plain": self.summary}
        if self.png is None:
            return data, {}
        image, width = base64.b64encode(self.png).decode("ascii"), shown_width(self.png)
        # JupyterLab gives an image/png output no alt text, whatever its metadata say; nbconvert reads the metadata.
        alt = f"Training curves, {self.summary}"
        data["text/html"] = f'<img src="data:image/png;base64,{image}" width="{width}" alt="{html.escape(alt)}">'
        data["image/png"] = image
        return data, {"image/png": {"width": width, "alt": alt}}


def plot_training(result: Any) -> TrainingPlot:
    """Plot reward, KL, thinking length and the share that closes its thinking over the steps of a run.

    For a model that does not think: completion length and the share truncated instead. Without a KL (`rloo.beta` 0) its
    panel is left out, with a note. Evaluations during training (`eval.every_steps`) add held-out accuracy, or held-out
    reward if there are no answers. From 20 logged steps on, a moving mean is drawn.

    Args:
        result: what `train` returned, interrupted and resumed runs included; only `metrics` is read.

    Returns:
        an object that displays itself: a PNG with a transparent background, and one line of text. A script prints the
    line."""
    by_step = {row["step"]: row for row in result.metrics if "step" in row}  # of a repeated step the last row counts
    rows = [by_step[step] for step in sorted(by_step)]
    # Other models log it too, if a completion happens to contain a tag.
    thinks = sum("thinking/mean_length" in row for row in rows) > len(rows) / 2
    curves, parts, notes = [], [], []
    held_out = [panel for panel in _HELD_OUT if any(is_number(row.get(panel[0])) for row in rows)][:1]
    for metric, title, low, high, form in (_REWARD, *held_out, _KL, *(_THINKING if thinks else _ANSWERING)):
        points = [(row["step"], row[metric]) for row in rows if is_number(row.get(metric))]
        logged = sum(metric in row for row in rows) if metric[:5] != "eval/" else len(points)
        if points:
            curves.append((title, points, low, high))
            name = title.split(",")[0].lower().replace("kl", "KL")
            parts.append(f"{name} {_from_to([value for _, value in points], form)}")
        elif rows and not logged:
            notes.append("KL not measured: rloo.beta is 0" if metric == "kl" else f"{title.lower()} not logged")
        if len(points) < logged:
            notes.append(f"{title}: {logged - len(points)} of {logged} steps without a finite number")
    return _shown(TrainingPlot(_summary(rows, parts, notes), curves, notes))


def _summary(rows: list[dict[str, Any]], parts: list[str], notes: list[str]) -> str:
    if not rows:
        return "no step was logged, so there is nothing to plot"
    steps = f"step {rows[-1]['step']}" if len(rows) == 1 else f"steps {rows[0]['step']} to {rows[-1]['step']}"
    if len(rows) >= SMOOTH_FROM:
        steps += f" (means of the first and the last {mean_window(len(rows))})"
    return f"{steps}: {'; '.join([', '.join(parts), *notes] if parts else notes)}"


def _from_to(values: list[float], form: str) -> str:
    """The start and the end of a curve as text; means if the curve is smoothed."""
    if len(values) == 1:
        return format(values[0], form)
    first, last = first_and_last(values)
    return f"{first:{form}} -> {last:{form}}"


# ------------------------------------------------------------------------------------------------ completions

# JupyterLab's sanitiser drops style sheets and scripts of untrusted notebooks; these inline properties survive it.
MUTED, RIGHT, WRONG = "#797979", "#1a8a4a", "#c9510c"  # legible on light and dark backgrounds
MAX_HTML, MAX_TEXT = 6000, 600  # characters shown per part
TEXT_WIDTH = 100  # columns
_MARKS = {True: ("✓ right", RIGHT), False: ("✗ wrong", WRONG), None: ("not judged", MUTED)}
_BOX = "border: 1px solid rgba(128, 128, 128, 0.4); border-radius: 6px; padding: 8px 12px; margin: 8px 0"
_PAIR = "display: flex; flex-wrap: wrap; gap: 12px; margin: 6px 0 0"
_SIDE = "flex: 1 1 280px; min-width: 0; border-left: 3px solid rgba(128, 128, 128, 0.4); padding: 0 0 0 10px"
_PRE = (
    "white-space: pre-wrap; overflow-wrap: break-word; word-break: normal; max-height: 16em; overflow-y: auto; "
    "margin: 0; padding: 0; background-color: transparent; font-family: monospace; font-size: 13px; line-height: 1.4"
)
_LABEL = f"color: {MUTED}; font-size: 12px; margin: 6px 0 0"


@dataclass(repr=False)
class CompletionPairs:
    """Completions of the same prompts side by side, under a one-line note; displays itself in a notebook."""

    note: str
    pairs: list[SamplePair]

    def __repr__(self) -> str:
        return pairs_as_text(self.note, self.pairs)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": repr(self), "text/html": pairs_as_html(self.note, self.pairs)}


def show_completions(before: Evaluation, after: Evaluation | None = None, num: int = 4) -> CompletionPairs:
    """Show completions that evaluations kept, with thinking and answer separate, and right or wrong.

    Args:
        before, after: from `evaluate`, shown side by side; each keeps one completion of the first
            `eval.num_completions` prompts.
        num: prompts to show, 1 or more.

    Returns:
        an object that displays itself: HTML without scripts or style sheets, in the page's colours, and text. A script
        prints the text.

    Raises:
        ConfigError: `num` is below 1.
    """
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise ConfigError(f"num is {num!r}; it takes a whole number of prompts, 1 or more")
    evaluations = {before.label or "completion": before} if after is None else {"before": before, "after": after}
    pairs = pair_samples(**evaluations)
    pairs.sort(key=lambda pair: -len(pair.samples))  # stable; prompts that only one side has come last
    if not pairs:
        return _shown(CompletionPairs("no completions were kept; set eval.num_completions above 0", []))
    shown = pairs[:num]
    note = f"{len(shown)} of {len(pairs)} kept prompts, one completion of each"
    if any(len(pair.samples) < len(evaluations) for pair in shown):
        note += "; the two evaluations are of different prompts"
    return _shown(CompletionPairs(note, shown))


def pairs_as_html(note: str, pairs: list[SamplePair]) -> str:
    """One box per prompt; its sides are next to each other and wrap if there is no room."""
    boxes = "".join(_box(number, pair) for number, pair in enumerate(pairs, 1))
    return f'<div style="text-align: left"><div style="{_LABEL}">{_escape(note)}</div>{boxes}</div>'


def _box(number: int, pair: SamplePair) -> str:
    gold = "" if pair.gold is None else f" · right answer <code>{_escape(pair.gold)}</code>"
    sides = "".join(_side(title, sample) for title, sample in pair.samples.items())
    return (
        f'<div style="{_BOX}"><div style="color: {MUTED}; font-size: 12px">{number}{gold}</div>'
        f'{_pre(plain_prompt(pair.prompt))}<div style="{_PAIR}">{sides}</div></div>'
    )


def _side(title: str, sample: dict[str, Any]) -> str:
    mark, color = _mark(sample)
    parts = "".join(f'<div style="{_LABEL}">{label}</div>{_pre(text)}' for label, text in _parts(sample))
    return (
        f'<div style="{_SIDE}"><div><b>{_escape(title)}</b> <b style="color: {color}">{mark}</b></div>{parts}'
        f'<div style="{_LABEL}">{_escape(describe_sample(sample))}</div></div>'
    )


def _mark(sample: dict[str, Any]) -> tuple[str, str]:
    is_scored = sample["correct"] is None and sample.get("reward") is not None
    return (f"reward {sample['reward']:.3g}", MUTED) if is_scored else _MARKS[sample["correct"]]


def _parts(sample: dict[str, Any]) -> list[tuple[str, str]]:
    return [*([("thinking", sample["thinking"])] if is_thinking(sample) else []), ("answer", sample["answer"])]


def _pre(text: str) -> str:
    if not text:
        return f'<div style="{_LABEL}">(none)</div>'
    return f'<pre style="{_PRE}">{_escape(_shorten(text, MAX_HTML))}</pre>'


def _escape(value: Any) -> str:
    return html.escape(picture_controls(str(value)))


def pairs_as_text(note: str, pairs: list[SamplePair]) -> str:
    """The pairs as lines of at most `TEXT_WIDTH` columns."""
    lines = [note]
    for number, pair in enumerate(pairs, 1):
        gold = "" if pair.gold is None else f"   (right answer: {pair.gold})"
        lines += ["", *_wrap(f"{number}. ", f"{plain_prompt(pair.prompt)}{gold}")]
        for title, sample in pair.samples.items():
            lines.append(f"   {title}: {_mark(sample)[0].lstrip('✓✗ ')}, {describe_sample(sample)}")
            for label, text in _parts(sample):
                lines += _wrap(f"      {label + ':':<10}", text or "(none)")
    return "\n".join(lines)


def _wrap(head: str, text: str) -> list[str]:
    """Text with `head` before its first line and an equal indent before the others; line breaks are kept."""
    lines: list[str] = []
    for line in picture_controls(_shorten(text, MAX_TEXT)).splitlines():
        lines += textwrap.wrap(line, TEXT_WIDTH - len(head)) or [""]
    return [f"{head if number == 0 else ' ' * len(head)}{line}".rstrip() for number, line in enumerate(lines)]


def _shorten(text: str, limit: int) -> str:
    """Cut the middle out of long text."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
