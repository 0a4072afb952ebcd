"""A batch's folder: its lock, the status of each run, the runs left to do, and the comparison of those that are done.

A run is done when its `status.json` has the state `done`, written only after a clean exit.
"""

import csv
import io
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError
from rich.table import Table as TextTable
from rich.text import Text

from rloo_kit.data.answers import EXACT
from rloo_kit.errors import ConfigError, RunExistsError, RunNotFoundError, SetupError
from rloo_kit.notebook.batch import FILES, Batch, BatchRun
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.pages import TONES, Cell, Table, format_duration, make_page
from rloo_kit.results.plots import draw_bar
from rloo_kit.runs.files import lock_folder, now, read_object, write_json, write_text
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.console import columns as terminal_columns
from rloo_kit.system.console import format_seconds, hide_secrets

State = Literal["waiting", "running", "done", "failed", "killed", "interrupted"]
RUN_FILES = ("notebook.ipynb", "parameters.yaml", "log.txt", "status.json")
TRAINING = "run"  # subfolder of a run with its training run


@dataclass
class RunStatus:
    """The status of one run: its `status.json`.

    Attributes:
        parameters: those of the batch file.
        exit_code, pid: of papermill; the negative signal number if a signal ended it.
        started, ended: of the last attempt. seconds: of all attempts that contributed to the result.
        error: why it is not done: the error of the cell or of the system.
        attempts: number of starts.
    """

    name: str
    notebook: str
    parameters: dict[str, Any] = field(default_factory=dict)
    state: State = "waiting"
    exit_code: int | None = None
    pid: int | None = None
    started: str | None = None
    ended: str | None = None
    seconds: float = 0.0
    error: str | None = None
    attempts: int = 0

    @classmethod
    def read(cls, path: Path) -> "RunStatus | None":
        """The status in a file; None without one, or if it is not a batch's."""
        try:
            return TypeAdapter(cls).validate_python(read_object(path))
        except ValidationError:
            return None


