"""A guard around each reward: a failure becomes an unscored sample with a message, not noise or a crash.

After a failed batch, each sample is scored alone. A reward gets text or messages, whichever it reads. The worker
process imports this module, so no torch here.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from rloo_kit.data.answers import GYM_REWARD, REWARDS_WITH_ANSWERS, ROW_REWARDS, names_in
from rloo_kit.errors import RewardError, WholeBatchError, describe_error, printable
from rloo_kit.rewarding.signature import (
    CONVENTION,
    EXCERPT,
    Signature,
    check_signature,
    find_problem,
    read_number,
    read_result,
    read_signature,
    takes_two,
)
from rloo_kit.rewards.text import as_text
from rloo_kit.system.user_code import submit

# By the type of the completions, in Python's error if code indexes a text as messages, or reads messages as a text.
OTHER_FORM: dict[type, tuple[str, str]] = {
    str: ("string indices must be", "'str' object has no attr"),
    list: ("'list' object has no attr", "expected string or bytes"),
}
OF_MODULES = ("forward", "named_parameters")  # what a reward model has, which TRL calls itself
PENDING: set[Future[Any]] = set()  # calls of async rewards that somebody waits for


def guard(reward: Any, columns: Iterable[str] | None = None) -> Any:
    """`reward` wrapped in a guard; unchanged if it has one, or if TRL loads and calls it itself (ids, `nn.Module`s).

    It is called with the arguments that its signature accepts; an object with `get_rewards(prompts, completions)` is a
    reward. `columns`: the dataset's, and `thinking_forced` with a thinking budget; None: not known. Raises RewardError
    if it cannot be called, or not with TRL's arguments and these columns.
    """
    check_no_class(reward)
    if isinstance(reward, GuardedReward):
        guarded = reward
    elif hasattr(reward, "get_rewards"):
        guarded = GuardedReward(RewardsObject(reward), is_async=is_async(reward.get_rewards))
    elif isinstance(reward, str) or all(callable(getattr(reward, name, None)) for name in OF_MODULES):
        return reward
    elif not callable(reward):
        raise RewardError(
            f"{reward!r} is not a reward; it must be a function of (prompts, completions, completion_ids, **columns), "
            "an object with get_rewards(prompts, completions), a model, or the id of one"
        )
    else:
        if inspect.isroutine(reward):
            refuse_judges_name(reward.__name__)
        guarded = GuardedReward(reward, is_async=is_async(reward))
    check_signature(guarded.__name__, guarded.signature, columns)
    return guarded


def check_no_class(reward: Any, name: str | None = None) -> None:
    """Raise RewardError for a class instead of an instance; calling it would create an object, not rewards."""
    if isinstance(reward, type):
        problem = f"{name or reward.__name__} is a class; a reward is a function or an object"
        raise RewardError(f"{problem}: {reward.__name__}(...)")


def refuse_judges_name(name: str) -> None:
    """Raise RewardError for a function named like a reward of the kit by which the accuracy is measured."""
    if name in (GYM_REWARD, *REWARDS_WITH_ANSWERS):
        raise RewardError(f"'{name}' is a reward of the kit, which measures the accuracy by it: rename the function")


def unwrap(reward: Any, wrappers: Any = functools.partial) -> Any:
    """The function or object inside partials, or other `wrappers`."""
    while isinstance(reward, wrappers):
        reward = next(getattr(reward, name) for name in ("reward", "scorer", "func") if hasattr(reward, name))
    return reward


def is_async(reward: Any) -> bool:
    """Whether calling `reward` returns a coroutine; sees through partials and callable objects, as TRL does."""
    reward = unwrap(reward)
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


def reward_name(reward: Any) -> str:
    """The name that TRL logs a reward under."""
    reward = unwrap(reward)
    return str(getattr(reward, "__name__", "") or type(reward).__name__)


def log_names(names: Sequence[str], rewards: Sequence[Any]) -> list[str]:
    """Unique, non-empty names to log rewards under: a model that was built in memory has none, and equal ones share a
    column.

    >>> log_names(["length", "length"], [len, len])
    ['length', 'length_2']
    """
    models = [getattr(getattr(reward, "config", None), "_name_or_path", None) or "" for reward in rewards]
    others = [str(path).rstrip("/").rpartition("/")[2] for path in models]
    given = [name or other or type(reward).__name__ for name, other, reward in zip(names, others, rewards, strict=True)]
    made: list[str] = []
    for name in given:
        free, count = name, 2
        while free in made or (free != name and free in given):
            free, count = f"{name}_{count}", count + 1
        made.append(free)
    return made


class RewardsObject:
    """An object with `get_rewards(prompts, completions)` as a reward: both are passed by position, whatever their
    names; a method that names `completions` or `completion_ids` gets everything it names."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer
        self.__name__ = reward_name(scorer)
        signature = read_signature(scorer.get_rewards)
        self.by_name = not signature.by_position and any(name in CONVENTION[1:] for name in signature.names)
        if not self.by_name and not takes_two(scorer.get_rewards):
            raise RewardError(
                f"reward '{self.__name__}' cannot be called: its get_rewards takes {', '.join(signature.names)}; it "
                "must be get_rewards(prompts, completions)"
            )
        self.signature = replace(signature, anything=False) if self.by_name else Signature(required=CONVENTION[:2])

    def __call__(self, *args: Any, **columns: Any) -> Any:
        batch = read_call(args, columns)
        if self.by_name:
            return self.scorer.get_rewards(**self.signature.select(batch))
        return self.scorer.get_rewards(batch["prompts"], batch["completions"])


