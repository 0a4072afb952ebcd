"""Gold answers as text, and which rows may go without one."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import refuse_surrogates
from rloo_kit.data.columns import DataSource
from rloo_kit.errors import DataError

REWARDS_WITH_ANSWERS = ("answer_reward", "math_answer_reward")
EXACT = "exact match"  # judges where no reward of the run compares answers
GYM_REWARD = "reasoning_gym_score"  # compares with the column `reasoning_gym`, in place of `answer`


class GymRow(str):
    """The column `reasoning_gym` of a row in place of its answer: the task's verifier judges, because many tasks have
    several right answers."""


def gold_answers(dataset: Any) -> list[Any] | None:
    """What each prompt's completions are judged by: its answer or its `GymRow`; None without either column."""
    columns = [list(dataset[name]) if name in dataset.column_names else None for name in ("answer", "reasoning_gym")]
    answers, rows = columns
    if rows is None:
        return answers
    answers = answers or [None] * len(rows)
    return [answer if row is None else GymRow(row) for answer, row in zip(answers, rows, strict=True)]


def answer_reward_of(names: Iterable[str]) -> str | None:
    """The first of a run's rewards, by the names they are logged under, that compares with right answers; else None."""
    found = set(names)
    return next((name for name in (*REWARDS_WITH_ANSWERS, GYM_REWARD) if name in found), None)


def compares_with_answers(run: RunConfig) -> bool:
    """Whether a reward of the run compares completions with the `answer` column."""
    return any(reward.name in REWARDS_WITH_ANSWERS for reward in run.rewards)


def needs_all_answers(run: RunConfig) -> bool:
    """Whether a row without an answer gets no reward, because every reward with a weight compares with answers."""
    names = {reward.name for reward in run.rewards if reward.weight}
    return names <= {*REWARDS_WITH_ANSWERS, GYM_REWARD} and names != {GYM_REWARD}


def find_judge(gold: list[Any] | None, names: Iterable[str]) -> str | None:
    """What judges whether answers are right: one of the run's rewards, by the `names` they are logged under, or EXACT;
    None without answers, and if no reward compares them and they are no texts or numbers."""
    known = [answer for answer in gold or () if not is_missing(answer)]
    name = answer_reward_of(names)
    return None if not known or (name is None and not is_plain(known)) else name or EXACT


def is_missing(answer: Any) -> bool:
    """Whether a row has no answer: null, NaN or blank text."""
    if isinstance(answer, float):
        return math.isnan(answer)
    return answer is None or (isinstance(answer, str) and not answer.strip())


def is_plain(answers: Iterable[Any]) -> bool:
    """Whether all are text, numbers or missing, and not lists, objects, or true and false."""
    return not any(isinstance(answer, list | dict | bool) for answer in answers)


def with_answers(run: RunConfig, source: DataSource, after: str | None, column: str) -> DataSource:
    """The source with its answers as text, None for a row without one if a reward scores such rows. If no reward
    compares answers, they may be lists, objects or true and false too, which are kept as they are.

    Args:
        after: the marker that an answer follows. column: key and name of the column, for errors.

    Raises:
        DataError: an answer that is not text or a number, or lacks the marker; a row without an answer it needs.
    """
    if source.answers is None:
        return source
    if after is None and answer_reward_of(one.name for one in run.rewards) is None and not is_plain(source.answers):
        return replace(source, answers=[None if is_missing(value) else value for value in source.answers])
    answers = [_answer(run, value, after, source.where(row), column) for row, value in enumerate(source.answers)]
    missing = [row for row, answer in enumerate(answers) if answer is None]
    if not missing:
        return replace(source, answers=answers)
    note = (
        f"{len(missing)} of {len(answers)} rows of {source.name} have no answer (the first: "
        f"{source.places[missing[0]]}); rewards that compare with one skip them"
    )
    return replace(source, answers=answers, notes=(*source.notes, note))


def require_one_answer(run: RunConfig, source: DataSource) -> None:
    """Raise DataError if a reward compares with answers but no row has one."""
    if compares_with_answers(run) and source.answers is not None and all(map(is_missing, source.answers)):
        raise DataError(
            f"{source.name}: no row has an answer, and a reward compares with one. Name the right column in "
            "data.answer_column, or remove the rewards that compare with an answer"
        )


def require_verifier(run: RunConfig, source: DataSource, key: str, alone: bool = True) -> None:
    """Raise DataError if `reasoning_gym_score` is a reward of the run but scores no row of the source; in a mix
    (`alone` is False), only if no other reward scores its rows. `key` names the source."""
    names = {reward.name for reward in run.rewards if reward.weight or alone}
    if GYM_REWARD not in names or (names != {GYM_REWARD} and not alone):
        return
    if "reasoning_gym" not in source.other_names or all(map(is_missing, source.column("reasoning_gym"))):
        way_out = f"use a reward other than {GYM_REWARD}" if alone else "add a reward that scores its rows"
        raise DataError(
            f"{key}: {source.name} has no rows of a task of reasoning-gym, and {GYM_REWARD} scores no others: name "
            f"reasoning_gym/TASK as the source, or {way_out}, such as {REWARDS_WITH_ANSWERS[0]}"
        )


def _answer(run: RunConfig, value: Any, after: str | None, where: str, column: str) -> str | None:
    if is_missing(value):
        if not needs_all_answers(run):
            return None
        raise DataError(
            f"{where}: no answer, and each reward with a weight compares with one; give the row a text or a number "
            f"({column}), or add a reward for rows without an answer"
        )
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, str) and not (number and (isinstance(value, int) or math.isfinite(value))):
        what = f"the answer is {value}" if number else f"an answer of type {type(value).__name__}"
        raise DataError(f"{where}: {what}; it must be text or a number ({column})")
    try:
        text = str(value).strip()
    except ValueError:  # Python converts no number of more than 4300 digits to text
        raise DataError(f"{where}: the answer has thousands of digits; give it as text ({column})") from None
    if after is not None:
        _, found, text = text.rpartition(after)
        if not found:
            key = column.split("answer_column")[0] + "answer_after"
            raise DataError(f"{where}: the answer has no {after!r} in it ({key}; {column})")
    if not text.strip():
        raise DataError(f"{where}: the answer is empty ({column})")
    refuse_surrogates(text, f"{where}: the answer")
    return text.strip()
