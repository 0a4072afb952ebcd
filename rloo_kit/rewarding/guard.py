"""A guard around each reward: a failure becomes an unscored sample with a message, not noise and not a crash.

A reward fails for a sample when it raises, or returns NaN, infinity or something that is no number; it fails for the
whole batch when it returns the wrong number of rewards or its process hangs or dies. A reward that raises on a batch is
asked again sample by sample, so that one bad completion does not cost its siblings their scores. How many failures a
run stands is the trainer's business.

TRL decides by inspection whether a reward is async, so async rewards get an async guard. Strings and `nn.Module`s stay
as they are: TRL loads and calls those itself. Nothing here imports torch.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from rloo_kit.errors import RewardError
from rloo_kit.rewards.text import as_text

EXCERPT = 60  # characters of a prompt or a completion in a message


class WholeBatchError(RewardError):
    """A reward failed in a way that asking again sample by sample would not narrow down (a hang, a dead process)."""


def guard(reward: Any) -> Any:
    """`reward` behind a guard; as it is where it has one already, or where TRL calls it itself (ids, `nn.Module`s).

    An object with `get_rewards(prompts, completions)` becomes a reward on the way.

    Raises:
        RewardError: `reward` is nothing that can be called.
    """
    if hasattr(reward, "get_rewards") and not isinstance(reward, GuardedReward):
        from rloo_kit.rewarding.models import RewardsObject

        return GuardedReward(RewardsObject(reward))
    if isinstance(reward, (str, GuardedReward)) or _is_module(reward):
        return reward
    if not callable(reward):
        raise RewardError(
            f"{reward!r} is no reward; it must be a function of (prompts, completions, completion_ids, **columns), an "
            "object with get_rewards(prompts, completions), a model, or the id of one"
        )
    return GuardedAsyncReward(reward) if is_async(reward) else GuardedReward(reward)


def is_async(reward: Callable[..., Any]) -> bool:
    """Whether calling `reward` gives a coroutine; sees through partials and callable objects, as TRL does."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


def reward_name(reward: Any) -> str:
    """The name that TRL logs a reward under."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__))


class GuardedReward:
    """A reward that answers None for a sample that it failed on, and remembers why.

    Attributes:
        weight: factor of this reward in the sum.
        failed: whether the last call failed, per sample.
        failures: one message per failure of the last call, with the reward's name and the sample.
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
    """The same around an async reward; async itself, so that TRL awaits it."""

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
    """The batch as batches of one. What would be logged twice goes nowhere."""
    size = _size(batch)
    muted = {key: _ignore for key in ("log_extra", "log_metric") if batch.get(key) is not None}
    return [
        {key: value[i : i + 1] if _is_column(value, size) else value for key, value in batch.items()} | muted
        for i in range(size)
    ]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stands in for TRL's log functions."""


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
    """The reward as a float and no problem, or None and the problem."""
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