class NamedReward:
    """A reward of a run: TRL's calling convention, its log name, its weight in the sum."""

    def __init__(self, reward: Callable[..., Any], name: str, weight: float) -> None:
        self.reward = reward
        self.__name__ = name
        self.weight = weight

    def __repr__(self) -> str:
        return f"{self.__name__} x{self.weight:g} = {self.reward!r}"

    @property
    def signature(self) -> Signature:
        return read_signature(self.reward)

    def __call__(self, *args: Any, **columns: Any) -> Any:
        return self.reward(*args, **columns)


class NamedAsyncReward(NamedReward):
    """A `NamedReward` of an async reward; async itself, so that TRL awaits it."""

    async def __call__(self, *args: Any, **columns: Any) -> Any:
        return await self.reward(*args, **columns)


@dataclass(frozen=True)
class Scored:
    """What a reward made of a batch.

    Attributes:
        values: per sample; None where the reward does not apply or failed.
        problems: why it failed, per sample; None where it did not.
        failures: one message per failure, with the reward's name and the sample's excerpt.
    """

    values: list[float | None]
    problems: list[str | None]
    failures: list[str]

    @property
    def failed(self) -> list[bool]:
        return [problem is not None for problem in self.problems]

    @property
    def marked(self) -> list[float | None]:
        """The values, NaN where the reward failed."""
        return [
            value if problem is None else math.nan for value, problem in zip(self.values, self.problems, strict=True)
        ]


class GuardedReward:
    """A reward that scores the other samples if it fails on one. `form`: whether it reads texts or messages as "given"
    or in the "other" form; None until it has scored a sample."""

    def __init__(self, reward: Callable[..., Any], is_async: bool = False) -> None:
        self.reward, self.is_async = reward, is_async
        self.__name__ = reward_name(reward)
        self.signature = read_signature(reward)
        self.weight: float = getattr(reward, "weight", 1.0)
        self.form: str | None = None

    def __repr__(self) -> str:
        return f"guard({self.reward!r})"

    def __call__(self, *args: Any, **columns: Any) -> list[float | None]:
        """The values in TRL's convention; None also for a sample that the reward failed on."""
        return self.score(**read_call(args, columns)).values

    def score(self, **batch: Any) -> Scored:
        """Call the reward with a batch's columns; after a failure each sample alone. Waits for an async reward."""
        return self.begin(batch).result()

    def begin(self, batch: dict[str, Any]) -> "Future[Scored]":
        """`score`, without waiting for an async reward."""
        scoring = self._score(batch)
        if self.is_async:
            return _submit(scoring)
        done: Future[Scored] = Future()
        try:
            scoring.send(None)  # a function that is not async never suspends it
        except StopIteration as stop:
            done.set_result(stop.value)
        return done

    async def _score(self, batch: dict[str, Any]) -> Scored:
        """The reward of the rows that name it, or name none; None for the others."""
        size = batch_size(batch)
        named = [names_in(value) for value in batch.get(ROW_REWARDS) or [None] * size]
        own = [i for i, names in enumerate(named) if names is None or self.__name__ in names]
        if len(own) == size:
            return await self._score_rows(batch)
        if not own:
            return Scored([None] * size, [None] * size, [])
        some = _pick(batch, own)
        if (log := some.get("log_extra")) is not None:
            some["log_extra"] = lambda column, values: log(column, _spread(values, own, size))
        scored = await self._score_rows(some)
        return Scored(_spread(scored.values, own, size), _spread(scored.problems, own, size), scored.failures)

    async def _score_rows(self, batch: dict[str, Any]) -> Scored:
        scored = await self._score_form(_in_other_form(batch) if self.form == "other" else batch)
        first = next(iter(batch.get("completions") or batch.get("prompts") or ()), None)
        words = OTHER_FORM.get(type(first), ()) if self.form is None else ()
        if any(word in str(problem) for problem in scored.problems for word in words):
            other = await self._score_form(_in_other_form(batch))
            if sum(other.failed) < sum(scored.failed):
                self.form, scored = "other", other
                _say_form(self.__name__, isinstance(first, str))
        if None in scored.problems:
            self.form = self.form or "given"
        return scored

    async def _score_form(self, batch: dict[str, Any]) -> Scored:
        size = batch_size(batch)
        outcome = await self._attempt(batch)
        raised = isinstance(outcome, Exception) and not isinstance(outcome, WholeBatchError)
        if raised and size > 1 and not is_relative(self):  # each sample alone; the failed call may have logged already
            muted = {key: lambda *_, **__: None for key in ("log_extra", "log_metric") if batch.get(key) is not None}
            singles = [_read_outcome(await self._attempt(_pick(batch, [i]) | muted), 1) for i in range(size)]
            read = [(None, problem) if problem else read_number(values[0]) for values, problem in singles]
        else:
            values, whole = _read_outcome(outcome, size)
            if whole is not None:
                where = "sample 0" if size == 1 else f"samples 0 to {size - 1}"
                return Scored([None] * size, [whole] * size, [f"reward '{self.__name__}' failed on {where}: {whole}"])
            read = [read_number(value) for value in values]
        failures = [
            f"reward '{self.__name__}' failed on sample {index} (prompt {_excerpt(batch, 'prompts', index)}, "
            f"completion {_excerpt(batch, 'completions', index)}): {problem}"
            for index, (_, problem) in enumerate(read)
            if problem
        ]
        return Scored([number for number, _ in read], [problem for _, problem in read], failures)

    async def _attempt(self, batch: dict[str, Any]) -> Any:
        try:
            if problem := find_problem(self.signature, batch):  # the columns may not have been known before
                raise WholeBatchError(problem)
            result = self.reward(**{name: _copy(value) for name, value in self.signature.select(batch).items()})
            return await result if self.is_async else result
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # what it awaited may have been cancelled
            if self.is_async and (task := asyncio.current_task()) and task.cancelling():
                raise  # it was this call
            return error if isinstance(error, Exception) else RewardError(describe_error(error))


