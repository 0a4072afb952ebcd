"""`comparison.html`: runs side by side, their curves over each other. One file, nothing to fetch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo_kit.health.series import is_number
from rloo_kit.results.figures import STYLE, to_svg
from rloo_kit.results.held_out import parse_evaluations, read_evaluations
from rloo_kit.results.report import escape_text, format_duration, make_page, make_section
from rloo_kit.results.versus import Contestant, RunComparison, measure_of
from rloo_kit.runs.files import write_text
from rloo_kit.runs.run_dir import RunDir

COLORS = ("#2f6fde", "#d97706", "#0f9d76", "#c026a3", "#8b5cf6", "#a16207", "#0e7490", "#dc2626")
MOST_POINTS = 300  # of a curve; each is the mean of its part of the steps
PANELS = (  # title, metrics (the first that was logged)
    ("Reward", ("reward",)),
    ("Groups without signal", ("frac_reward_zero_std",)),
    ("Thinking tokens", ("thinking/mean_length", "completions/mean_length")),
    ("Share that closes its thinking", ("thinking/closed_ratio",)),
    ("Entropy, nats", ("entropy",)),
    ("KL to the reference, nats a token", ("kl",)),
)
CLASSES = {"learnt": "right", "no signal": "wrong", "broken": "wrong", "gamed": "wrong"}

Points = list[tuple[float, float]]


def write_comparison_page(found: RunComparison, path: Path) -> Path:
    """Write the page; links in it lead to each run's report, where there is one. Returns the file."""
    sections = [
        f"<h1>{len(found.runs)} runs side by side</h1>\n<p>{escape_text(found.sentence)}</p>\n",
        make_section("Every run", f"<div class='scroll'>{_table(found, path.resolve().parent)}</div>"),
        make_section("Curves", _curves(found.runs)),
        make_section("What differs", _changes(found.runs)),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, make_page("RLOO runs side by side", sections))


def _table(found: RunComparison, place: Path) -> str:
    measure = measure_of(found.runs)
    titles = ("run", "verdict", f"{measure.replace('_', ' ')} before", "after", "against the first", "steps", "time")
    head = "".join(f"<th scope='col'>{escape_text(title)}</th>" for title in titles)
    body = ""
    for number, one in enumerate(found.runs):
        report = Path(one.result.folder).resolve() / "report.html"
        name = escape_text(one.name)
        if report.is_file():
            name = f"<a href='{escape_text(Path(os.path.relpath(report, place)).as_posix())}'>{name}</a>"
        mark = f"<span aria-hidden='true' style='color: {COLORS[number % len(COLORS)]}'>■</span> "
        sides = [None if side is None else side.measure(measure) for side in (one.before, one.after)]
        values = ["-" if value is None else _value(*value[:3]) for value in sides]
        lead = "-" if one.lead is None else _value(one.lead.value, one.lead.low, one.lead.high, "+")
        lead += f"<span class='under'>{escape_text(one.word)}</span>" if one.word else ""
        kind = f"<span class='{CLASSES.get(one.verdict.kind, '')}'>{one.verdict.kind}</span>"
        cells = [mark + name, kind, *values, lead, str(one.result.steps), format_duration(one.result.seconds)]
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f"<table class='runs'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _value(value: float, low: float | None, high: float | None, sign: str = "") -> str:
    ends = "" if low is None or high is None else f"<span class='under'>[{low:{sign}.3f}, {high:{sign}.3f}]</span>"
    return f"{value:{sign}.3f}{ends}"


def _curves(runs: Sequence[Contestant]) -> str:
    measure = measure_of(runs)
    drawn = [(f"Held-out {measure.replace('_', ' ')}", [_held_out(one, measure) for one in runs], True)]
    drawn += [(title, [_logged(one, names) for one in runs], False) for title, names in PANELS]
    names = [one.name for one in runs]
    figures = [_draw(title, curves, names, marked) for title, curves, marked in drawn if _says_something(curves)]
    if not figures:
        return "<p>Nothing was logged.</p>"
    return "<div class='curves'>" + "".join(f"<figure>{one}</figure>" for one in figures) + "</div>"


def _says_something(curves: Sequence[Points]) -> bool:
    return len({value for points in curves for _, value in points}) > 1


def _held_out(one: Contestant, measure: str) -> Points:
    folder = Path(one.result.folder)
    during = parse_evaluations(read_evaluations(folder, RunDir(folder).id))
    sides = [(0, one.before), *((found.step, found.evaluation) for found in during)]
    last = one.result.steps if one.result.adapter_step is None else one.result.adapter_step
    sides.append((last, one.after))
    found = {step: side.measure(measure) for step, side in sides if side is not None}
    return [(step, value.value) for step, value in sorted(found.items()) if value is not None]


def _logged(one: Contestant, names: Sequence[str]) -> Points:
    rows = one.result.metrics
    name = next((name for name in names if any(is_number(row.get(name)) for row in rows)), None)
    return thin([(row["step"], row[name]) for row in rows if is_number(row.get(name))]) if name else []


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points: each the mean of its part of them.

    >>> thin([(1, 1.0), (2, 3.0), (3, 5.0), (4, 7.0)], 2)
    [(1.5, 2.0), (3.5, 6.0)]
    """
    if len(points) <= most:
        return points
    ends = [len(points) * number // most for number in range(most + 1)]
    parts = [points[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _draw(title: str, curves: Sequence[Points], names: Sequence[str], marked: bool) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(STYLE):
        figure = Figure(figsize=(3.6, 2.3), layout="constrained")
        axes: Any = figure.add_subplot()
        for number, points in enumerate(curves):
            if points:
                steps, values = zip(*points, strict=True)
                style = "o-" if marked or len(points) == 1 else "-"
                axes.plot(steps, values, style, color=COLORS[number % len(COLORS)], linewidth=1.5, markersize=3.5)
        axes.set_title(title)
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.margins(x=0.03, y=0.08)
        shown = [(name, points) for name, points in zip(names, curves, strict=True) if points]
        ends = [f"{name} from {points[0][1]:.3g} to {points[-1][1]:.3g}" for name, points in shown]
        return to_svg(figure, "".join(filter(str.isalnum, title.lower())), escape_text(f"{title}: {'; '.join(ends)}"))


def _changes(runs: Sequence[Contestant]) -> str:
    keys = sorted({key for one in runs for key in one.changed or {}})
    if not keys:
        return "<p>No key of the configuration that trains.</p>"
    head = "".join(f"<th scope='col'>{escape_text(title)}</th>" for title in ("key", *(one.name for one in runs)))
    body = ""
    for key in keys:
        first = next((one.changed[key][0] for one in runs if one.changed and key in one.changed), None)
        values = [one.changed[key][1] if one.changed and key in one.changed else first for one in runs]
        body += f"<tr><td>{escape_text(key)}</td>{''.join(f'<td>{escape_text(value)}</td>' for value in values)}</tr>"
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
