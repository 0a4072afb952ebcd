"""What the kit says about eight kinds of tasks: the measure that decides, the verdict, its advice and its figures, the
same on every surface.

The first model that was not the kit's own rose from 0.015 to 0.740 by its reward, and the kit said "no evidence:
accuracy went from 0.0 % to 0.0 %, train longer".
"""

import json
import shutil
import statistics
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rloo_kit.cli import app
from rloo_kit.runs.files import read_rows
from rloo_kit.runs.rollouts import read_rollouts
from tests.html_page import Page
from tests.tasks.tasks import TASKS, Task

CORE = ("literal",)  # the others are alike, and slow


def call(*words: Any) -> str:
    """What `rloo-kit words` prints."""
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.stdout


@pytest.mark.parametrize(
    "task", [pytest.param(task, id=task.name, marks=() if task.name in CORE else pytest.mark.slow) for task in TASKS]
)
def test_a_task_is_judged_by_what_its_rewards_pay_for(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact match led where nothing compared answers, and the report said something else than `show`."""
    monkeypatch.setenv("COLUMNS", "400")
    printed = call("train", task.write(tmp_path))
    run, twin = tmp_path / "outputs" / task.name, tmp_path / "outputs" / "untrained"
    verdict = json.loads((run / "status.json").read_text())["verdict"]
    assert verdict["kind"] in task.kinds and verdict["change"]["measure"] == task.leads, verdict
    assert not task.advice or any(words in verdict["next"] for words in task.advice), verdict["next"]
    assert bool(verdict["next"]) or verdict["kind"] == "learnt"

    report = Page((run / "report.html").read_text(encoding="utf-8")).text
    for surface, text in {"train": printed, "show": call("show", run), "report": report}.items():
        assert verdict["kind"] in text and verdict["sentence"] in " ".join(text.split()), surface

    shutil.copytree(run, twin)
    shutil.copy(twin / "before.json", twin / "after.json")
    compared = json.loads(call("show", twin, run, "--json"))
    assert compared["runs"][1]["lead"] == verdict["change"], "the lead over the untrained twin"
    check_figures(task, run)


def check_figures(task: Task, run: Path) -> None:
    """The means in the files are those of the completions, and no interval leaves the reward's range."""
    steps = groupby(read_rollouts(run), key=lambda row: row["step"])
    totals = {step: statistics.fmean(row["reward"] for row in rows) for step, rows in steps}
    logged = {row["step"]: row["reward"] for row in read_rows(run / "metrics.jsonl")}
    assert logged == pytest.approx(totals)
    for when in ("before", "after"):
        found = json.loads((run / f"{when}.json").read_text())
        reward, samples = found["measures"]["reward"], [*found["samples"], *found["more_samples"]]
        assert reward["value"] == pytest.approx(statistics.fmean(sample["reward"] for sample in samples))
        assert (
            task.low <= reward["low"] <= reward["value"] <= reward["high"] <= task.high
            and reward["low"] < reward["high"]
        )
