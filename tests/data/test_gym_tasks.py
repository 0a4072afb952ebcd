"""Which tasks of reasoning-gym are offered: each verifier on rows of its own, by `benchmarks/gym_tasks.py`."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.data.gym_tasks import REFUSED, SOUND
from rloo_kit.system.versions import is_importable

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SELDOM = ("too slow",)  # measured by the benchmark: a figure of seconds is one of that machine
pytestmark = pytest.mark.skipif(not is_importable("reasoning_gym"), reason="make reasoning-gym has not been run")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module; the folder lies last on the path, because its rewards.py is not the package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    return importlib.import_module("gym_tasks")


def test_every_task_of_the_library_is_on_one_list(bench: Any) -> None:
    """A new version brings tasks whose verifiers nobody has looked at."""
    assert sorted([*SOUND, *REFUSED]) == bench.list_tasks() and not set(SOUND) & set(REFUSED)
    assert len(SOUND) + len(REFUSED) == 106 and all(REFUSED.values())


def test_the_lists_are_those_that_were_measured() -> None:
    """A reason that was typed in by hand outlives the figure."""
    found = json.loads((FOLDER / "results" / "gym_tasks.json").read_text(encoding="utf-8"))
    assert {row["task"]: row["refused"] for row in found["tasks"] if row["refused"]} == REFUSED
    assert (found["sound"], found["refused"]) == (len(SOUND), len(REFUSED))
    page = (FOLDER.parent / "docs" / "data.md").read_text(encoding="utf-8")
    assert all(f"| `{task}` | {why} |" in page for task, why in REFUSED.items())


def test_ten_kinds_of_nonsense_never_hold_the_answer(bench: Any) -> None:
    """Many verifiers give a text that holds the answer a share of the score: that is no fault of theirs."""
    for answer in ("7", "42", "yes", "-3/4", "['1', '2']"):
        found = dict(bench.nonsense(f"What is {answer}?", answer))
        assert len(found) == 10 and all(answer not in text for text in found.values())


@pytest.mark.parametrize("rows", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_offered_tasks_have_sound_verifiers(bench: Any, rows: int) -> None:
    """The stored answer scores 1, ten kinds of nonsense 0, nothing raises: reward for nonsense is what a policy finds
    first."""
    faulty = {}
    for task in SOUND:
        found = bench.measure(task, rows, most_drawn=rows)
        if (found["gold"], found["nonsense"], found["raised"]) != (1.0, {}, {}):
            faulty[task] = found
    assert not faulty


@pytest.mark.slow
def test_refused_tasks_are_refused_for_their_reason(bench: Any) -> None:
    """A task that a new version has mended may be offered again."""
    for task, why in REFUSED.items():
        if not any(word in why for word in SELDOM):
            assert bench.why_refused(bench.measure_apart(task, 60, most_drawn=60)) == why, task
