"""Files, verdict, words and every interval on every surface of ten kinds of tasks, recomputed from the run's files.

The first model that was not the kit's own rose from 0.015 to 0.740 by its reward, and the kit said "no evidence:
accuracy went from 0.0 % to 0.0 %, train longer".
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.check import check_run
from tests.tasks.surfaces import Surfaces, run_task
from tests.tasks.tasks import BY_NAME, TASKS

CORE = ("literal", "marker", "penalty", "never")  # the others are alike, and slow


@pytest.fixture(scope="session")
def toy_runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`toy_runs(name)`: the surfaces of that task on the toy, run once a session."""
    found: dict[str, Surfaces] = {}

    def look(name: str) -> Surfaces:
        if name not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("COLUMNS", "400")
                found[name] = run_task(BY_NAME[name], "toy", tmp_path_factory.mktemp(name))
        return found[name]

    return look


@pytest.mark.parametrize("name", [
    pytest.param(task.name, marks=() if task.name in CORE else pytest.mark.slow) for task in TASKS
])  # fmt: skip
def test_every_figure_of_a_task_is_true(toy_runs: Any, name: str) -> None:
    """Exact match led where nothing compared answers; `show` printed episodes a second as tokens per second."""
    assert check_run(BY_NAME[name], "toy", toy_runs(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.long
def test_every_figure_of_a_task_is_true_on_a_real_model(
    smollm2_at: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toy's answers are bare numbers after a tag; a real model's are sentences, and it does not think."""
    monkeypatch.setenv("COLUMNS", "400")
    smollm2_at("smollm2/thinking" if name == "thinking" else "smollm2/instruct")
    assert check_run(BY_NAME[name], "real", run_task(BY_NAME[name], "real", tmp_path)) == []


CHANGES = {
    "printed": " [0", "show": " [0", "report": " [0", "versus": "[0", "page": "[0",
    "evaluation": " [0", "comparison": "[+0",
}  # fmt: skip


@pytest.mark.parametrize("surface", CHANGES)
def test_a_wrong_figure_is_found(toy_runs: Any, surface: str) -> None:
    """A check that reads past a figure would call everything true."""
    surfaces = toy_runs("literal")
    old, text = CHANGES[surface], getattr(surfaces, surface)
    assert old in text
    changed = dataclasses.replace(surfaces, **{surface: text.replace(old, old.replace("0", "9"), 1)})
    assert len(check_run(BY_NAME["literal"], "toy", changed)) > len(check_run(BY_NAME["literal"], "toy", surfaces))
