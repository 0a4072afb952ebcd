"""Compares the runs of a batch, from their folders: `comparison.html`, `comparison.csv` and a text table."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rloo_kit.batch.status import TRAINING, BatchDir, RunStatus, count_states
from rloo_kit.data.answers import EXACT
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.figures import BLUE, GREY, STYLE, to_svg
from rloo_kit.results.pages import escape_text, format_duration, make_page, make_section, mark_verdict
from rloo_kit.runs.files import write_text
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.console import columns as terminal_columns
from rloo_kit.system.console import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
NAME_WIDTH = 24  # columns for a name in the text table; longer names wrap
LEFT_OUT = ("thinking tokens", "time", "after, 95 %")  # dropped in this order if the text table is too wide
LONGEST_LABEL = 48  # characters of a run's name in the figure
COLORS = {"done": "right", "failed": "wrong", "killed": "wrong"}


def read_figures(training: RunDir) -> dict[str, Any]:
    """The figures of a training run, None if its folder is missing: MEASURES, ATTRIBUTES and `greedy_reward` with
    `_before` and `_after`, `judged_by`, `measure` (the deciding one), `steps`, `reward_last`, `verdict`, and `report`
    (whether one exists)."""
    figures: dict[str, Any] = {"judged_by": None, "measure": None}
    for when in ("before", "after"):
        found = Evaluation.read(training / f"{when}.json")
        for name, measure in MEASURES.items():
            one = None if found is None else found.measure(measure)
            ends = (None, None, None) if one is None else one.ends
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
    """Write `comparison.html` and `comparison.csv` into the batch's folder. Returns the files."""
    rows = collect_rows(place)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return [
        write_text(place.folder / "comparison.html", make_comparison(place, rows)),
        write_text(place.folder / "comparison.csv", text.getvalue()),
    ]


def make_comparison(place: BatchDir, rows: list[dict[str, Any]]) -> str:
    """The page: how many runs are done, the figure, the table, the errors."""
    counts = ", ".join(f"{count} {state}" for state, count in count_states(place.statuses.values()).items())
    seconds = sum(row["seconds"] or 0 for row in rows)
    summary = f"{len(rows)} runs: {counts}; {format_duration(seconds)} of running time in all."
    drawing = draw_runs(rows, short_names(rows))
    sections = [
        f"<h1>{escape_text(place.batch.name)}</h1>\n<p>{escape_text(summary)}</p>\n{_common(place)}",
        make_section("Runs side by side", f"<figure>{drawing}</figure>") if drawing else "",
        make_section("Every run", f"<div class='scroll'>{_table(place, rows)}</div>{_legend(rows)}"),
    ]
    wrong = [status for status in place.statuses.values() if status.error]
    if wrong:
        sections.append(make_section("What is not done, and why", "".join(map(_failure, wrong))))
    return make_page(f"{place.batch.name} - batch of RLOO runs", sections)


def short_names(rows: list[dict[str, Any]]) -> list[str]:
    """Names for a table or figure, without the notebook's name in front if they stay unique."""
    names = [str(row["name"]) for row in rows]
    short = [name.removeprefix(f"{Path(row['notebook']).stem}-") for name, row in zip(names, rows, strict=True)]
    return short if len(set(short)) == len(names) else names


def _common(place: BatchDir) -> str:
    """A line with the parameters that all runs share."""
    varying = set(place.batch.varying())
    first = place.batch.runs[0].parameters
    common = [f"{name} = {value}" for name, value in first.items() if name not in varying]
    return f"<p>Every run: {escape_text(', '.join(common))}.</p>\n" if common else ""


