"""What judges whether a completion is right: the answer rewards, a task's verifier, or exact match."""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

from rloo_kit.rewards.answer import has_no_answer

REWARDS_WITH_ANSWERS = ("answer_reward", "math_answer_reward")
ROW_REWARDS = "rewards"  # the column that names the rewards of a row
EXACT = "exact match"  # judges where no reward of the run compares answers
GYM_REWARD = "reasoning_gym_score"  # compares with the column `reasoning_gym`, in place of `answer`


class GymRow(str):
    """The column `reasoning_gym` of a row in place of its answer: the task's verifier judges, because many tasks have
    several right answers."""


def names_in(value: Any) -> list[str] | None:
    """The rewards that a row's column `rewards` names: a list, or text with commas. None: all of the run's; also for
    anything else, such as a list of numbers.

    >>> names_in("code_reward, length_reward"), names_in(None)
    (['code_reward', 'length_reward'], None)
    """
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return list(value) if is_list else None


def task_of(row: Mapping[str, Any]) -> str | None:
    """The name of a row's task, for metrics: its column `task`, else the rewards that it names. None without the column
    `rewards`: elsewhere a `task` may be anything, such as the prompt."""
    if ROW_REWARDS not in row:
        return None
    return str(row["task"]) if row.get("task") is not None else "+".join(names_in(row.get(ROW_REWARDS)) or ()) or None


def gold_answers(dataset: Any) -> list[Any] | None:
    """What each prompt's completions are judged by: its answer or its `GymRow`; None without either column. A row that
    names its rewards, and none that compares answers, has none."""
    names = dataset.column_names
    answers, rows = (list(dataset[name]) if name in names else None for name in ("answer", "reasoning_gym"))
    if answers is not None and ROW_REWARDS in names:
        named = [names_in(value) for value in dataset[ROW_REWARDS]]
        pairs = zip(answers, named, strict=True)
        answers = [gold if row_names is None or answer_reward_of(row_names) else None for gold, row_names in pairs]
    if rows is None:
        return answers
    answers = answers or [None] * len(rows)
    return [answer if row is None else GymRow(row) for answer, row in zip(answers, rows, strict=True)]


def answer_reward_of(names: Iterable[str]) -> str | None:
    """The first of a run's rewards, by the names they are logged under, that compares with right answers; else None."""
    logged = set(names)
    return next((name for name in (*REWARDS_WITH_ANSWERS, GYM_REWARD) if name in logged), None)


def find_judge(gold: list[Any] | None, names: Iterable[str]) -> str | None:
    """What judges whether answers are right: one of the run's rewards, by the `names` they are logged under, or EXACT;
    None without answers, and if no reward compares them and they are no texts or numbers."""
    answers = [answer for answer in gold or () if not has_no_answer(answer)]
    name = answer_reward_of(names)
    return None if not answers or (name is None and not all(map(is_comparable, answers))) else name or EXACT


def is_comparable(answer: Any) -> bool:
    """Whether an answer is text or a finite number, not true or false."""
    is_number = isinstance(answer, Real | Decimal) and not isinstance(answer, bool)
    return isinstance(answer, str) or (is_number and abs(answer) != math.inf)
