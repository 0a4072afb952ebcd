"""Which tasks of reasoning-gym are offered: each verifier on its task's rows.

A verifier is sound if the stored answer scores 1, nonsense 0, nothing raises, and no answer is run as Python. Nonsense
never equals or contains the stored answer: some verifiers give len(stored) / len(given) to a text that does.
"""

import contextlib
import io
import json
import os
import random
import re
import tempfile
from typing import Any

import pytest

from rloo_kit.system.versions import is_importable
from rloo_kit.tasks.gym import REFUSED, SOUND, make_dataset

LONG = (pytest.mark.slow, pytest.mark.long)
pytestmark = pytest.mark.skipif(not is_importable("reasoning_gym"), reason="make reasoning-gym has not been run")

START = 2**30  # of the rows' seeds
NUMBERS = ("7310055", "4446644", "99", "28", "135790864200", "55555")
NONSENSE = (
    "", "  \n\t ", "purple giraffe beneath quiet thunder", "slowly mumbling jelly", "qwx vbn hjk", "#~#~#", *NUMBERS,
    *(f"-{number}.{part}" for number in NUMBERS for part in ("25", "6")), "nan", "inf", "-inf", "0", "1", "-1", "2",
    "10", "100", "0.0", "0.5", "1/2", "0:00", "00:00:00", "[]", "[[]]", "{}", "()", "''", '""', "None", "null", "true",
    "false", "yes", "no", "A", "a", ".", "-", "x", "0 0", "[0]", "unknown", '{"a": [[], {"b"', "[[{((", "[", "<",
    "purple giraffe " * 800, "#~#~# " * 800, "\u3042\u0645 \U0001f642 \u00e9\ufffd \ufdfd", "\u05d0",
    "\\boxed{{\\frac{}$", "\\boxed{", "$",
)  # fmt: skip


def nonsense(question: str, answer: str) -> list[str]:
    """Texts that answer nothing; none is or contains the stored answer."""
    without = question
    while is_answer(without, answer):
        without = re.sub(r"\s*".join(map(re.escape, "".join(answer.split()))), "", without, flags=re.IGNORECASE)
    return [text for text in (*NONSENSE, without, without.replace(" ", "")) if not is_answer(text, answer)]


def is_answer(text: str, answer: str) -> bool:
    """Whether a text contains the stored answer, or is the same number."""
    if "".join(answer.lower().split()) in "".join(text.lower().split()):
        return True
    try:
        return float(text) == float(answer)
    except ValueError:
        return False


def runs_python(verifier: Any, entry: dict[str, Any]) -> bool:
    """Whether the verifier runs an answer as Python: each probe creates a file, in a form that verifiers may expect."""
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "made")
        code = f"open('{made}', 'w')"
        system = f"__import__('os').system('touch {made}')"
        forms = "{}", "[{}]", "[[{}]]", "{{0: {}}}", "str({})", "1 + {}"
        for text in [form.format(made_by) for made_by in (code, system) for form in forms]:
            with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stderr(io.StringIO()):
                verifier.score_answer(text, entry)
            if os.path.exists(made):
                return True
    return False


def find_faults(task: str, rows: int) -> list[str]:
    """What is wrong with the task's verifier on `rows` rows."""
    random.seed(START)  # list_functions draws some rows with the generator that all share
    dataset, verifier = (make_dataset(task, {}, seed=seed, size=rows) for seed in (START, 0))
    entries = [dataset[index] for index in range(rows)]
    if any(runs_python(verifier, entry) for entry in entries[:5]):
        return ["runs an answer as Python"]
    found = []
    for entry in entries:
        answer = entry["answer"].strip()
        for text, expected in [(answer, 1.0), *((text, 0.0) for text in nonsense(entry["question"], answer))]:
            try:
                value = float(verifier.score_answer(text, entry))
            except (Exception, SystemExit) as error:
                value = f"{type(error).__name__}: {error}"[:200]
            if value != expected:
                found.append(f"{text[:40]!r}: {value}")
    return found


def test_every_task_of_the_library_is_on_one_list() -> None:
    """A new version brings tasks whose verifiers are not measured yet."""
    from reasoning_gym.factory import DATASETS

    assert sorted([*SOUND, *REFUSED]) == sorted(DATASETS) and not set(SOUND) & set(REFUSED)
    assert len(SOUND) + len(REFUSED) == 106 and all(REFUSED.values())


@pytest.mark.parametrize("rows", [pytest.param(2, marks=pytest.mark.slow), pytest.param(20, marks=LONG)])
def test_offered_tasks_have_sound_verifiers(rows: int) -> None:
    """Reward for nonsense is what a policy finds first, and its text must never be run as a program."""
    assert {task: found for task in SOUND if (found := find_faults(task, rows))} == {}


@pytest.mark.parametrize("rows", [pytest.param(2, marks=pytest.mark.slow), pytest.param(50, marks=LONG)])
def test_offered_tasks_draw_the_same_rows_in_another_process(run_fresh: Any, rows: int) -> None:
    """list_functions draws some rows with the generator that all share: a resumed run had others."""
    code = f"""
import json
from rloo_kit.tasks.gym import SOUND, draw_rows
found = {{task: draw_rows(task, "{{}}", "data.options", 74, {rows}, 60.0, 20.0, 0) for task in SOUND}}
print("\\n" + json.dumps(found))
"""
    first, second = (json.loads(run_fresh(code, PYTHONHASHSEED="0").stdout.splitlines()[-1]) for _ in range(2))
    assert [task for task in SOUND if first[task] != second[task]] == []
    assert all(entry and is_sound for drawn in first.values() for entry, _, is_sound in drawn)
