"""Compares the runs of a batch, from their folders: `comparison.html`, `comparison.csv` and a text table."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as TextTable
from rich.text import Text

from rloo_kit.batch.status import TRAINING, BatchDir, count_states
from rloo_kit.data.answers import EXACT
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.pages import TONES, Cell, Table, format_duration, make_page
from rloo_kit.results.plots import draw_bar
from rloo_kit.runs.files import write_text
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.console import columns as terminal_columns
from rloo_kit.system.console import format_seconds

# The figures of the comparison (with _before or _after appended): measures with their intervals, and attributes.
MEASURES = {"accuracy": "accuracy", "greedy_accuracy": "greedy_accuracy", "held_out_reward": "reward"}
ATTRIBUTES = {
    "thinking_tokens": "mean_thinking_tokens",
    "closed_share": "closed_share",
    "tokens": "mean_tokens",
    "eval_prompts": "num_prompts",
}
# What may lead, in titles, and the other one.
WORDS = {"accuracy": ("accuracy", "held-out reward"), "held_out_reward": ("reward", "accuracy")}
KINDS = (("s0", "before"), ("s1", "after"))  # classes of the style for the bars
NAME_WIDTH = 24  # columns for a name in the text table; longer names wrap
LEFT_OUT = ("thinking tokens", "time", "after, 95 %")  # dropped in this order if the text table is too wide


def read_figures(training: RunDir) -> dict[str, Any]:
    """The figures of a training run, None if its folder is missing: MEASURES, ATTRIBUTES and `greedy_reward` with
    `_before` and `_after`, `judged_by`, `measure` (the deciding one), `steps`, `reward_last`, `verdict`, and `report`
    (whether one exists)."""
    figures: dict[str, Any] = {"judged_by": None, "measure": None}
    for when in ("before", "after"):
        found = Evaluation.read(training / f"{when}.json")
        for name, measure in MEASURES.items():
            ends = (None, None, None) if found is None else found.ends(measure)
            figures |= {f"{name}{end}_{when}": value for end, value in zip(("", "_low", "_high"), ends, strict=True)}
        figures |= {f"{name}_{when}": getattr(found, attribute, None) for name, attribute in ATTRIBUTES.items()}
        figures[f"greedy_reward_{when}"] = None if found is None else found.value("greedy_reward")
        if found is not None:
            figures["judged_by"] = found.judged_by or figures["judged_by"]
            figures["measure"] = found.leading if found.measures else figures["measure"]
    rows, status = training.read_metrics(), training.status()
    verdict = status.get("verdict")
    figures |= {"steps": status.get("step"), "reward_last": rows[-1].get("reward") if rows else None}
    figures["verdict"] = verdict.get("kind") if isinstance(verdict, dict) else None
    return figures | {"report": (training / "report.html").is_file()}


def collect_rows(place: BatchDir) -> list[dict[str, Any]]:
    """One row per run: name, state, varying parameters (`parameters.seed`), seconds, figures, error."""
    varying = place.batch.varying()
    rows = []
    for run in place.batch.runs:
        status = place.statuses[run.name]
        parameters = {f"parameters.{name}": run.resolved.get(name) for name in varying}
        row = {"name": run.name, "notebook": run.notebook.path.name, "state": status.state, **parameters}
        row |= {"seconds": status.seconds or None, "attempts": status.attempts, "exit_code": status.exit_code}
        rows.append({**row, **read_figures(place.training(run.name)), "error": status.error})
    return rows


def write_comparison(place: BatchDir) -> list[Path]:
    """Write `comparison.html` (the states, a table with bars, the errors) and `comparison.csv` into the batch's folder.
    Returns the files."""
    rows = collect_rows(place)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    counts = ", ".join(f"{count} {state}" for state, count in count_states(place.statuses.values()).items())
    seconds = format_duration(sum(row["seconds"] or 0 for row in rows))
    varying = place.batch.varying()
    common = [f"{name} = {value}" for name, value in place.batch.runs[0].parameters.items() if name not in varying]
    page = make_page(
        "comparison.html.jinja",
        title=f"{place.batch.name} - batch of RLOO runs",
        heading=place.batch.name,
        summary=[
            f"{len(rows)} runs: {counts}; {seconds} of running time in all.",
            *([f"Every run: {', '.join(common)}."] if common else []),
        ],
        tables=[("Every run", _every_run(place, rows), _legend(rows))],
        curves=None,
        failures=[
            {
                "name": one.name,
                "state": one.state,
                "tone": TONES.get(one.state, ""),
                "error": one.error,
                "log": f"{one.name}/log.txt" if one.attempts else "",
            }
            for one in place.statuses.values()
            if one.error
        ],
    )
    return [
        write_text(place.folder / "comparison.html", page),
        write_text(place.folder / "comparison.csv", text.getvalue()),
    ]


def short_names(rows: list[dict[str, Any]]) -> list[str]:
    """Names for a table, without the notebook's name in front if they stay unique."""
    names = [str(row["name"]) for row in rows]
    short = [name.removeprefix(f"{Path(row['notebook']).stem}-") for name, row in zip(names, rows, strict=True)]
    return short if len(set(short)) == len(names) else names


