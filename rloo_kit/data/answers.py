"""Gold answers: which can be compared with a completion, and which rows may go without one."""

import math
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import refuse_surrogates
from rloo_kit.data.columns import DataSource, exact_array, is_plain, refuse_deep
from rloo_kit.errors import DataError, excerpt
from rloo_kit.rewards.answer import has_no_answer

REWARDS_WITH_ANSWERS = ("answer_reward", "math_answer_reward")
EXACT = "exact match"  # judges where no reward of the run compares answers
GYM_REWARD = "reasoning_gym_score"  # compares with the column `reasoning_gym`, in place of `answer`


class GymRow(str):
    """The column `reasoning_gym` of a row in place of its answer: the task's verifier judges, because many tasks have
    several right answers."""


def gold_answers(dataset: Any) -> list[Any] | None:
    """What each prompt's completions are judged by: its answer or its `GymRow`; None without either column."""
    names = dataset.column_names
    answers, rows = (list(dataset[name]) if name in names else None for name in ("answer", "reasoning_gym"))
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
    known = [answer for answer in gold or () if not has_no_answer(answer)]
    name = answer_reward_of(names)
    return None if not known or (name is None and not all(map(is_comparable, known))) else name or EXACT


def is_comparable(answer: Any) -> bool:
    """Whether an answer is text or a finite number, not true or false."""
    is_number = isinstance(answer, Real | Decimal) and not isinstance(answer, bool)
    return isinstance(answer, str) or (is_number and abs(answer) != math.inf)


def with_answers(run: RunConfig, source: DataSource, after: str | None, column: str) -> DataSource:
    """The source with its answers as they are, or the text after a marker; None for a row without one if a reward
    scores such rows. See `with_one_type`.

    Args:
        after: the marker that an answer follows. column: key and name of the column, for errors.

    Raises:
        DataError: an answer without the marker, or, if a reward of the run compares it, that is no text or number; a
            row without an answer it needs.
    """
    if source.answers is None:
        return source
    answers, notes = list(source.answers), list(source.notes)
    for row, value in enumerate(answers):
        if has_no_answer(value):
            if needs_all_answers(run):
                raise DataError(
                    f"{source.where(row)}: no answer, and each reward with a weight compares with one; give the row a "
                    f"text or a number ({column}), or add a reward for rows without an answer"
                )
            answers[row] = None
        elif after is not None or compares_with_answers(run):
            text = comparable_text(value, source.where(row), column, after)
            answers[row] = value if after is None else text
    missing = [row for row, answer in enumerate(answers) if answer is None]
    if missing:
        notes.append(
            f"{len(missing)} of {len(answers)} rows of {source.name} have no answer (the first: "
            f"{source.places[missing[0]]}); rewards that compare with one skip them"
        )
    return with_one_type(replace(source, answers=answers, notes=tuple(notes)), column)


def with_one_type(source: DataSource, column: str) -> DataSource:
    """The source with all answers as text, and a note, if they are numbers and text, or numbers of no type of Arrow."""
    answers = source.answers
    if answers is None or is_plain(answers):
        return source
    refuse_deep(column, answers, source.where)
    if not all(isinstance(value, str | Real | Decimal | None) for value in answers) or exact_array(answers) is not None:
        return source
    note = f"the answers of {source.name} are not of one type; all are passed on as text ({column})"
    texts = [value if value is None else _text(value, source.where(row), column) for row, value in enumerate(answers)]
    return replace(source, answers=texts, notes=(*source.notes, note))


def require_one_answer(run: RunConfig, source: DataSource) -> None:
    """Raise DataError if a reward compares with answers but no row has one."""
    if compares_with_answers(run) and source.answers is not None and all(map(has_no_answer, source.answers)):
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
    if "reasoning_gym" not in source.other_names or all(map(has_no_answer, source.column("reasoning_gym"))):
        way_out = f"use a reward other than {GYM_REWARD}" if alone else "add a reward that scores its rows"
        raise DataError(
            f"{key}: {source.name} has no rows of a task of reasoning-gym, and {GYM_REWARD} scores no others: name "
            f"reasoning_gym/TASK as the source, or {way_out}, such as {REWARDS_WITH_ANSWERS[0]}"
        )


def comparable_text(value: Any, where: str, column: str, after: str | None = None) -> str:
    """The text of an answer that rewards compare, behind the marker `after`; raises DataError, with the place and the
    column, if there is none."""
    if not is_comparable(value):
        what = f"an answer of type {type(value).__name__} ({excerpt(value, 40)})"
        raise DataError(f"{where}: {what}; it must be text or a number where a reward compares it ({column})")
    text = _text(value, where, column)
    if after is None:
        return text
    _, found, text = text.rpartition(after)
    if not found:
        key = column.split("answer_column")[0] + "answer_after"
        raise DataError(f"{where}: the answer has no {after!r} in it ({key}; {column})")
    if not text.strip():
        raise DataError(f"{where}: the answer is empty ({column})")
    return text.strip()


def _text(value: Any, where: str, column: str) -> str:
    try:
        text = str(value)
    except ValueError:  # Python converts no number of more than 4300 digits to text
        raise DataError(f"{where}: the answer has thousands of digits; give it as text ({column})") from None
    refuse_surrogates(text, f"{where}: the answer")
    return text
