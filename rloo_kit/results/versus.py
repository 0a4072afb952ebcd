"""Compares runs: verdicts, differences from the first run on the held-out measure, the keys that differ; as text and as
`comparison.html`, a single file that fetches nothing."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rloo_kit.config.run import COMPARED_ON_RESUME, RunConfig, changed_keys
from rloo_kit.errors import ConfigError
from rloo_kit.results.changes import Change, HeldOut, change_of, parse_evaluations, read_evaluations
from rloo_kit.results.evaluation import (
    Evaluation,
    name_of,
    named_sides,
    rewards_differ,
    setting_differences,
    shared_measures,
)
from rloo_kit.results.intervals import Measured
from rloo_kit.results.pages import TONES, Cell, make_page
from rloo_kit.results.pages import Table as PageTable
from rloo_kit.results.plots import COLORS, Chart, Drawing, draw_chart, measured_points, points_of, signal_shares
from rloo_kit.results.verdict import TrainResult, Verdict, judge_run, load_evaluation, load_result, measured_words
from rloo_kit.runs.files import write_text
from rloo_kit.runs.find import find_run
from rloo_kit.runs.reader import read_run_id
from rloo_kit.system.console import fill_text, format_seconds, render_text


@dataclass(frozen=True)
class Contestant:
    """One of the runs, with a short and unique name; the verdict is on this run alone.

    Attributes:
        lead: how far its `after` is above the first run's; None for the first, and if they cannot be compared.
        word: why they cannot be compared, or a caveat; empty without one.
        changed: dotted keys that differ from the first run's.
    """

    name: str
    run: RunConfig
    result: TrainResult
    before: Evaluation | None
    after: Evaluation | None
    verdict: Verdict
    lead: Change | None = None
    word: str = ""
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def measured(self, measure: str) -> list[Measured | None]:
        """Before and after training."""
        return [None if side is None else side.measure(measure) for side in (self.before, self.after)]


@dataclass(frozen=True)
class RunComparison:
    """Runs compared with the first of them, after training."""

    runs: list[Contestant]

    @property
    def sentence(self) -> str:
        """Which run is ahead and by how much, with the interval, or that none is."""
        first, ahead, tied, unknown = self.runs[0], [], [], []
        for run in self.runs[1:]:
            if run.lead is None:
                unknown.append(f"{run.name} cannot be compared with {first.name}: {run.word}")
            elif run.lead.rose or run.lead.fell:
                better, worse = (run, first) if run.lead.rose else (first, run)
                lead = ", ".join(filter(None, [run.lead.describe_lead(), run.word]))
                ahead.append(f"{better.name} is ahead of {worse.name}: {lead}")
            else:
                tied.append(run)
        same = ""
        if tied:
            names = ", ".join(run.name for run in tied[:-1])
            words = ", ".join(dict.fromkeys(run.word for run in tied if run.word))
            same = f"{f'{names} and ' if names else ''}{tied[-1].name} and {first.name} do not differ significantly on"
            same += f" their held-out prompts{f' ({words})' if words else ''}"
        luck = "; among several runs the best is partly luck" if len(ahead) > 1 else ""
        return f"{'; '.join([*ahead, *filter(None, [same]), *unknown])}{luck}."

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        runs = []
        for one in self.runs:
            found: dict[str, Any] = {"name": one.name, "folder": str(one.result.folder), "steps": one.result.steps}
            found |= {"seconds": one.result.seconds, "verdict": one.verdict.to_dict()}
            found |= {name: side.summary() for name, side in named_sides(one.before, one.after).items()}
            lead = None if one.lead is None else one.lead.to_dict()
            changed = {key: list(pair) for key, pair in one.changed.items()}
            runs.append(found | {"lead": lead, "word": one.word, "changed": changed})
        return {"sentence": self.sentence, "runs": runs}

    def __rich__(self) -> Group:
        page = _every_run(self.runs)
        table = Table(box=None, pad_edge=False)
        for title in page.head:
            table.add_column(title, justify="left" if title in ("run", "verdict") else "right", overflow="fold")
        for row in page.rows:
            table.add_row(*map(str, row))
        lines = []
        for one in self.runs:
            keys = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in one.changed.items())
            lines += [Text(fill_text(f"  {one.name}: {keys}"))] if keys else []
        return Group(Text(fill_text(self.sentence)), Text(""), table, *lines)

    def __str__(self) -> str:
        return render_text(self)


def compare_runs(sources: Sequence[str | Path], names: Sequence[str] | None = None) -> RunComparison:
    """Compare two or more runs, given by their folders or YAML files, with the first of them; `names`: other short and
    unique ones than the folders'. Raises ConfigError for fewer than two, RunNotFoundError if one of them is not a
    run."""
    if len(sources) < 2:
        raise ConfigError(f"a comparison takes two or more runs; got {len(sources)}")
    runs = [find_run(source) for source in sources]
    names = names or _short_names([Path(run.folder) for run in runs])
    made: list[Contestant] = []
    for name, run in zip(names, runs, strict=True):
        result, before, after = load_result(run), load_evaluation(run, "before"), load_evaluation(run, "after")
        made.append(Contestant(name, run, result, before, after, judge_run(run, result, before, after)))
    first, measure = made[0], measure_of(made)
    compared = [first]
    for one in made[1:]:
        sections = [
            {"run": {"seed": side.run.run.seed}} | side.run.model_dump(mode="json", include=set(COMPARED_ON_RESUME))
            for side in (first, one)
        ]
        lead, word = _lead(first, one, measure)
        compared.append(replace(one, lead=lead, word=word, changed=changed_keys(*sections)))
    return RunComparison(compared)


def measure_of(runs: Sequence[Contestant]) -> str:
    """The measure to compare the runs by: the first that every evaluated one has."""
    return next(iter(shared_measures(*(one.after for one in runs))), "accuracy")


def _lead(first: Contestant, one: Contestant, measure: str) -> tuple[Change | None, str]:
    """How far `one` is ahead, by `measure` if both have it and it is of one kind, and the caveat to show with it."""
    if first.after is None or one.after is None:
        return None, "one was not evaluated after training"
    if apart := setting_differences(first.after, one.after):
        return None, f"measured differently ({'; '.join(apart)})"
    judges = [side.judged_by for side in (first.after, one.after) if side.judged_by is not None]
    words = [f"their accuracies are not of one kind ({' and '.join(judges)})"] if len(set(judges)) > 1 else []
    other_rewards = _rewards(first) != _rewards(one) or rewards_differ(first.after, one.after)
    for name in sorted(shared_measures(first.after, one.after), key=lambda name: name != measure):
        is_other = other_rewards if name.endswith("reward") else bool(words)
        if not is_other and (found := change_of(name, first.after, one.after)) is not None:
            words += [f"{found.name}, as their rewards differ"] if other_rewards and "reward" in measure else []
            return found, ", ".join(filter(None, (measured_words(first.after, one.after, name), *words)))
    words += ["their rewards differ"] if other_rewards else []
    return None, " and ".join(words) or "no measure in common"


def _rewards(one: Contestant) -> tuple[Any, ...]:
    """What the weighted sum is made of."""
    entries = [entry.model_dump(include={"name", "weight", "params"}) for entry in one.run.rewards if entry.weight]
    names = [] if one.after is None else [name for name in one.after.rewards if one.run.reward_weights.get(name, 1)]
    return entries, sorted(names)


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parent folders as needed to make them unique."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{one[-1]} ({number})" for number, one in enumerate(parts, 1)]  # the same run twice


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
    values = page_values(found, path.resolve().parent)
    heading = f"{len(found.runs)} runs side by side"
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, make_page("comparison.html.jinja", title=TITLE, heading=heading, **values))


def page_values(found: RunComparison, place: Path) -> dict[str, Any]:
    """What a page in the folder `place` shows of the runs: `summary`, `tables` and `curves` of `comparison.html.jinja`,
    with links to the reports that exist."""
    rows = []
    for key in sorted({key for one in found.runs for key in one.changed}):
        pairs = [one.changed.get(key) for one in found.runs]
        first = next(pair[0] for pair in pairs if pair is not None)
        rows.append((key, *(first if pair is None else pair[1] for pair in pairs)))
    changed = PageTable("Keys that differ", ("key", *(one.name for one in found.runs)), rows)
    tables = [
        ("Every run", _every_run(found.runs, place), ""),
        ("What differs", changed, "" if changed.rows else "No key that affects training."),
    ]
    return {"summary": [found.sentence], "tables": tables, "curves": _curves(found.runs)}


def _every_run(runs: Sequence[Contestant], place: Path | None = None) -> PageTable:
    """The runs, with links from a page in the folder `place` to the reports that exist."""
    measure, rows = measure_of(runs), []
    for number, one in enumerate(runs):
        report = Path(one.result.folder).resolve() / "report.html"
        link = Path(os.path.relpath(report, place)).as_posix() if place and report.is_file() else ""
        rows.append((
            Cell(one.name, link=link, key=f"c{number % COLORS}"),
            Cell(one.verdict.kind, tone=TONES.get(one.verdict.kind, "")),
            *("-" if value is None else _value(value) for value in one.measured(measure)),
            "-" if one.lead is None else _value(one.lead.difference, "+"),
            one.result.steps,
            format_seconds(one.result.seconds),
        ))  # fmt: skip
    name = name_of(measure, *(one.after for one in runs))
    return PageTable("Every run", ("run", "verdict", f"{name} before", "after", "vs. the first", "steps", "time"), rows)


def _value(found: Measured, sign: str = "") -> Cell:
    value, _, interval = f"{found:{sign}.3f}".partition(" ")
    return Cell(value, under=interval)


def _curves(runs: Sequence[Contestant]) -> list[Drawing]:
    measure = measure_of(runs)
    form = "share" if measure.endswith("accuracy") else "number"
    held_out = {}  # before, during and after training
    for one in runs:
        folder = Path(one.result.folder)
        sides = {found.step: found for found in parse_evaluations(read_evaluations(folder, read_run_id(folder)))}
        ends = {0: one.before, one.result.kept_step: one.after}
        sides |= {step: HeldOut(step, side) for step, side in ends.items() if side is not None}
        held_out[one.name] = measured_points([sides[step] for step in sorted(sides)], measure)
    charts = [
        Chart(f"Held-out {name_of(measure, *(one.after for one in runs))}", held_out, form, dots=True, alike=True)
    ]
    for title, form, metric in PANELS:
        logs = {one.name: one.result.metrics for one in runs}
        points = {name: points_of(rows, metric) if metric else signal_shares(rows) for name, rows in logs.items()}
        charts.append(Chart(title, points, form, alike=True))
    return [draw_chart(chart) for chart in charts if len(set(chart.values)) > 1]
