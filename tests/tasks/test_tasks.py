"""Every figure, word and advice on every surface of twelve kinds of tasks, recomputed from the run's files.

The first model that was not the kit's own rose from 0.015 to 0.740 by its reward, and the kit said "no evidence:
accuracy went from 0.0 % to 0.0 %, train longer".
"""

import dataclasses
import json
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
    "printed": ("reward 0", "reward 9"),
    "show": (" steps, ", " steps, 9"),
    "report": ("<dt>tokens generated</dt><dd>", "<dt>tokens generated</dt><dd>9"),
    "versus": ("[", "[9"),
    "page": ('<span class="under">[', '<span class="under">[9'),
    "batch": ("→ ", "→ 9"),
    "batch_page": ("→ ", "→ 9"),
    "plot": (" -> ", " -> 9"),
    "completions": (" tokens", "9 tokens"),
    "evaluation": (" [0", " [9"),
    "comparison": ("[", "[9"),
}


@pytest.mark.parametrize("surface", CHANGES)
def test_a_wrong_figure_is_found(toy_runs: Any, surface: str) -> None:
    """A check that reads past a figure would call everything true."""
    surfaces = toy_runs("literal")
    old, new = CHANGES[surface]
    text = getattr(surfaces, surface)
    assert old in text
    changed = dataclasses.replace(surfaces, **{surface: text.replace(old, new, 1)})
    assert len(check_run(BY_NAME["literal"], "toy", changed)) > len(check_run(BY_NAME["literal"], "toy", surfaces))


@pytest.mark.parametrize("path", ["accuracy/after/reward", "means/reward", "metrics/0/value", "step"])
def test_a_wrong_number_in_json_is_found(toy_runs: Any, path: str) -> None:
    """The same for `show --json`."""
    surfaces = toy_runs("literal")
    values = json.loads(json.dumps(surfaces.show_json))
    *parents, last = path.split("/")
    place = values
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] += 0.01
    changed = dataclasses.replace(surfaces, show_json=values)
    assert len(check_run(BY_NAME["literal"], "toy", changed)) > len(check_run(BY_NAME["literal"], "toy", surfaces))