WRAPPERS = NamedReward | GuardedReward | RewardsObject | functools.partial


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, run in the loop of the async rewards; waits for it."""
    return _submit(coroutine).result()


def is_relative(reward: Any) -> bool:
    """Whether a reward only compares the completions of a prompt, so that its mean over prompts says nothing."""
    return bool(getattr(unwrap(reward, WRAPPERS), "is_relative", False))


def _submit(coroutine: Coroutine[Any, Any, Any]) -> Any:
    future = submit(coroutine)
    PENDING.add(future)
    future.add_done_callback(PENDING.discard)
    return future


def read_call(args: tuple[Any, ...], columns: dict[str, Any]) -> dict[str, Any]:
    """A call in TRL's convention, as keywords."""
    return dict(zip(CONVENTION, args, strict=False)) | columns


def _in_other_form(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with texts as messages (of a rendered prompt the user's), and messages as text."""
    changed, asked = dict(batch), "user_message" if batch.get("user_message") else "question"
    for name, role, source in (("prompts", "user", asked), ("completions", "assistant", "completions")):
        if batch.get(name):
            pairs = zip(batch[name], batch.get(source) or batch[name], strict=True)
            changed[name] = [
                [{"role": role, "content": text}] if isinstance(value, str) else value[-1]["content"]
                for value, text in pairs
            ]
    return changed


@functools.cache
def _say_form(name: str, is_text: bool) -> None:
    from rloo_kit.system.processes import say  # the worker needs none of what it loads

    kind = "messages (completion[0]['content'])" if is_text else "text"
    say(f"rewards: {name} reads {kind}, and gets them")


def batch_size(batch: dict[str, Any]) -> int:
    """The number of completions in a call."""
    first = next((batch[key] for key in ("completions", "completion_ids", "prompts") if batch.get(key) is not None), ())
    return len(first)


def _pick(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Some rows of a batch; arrays and tensors stay what they are if one row is picked."""
    size = batch_size(batch)

    def pick(value: Any) -> Any:
        is_list = hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, dict))
        if not is_list or not hasattr(value, "__len__") or len(value) != size:
            return value
        return value[rows[0] : rows[0] + 1] if len(rows) == 1 else [value[i] for i in rows]

    return {key: pick(value) for key, value in batch.items()}


def _spread(values: Sequence[Any], rows: list[int], size: int) -> list[Any]:
    """The values of some rows as a list of all, None elsewhere."""
    by_row = dict(zip(rows, values, strict=True))
    return [by_row.get(i) for i in range(size)]


def _copy(value: Any) -> Any:
    """A copy of a list column for each reward: one that sorts or pops would change what the others and the step see."""
    return [list(item) if type(item) is list else item for item in value] if type(value) is list else value


def _read_outcome(outcome: Any, size: int) -> tuple[list[Any], str | None]:
    if isinstance(outcome, Exception):
        known = type(outcome) in (RewardError, WholeBatchError)
        return [], printable(str(outcome)) if known else describe_error(outcome)
    return read_result(outcome, size)


def _excerpt(batch: dict[str, Any], key: str, index: int) -> str:
    values = batch.get(key)
    if values is None:
        return "not given"
    try:
        text = as_text(values[index])
    except ValueError:
        text = str(values[index])
    return repr(text if len(text) <= EXCERPT else "..." + text[-EXCERPT:])
