"""A reward is handed what its signature accepts; a signature that cannot work is refused before training."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from rewards import answer_reward, thinking_reward
from rloo_kit.errors import RewardError
from rloo_kit.rewarding.guard import NamedReward, guard

BATCH: dict[str, Any] = {
    "prompts": ["2+2=", "3+3="],
    "completions": ["4", "66"],
    "completion_ids": [[1], [2, 3]],
    "answer": ["4", "6"],
    "trainer_state": object(),
    "log_extra": lambda *args: None,
    "log_metric": lambda *args: None,
}


def length_reward(completions):
    return [float(len(text)) for text in completions]


def by_answer(completions, answer):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def by_keyword(*, completion_ids, scale=1.0):
    return [scale * len(ids) for ids in completion_ids]


def with_factor(factor, completions):
    return [factor * len(text) for text in completions]


async def slowly(completions):
    return [float(len(text)) for text in completions]


class Judge:
    def __call__(self, completions):
        return length_reward(completions)

    def judge(self, completions, answer):
        return by_answer(completions, answer)


class AsyncJudge:
    async def __call__(self, completions, answer):
        return by_answer(completions, answer)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as everybody writes it: it passes on what it gets."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (length_reward, [1.0, 2.0]),
        (by_answer, [1.0, 0.0]),
        (by_keyword, [1.0, 2.0]),
        (functools.partial(with_factor, 2.0), [2.0, 4.0]),
        (Judge().judge, [1.0, 0.0]),
        (logged(by_answer), [1.0, 0.0]),
        (functools.partial(slowly), [1.0, 2.0]),
        (AsyncJudge(), [1.0, 0.0]),
        (NamedReward(length_reward, "named", 0.5), [1.0, 2.0]),
    ],
)
def test_published_rewards_get_what_they_accept(reward: Any, expected: list[float]) -> None:
    """The published recipe's `def length_reward(completions)` failed on every sample: unexpected keyword 'prompts'."""
    found = guard(reward, columns=["answer"]).score(**BATCH)
    assert found.values == expected and found.failures == []


def test_columns_and_what_cannot_be_inspected_get_everything() -> None:
    """Guards against a filter that takes from rewards what they read today."""
    seen: list[set[str]] = []

    def curious(completions: list[str], **columns: Any) -> list[float]:
        seen.append(set(columns))
        return [0.0] * len(completions)

    class NoSignature:
        __signature__ = "none"

        def __call__(self, **columns: Any) -> list[float]:
            seen.append(set(columns))
            return [0.0] * len(columns["completions"])

    assert guard(curious)(**BATCH) == guard(NoSignature())(**BATCH) == [0.0, 0.0]
    assert seen == [set(BATCH) - {"completions"}, set(BATCH)]


class Sided:
    def __init__(self, get_rewards: Callable[..., Any]) -> None:
        self.get_rewards = get_rewards


async def rewards_of_texts(prompts, completions):
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    ("get_rewards", "expected"),
    [
        (lambda queries, responses: [len(text) for text in responses], [1.0, 2.0]),
        (lambda *texts, **options: [len(text) + len(options) for text in texts[1]], [1.0, 2.0]),
        (lambda completions: [len(text) for text in completions], [1.0, 2.0]),
        (lambda prompts, completions, /: [len(text) for text in completions], [1.0, 2.0]),
        (rewards_of_texts, [1.0, 2.0]),
    ],
)
def test_objects_with_get_rewards(get_rewards: Any, expected: list[float]) -> None:
    """By position, whatever the names; one that names `completions` gets what it names. An async one was never
    awaited."""
    found = guard(Sided(get_rewards), columns=["answer"]).score(**BATCH)
    assert found.values == expected and found.failures == []


@pytest.mark.parametrize(
    ("reward", "columns", "parts"),
    [
        (lambda completions, /: [], None, ["'completions'", "by position", "/"]),
        (lambda: [], None, ["it takes nothing", "prompts, completions, completion_ids"]),
        (lambda limit=3: [], ["answer"], ["it takes limit", "answer"]),
        (lambda completion: [], None, ["'completion'", "did you mean 'completions'?"]),
        (lambda texts: [], ["answer"], ["'texts'", "did you mean 'completions'?", "dataset's columns (answer)"]),
        (lambda completions, answers: [], ["prompt", "answer"], ["'answers'", "did you mean 'answer'?"]),
        (lambda completions, solution: [], ["answer", "question"], ["'solution'", "did you mean 'answer'?"]),
        (lambda completions, question: [], ["level"], ["'question'", "did you mean 'prompts'?"]),
        (lambda completions, solution: [], ["answer"], ["'solution'", "columns (answer)", "add the column"]),
        (lambda completions, thinking_forced: [], ["answer"], ["rloo.thinking_budget", "thinking_forced=None"]),
        (lambda completions, turns: [], ["answer"], ["a run with tools (rloo.tools, rloo.environ", "turns=None"]),
        (lambda environments: [], ["completion_mask", "turns"], ["(rloo.environment)", "environments=None"]),
        (Judge, None, ["Judge is a class", "Judge(...)"]),
        (Sided(lambda texts: []), None, ["Sided", "get_rewards(prompts, completions)"]),
    ],
)
def test_what_can_never_work_is_refused_when_the_rewards_are_built(
    reward: Any, columns: list[str] | None, parts: list[str]
) -> None:
    """Each of these failed on every sample of step 1, with a TypeError a sample."""
    with pytest.raises(RewardError) as caught:
        guard(reward, columns=columns)
    assert not [part for part in parts if part not in str(caught.value)], str(caught.value)


def test_what_may_be_a_column_is_not_refused() -> None:
    """Guards against refusing a reward of a dataset whose columns are not known before it is read."""
    for reward in (by_answer, lambda answer: [], lambda texts: []):
        assert guard(reward).signature.required
    for forced in (lambda completions, thinking_forced: [], lambda completions, thinking_forced=None: []):
        guard(forced, columns=["thinking_forced"])
    for of_tools in (lambda completion_mask, turns: [], lambda environments: []):
        guard(of_tools, columns=["completion_mask", "turns", "environments"])
    guard(lambda answer=None: [], columns=["answer"])
    for kit_reward in (thinking_reward, answer_reward):
        guard(kit_reward, columns=["answer"])
    with pytest.raises(RewardError, match="'texts'"):
        guard(guard(lambda texts: []), columns=["answer"])


def test_a_column_that_turns_out_to_be_missing_fails_the_batch_once() -> None:
    """Guards against one TypeError a sample where the columns were unknown: one message, with what is there."""
    calls: list[Any] = []
    guarded = guard(lambda completions, solution: calls.append(completions))
    assert (found := guarded.score(**BATCH)).values == [None, None] and found.failed == [True, True] and not calls
    (failure,) = found.failures
    for part in ("reward '<lambda>' failed on samples 0 to 1", "'solution'", "columns (answer)"):
        assert part in failure
