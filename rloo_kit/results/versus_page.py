"""`comparison.html`: runs side by side, with overlaid curves. A single file that fetches nothing."""

import os
from collections.abc import Sequence
from pathlib import Path

from rloo_kit.errors import ConfigError
from rloo_kit.health.series import logged
from rloo_kit.results.charts import COLORS, Chart, Drawing, Point, draw_chart
from rloo_kit.results.curves import measured_points, signal_shares
from rloo_kit.results.evaluation import name_of
from rloo_kit.results.held_out import HeldOut, parse_evaluations, read_evaluations
from rloo_kit.results.intervals import Measured
from rloo_kit.results.pages import TONES, Cell, Table, format_duration, make_page
from rloo_kit.results.versus import Contestant, RunComparison, column_titles, measure_of
from rloo_kit.runs.files import write_text
from rloo_kit.runs.folder import RunDir

TITLE = "RLOO runs side by side"
PANELS = (  # title, form, metric
    ("Reward", "number", "reward"),
    ("Groups with signal", "share", ""),
    ("Completion tokens", "count", "completions/mean_length"),
    ("Thinking tokens", "count", "thinking/mean_length"),
    ("Thinking closed", "share", "thinking/closed_ratio"),
    ("Entropy, nats", "number", "entropy"),
    ("KL to the reference, nats", "number", "kl"),
)


def write_comparison_page(found: RunComparison, path: Path) -> Path:
    """Write the page, with links to the runs' reports if they exist. Returns the file; raises ConfigError if `path` is
    there and not such a page."""
    if path.exists() and not (path.is_file() and TITLE.encode() in path.read_bytes()):
        raise ConfigError(f"{path} exists and is not a comparison of runs, so it is kept: name another file")
    changed = _changed_keys(found.runs)
    page = make_page(
        "comparison.html.jinja",
        title=TITLE,
        heading=f"{len(found.runs)} runs side by side",
        summary=[found.sentence],
        tables=[
            ("Every run", _every_run(found.runs, path.resolve().parent), ""),
            ("What differs", changed, "" if changed.rows else "No key that affects training."),
        ],
        curves=_curves(found.runs),
        failures=[],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, page)


def _every_run(runs: Sequence[Contestant], place: Path) -> Table:
    measure, rows = measure_of(runs), []
    for number, one in enumerate(runs):
        report = Path(one.result.folder).resolve() / "report.html"
        link = Path(os.path.relpath(report, place)).as_posix() if report.is_file() else ""
        sides = [None if side is None else side.measure(measure) for side in (one.before, one.after)]
        lead = Cell("-") if one.lead is None else _value(one.lead.difference, "+")
        lead.under = "\n".join(filter(None, (lead.under, one.word)))
        rows.append((
            Cell(one.name, link=link, key=f"c{number % COLORS}"),
            Cell(one.verdict.kind, tone=TONES.get(one.verdict.kind, "")),
            *("-" if value is None else _value(value) for value in sides),
            lead, one.result.steps, format_duration(one.result.seconds),
        ))  # fmt: skip
    return Table("Every run", column_titles(runs), rows)


def _value(found: Measured, sign: str = "") -> Cell:
    value, _, interval = f"{found:{sign}.3f}".partition(" ")
    return Cell(value, under=interval)


def _curves(runs: Sequence[Contestant]) -> list[Drawing]:
    measure = measure_of(runs)
    form = "share" if measure.endswith("accuracy") else "number"
    held_out = {one.name: held_out_points(one, measure) for one in runs}
    charts = [Chart(f"Held-out {name_of(measure, *(one.after for one in runs))}", held_out, form, dots=True)]
    for title, form, metric in PANELS:
        points = {one.name: [Point(*found) for found in logged(one.result.metrics, metric)] for one in runs}
        if not metric:
            points = {one.name: signal_shares(one.result.metrics) for one in runs}
        charts.append(Chart(title, points, form))
    for chart in charts:
        chart.alike = True
    return [draw_chart(chart) for chart in charts if len(set(chart.values)) > 1]


def held_out_points(one: Contestant, measure: str) -> list[Point]:
    """A run's held-out measure over its steps: before, during and after training."""
    folder = Path(one.result.folder)
    sides = {found.step: found for found in parse_evaluations(read_evaluations(folder, RunDir(folder).id))}
    ends = {0: one.before, one.result.kept_step: one.after}
    sides |= {step: HeldOut(step, side) for step, side in ends.items() if side is not None}
    return measured_points([sides[step] for step in sorted(sides)], measure)


def _changed_keys(runs: Sequence[Contestant]) -> Table:
    rows = []
    for key in sorted({key for one in runs for key in one.changed or {}}):
        pairs = [(one.changed or {}).get(key) for one in runs]
        first = next(pair[0] for pair in pairs if pair is not None)
        rows.append((key, *(first if pair is None else pair[1] for pair in pairs)))
    return Table("Keys that differ", ("key", *(one.name for one in runs)), rows)
