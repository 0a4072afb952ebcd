"""The win rate: a judge compares each held-out answer with an opponent's, the base's or a reference."""

import asyncio
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError, RewardError, describe_error
from rloo_kit.graders.judge import BASE, NO_COLUMN, Judge, build_judge, task_text
from rloo_kit.results.evaluation import Evaluation, number_repeats
from rloo_kit.results.intervals import Measured, paired_difference
from rloo_kit.rewarding.guard import run_async
from rloo_kit.rewards.answer import has_no_answer
from rloo_kit.system.processes import say


def measure_win_rate(run: RunConfig, dataset: Any, measured: Evaluation, base: Evaluation | None) -> None:
    """Write the win rate of `run.eval.judge` into an evaluation: of each prompt's first completion, by the answers that
    evaluations keep. Before training, that against the base is one half.

    Args:
        dataset: the prompts that were measured, with their columns. base: the evaluation before training.

    Raises:
        ConfigError: a judge that cannot be built, or no such column.
    """
    assert run.eval.judge is not None
    against, size = run.eval.judge.against, len(dataset)
    judge = build_judge(run)
    if against != BASE and against not in dataset.column_names:
        raise ConfigError(NO_COLUMN.format(against, ", ".join(dataset.column_names)))
    if against == BASE and measured.label == "before":
        measured.measures["win_rate"] = Measured(0.5, 0.5, 0.5, size, [0.5] * size)
    elif against == BASE and base is None:
        say("WARNING: eval.judge: there is no evaluation before training to compare with, so no win rate is measured")
        return
    else:
        found = run_async(_compare_all(judge, dataset, measured, base if against == BASE else None, against))
        values = [one[0] if isinstance(one, tuple) else None for one in found]
        agreed = [one[1] for one in found if isinstance(one, tuple) and one[1] is not None]
        problems = [str(one) for one in found if isinstance(one, RewardError)]
        if problems:
            say(f"WARNING: eval.judge: {len(problems)} of {size} answers were not compared. {problems[0]}")
        known = [value for value in values if value is not None]
        if not known:
            return
        lead = paired_difference([0.5] * len(known), known)  # the interval is above one half where that of the lead is
        value, low, high = (min(max(0.5 + end, 0.0), 1.0) for end in lead.ends)
        win_rate = Measured(value, low, high, len(known), values)
        measured.measures["win_rate"] = win_rate
        measured.judge_agreement = sum(agreed) / len(agreed) if agreed else None
    measured.judge = f"against {'the base' if against == BASE else against}, by {judge.model}"
    measured.judge_digest = judge.identity


def renew_win_rate(run: RunConfig, dataset: Any, measured: Evaluation) -> bool:
    """Measure the win rate of the evaluation before training again, from the answers that it keeps, if `eval.judge` is
    another judge now. Returns whether that was done."""
    wanted = "" if run.eval.judge is None else build_judge(run).identity
    if wanted in ("", measured.judge_digest):
        return False
    measure_win_rate(run, dataset.select(range(measured.num_prompts)), measured, None)
    return measured.judge_digest == wanted


async def _compare_all(
    judge: Judge, dataset: Any, measured: Evaluation, base: Evaluation | None, against: str
) -> list[tuple[float, bool | None] | RewardError | None]:
    """How each answer compares, and whether both orders agree (None: not asked); None where one was not kept."""
    others = {} if base is None else _answers(base)
    own = _answers(measured)

    async def compare(key: Any, row: dict[str, Any]) -> tuple[float, bool | None] | RewardError | None:
        answer, other = own.get(key), others.get(key)
        if base is None:
            other = "" if has_no_answer(row[against]) else str(row[against])
        if answer is None or other is None:
            return None
        if answer == other:
            return 0.5, None
        if not answer or not other:  # thinking that was never closed, a row without a reference
            return float(bool(answer)), None
        try:
            return await judge.compare(task_text(row["prompt"], row), [answer, other], row)
        except Exception as error:  # also of a template, on this row
            return error if isinstance(error, RewardError) else RewardError(describe_error(error))

    return await asyncio.gather(*map(compare, number_repeats(dataset["prompt"]), dataset))


def _answers(measured: Evaluation) -> dict[Any, str]:
    samples = measured.all_samples
    return dict(zip(number_repeats(one["prompt"] for one in samples), (one["answer"] for one in samples), strict=True))