def _table(place: BatchDir, rows: list[dict[str, Any]]) -> str:
    lead = leading_figure(rows)
    word, other = WORDS[lead]
    titles = ["run", "state", "verdict", "time", f"{word} before", f"{word} after"]
    titles += [f"greedy {word}", other, "thinking tokens", "closed"]
    head = "".join(f"<th>{title}</th>" for title in titles)
    varying, names = place.batch.varying(), short_names(rows)
    body = ""
    for run, row, name in zip(place.batch.runs, rows, names, strict=True):
        hidden = [f"{key}={run.parameters[key]}" for key in varying if key in run.parameters and f"{key}=" not in name]
        body += _row(row, name, ", ".join(hidden), lead)
    return f"<table class='runs'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: dict[str, Any], short_name: str, hidden: str, lead: str) -> str:
    """A run's row; `hidden`: varying parameters that its name does not show."""
    name, shown = escape_text(row["name"]), escape_text(short_name)
    state = f"<span class='{COLORS.get(row['state'], '')}'>{row['state']}</span>"
    page = f"{name}/{TRAINING}/report.html" if row["report"] else f"{name}/notebook.ipynb"
    cells = [f"<a href='{page}'>{shown}</a>" if row["attempts"] else shown]
    cells[0] += f"<span class='under'>{escape_text(hidden)}</span>" if hidden else ""
    verdict = mark_verdict(row["verdict"] or "-")
    cells += [state, verdict, escape_text(format_duration(row["seconds"])) if row["seconds"] else "-"]
    cells += [_interval(row, f"{lead}{{}}_{when}") for when in ("before", "after")]
    cells += [change(row, f"greedy_{WORDS[lead][0]}", ".3f"), _other(row, lead)]
    cells += [change(row, "thinking_tokens", ".1f"), change(row, "closed_share", ".3f")]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _interval(row: dict[str, Any], key: str) -> str:
    value, low, high = (row[key.format(end)] for end in ("", "_low", "_high"))
    if value is None:
        return "-"
    return f"{value:.3f}" if low is None else f"{value:.3f} <span class='under'>[{low:.3f}, {high:.3f}]</span>"


def change(row: dict[str, Any], name: str, form: str, arrow: str = " → ") -> str:
    """Before and after as text, or the one that was measured; a dash without any."""
    values = [row[f"{name}_{when}"] for when in ("before", "after")]
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
    prompts = sorted({row[f"eval_prompts_{when}"] for row in rows for when in ("before", "after")} - {None})
    if not prompts:
        return ""
    word = WORDS[leading_figure(rows)][0].capitalize()
    count = " to ".join(str(n) for n in sorted({prompts[0], prompts[-1]}))
    return (
        f"<p class='notes'>{word} on {count} held-out prompts, sampled and greedy, with 95 % intervals. Thinking "
        "tokens are over completions that close their thinking; closed is their share. Before → after.</p>"
    )


def _failure(status: RunStatus) -> str:
    name = escape_text(status.name)
    log = f"<p class='notes'><a href='{name}/log.txt'>{name}/log.txt</a></p>" if status.attempts else ""
    return (
        f"<article><div><b>{name}</b> <span class='mark {COLORS.get(status.state, '')}'>{status.state}</span></div>"
        f"<pre>{escape_text(status.error)}</pre>{log}</article>\n"
    )


def make_text_table(place: BatchDir) -> Table:
    """The comparison for a terminal or a log, without figures that no run has."""
    table = Table(title=f"batch {place.batch.name}", title_justify="left")
    rows = collect_rows(place)
    lead = leading_figure(rows)
    columns = {
        "run": short_names(rows),
        "state": [row["state"] for row in rows],
        "verdict": [row["verdict"] or "-" for row in rows],
        "time": [format_seconds(row["seconds"]) if row["seconds"] else "-" for row in rows],
        WORDS[lead][0]: [change(row, lead, ".3f") for row in rows],
        "after, 95 %": [_bounds(row[f"{lead}_low_after"], row[f"{lead}_high_after"]) for row in rows],
        WORDS[lead][1]: [_other(row, lead) for row in rows],
        "thinking tokens": [change(row, "thinking_tokens", ".1f") for row in rows],
    }
    shown = {title: cells for title, cells in columns.items() if set(cells) != {"-"}}
    for title in LEFT_OUT:  # if the terminal is narrow; comparison.csv has them
        if _width(shown) > terminal_columns():
            shown.pop(title, None)
    for title in shown:
        is_word = title in ("run", "state", "verdict")
        table.add_column(title, overflow="fold", no_wrap=title != "run", justify="left" if is_word else "right")
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _width(shown: dict[str, list[str]]) -> int:
    """The table's width in columns, with wrapped names."""
    widest = {title: max(map(len, [title, *cells])) for title, cells in shown.items()}
    return sum(widest.values()) - widest["run"] + min(widest["run"], NAME_WIDTH) + 3 * len(shown) + 1


