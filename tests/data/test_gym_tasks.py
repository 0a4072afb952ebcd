"""Which tasks of reasoning-gym are offered: each verifier on its task's rows, by `benchmarks/gym_tasks.py`."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.data.gym_tasks import REFUSED, SOUND
from rloo_kit.system.versions import is_importable

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
LONG = (pytest.mark.slow, pytest.mark.long)
SELDOM = ("too slow",)  # measured by the benchmark: a figure of seconds is one of that machine
pytestmark = pytest.mark.skipif(not is_importable("reasoning_gym"), reason="make reasoning-gym has not been run")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module; the folder lies last on the path, because its rewards.py is not the package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    return importlib.import_module("gym_tasks")


def test_every_task_of_the_library_is_on_one_list(bench: Any) -> None:
    """A new version brings tasks whose verifiers are not measured yet."""
    assert sorted([*SOUND, *REFUSED]) == bench.list_tasks() and not set(SOUND) & set(REFUSED)
    assert len(SOUND) + len(REFUSED) == 106 and all(REFUSED.values())


def test_the_lists_are_those_that_were_measured() -> None:
    """A reason that was typed in by hand outlives the figure."""
    found = json.loads((FOLDER / "results" / "gym_tasks.json").read_text(encoding="utf-8"))
    assert {row["task"]: row["refused"] for row in found["tasks"] if row["refused"]} == REFUSED
    assert (found["sound"], found["refused"]) == (len(SOUND), len(REFUSED))
    page = (FOLDER.parent / "docs" / "data.md").read_text(encoding="utf-8")
    assert all(f"| `{task}` | {why} |" in page for task, why in REFUSED.items())


def test_nonsense_of_every_kind_never_holds_the_answer(bench: Any) -> None:
    """Many verifiers give a text that holds the answer a share of the score: that is no fault of theirs. Some answers
    lost a kind, and nothing said so; measure() raises where one is lost."""
    for answer in ("7", "2", "5", "0", "-1", "a", "on", "nan", "42", "yes", "-3/4", "['1', '2']", "A# B#", "[ ]"):
        found = list(bench.nonsense(f"What is {answer}, or {answer.upper()}?", answer))
        assert len({kind for kind, _ in found}) == 11
        assert not any("".join(answer.lower().split()) in "".join(text.lower().split()) for _, text in found)
    assert not {"0.0", "0"} & {text for _, text in bench.nonsense("", "0.00")} and bench.is_answer("1", "1.0")


def test_a_verifier_that_runs_answers_is_found(bench: Any, tmp_path: Path) -> None:
    """Seven offered verifiers ran what the model wrote; in four an answer had to be a list first."""

    class Verifier:
        def __init__(self, judge: Any) -> None:
            self.score_answer = judge

    def run_lists(answer: str, entry: Any) -> float:
        if not answer.startswith("["):
            raise ValueError(answer)
        return float(bool(eval(answer)))

    assert bench.runs_python(Verifier(run_lists), {}) and bench.runs_python(
        Verifier(lambda answer, _: exec(answer)), {}
    )
    assert not bench.runs_python(Verifier(lambda answer, _: float(answer)), {})


@pytest.mark.parametrize("rows", [2, pytest.param(20, marks=LONG)])
def test_offered_tasks_have_sound_verifiers(bench: Any, rows: int) -> None:
    """The stored answer scores 1, every kind of nonsense 0, nothing raises, and no answer is run as Python: reward for
    nonsense is what a policy finds first, and its text must never be a program."""
    faulty = {}
    for task in SOUND:
        found = bench.measure(task, rows, most_drawn=rows)
        if found["runs_python"] or (found["gold"], found["nonsense"], found["raised"]) != (1.0, {}, {}):
            faulty[task] = found
    assert not faulty


@pytest.mark.parametrize("rows", [2, pytest.param(50, marks=LONG)])
def test_offered_tasks_draw_the_same_rows_in_another_process(run_fresh: Any, rows: int) -> None:
    """list_functions draws some rows with the generator that all share, that of seed 74 too: a run that was resumed had
    others."""
    code = f"""
import json
from rloo_kit.data.gym_library import draw
from rloo_kit.data.gym_tasks import SOUND
found = {{task: draw(task, {{}}, None, 74, {rows}, "data.options") for task in SOUND}}
print("\\n" + json.dumps(found))
"""
    first, second = (json.loads(run_fresh(code, PYTHONHASHSEED="0").stdout.splitlines()[-1]) for _ in range(2))
    assert [task for task in SOUND if first[task] != second[task]] == []
    assert all(len(found["entries"]) == rows and not found["wrong"] for found in first.values())


@pytest.mark.slow
@pytest.mark.long
def test_refused_tasks_are_refused_for_their_reason(bench: Any) -> None:
    """A task that a new version has fixed may be offered again."""
    for task, why in REFUSED.items():
        if not any(word in why for word in SELDOM):
            assert bench.why_refused(bench.measure_apart(task, 60, most_drawn=60)) == why, task
