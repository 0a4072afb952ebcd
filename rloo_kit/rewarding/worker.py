"""A user's reward function in a `Worker`: the process imports its module, and the run does not; digests of its sources.

`load_reward` and `call_reward` run in the process, so no torch here. A resumed run and a comparison notice an edited
source by its digest.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError, RewardError, WholeBatchError
from rloo_kit.rewarding.guard import (
    WRAPPERS,
    GuardedReward,
    NamedReward,
    RewardsObject,
    batch_size,
    check_no_class,
    read_call,
    reward_name,
    unwrap,
)
from rloo_kit.rewarding.signature import Signature, make_sendable, read_result, read_signature
from rloo_kit.rewards.text import as_ids
from rloo_kit.system.isolation import WORKERS, LateError, Worker, worker_environment
from rloo_kit.system.user_code import describe_user_error, digest_texts, finish, import_target, make_plain, read_files


def read_sources(rewards: Iterable[Any]) -> dict[str, str]:
    """Digests of users' rewards: of the file that defines one and the local modules that this imports; in a notebook or
    a script, of the function or class itself. Keywords of a partial count, attributes of an object do not: rewards
    count and cache in them."""
    sources: dict[str, list[str]] = {}
    for reward in rewards:
        reward = unwrap(reward, NamedReward | GuardedReward)
        keywords = reward.keywords if isinstance(reward, functools.partial) else {}
        plain = sorted((name, value) for name, value in keywords.items() if isinstance(value, str | int | float))
        given = {f"reward {reward_name(reward)}, keywords": repr(plain)} if plain else {}
        for name, text in (_read_source(unwrap(reward, WRAPPERS)) | given).items():
            sources.setdefault(name, []).append(text)
    return {name: digest_texts(texts) for name, texts in sources.items()}


def _read_source(reward: Any) -> dict[str, str]:
    """What identifies the source of an unwrapped reward, by file or function."""
    if inspect.getattr_static(reward, "source_digests", None):  # a `WorkerReward`'s, a `RewardModel`'s
        return reward.source_digests | _read_file(type(reward))
    made = reward if inspect.isroutine(reward) else type(reward)
    if inspect.ismethod(reward) and not inspect.isclass(reward.__self__):
        made = type(reward.__self__)
    return {f"reward {reward_name(reward)}": _read_main(made)} if made.__module__ == "__main__" else _read_file(made)


def _read_file(made: Any) -> dict[str, str]:
    """`read_files` of the module that a function, class or module comes from; empty for the kit's and compiled ones."""
    module = str(getattr(made, "__module__", None) or getattr(made, "__name__", ""))
    with suppress(OSError, TypeError):  # no source
        file = inspect.getsourcefile(made)
        return read_files(file, [str(Path(file).parent)]) if file and module.partition(".")[0] != "rloo_kit" else {}
    return {}


def _read_main(made: Any) -> str:
    """The source of a function, or of a class's methods (a notebook's class has none itself); helpers do not count."""
    bases = made.__mro__ if inspect.isclass(made) else ()
    methods = [getattr(value, "__func__", value) for base in bases for value in vars(base).values()]  # also static
    texts = []
    for function in filter(inspect.isfunction, methods or [inspect.unwrap(made)]):
        with suppress(OSError, TypeError):  # no source
            texts.append(inspect.getsource(function))
    return repr(texts)


START_TIMEOUT_S = 120.0  # to start the interpreter and import the module, which may import torch
LOGS = ("log_extra", "log_metric")  # their calls come back with the reply and are made in this process
NOT_SENT = ("trainer_state", *LOGS)
_REWARDS: "weakref.WeakSet[WorkerReward]" = weakref.WeakSet()