def _every_run(place: BatchDir, rows: list[dict[str, Any]]) -> Table:
    lead = leading_figure(rows)
    word, other = WORDS[lead]
    varying, cells = place.batch.varying(), []
    longest = max(row["seconds"] or 0.0 for row in rows)
    for run, row, name in zip(place.batch.runs, rows, short_names(rows), strict=True):
        hidden = [f"{key}={run.parameters[key]}" for key in varying if key in run.parameters and f"{key}=" not in name]
        page = f"{row['name']}/{TRAINING}/report.html" if row["report"] else f"{row['name']}/notebook.ipynb"
        time = Cell("-")
        if row["seconds"]:
            time = Cell(format_duration(row["seconds"]), bar=draw_bar([("s1", row["seconds"], 0.0, None)], longest))
        before, after = (
            Cell(change(row, lead, ".3f", only=when), under=_bounds(row, lead, when).strip("-"))
            for when in ("before", "after")
        )
        after.bar = draw_change(row, rows, lead)
        cells.append((
            Cell(name, under=", ".join(hidden), link=page if row["attempts"] else ""),
            *(Cell(said, tone=TONES.get(said, "")) for said in (row["state"], row["verdict"] or "-")),
            time, before, after, change(row, f"greedy_{word}", ".3f"), _other(row, lead),
            Cell(change(row, "thinking_tokens", ".1f"), bar=draw_change(row, rows, "thinking_tokens")),
            change(row, "closed_share", ".3f"),
        ))  # fmt: skip
    head = ["run", "state", "verdict", "time", f"{word} before", f"{word} after"]
    return Table("Every run", [*head, f"greedy {word}", other, "thinking tokens", "closed"], cells)


def draw_change(row: dict[str, Any], rows: list[dict[str, Any]], name: str) -> list[tuple[str, ...]]:
    """The bar of a figure before and after, on the scale of all runs."""

    def sides(row: dict[str, Any]) -> list[tuple[str, float, float | None, float | None]]:
        values: list[Any] = [
            (kind, *(row.get(f"{name}{end}_{when}") for end in ("", "_low", "_high"))) for kind, when in KINDS
        ]
        return [(kind, value, low, high) for kind, value, low, high in values if value is not None]

    ends = [0.0, *(end for one in rows for _, *values in sides(one) for end in values if end is not None)]
    return draw_bar(sides(row), 1.0 if name == "accuracy" else max(ends), min(ends))


def change(row: dict[str, Any], name: str, form: str, arrow: str = " → ", only: str = "") -> str:
    """Before and after as text, or the one that was measured, or `only` one of them; a dash without any."""
    values = [row[f"{name}_{when}"] for when in ("before", "after") if only in ("", when)]
    return arrow.join(format(value, form) for value in values if value is not None) or "-"


def leading_figure(rows: Sequence[dict[str, Any]]) -> str:
    """The deciding figure: "held_out_reward" if it leads in any of the runs, else "accuracy"."""
    return "held_out_reward" if any(row["measure"] == "reward" for row in rows) else "accuracy"


def _other(row: dict[str, Any], lead: str) -> str:
    """The accuracy if the reward leads, else the reward; exact match is labelled, left out if only it is 0."""
    if lead == "accuracy":
        return change(row, "held_out_reward", ".3f")
    is_exact = row["judged_by"] == EXACT
    is_zero = {name: not (row[f"{name}_before"] or row[f"{name}_after"]) for name in ("accuracy", "held_out_reward")}
    if is_exact and is_zero["accuracy"] and not is_zero["held_out_reward"]:
        return "-"
    return change(row, "accuracy", ".3f") + (f" ({EXACT})" if is_exact else "")


def _legend(rows: list[dict[str, Any]]) -> str:
    prompts = {row[f"eval_prompts_{when}"] for row in rows for when in ("before", "after")} - {None}
    if not prompts:
        return ""
    word = WORDS[leading_figure(rows)][0].capitalize()
    count = " to ".join(map(str, sorted({min(prompts), max(prompts)})))
    return (
        f"{word} on {count} held-out prompts, sampled and greedy, with 95 % intervals. Thinking tokens are over "
        "completions that close their thinking; closed is their share. Before → after; in the bars, before is grey."
    )


def make_text_table(place: BatchDir) -> TextTable:
    """The comparison for a terminal or a log, without figures that no run has."""
    rows = collect_rows(place)
    lead = leading_figure(rows)
    columns = {
        "run": short_names(rows),
        "state": [row["state"] for row in rows],
        "verdict": [row["verdict"] or "-" for row in rows],
        "time": [format_seconds(row["seconds"]) if row["seconds"] else "-" for row in rows],
        WORDS[lead][0]: [change(row, lead, ".3f") for row in rows],
        "after, 95 %": [_bounds(row, lead) for row in rows],
        WORDS[lead][1]: [_other(row, lead) for row in rows],
        "thinking tokens": [change(row, "thinking_tokens", ".1f") for row in rows],
    }
    if columns[WORDS[lead][1]] == columns[WORDS[lead][0]]:  # a reward that is the accuracy
        del columns[WORDS[lead][1]]
    columns = {title: cells for title, cells in columns.items() if set(cells) != {"-"}}
    widths = {title: max(map(len, [title, *cells])) for title, cells in columns.items()}
    widths["run"] = min(widths["run"], NAME_WIDTH)
    for title in LEFT_OUT:  # if the terminal is narrow; comparison.csv has them
        if sum(width + 3 for width in widths.values()) >= terminal_columns():
            widths.pop(title, None)
    table = TextTable(title=f"batch {place.batch.name}", title_justify="left")
    for title in widths:
        is_word = title in ("run", "state", "verdict")
        table.add_column(title, overflow="fold", no_wrap=title != "run", justify="left" if is_word else "right")
    for cells in zip(*(columns[title] for title in widths), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _bounds(row: dict[str, Any], name: str, when: str = "after") -> str:
    low, high = row[f"{name}_low_{when}"], row[f"{name}_high_{when}"]
    return "-" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"
