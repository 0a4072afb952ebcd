"""An overview of a run from its folder, for a terminal and as JSON: verdict, numbers, curves, health."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rloo_kit.errors import RunNotFoundError
from rloo_kit.health.rules import Context
from rloo_kit.health.series import LEVELS, Judgement, judge_metrics
from rloo_kit.health.watch import HealthWatch
from rloo_kit.results.changes import Comparison, compare, find_changes
from rloo_kit.results.evaluation import Evaluation, merge_rows, named_sides
from rloo_kit.results.pages import TONES
from rloo_kit.results.plots import SMOOTH_FROM, first_and_last, format_value, mean_window, select_charts, split_time
from rloo_kit.results.verdict import Verdict, judge_run, load_evaluation, load_result
from rloo_kit.runs.files import is_number
from rloo_kit.runs.find import find_run
from rloo_kit.runs.reader import RunReader
from rloo_kit.system.console import columns, fill_text, format_seconds, render_text

STATUS = ("state", "step", "max_steps", "updated", "error", "command", "resume", "adapter_step", "energy_wh")
MEANS = ["reward", "completions/mean_length", "thinking/mean_length", "thinking/closed_ratio", "val/ratio"]
MEANS += ["tools/call_frequency", "tools/failure_frequency", "tools/invalid_frequency", "tools/turns"]
MEANS += ["time/rollout_s", "time/reward_s", "time/gradient_s", "time/evaluation_s"]
MEANS += ["time/decode_ms_per_token_step", "time/tokens_per_s"]
BLOCKS = "▁▂▃▄▅▆▇█"
COLORS = {"right": "green", "wrong": "red", "": "yellow"}


@dataclass(frozen=True)
class RunOverview:
    """A run's status, verdict, evaluations (None if missing), health and metrics.

    Attributes:
        folder: the run's. status: STATUS of `status.json`.
        level: "healthy", "watch" or "alarming", by the last logged steps; None before the first one.
        actions: what to change, the most important first. findings: of the whole run, each with `holds`.
        judgements: single metrics over the last steps. last: number of steps averaged. seconds: of training.
    """

    folder: Path
    status: dict[str, Any]
    verdict: Verdict
    before: Evaluation | None
    after: Evaluation | None
    level: str | None
    actions: list[str]
    findings: list[dict[str, Any]]
    judgements: list[Judgement]
    rows: list[dict[str, Any]]
    last: int
    seconds: float

    @property
    def comparison(self) -> Comparison | None:
        """The comparison of before and after; None if one is missing."""
        return None if self.before is None or self.after is None else compare(self.before, self.after)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values: dict[str, Any] = {"folder": str(self.folder)} | self.status | {"verdict": self.verdict.to_dict()}
        values["accuracy"] = {name: _brief(side) for name, side in named_sides(self.before, self.after).items()}
        if (comparison := self.comparison) is not None:
            values["measure"] = comparison.leading
            for key, name in (("difference", "accuracy"), ("reward_difference", "reward")):
                change = comparison.changes.get(name)
                ends = (None, None, None) if change is None else change.difference.ends
                values["accuracy"][key] = dict(zip(("value", "low", "high"), ends, strict=True))
            values["prompts"] = find_changes(self.before, self.after).counts
        values |= {"level": self.level, "actions": self.actions, "health": self.findings}
        values["metrics"] = [metric.to_dict() for metric in self.judgements]
        return values | {"means": _means(self.rows[-self.last :]), "first": _means(self.rows[: self.last])}

    def __rich__(self) -> Group:
        step, total = self.status.get("step"), self.status.get("max_steps")
        head = f"{self.folder}: {self.status.get('state')}"
        head += "" if step is None else f", {step}{f' of {total}' if total else ''} steps"
        head += f", {format_seconds(self.seconds)} of training" if self.seconds else ""
        verdict = Text(str(self.verdict))
        verdict.stylize(f"bold {COLORS[TONES.get(self.verdict.kind, '')]}", 0, len(self.verdict.kind))
        if self.status.get("error"):
            verdict.append(f"\n{fill_text('error: ' + str(self.status['error']))}")
        parts: list[Any] = [Text(head, style="bold"), verdict]
        if sides := named_sides(self.before, self.after):
            table = Table("held-out", box=None, pad_edge=False)
            for name in sides:
                table.add_column(name, justify="right")
            for row in merge_rows(*sides.values()):
                table.add_row(*row)
            parts += [Text(""), table]
            # how many prompts broke and were fixed, by greedy completions if any, which have no sampling noise
            for measured, counts in list(find_changes(self.before, self.after).counts.items())[:1]:
                text = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
                parts.append(Text(fill_text(f"Prompt by prompt ({measured}): {text}.")))
        curves = self._curves()
        if curves.row_count:
            parts += [Text(""), curves]
        if (time := split_time(self.rows)) is not None:
            parts += [Text(""), Text(fill_text(f"{time}."))]
        if self.findings:
            parts.append(Text("\nHealth, the earliest cause first"))
            for finding in self.findings:
                over = "" if finding["holds"] else f" (over after step {finding['last']})"
                rule = finding["rule"].replace("_", " ")
                text = f"  {rule} since step {finding['since']}{over}: {finding['evidence']}"
                parts.append(Text(fill_text(f"{text}. {finding['cause']}. To do: {finding['fix']}")))
        if others := [metric for metric in self.judgements if str(metric) in self.actions]:
            is_alarming = any(metric.level == "alarming" for metric in others)
            title = "Alarming, so the exit code is 1" if is_alarming else "Worth checking"
            parts.append(Text(f"\n{title}, mean of the last {self.last} logged steps"))
            parts += [Text(fill_text(f"  {metric}")) for metric in others]
        return Group(*parts)

    def __str__(self) -> str:
        return render_text(self)

    def _curves(self) -> Table:
        """The report's curves that are not flat, with its starts and ends (means, if there are many steps)."""
        curves = [
            (f"{chart.title}, {name}" if len(chart.series) > 1 else chart.title, [p.value for p in points], chart.form)
            for chart in select_charts(self.rows)
            for name, points in chart.series.items()
        ]
        width = columns() - 24 - max((len(title) for title, *_ in curves), default=0)
        each = f" {mean_window(len(self.rows))}" if len(self.rows) >= SMOOTH_FROM else ""
        table = Table(box=None, pad_edge=False)
        for title in ("training", "over the steps", f"first{each}", f"last{each}"):
            table.add_column(title, justify="right" if title.startswith(("first", "last")) else "left", no_wrap=True)
        for title, values, form in curves:
            if len(set(values)) > 1:
                ends = (format_value(end, form) for end in first_and_last(values))
                table.add_row(title, sparkline(values, max(width, 10)), *ends)
        return table


