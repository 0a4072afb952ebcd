"""Compares runs: verdicts, differences from the first run on the held-out measure, and the keys that differ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rloo_kit.config.resume import COMPARED_ON_RESUME, changed_keys
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.results.evaluation import Evaluation, setting_differences, with_interval
from rloo_kit.results.result import TrainResult, load_evaluation, load_result
from rloo_kit.results.verdict import MEASURES, Change, Verdict, change_of, judge_run, measured_words
from rloo_kit.runs.find import find_run
from rloo_kit.system.console import fill_text, format_seconds, render_text


@dataclass(frozen=True)
class Contestant:
    """One of the runs.

    Attributes:
        name: short and unique. run, result, before, after: from its folder. verdict: on this run alone.
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
    changed: dict[str, tuple[Any, Any]] | None = None


@dataclass(frozen=True)
class RunComparison:
    """Runs compared with the first of them, after training."""

    runs: list[Contestant]

    @property
    def sentence(self) -> str:
        """Which run is ahead and by how much, with the interval, or that none is."""
        first, others = self.runs[0], self.runs[1:]
        apart = [one for one in others if one.lead is not None and (one.lead.rose or one.lead.fell)]
        unknown = [one for one in others if one.lead is None]
        parts = [_ahead(one, first) for one in apart]
        tied = [one.name for one in others if one.lead is not None and one not in apart]
        if tied:
            parts.append(f"{_join(tied)} and {first.name} do not differ significantly on their held-out prompts")
        parts += [f"{one.name} cannot be compared with {first.name}: {one.word}" for one in unknown]
        luck = "; among several runs the best is partly luck" if len(apart) > 1 else ""
        return f"{'; '.join(parts)}{luck}."

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"sentence": self.sentence, "runs": [_describe(one) for one in self.runs]}

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for title in ("run", "verdict", "before", "after", "vs. the first", "steps", "time"):
            table.add_column(title, justify="left" if title in ("run", "verdict") else "right", overflow="fold")
        for one in self.runs:
            change = one.verdict.change
            lead = "-" if one.lead is None else _signed(one.lead)
            sides = [_value(side, measure_of(self.runs)) for side in (one.before, one.after)]
            steps, time = str(one.result.steps), format_seconds(one.result.seconds)
            table.add_row(one.name, one.verdict.kind if change or one.after else "-", *sides, lead, steps, time)
        keys = [f"{one.name}: {_keys(one.changed)}" for one in self.runs if one.changed]
        return Group(Text(fill_text(self.sentence)), Text(""), table, *(Text(fill_text(f"  {key}")) for key in keys))

    def __str__(self) -> str:
        return render_text(self)


def compare_runs(sources: Sequence[str | Path]) -> RunComparison:
    """Compare runs with the first of them.

    Args:
        sources: folders of runs, or their YAML files; at least two.

    Raises:
        ConfigError: fewer than two. RunNotFoundError: one of them is not a run.
    """
    if len(sources) < 2:
        raise ConfigError(f"a comparison takes two or more runs; got {len(sources)}")
    runs = [find_run(source) for source in sources]
    names = _short_names([Path(run.folder) for run in runs])
    made: list[Contestant] = []
    for name, run in zip(names, runs, strict=True):
        try:
            result = load_result(run)
        except RunNotFoundError:
            raise RunNotFoundError(f"{run.folder} is not a run's folder: it has no status.json") from None
        before, after = load_evaluation(run, "before"), load_evaluation(run, "after")
        made.append(Contestant(name, run, result, before, after, judge_run(run, result, before, after)))
    first, measure = made[0], measure_of(made)
    return RunComparison([first, *(_against(first, one, measure) for one in made[1:])])


def measure_of(runs: Sequence[Contestant]) -> str:
    """The measure to compare the runs by: the first that every evaluated one has."""
    after = [one.after for one in runs if one.after is not None]
    return next((name for name in MEASURES if after and all(one.measure(name) for one in after)), MEASURES[0])


def _against(first: Contestant, one: Contestant, measure: str) -> Contestant:
    sections = [_sections(side.run) for side in (first, one)]
    lead, word = _lead(first.after, one.after, measure)
    return replace(one, lead=lead, word=word, changed=changed_keys(*sections))


def _sections(run: RunConfig) -> dict[str, Any]:
    seed = {"run": {"seed": run.run.seed}}
    return seed | run.model_dump(mode="json", include=set(COMPARED_ON_RESUME))


def _lead(first: Evaluation | None, one: Evaluation | None, measure: str) -> tuple[Change | None, str]:
    """How far `one` is ahead, by `measure` if both have it, and the caveat to show with it."""
    if first is None or one is None:
        return None, "one was not evaluated after training"
    if apart := setting_differences(first, one):
        return None, f"measured differently ({'; '.join(apart)})"
    for name in (measure, *MEASURES):
        if (found := change_of(name, first, one)) is not None:
            return found, measured_words(first, one)
    return None, "no measure in common"


def _ahead(one: Contestant, first: Contestant) -> str:
    assert one.lead is not None
    better, worse = (one, first) if one.lead.rose else (first, one)
    words = f", {one.word}" if one.word else ""
    return f"{better.name} is ahead of {worse.name}: {one.lead.describe_lead()}{words}"


def _describe(one: Contestant) -> dict[str, Any]:
    found: dict[str, Any] = {"name": one.name, "folder": str(one.result.folder), "steps": one.result.steps}
    found |= {"seconds": one.result.seconds, "verdict": one.verdict.to_dict()}
    for when, side in (("before", one.before), ("after", one.after)):
        values = {name: side.measure(name) for name in MEASURES} if side is not None else {}
        found[when] = {name: list(value[:3]) for name, value in values.items() if value is not None}
        found[when] |= {} if side is None else {"thinking_tokens": side.mean_thinking_tokens}
    lead = None if one.lead is None else vars(one.lead)
    changed = {key: list(pair) for key, pair in (one.changed or {}).items()}
    return found | {"lead": lead, "word": one.word, "changed": changed}


def _value(side: Evaluation | None, name: str) -> str:
    found = None if side is None else side.measure(name)
    return "-" if found is None else with_interval(*found[:3]).replace(" [", "\n[")


def _signed(lead: Change) -> str:
    if lead.low is None or lead.high is None:
        return f"{lead.value:+.3f}"
    return f"{lead.value:+.3f}\n[{lead.low:+.3f}, {lead.high:+.3f}]"


def _keys(changed: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parent folders as needed to make them unique."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{one[-1]} ({number})" for number, one in enumerate(parts, 1)]  # the same run twice
