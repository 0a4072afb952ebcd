"""`code_reward` against a plain interpreter, on a corpus of right and wrong answers in every form of tests."""

from collections import Counter
from typing import Any

import pytest

from rloo_kit.errors import RewardError
from rloo_kit.graders.code import CodeReward, find_jail
from tests.graders.code_corpus import Task, plain_shares, read_tasks

pytestmark = pytest.mark.slow

TASKS = read_tasks()
JOBS = [
    (task, answer, right)
    for task in TASKS.values()
    for right in (True, False)
    for answer in vars(task)["right" if right else "wrong"]
]
# Tasks that the reward does not score, None for each of their answers, with the reason.
UNSCORED: dict[str, str] = {
    "logs_lines": "the tests replace a part of the code's process with unittest.mock",
    "tests_own_objects": "the tests hand the code an object of a class of their own",
}


@pytest.fixture(scope="module")
def shares() -> list[float]:
    """What each answer of JOBS is worth in a plain interpreter."""
    return plain_shares([(task, answer) for task, answer, _ in JOBS])


def show(task: Task, answer: str, *values: Any) -> str:
    return f"{task.name} ({task.form}, {task.kind}): {', '.join(map(str, values))}\n{answer}"


def test_plain_python_tells_right_from_wrong(shares: list[float]) -> None:
    """A corpus that is wrong about an answer says nothing about the reward."""
    offenders = [
        show(task, answer, "right" if right else "wrong", share)
        for (task, answer, right), share in zip(JOBS, shares, strict=True)
        if (share == 1.0) is not right
    ]
    assert not offenders, f"{len(offenders)} of {len(JOBS)}:\n" + "\n".join(offenders)
    counts = Counter(right for _, _, right in JOBS)
    assert min(counts.values()) >= 300 and len({(task.name, answer) for task, answer, _ in JOBS}) == len(JOBS), counts


def test_the_reward_agrees_with_plain_python(shares: list[float]) -> None:
    """Right answers are worth exactly 1.0, wrong ones no more than the share that holds; or a task is not scored."""
    try:
        find_jail()
    except RewardError as error:
        pytest.skip(str(error))
    columns = {name: [task.row.get(name) for task, _, _ in JOBS] for task in TASKS.values() for name in task.row}
    values = CodeReward(thinking=False)(
        completions=[f"An answer:\n\n```python\n{answer}```\n" for _, answer, _ in JOBS],
        completion_ids=[[1]] * len(JOBS),
        tests=[task.tests for task, _, _ in JOBS],
        **columns,
    )
    offenders, unscored = [], Counter[str]()
    for (task, answer, right), share, value in zip(JOBS, shares, values, strict=True):
        unscored[task.name] += value is None
        if value is None and task.name in UNSCORED or value == 1.0 and right:
            continue
        if right or value is None or not value <= share + 1e-9:
            offenders.append(show(task, answer, "right" if right else "wrong", f"reward {value}", f"plain {share}"))
    assert not offenders, f"{len(offenders)} of {len(JOBS)}:\n" + "\n".join(offenders)
    assert {name for name, count in unscored.items() if count} == UNSCORED.keys(), unscored
