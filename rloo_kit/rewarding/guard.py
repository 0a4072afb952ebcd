"""A guard around each reward: a failure becomes an unscored sample with a message, not noise and not a crash.

After a failed batch each sample is scored alone. The worker process imports this module: no torch here.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from rloo_kit.errors import RewardError, WholeBatchError
from rloo_kit.rewards.text import as_text

EXCERPT = 60  # characters of a prompt or a completion in a message


def guard(reward: Any) -> Any:
    """`reward` behind a guard; unchanged if it has one, or if TRL loads and calls it itself (ids, `nn.Module`s).

    An object with `get_rewards(prompts, completions)` is wrapped as a reward. TRL decides by inspection whether a
    reward is async, so an async reward gets an async guard.

    Raises:
        RewardError: `reward` cannot be called.
    """
    if hasattr(reward, "get_rewards") and not isinstance(reward, GuardedReward):
        return GuardedReward(RewardsObject(reward))
    if isinstance(reward, (str, GuardedReward)) or _is_module(reward):
        return reward
    if not callable(reward):
        raise RewardError(
            f"{reward!r} is not a reward; it must be a function of (prompts, completions, completion_ids, **columns), "
            "an object with get_rewards(prompts, completions), a model, or the id of one"
        )
    return GuardedAsyncReward(reward) if is_async(reward) else GuardedReward(reward)


def is_async(reward: Any) -> bool:
    """Whether calling `reward` returns a coroutine; sees through partials and callable objects, as TRL does."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


def reward_name(reward: Any) -> str:
    """The name that TRL logs a reward under."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__))


class RewardsObject:
    """An object with `get_rewards(prompts, completions)` as a reward; prompts and completions are passed unchanged."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer
        self.__name__ = str(getattr(scorer, "__name__", type(scorer).__name__))

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        rewards = self.scorer.get_rewards(prompts, completions)
        to_list = getattr(rewards, "tolist", None)
        return list(rewards if to_list is None else to_list())


class NamedReward:
    """A reward of a run: TRL's calling convention, the name it is logged under, its weight in the sum."""

    def __init__(self, reward: Callable[..., Any], name: str, weight: float) -> None:
        self.reward = reward
        self.__name__ = name
        self.weight = weight

    def __repr__(self) -> str:
        return f"{self.__name__} x{self.weight:g} = {self.reward!r}"

    def __call__(self, *args: Any, **columns: Any) -> list[float | None]:
        return self.reward(*args, **columns)


class GuardedReward:
    """A reward that returns None for a sample that it failed on, and records why.

    Attributes:
        weight: factor of this reward in the sum.
        failed: whether the last call failed, per sample.
        failures: one message per failure of the last call, with the reward's name and the sample's excerpt.
    """

    def __init__(self, reward: Callable[..., Any]) -> None:
        self.reward = reward
        self.__name__ = reward_name(reward)
        self.weight: float = getattr(reward, "weight", 1.0)
        self.failed: list[bool] = []
        self.failures: list[str] = []

    def __repr__(self) -> str:
        return f"guard({self.reward!r})"

    def __call__(self, *args: Any, **columns: Any) -> list[float | None]:
        batch = read_call(args, columns)
        outcome = self._attempt(batch)
        if _narrows_down(outcome, batch):
            return self._judge_singles([self._attempt(single) for single in _singles(batch)], batch)
        return self._judge(outcome, batch)

    def _attempt(self, batch: dict[str, Any]) -> Any:
        try:
            return self.reward(**batch)
        except Exception as error:
            return error

    def _judge_singles(self, outcomes: list[Any], batch: dict[str, Any]) -> list[float | None]:
        problems = [_problem_of_result(outcome, 1) for outcome in outcomes]
        values = [None if bad else list(outcome)[0] for bad, outcome in zip(problems, outcomes, strict=True)]
        return self._settle(values, problems, batch)

    def _judge(self, outcome: Any, batch: dict[str, Any]) -> list[float | None]:
        size = _size(batch)
        problem = _problem_of_result(outcome, size)
        if problem is None:
            return self._settle(list(outcome), [None] * size, batch)
        self.failed = [True] * size
        where = "sample 0" if size == 1 else f"samples 0 to {size - 1}"
        self.failures = [f"reward '{self.__name__}' failed on {where}: {problem}"]
        return [None] * size

    def _settle(self, values: list[Any], problems: list[str | None], batch: dict[str, Any]) -> list[float | None]:
        rewards: list[float | None] = []
        self.failed, self.failures = [], []
        for index, (value, problem) in enumerate(zip(values, problems, strict=True)):
            number, problem = (None, problem) if problem else _read_number(value)
            rewards.append(number)
            self.failed.append(problem is not None)
            if problem is not None:
                where = f"sample {index} (prompt {_excerpt(batch, 'prompts', index)}, "
                where += f"completion {_excerpt(batch, 'completions', index)})"
                self.failures.append(f"reward '{self.__name__}' failed on {where}: {problem}")
        return rewards


