"""Which tasks of reasoning-gym are offered: each verifier on its task's rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.data.gym import REFUSED, SOUND
from rloo_kit.system.versions import is_importable
from tests.data.gym_verifiers import is_answer, measure, nonsense, runs_python

DATA_PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
LONG = (pytest.mark.slow, pytest.mark.long)
pytestmark = pytest.mark.skipif(not is_importable("reasoning_gym"), reason="make reasoning-gym has not been run")


def test_every_task_of_the_library_is_on_one_list() -> None:
    """A new version brings tasks whose verifiers are not measured yet."""
    from reasoning_gym.factory import DATASETS

    assert sorted([*SOUND, *REFUSED]) == sorted(DATASETS) and not set(SOUND) & set(REFUSED)
    assert len(SOUND) + len(REFUSED) == 106 and all(REFUSED.values())


def test_the_page_has_the_reason_of_each_refusal() -> None:
    """A reason that was typed in by hand outlives the list."""
    page = DATA_PAGE.read_text(encoding="utf-8")
    assert all(f"| `{task}` | {why} |" in page for task, why in REFUSED.items())


def test_nonsense_of_every_kind_never_holds_the_answer() -> None:
    """Many verifiers give a text that holds the answer a share of the score: that is no fault of theirs. Some answers
    lost a kind, and nothing said so; measure() raises where one is lost."""
    for answer in ("7", "2", "5", "0", "-1", "a", "on", "nan", "42", "yes", "-3/4", "['1', '2']", "A# B#", "[ ]"):
        found = list(nonsense(f"What is {answer}, or {answer.upper()}?", answer))
        assert len({kind for kind, _ in found}) == 11
        assert not any("".join(answer.lower().split()) in "".join(text.lower().split()) for _, text in found)
    assert not {"0.0", "0"} & {text for _, text in nonsense("", "0.00")} and is_answer("1", "1.0")


def test_a_verifier_that_runs_answers_is_found(tmp_path: Path) -> None:
    """Seven offered verifiers ran what the model wrote; in four an answer had to be a list first."""

    class Verifier:
        def __init__(self, judge: Any) -> None:
            self.score_answer = judge

    def run_lists(answer: str, entry: Any) -> float:
        if not answer.startswith("["):
            raise ValueError(answer)
        return float(bool(eval(answer)))

    assert runs_python(Verifier(run_lists), {}) and runs_python(Verifier(lambda answer, _: exec(answer)), {})
    assert not runs_python(Verifier(lambda answer, _: float(answer)), {})


@pytest.mark.parametrize("rows", [2, pytest.param(20, marks=LONG)])
def test_offered_tasks_have_sound_verifiers(rows: int) -> None:
    """The stored answer scores 1, every kind of nonsense 0, nothing raises, and no answer is run as Python: reward for
    nonsense is what a policy finds first, and its text must never be a program."""
    faulty = {}
    for task in SOUND:
        found = measure(task, rows)
        if found["runs_python"] or (found["gold"], found["nonsense"], found["raised"]) != (1.0, {}, {}):
            faulty[task] = found
    assert not faulty


@pytest.mark.parametrize("rows", [2, pytest.param(50, marks=LONG)])
def test_offered_tasks_draw_the_same_rows_in_another_process(run_fresh: Any, rows: int) -> None:
    """list_functions draws some rows with the generator that all share, that of seed 74 too: a run that was resumed had
    others."""
    code = f"""
import json
from rloo_kit.data.gym import SOUND, draw_row
asked = {{task: (task, "{{}}", None, "data.options", 74, {rows}) for task in SOUND}}
found = {{task: [draw_row(*asked[task], index) for index in range({rows})] for task in SOUND}}
print("\\n" + json.dumps(found))
"""
    first, second = (json.loads(run_fresh(code, PYTHONHASHSEED="0").stdout.splitlines()[-1]) for _ in range(2))
    assert [task for task in SOUND if first[task] != second[task]] == []
    assert all(entry and is_sound for drawn in first.values() for entry, is_sound in drawn)