class WorkerReward:
    """A `module:function` or `path/to/file.py:function` as a reward in TRL's calling convention, run by a `Worker`.

    Args:
        params: keyword arguments added to each call. folders: put in front of the module path.
        timeout_s: limit for one call, in seconds.
        env: further variables of this process's environment that the worker gets (`worker_environment`).
    """

    def __init__(
        self,
        target: str,
        *,
        params: dict[str, Any] | None = None,
        folders: Sequence[Path | str] = (),
        timeout_s: float = 30.0,
        env: Sequence[str] = (),
    ) -> None:
        module, _, self.__name__ = target.rpartition(":")
        self.target = target
        self.params = params or {}
        self.folders = [str(folder) for folder in folders]
        self.timeout_s = timeout_s
        self.worker = Worker(f"'{target}'", worker_environment(env))
        self.source_digests = read_files(module, self.folders)  # no later process runs other code
        self._declared: Signature | None = None
        _REWARDS.add(self)

    def __repr__(self) -> str:
        return f"WorkerReward({self.target!r}, timeout_s={self.timeout_s:g})"

    def load(self) -> Signature:
        """What the function accepts; starts the process and imports the module if need be, or raises
        WholeBatchError."""
        if self._declared is not None and self.worker.running:
            return self._declared
        if edited := self.find_edited():
            raise WholeBatchError(edited)
        try:
            doing, request = f"importing '{self.target}'", (load_reward, self.target, self.folders)
            fields = self.worker.call(*request, timeout_s=START_TIMEOUT_S, name=doing)
        except LateError as error:
            raise WholeBatchError(f"{error}; import what takes long inside the function") from None
        except RewardError as error:
            self.worker.close()
            raise WholeBatchError(str(error)) from None
        names: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in fields.items()}
        self._declared = Signature(**names)
        return self._declared

    def find_edited(self) -> str:
        """What to do if a further process would run other code than the first one; "" if it would not."""
        now = read_files(self.target.rpartition(":")[0], self.folders)
        files = ", ".join(sorted({name for name, _ in now.items() ^ self.source_digests.items()}))
        return files and f"{files} changed after the reward '{self.target}' was loaded: put it back, or load it again"

    @property
    def signature(self) -> Signature:
        """What the function accepts in addition to `params`; starts the process, because only it imports the module."""
        declared = self._declared or self.load()
        required, optional = (
            tuple(name for name in names if name not in self.params) for names in (declared.required, declared.optional)
        )
        return replace(declared, required=required, optional=optional, in_worker=True)

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """The function's rewards. Raises RewardError if it raised, WholeBatchError if it or its process failed
        otherwise."""
        called = read_call(args, columns)
        batch = self.signature.select(called)
        sent = {key: value for key, value in batch.items() if key not in NOT_SENT} | self.params
        if batch.get("completion_ids") is not None:
            sent["completion_ids"] = [None if ids is None else as_ids(ids) for ids in batch["completion_ids"]]
        logged = [key for key in LOGS if batch.get(key) is not None]
        self.load()
        try:
            request = (call_reward, sent, logged, batch_size(called))
            values, records = self.worker.call(*request, timeout_s=self.timeout_s, restart=False)
        except LateError as error:
            raise WholeBatchError(f"{error} (timeout_s)") from None
        for key, name, value in records:
            batch[key](name, value)
        return values


def end_workers() -> None:
    """End the workers of this process and everything they started; a reward that is called again starts another."""
    for worker in list(WORKERS):
        worker.close()


def refuse_edited() -> None:
    """Raise ConfigError if a reward of this process would start again with other code than it began with."""
    if edited := next(filter(None, (reward.find_edited() for reward in list(_REWARDS))), ""):
        raise ConfigError(f"{edited} (--resume --accept-changes measures everything with the new ones)")


def close_worker(reward: Any) -> None:
    """End a reward's process, if it has one; a later call starts another."""
    worker = vars(reward).get("worker") if hasattr(reward, "__dict__") else None  # the property would start one
    if worker is not None:
        worker.close()


# ---- in the process

_reward: Callable[..., Any]


def load_reward(target: str, folders: list[str]) -> dict[str, Any]:
    """Import the function behind `target` and keep it for `call_reward`; returns its `Signature` as a mapping."""
    global _reward
    function = import_target(target, folders)
    check_no_class(function, f"'{target}'")
    if not callable(function) and hasattr(function, "get_rewards"):
        function = RewardsObject(function)
    if not callable(function):
        raise RewardError(f"'{target}' is {type(function).__name__}; a reward is a function")
    _reward = function
    return vars(read_signature(function))


def call_reward(sent: dict[str, Any], logged: list[str], size: int) -> tuple[list[Any], list[Any]]:
    """The function's rewards of `size` completions, and its calls of `logged` functions as (function, name, value)."""
    records: list[Any] = []

    def log_extra(column: str, values: list[Any]) -> None:
        records.append(("log_extra", str(column), make_plain(list(values))))

    def log_metric(name: str, value: float) -> None:
        records.append(("log_metric", str(name), float(value)))

    logs = {"log_extra": log_extra, "log_metric": log_metric}
    try:
        result = finish(_reward(**sent, **{key: logs[key] for key in logged}))
        values, problem = read_result(result, size)
    except BaseException as error:  # sys.exit and KeyboardInterrupt too
        raise RewardError(describe_user_error(error)) from None
    if problem:
        raise WholeBatchError(problem)
    return make_sendable(values), records