def describe_run(source: str | Path, last: int = 10) -> RunOverview:
    """An overview of a run, given by its folder or YAML file; raises RunNotFoundError if there is none. `last`: logged
    steps to average for the level, at least 1."""
    run = find_run(source)
    run_dir = RunReader(Path(run.folder))
    status = run_dir.status()
    if not status:
        raise RunNotFoundError(
            f"{run_dir.folder} is not a run's folder: it has no status.json. rloo-kit train writes runs to "
            "OUTPUT_DIR/NAME; a batch writes them to BATCH/NAME/run"
        )
    result, before, after = load_result(run), load_evaluation(run, "before"), load_evaluation(run, "after")
    context, rows = Context.of(run), result.metrics
    watch = HealthWatch(context, rows)
    judgements = judge_metrics(rows, context.on_policy, last, watch.is_solved())
    now = [finding for finding in watch.findings if watch.holds(finding)]
    known = {finding.name for finding in now} | watch.explained()
    problems = [*now, *(metric for metric in judgements if metric.rule not in known)]
    actions = [str(problem) for level in ("alarming", "watch") for problem in problems if problem.level == level]
    levels = ["healthy", *(problem.level for problem in (*now, *judgements))]
    return RunOverview(
        folder=run_dir.folder,
        status={key: status[key] for key in STATUS if status.get(key) is not None},
        verdict=judge_run(run, result, before, after),
        before=before,
        after=after,
        level=max(levels, key=LEVELS.index) if rows else None,
        actions=actions,
        findings=[one.to_dict() | {"holds": watch.holds(one)} for one in watch.findings],
        judgements=judgements,
        rows=rows,
        last=last,
        seconds=result.seconds,
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve as one line of block characters, each the mean of a segment of the values.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 4), sparkline([1, 1], 9)
    ('▁▃▆█', '▁▁')
    """
    width = min(width, len(values))
    ends = [len(values) * number // width for number in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in zip(ends, ends[1:], strict=False)]
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1)) if span else 0] for value in means)


def _brief(one: Evaluation) -> dict[str, Any]:
    values: dict[str, Any] = dict(zip(("accuracy", "low", "high"), one.ends("accuracy"), strict=True))
    values |= {"greedy": one.value("greedy_accuracy"), "judged_by": one.judged_by, "reward": one.value("reward")}
    values |= {"greedy_reward": one.value("greedy_reward"), "thinking_tokens": one.mean_thinking_tokens}
    values |= {"closed_share": one.closed_share} | ({"tools": one.tools} if one.tools else {})
    return values | {"truncated_share": one.truncated_share, "prompts": one.num_prompts}


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    values = {name: [row[name] for row in rows if is_number(row.get(name))] for name in MEANS}
    return {name: sum(found) / len(found) for name, found in values.items() if found}