class GuardedAsyncReward(GuardedReward):
    """The guard of an async reward; async itself, so that TRL awaits it."""

    async def __call__(self, *args: Any, **columns: Any) -> list[float | None]:  # type: ignore[override]
        batch = read_call(args, columns)
        outcome = await self._attempt_async(batch)
        if _narrows_down(outcome, batch):
            return self._judge_singles([await self._attempt_async(single) for single in _singles(batch)], batch)
        return self._judge(outcome, batch)

    async def _attempt_async(self, batch: dict[str, Any]) -> Any:
        try:
            return await self.reward(**batch)
        except Exception as error:
            return error


def _is_module(reward: Any) -> bool:
    return callable(getattr(reward, "forward", None)) and callable(getattr(reward, "named_parameters", None))


def read_call(args: tuple[Any, ...], columns: dict[str, Any]) -> dict[str, Any]:
    """A call in TRL's convention as keywords."""
    return dict(zip(("prompts", "completions", "completion_ids"), args, strict=False)) | columns


def _size(batch: dict[str, Any]) -> int:
    given = next((batch[key] for key in ("completions", "completion_ids", "prompts") if batch.get(key) is not None), ())
    return len(given)


def _narrows_down(outcome: Any, batch: dict[str, Any]) -> bool:
    return isinstance(outcome, Exception) and not isinstance(outcome, WholeBatchError) and _size(batch) > 1


def _singles(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The batch as batches of one, without TRL's log functions: the failed call may have logged already."""
    size = _size(batch)
    muted = {key: lambda *args, **kwargs: None for key in ("log_extra", "log_metric") if batch.get(key) is not None}
    return [
        {key: value[i : i + 1] if _is_column(value, size) else value for key, value in batch.items()} | muted
        for i in range(size)
    ]


def _is_column(value: Any, size: int) -> bool:
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        return False
    return len(value) == size


def _problem_of_result(outcome: Any, size: int) -> str | None:
    if isinstance(outcome, Exception):
        return str(outcome) if isinstance(outcome, RewardError) else f"{type(outcome).__name__}: {outcome}"
    try:
        count = len(outcome)
    except TypeError:
        return f"it returned {type(outcome).__name__}; it must return a list of {size} rewards, one per completion"
    if count != size:
        return f"it returned {count} rewards for {size} completions; it must return one per completion"
    return None


def _read_number(value: Any) -> tuple[float | None, str | None]:
    """The reward as a float, or None, and the problem if there is one."""
    if value is None:
        return None, None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None, f"it returned {value!r}; a reward is a number or None"
    if not math.isfinite(number):
        return None, f"it returned {number}; a reward is finite, or None where it does not apply"
    return number, None


def _excerpt(batch: dict[str, Any], key: str, index: int) -> str:
    values = batch.get(key)
    if values is None:
        return "not given"
    try:
        text = as_text(values[index])
    except ValueError:
        text = str(values[index])
    return repr(text if len(text) <= EXCERPT else "..." + text[-EXCERPT:])
