"""An overview of a run from its folder, for a terminal and as JSON: verdict, numbers, curves, health."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rloo_kit.results.changes import find_changes
from rloo_kit.results.evaluation import Evaluation, merge_rows, named_sides
from rloo_kit.results.pages import TONES
from rloo_kit.results.plots import SMOOTH_FROM, first_and_last, format_value, mean_window, select_charts, split_time
from rloo_kit.results.verdict import TrainResult, Verdict, judge_run, load_evaluation, load_result
from rloo_kit.runs.files import is_number
from rloo_kit.runs.find import find_run
from rloo_kit.runs.reader import RunReader
from rloo_kit.system.console import columns, fill_text, format_seconds, render_text
from rloo_kit.system.problems import errors_of

STATUS = ("state", "step", "max_steps", "updated", "error", "command", "resume", "adapter_step")
MEANS = (
    "reward", "rewards/failed_ratio", "frac_score_zero_std", "grad_norm", "kl", "kl/spread_ratio", "entropy",
    "sampling/logp_difference_mean", "clip_ratio/region_mean", "val/ratio",
    "completions/clipped_ratio", "completions/repeated_ratio", "completions/mean_length",
    "thinking/mean_length", "thinking/closed_ratio",
    "tools/call_frequency", "tools/failure_frequency", "tools/invalid_frequency", "tools/turns",
    "time/rollout_s", "time/reward_s", "time/gradient_s", "time/evaluation_s",
    "time/decode_ms_per_token_step", "time/tokens_per_s",
)  # fmt: skip
LAST_ROWS = 10  # logged steps to average
BLOCKS = "▁▂▃▄▅▆▇█"
COLORS = {"right": "green", "wrong": "red", "": "yellow"}


@dataclass(frozen=True)
class RunOverview:
    """A run's result, status (STATUS of `status.json`), verdict and evaluations (None if missing)."""

    result: TrainResult
    status: dict[str, Any]
    verdict: Verdict
    before: Evaluation | None
    after: Evaluation | None

    @property
    def level(self) -> str | None:
        """ "alarming" if a health finding holds at the last step, else "healthy"; None before the first step."""
        return ("alarming" if errors_of(self.result.lasting) else "healthy") if self.result.metrics else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values: dict[str, Any] = {"folder": str(self.result.folder)} | self.status | {"verdict": self.verdict.to_dict()}
        values |= {name: side.summary() for name, side in named_sides(self.before, self.after).items()}
        values["prompts"] = find_changes(self.before, self.after).counts
        lasting, rows = self.result.lasting, self.result.metrics
        values |= {"level": self.level, "actions": [finding.fix for finding in lasting]}
        values["health"] = [finding.to_dict() | {"holds": finding in lasting} for finding in self.result.findings]
        return values | {"means": _means(rows[-LAST_ROWS:]), "first": _means(rows[:LAST_ROWS])}

    def __rich__(self) -> Group:
        step, total = self.status.get("step"), self.status.get("max_steps")
        head, seconds = f"{self.result.folder}: {self.status.get('state')}", self.result.seconds
        head += "" if step is None else f", {step}{f' of {total}' if total else ''} steps"
        head += f", {format_seconds(seconds)} of training" if seconds else ""
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
            parts += [Text(fill_text(text)) for text in find_changes(self.before, self.after).describe()[:1]]
        curves = self._curves()
        if curves.row_count:
            parts += [Text(""), curves]
        if (time := split_time(self.result.metrics)) is not None:
            parts += [Text(""), Text(fill_text(f"{time}."))]
        if self.result.findings:
            parts.append(Text("\nHealth, the earliest cause first"))
            for finding in self.result.findings:
                over = "" if finding in self.result.lasting else f" (over after step {finding.last})"
                text = f"  {finding.title} since step {finding.since}{over}: {finding.found}"
                parts.append(Text(fill_text(f"{text}. {finding.cause}. To do: {finding.fix}")))
        return Group(*parts)

    def __str__(self) -> str:
        return render_text(self)

    def _curves(self) -> Table:
        """The report's curves that are not flat, with its starts and ends (means, if there are many steps)."""
        curves = [
            (f"{chart.title}, {name}" if len(chart.series) > 1 else chart.title, [p.value for p in points], chart.form)
            for chart in select_charts(self.result.metrics)
            for name, points in chart.series.items()
        ]
        width = columns() - 24 - max((len(title) for title, *_ in curves), default=0)
        each = f" {mean_window(len(self.result.metrics))}" if len(self.result.metrics) >= SMOOTH_FROM else ""
        table = Table(box=None, pad_edge=False)
        for title in ("training", "over the steps", f"first{each}", f"last{each}"):
            table.add_column(title, justify="right" if title.startswith(("first", "last")) else "left", no_wrap=True)
        for title, values, form in curves:
            if len(set(values)) > 1:
                ends = (format_value(end, form) for end in first_and_last(values))
                table.add_row(title, sparkline(values, max(width, 10)), *ends)
        return table


def describe_run(source: str | Path) -> RunOverview:
    """An overview of a run, given by its folder or YAML file; raises RunNotFoundError if there is none."""
    run = find_run(source)
    result, before, after = load_result(run), load_evaluation(run, "before"), load_evaluation(run, "after")
    status = RunReader(result.folder).status()
    return RunOverview(
        result=result,
        status={key: status[key] for key in STATUS if status.get(key) is not None},
        verdict=judge_run(run, result, before, after),
        before=before,
        after=after,
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


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    values = {name: [row[name] for row in rows if is_number(row.get(name))] for name in MEANS}
    return {name: sum(found) / len(found) for name, found in values.items() if found}
