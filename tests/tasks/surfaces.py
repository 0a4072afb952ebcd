"""Runs a task through the command line, and collects everything that the kit then shows of the run."""

import contextlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import rloo_kit as kit
from rloo_kit.cli import app
from rloo_kit.results.verdict import load_evaluation, load_result
from rloo_kit.runs.find import find_run
from tests.tasks.tasks import Task, write_task


@dataclass
class Surfaces:
    """What a run shows. Texts and pages as they are; JSON as values.

    Attributes:
        folder: of the run. twin: its copy in which `after.json` is `before.json`, as if it had not been trained.
        printed: by `rloo-kit train`. show, versus: `rloo-kit show` of the run, and of twin and run. report, page:
            `report.html`, `comparison.html` of both.
        plot, evaluation, comparison: what a notebook shows, as text.
    """

    folder: Path
    twin: Path
    printed: str
    show: str
    versus: str
    versus_json: dict[str, Any]
    report: str
    page: str
    plot: str
    evaluation: str
    comparison: str


def run_task(task: Task, folder: Path) -> Surfaces:
    """Train `task` in `folder`, with `rloo-kit train`, and look at it everywhere; wants a wide terminal (COLUMNS)."""
    printed = _call("train", write_task(task, folder))
    run = folder / "outputs" / task.name
    twin = run.parent / "untrained"
    shutil.copytree(run, twin)
    shutil.copy(twin / "before.json", twin / "after.json")
    page = folder / "comparison.html"
    _call("report", twin, run, "--output", page)
    found = find_run(run)
    before, after = load_evaluation(found, "before"), load_evaluation(found, "after")
    with contextlib.redirect_stdout(io.StringIO()):  # outside a notebook they print themselves
        plot = kit.plot_training(load_result(found))
    return Surfaces(
        folder=run,
        twin=twin,
        printed=printed,
        show=_call("show", run),
        versus=_call("show", twin, run),
        versus_json=json.loads(_call("show", twin, run, "--json")),
        report=(run / "report.html").read_text(encoding="utf-8"),
        page=page.read_text(encoding="utf-8"),
        plot=repr(plot),
        evaluation=f"{before}\n{after}",
        comparison=str(kit.compare(before, after)),
    )


def _call(*words: Any) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    allowed = (0, 1) if words[0] == "show" else (0,)  # show: 1 for a run that is alarming
    if result.exit_code not in allowed:
        raise RuntimeError(f"rloo-kit {' '.join(map(str, words))} ended with {result.exit_code}:\n{result.output}")
    return result.stdout