def _bounds(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"


def draw_runs(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> str | None:
    """One SVG with a labelled row per run, the first on top; None if no run has a figure yet."""
    panels: list[tuple[str, Any]] = []
    lead = leading_figure(rows)
    word = WORDS[lead][0].capitalize()
    if _has(rows, lead):
        panels.append((f"{word}, 95 % interval", _draw_lead))
    if _has(rows, "thinking_tokens"):
        panels.append(("Thinking tokens", _draw_thinking))
    if any(row["seconds"] for row in rows):
        panels.append(("Time, minutes", _draw_time))
    if not panels:
        return None
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    with rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(10.4, 1.0 + 0.42 * len(rows)), layout="constrained")
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, draw) in zip(all_axes, panels, strict=True):
            draw(axes, rows)
            axes.set_title(title)
            axes.tick_params(length=0)
        short = [label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 3]}..." for label in labels]
        all_axes[0].set_yticks(range(len(rows)), short)
        all_axes[0].set_ylim(len(rows) - 0.5, -0.5)
        handles = [Line2D([], [], color=color, marker="o", linestyle="none") for color in (GREY, BLUE)]
        figure.legend(handles, ["before training", "after"], loc="outside lower right", ncols=2)
        return to_svg(figure, "runs", f"{word}, thinking tokens and time of each run")


def _draw_lead(axes: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    lead = leading_figure(rows)
    for y, row in enumerate(rows):
        for when, shift, color in (("before", -0.13, GREY), ("after", 0.13, BLUE)):
            value, low, high = (row[f"{lead}{end}_{when}"] for end in ("", "_low", "_high"))
            if value is None:
                continue
            if low is not None and high is not None:
                axes.plot([low, high], [y + shift] * 2, color=color, linewidth=2, solid_capstyle="round")
            axes.plot([value], [y + shift], "o", color=color, markersize=6)
        if row[f"{lead}_after"] is None:
            axes.annotate(row["state"], (0.98, y), ha="right", va="center", fontsize=9, fontstyle="italic")
    if lead == "accuracy":
        axes.set_xlim(0, 1)


def _draw_thinking(axes: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    for y, row in enumerate(rows):
        values = [row["thinking_tokens_before"], row["thinking_tokens_after"]]
        if None not in values:
            axes.plot(values, [y, y], color=GREY, linewidth=1)
        for value, color in zip(values, (GREY, BLUE), strict=True):
            if value is not None:
                axes.plot([value], [y], "o", color=color, markersize=6)
    longest = max(row[f"thinking_tokens_{when}"] or 0.0 for row in rows for when in ("before", "after"))
    axes.set_xlim(0, 1.08 * longest or 1.0)


def _draw_time(axes: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    minutes = [(row["seconds"] or 0) / 60 for row in rows]
    colors = [BLUE if row["state"] == "done" else GREY for row in rows]
    axes.barh(range(len(rows)), minutes, height=0.5, color=colors)
    axes.set_xlim(left=0)


def _has(rows: Sequence[dict[str, Any]], name: str) -> bool:
    return any(row[f"{name}_{when}"] is not None for row in rows for when in ("before", "after"))
