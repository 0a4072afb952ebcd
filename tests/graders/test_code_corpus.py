"""`code_reward` on a corpus of right and wrong answers in every form of tests, sorted by plain Python."""

from collections import Counter
from typing import Any

import pytest

from rloo_kit.errors import RewardError
from rloo_kit.graders.code import CodeReward, find_jail
from tests.graders.code_corpus import Task, read_tasks

pytestmark = pytest.mark.slow

TASKS = read_tasks()
# Tasks of which right answers are not scored, with the reason.
UNSCORED: dict[str, str] = {
    "printed": "the tests catch what the code prints",
    "logs_lines": "the tests replace a part of the code's process with unittest.mock",
    **dict.fromkeys(("functions_given", "observer"), "the tests hand the code a function of their own"),
    "tests_own_objects": "the tests hand the code an object of a class of their own",
    "pipeline": "the tests hand the code an iterator",
    "array_argument": "the tests hand the code an array",
    **dict.fromkeys(("book", "version_order"), "dataclasses.asdict and replace look into an object of the code's"),
    "pages": "the tests match an object of the code's against its class",
    "own_errors": "the tests read __cause__ of the code's exception",
    **dict.fromkeys(
        ("context_managers", "decorators", "events_calendar", "keeps_its_list", "singleton", "group_default"),
        "the tests change, or know again, a container that the code gave out and keeps",
    ),
    "ordered": "a subclass of OrderedDict is compared by its content alone",
    **dict.fromkeys(
        ("range_like", "sets_of_own"), "an operator gets a plain value, and no attribute shows that the name is a class"
    ),
    "array_results": "the tests look at an array's type and shape",
}


def test_right_answers_are_worth_one_and_wrong_ones_less() -> None:
    """Else a run learns from a wrong verdict; what cannot be judged is not scored."""
    try:
        find_jail()
    except RewardError as error:
        pytest.skip(str(error))
    jobs: list[tuple[Task, str, bool]] = []
    for task in TASKS.values():
        jobs += [(task, answer, True) for answer in task.right] + [(task, answer, False) for answer in task.wrong]
    columns: dict[str, list[Any]] = {
        name: [task.row.get(name) for task, _, _ in jobs] for task in TASKS.values() for name in task.row
    }
    values = CodeReward(thinking=False)(
        completions=[f"An answer:\n\n```python\n{answer}```\n" for _, answer, _ in jobs],
        completion_ids=[[1]] * len(jobs),
        tests=[task.tests for task, _, _ in jobs],
        **columns,
    )
    offenders, unscored = [], Counter[str]()
    for (task, answer, is_right), value in zip(jobs, values, strict=True):
        unscored[task.name] += value is None
        is_unscored = value is None and task.name in UNSCORED
        if not is_unscored and (value is None or (value == 1.0) != is_right):
            offenders.append(f"{task.name} ({task.form}, {task.kind}): {is_right}, reward {value}\n{answer}")
    assert not offenders, f"{len(offenders)} of {len(jobs)}:\n" + "\n".join(offenders)
    assert {name for name, count in unscored.items() if count} == UNSCORED.keys(), unscored
