"""`comparison.html`: runs side by side, with overlaid curves. A single file that fetches nothing."""

import os
from collections.abc import Sequence
from pathlib import Path

from rloo_kit.errors import ConfigError
from rloo_kit.health.series import logged
from rloo_kit.results.charts import COLORS, Chart, Point
from rloo_kit.results.curves import draw_figure, signal_shares
from rloo_kit.results.evaluation import name_of
from rloo_kit.results.held_out import parse_evaluations, read_evaluations
from rloo_kit.results.pages import escape_text, format_duration, make_page, make_section, mark_verdict
from rloo_kit.results.versus import Contestant, RunComparison, measure_of
from rloo_kit.runs.files import write_text
from rloo_kit.runs.run_dir import RunDir

TITLE = "RLOO runs side by side"
PANELS = (  # title, form, metrics (the first that was logged counts)
    ("Reward", "number", ("reward",)),
    ("Completion tokens", "count", ("completions/mean_length",)),
    ("Thinking tokens", "count", ("thinking/mean_length",)),
    ("Thinking closed", "share", ("thinking/closed_ratio",)),
    ("Entropy, nats", "number", ("entropy",)),
    ("KL to the reference, nats", "number", ("kl",)),
)


def write_comparison_page(found: RunComparison, path: Path) -> Path:
    """Write the page, with links to the runs' reports if they exist. Returns the file; raises ConfigError if `path` is
    there and not such a page."""
    if path.exists() and not (path.is_file() and TITLE.encode() in path.read_bytes()):
        raise ConfigError(f"{path} exists and is not a comparison of runs, so it is kept: name another file")
    sections = [
        f"<h1>{len(found.runs)} runs side by side</h1>\n<p>{escape_text(found.sentence)}</p>\n",
        make_section("Every run", _region("Every run", _table(found, path.resolve().parent))),
        make_section("Curves", _curves(found.runs)),
        make_section("What differs", _changes(found.runs)),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, make_page(TITLE, sections))


def _table(found: RunComparison, place: Path) -> str:
    measure = measure_of(found.runs)
    name = name_of(measure, *(one.after for one in found.runs))
    titles = ("run", "verdict", f"{name} before", "after", "vs. the first", "steps", "time")
    head = "".join(f"<th scope='col'>{escape_text(title)}</th>" for title in titles)
    body = ""
    for number, one in enumerate(found.runs):
        report = Path(one.result.folder).resolve() / "report.html"
        link = escape_text(one.name)
        if report.is_file():
            link = f"<a href='{escape_text(Path(os.path.relpath(report, place)).as_posix())}'>{link}</a>"
        mark = f"<span aria-hidden='true' class='key c{number % COLORS}'></span>"
        sides = [None if side is None else side.measure(measure) for side in (one.before, one.after)]
        values = ["-" if value is None else _value(*value.ends) for value in sides]
        lead = "-" if one.lead is None else _value(*one.lead.difference.ends, "+")
        lead += f"<span class='under'>{escape_text(one.word)}</span>" if one.word else ""
        cells = [
            mark + link,
            mark_verdict(one.verdict.kind),
            *values,
            lead,
            str(one.result.steps),
            format_duration(one.result.seconds),
        ]
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f"<table class='runs'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _value(value: float, low: float | None, high: float | None, sign: str = "") -> str:
    ends = "" if low is None or high is None else f"<span class='under'>[{low:{sign}.3f}, {high:{sign}.3f}]</span>"
    return f"{value:{sign}.3f}{ends}"


def _curves(runs: Sequence[Contestant]) -> str:
    measure = measure_of(runs)
    form = "share" if measure.endswith("accuracy") else "number"
    held_out = {one.name: _held_out(one, measure) for one in runs}
    name = name_of(measure, *(one.after for one in runs))
    charts = [Chart(f"Held-out {name}", held_out, form, dots=True)]
    for title, form, names in PANELS:
        points = {one.name: [Point(*found) for found in logged(one.result.metrics, *names)] for one in runs}
        charts.append(Chart(title, points, form))
    signal = {one.name: signal_shares(one.result.metrics) for one in runs}
    charts.insert(2, Chart("Groups with signal", signal, "share"))
    figures = []
    for chart in charts:
        chart.alike = True
        if len(set(chart.values)) > 1:
            figures.append(draw_figure(chart))
    return f"<div class='curves'>{''.join(figures)}</div>" if figures else "<p>Nothing was logged.</p>"


def _held_out(one: Contestant, measure: str) -> list[Point]:
    folder = Path(one.result.folder)
    during = parse_evaluations(read_evaluations(folder, RunDir(folder).id))
    ends = {0: one.before, one.result.kept_step: one.after}
    sides = {found.step: found.evaluation for found in during}
    sides |= {step: side for step, side in ends.items() if side is not None}
    found = {step: side.measure(measure) for step, side in sides.items()}
    return [Point(step, *value.ends) for step, value in sorted(found.items()) if value is not None]


def _changes(runs: Sequence[Contestant]) -> str:
    keys = sorted({key for one in runs for key in one.changed or {}})
    if not keys:
        return "<p>No key that affects training.</p>"
    head = "".join(f"<th scope='col'>{escape_text(title)}</th>" for title in ("key", *(one.name for one in runs)))
    body = ""
    for key in keys:
        first = next((one.changed[key][0] for one in runs if one.changed and key in one.changed), None)
        values = [one.changed[key][1] if one.changed and key in one.changed else first for one in runs]
        body += f"<tr><td>{escape_text(key)}</td>{''.join(f'<td>{escape_text(value)}</td>' for value in values)}</tr>"
    return _region("Keys that differ", f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _region(label: str, table: str) -> str:
    """A table that may be wider than the screen and can be scrolled with the keyboard."""
    return f"<div class='scroll' role='region' aria-label='{label}' tabindex='0'>{table}</div>"