class BatchDir:
    """The open folder of a batch; a context manager that releases it at the end.

    Attributes:
        statuses: one per run, in the batch's order.
        left: folder names of runs that are no longer in the file.
    """

    def __init__(self, batch: Batch):
        self.batch, self.folder = batch, batch.folder
        self.statuses: dict[str, RunStatus] = {}
        self.left: list[str] = []
        self.started = now()
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, batch: Batch, *, resume: bool = False, overwrite: bool = False) -> "BatchDir":
        """Open the folder of `batch` for writing.

        Args:
            batch: the checked batch.
            resume: keep what is done, and run what is not.
            overwrite: delete the files of the batch in the folder (nothing else in it) and start over.

        Raises:
            RunExistsError: the folder contains a batch and neither flag is given, another process writes to it, or it
                contains something other than a batch.
            RunNotFoundError: `resume`, and the folder has no batch.
            ConfigError: both flags; or `resume`, and a run's parameters have changed since it started.
            SetupError: the folder cannot be created or written.
        """
        self = cls(batch)
        self._check(resume, overwrite)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.folder)
            if overwrite:
                self._delete()
            self._read(resume)
            write_text(self.folder / "batch.yaml", batch.to_yaml())
        except BlockingIOError:
            pid = read_object(self.folder / "batch.json").get("pid", "unknown")
            raise RunExistsError(
                f"{self.folder} is being written by another process ({pid}): wait for it, stop it, or choose another "
                "name with name=..."
            ) from None
        except ConfigError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise SetupError(
                f"the batch's folder {self.folder} cannot be written: {error.strerror or error}; choose another place "
                "with output_dir=... or another name with name=..."
            ) from error
        return self

    def _check(self, resume: bool, overwrite: bool) -> None:
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite were both given: one keeps the runs, the other deletes them")
        state = read_object(self.folder / "batch.json").get("state")
        if resume and state is None:
            raise RunNotFoundError(f"no batch to resume in {self.folder}; start it without --resume")
        if state is None and self.folder.is_dir() and any(item.name != ".lock" for item in self.folder.iterdir()):
            raise RunExistsError(
                f"{self.folder} is not empty and not a batch's folder (it has no batch.json): choose another folder "
                "with name=... or output_dir=..."
            )
        if state is not None and not (resume or overwrite):
            raise RunExistsError(
                f"{self.folder} already contains a batch ({state}): run what is missing or failed with --resume, "
                "delete it and start over with --overwrite, or choose another name with name=..."
            )

    def _read(self, resume: bool) -> None:
        """Read the statuses in the folder; a run that was running when its batch was killed counts as killed."""
        changed = []
        for run in self.batch.runs:
            fresh = RunStatus(run.name, str(run.notebook.path), run.parameters)
            found = (RunStatus.read(self.folder / run.name / "status.json") if resume else None) or fresh
            self.statuses[run.name] = found
            old, new = ({"the notebook": one.notebook, **one.parameters} for one in (found, fresh))
            changes = [
                f"{name} was {old.get(name, 'not given')!r}, is {new.get(name, 'not given')!r}"
                for name in sorted(old | new)
                if old.get(name, ...) != new.get(name, ...)
            ]
            changed += [f"{run.name}: {', '.join(changes)}"] if changes else []
        if changed:
            raise ConfigError(
                "--resume, but runs have changed since they started:\n"
                + "\n".join(changed)
                + "\nchange them back, give them another name, or start the batch over with --overwrite"
            )
        for status in self.statuses.values():
            if status.state == "running":
                status.state, status.error = "killed", "its batch was killed (SIGKILL, a crash, a power failure)"
                self.save(status)
        self.left = sorted({path.parent.name for path in self._status_files()} - self.statuses.keys())

    def _status_files(self) -> list[Path]:
        """The files of all runs of a batch in the folder."""
        return [path for path in self.folder.glob("*/status.json") if RunStatus.read(path)]

    def _delete(self) -> None:
        """Delete the files that a batch writes, also in its runs' folders; everything else stays."""
        for folder in [path.parent for path in self._status_files()]:
            for name in RUN_FILES:
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / TRAINING, ignore_errors=True)
            if not any(folder.iterdir()):
                folder.rmdir()
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)

    def training(self, name: str) -> RunDir:
        """The folder of a run's training run, which need not exist."""
        return RunDir(self.folder / name / TRAINING)

    def to_do(self) -> list[BatchRun]:
        """The runs that are not done, in order."""
        return [run for run in self.batch.runs if self.statuses[run.name].state != "done"]

    def save(self, status: RunStatus) -> None:
        """Replace a run's `status.json` atomically."""
        folder = self.folder / status.name
        folder.mkdir(exist_ok=True)
        write_json(folder / "status.json", asdict(status))

    def save_batch(self, state: str, resume: str) -> None:
        """Replace `batch.json`: the state (running, finished, interrupted), the command that resumes it, the counts,
        and a summary of every run."""
        values = {"name": self.batch.name, "state": state, "pid": os.getpid(), "started": self.started}
        values |= {"updated": now(), "counts": count_states(self.statuses.values())}
        values |= {"runs": [asdict(status) for status in self.statuses.values()], "resume": hide_secrets(resume)}
        write_json(self.folder / "batch.json", values)

    def close(self) -> None:
        """Release the folder; harmless a second time."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "BatchDir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def count_states(statuses: Iterable[RunStatus]) -> dict[str, int]:
    """The number of runs in each state, in the order of `State`; states without a run are left out."""
    counts = Counter(status.state for status in statuses)
    return {state: counts[state] for state in get_args(State) if counts[state]}


# The figures of the comparison (with _before or _after appended): measures with their intervals, and attributes.
MEASURES = {"accuracy": "accuracy", "greedy_accuracy": "greedy_accuracy", "win_rate": "win_rate"}
MEASURES["held_out_reward"] = "reward"
ATTRIBUTES = {
    "thinking_tokens": "mean_thinking_tokens",
    "closed_share": "closed_share",
    "tokens": "mean_tokens",
    "eval_prompts": "num_prompts",
}
# What may lead, in titles, and the other one.
WORDS = {"accuracy": ("accuracy", "held-out reward"), "held_out_reward": ("reward", "accuracy")}
WORDS["win_rate"] = "win rate", "held-out reward"
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
    summary = [f"{len(rows)} runs: {counts}; {seconds} of running time in all."]
    summary += [f"Every run: {', '.join(common)}."] if common else []
    failures = []
    for one in (one for one in place.statuses.values() if one.error):
        tone, log = TONES.get(one.state, ""), f"{one.name}/log.txt" if one.attempts else ""
        failures.append({"name": one.name, "state": one.state, "tone": tone, "error": one.error, "log": log})
    page = make_page(
        "comparison.html.jinja", title=f"{place.batch.name} - batch of RLOO runs", heading=place.batch.name,
        summary=summary, tables=[("Every run", _every_run(place, rows), _legend(rows))], curves=None, failures=failures,
    )  # fmt: skip
    contents = {"comparison.html": page, "comparison.csv": text.getvalue()}
    return [write_text(place.folder / name, content) for name, content in contents.items()]


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
    return draw_bar(sides(row), 1.0 if name in ("accuracy", "win_rate") else max(ends), min(ends))


def change(row: dict[str, Any], name: str, form: str, arrow: str = " → ", only: str = "") -> str:
    """Before and after as text, or the one that was measured, or `only` one of them; a dash without any."""
    values = [row.get(f"{name}_{when}") for when in ("before", "after") if only in ("", when)]
    return arrow.join(format(value, form) for value in values if value is not None) or "-"


def leading_figure(rows: Sequence[dict[str, Any]]) -> str:
    """The deciding figure: "win_rate" or "held_out_reward" if it leads in any of the runs, else "accuracy"."""
    leads = {row["measure"] for row in rows}
    return "win_rate" if "win_rate" in leads else "held_out_reward" if "reward" in leads else "accuracy"


def _other(row: dict[str, Any], lead: str) -> str:
    """The accuracy if the reward leads, else the reward; exact match is labelled, left out if only it is 0."""
    if lead != "held_out_reward":
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
