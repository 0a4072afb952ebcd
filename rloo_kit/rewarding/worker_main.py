"""The worker's side of `worker`: runs in the process of a `module:function` reward. Never imports torch itself.

Pickled requests on standard input, replies on the original standard output; the reward's own output goes to stderr.
"""

import asyncio
import importlib
import inspect
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from rloo_kit.errors import RewardError
from rloo_kit.rewarding.guard import RewardsObject, check_no_class
from rloo_kit.rewarding.signature import read_signature
from rloo_kit.rewarding.values import make_sendable

GRACE_S = 5.0  # a worker whose parent is gone ends itself so long after its limit


def serve() -> None:
    """Answer requests until standard input closes: first the target and its folders, then one request a call."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    target, folders = pickle.load(requests)
    sys.path[:0] = [*folders, os.getcwd()]
    try:
        function = resolve(target)
    except RewardError as error:
        _reply(replies, "error", str(error))
        return
    _reply(replies, "ready", getattr(function, "signature", None))
    while True:
        try:
            args, kwargs, limit_s = pickle.load(requests)
        except EOFError:
            return
        except Exception as error:
            _reply(replies, "error", f"the worker cannot read the arguments: {type(error).__name__}: {error}")
            continue
        _arm(limit_s + GRACE_S)
        try:
            _reply(replies, "value", function(*args, **kwargs))
        except Exception as error:
            _reply(replies, "error", _describe(error))
        _arm(0.0)


def resolve(target: str) -> Callable[..., Any]:
    """The function behind `module:function`, ready for a worker's request.

    The kit's own functions are called directly; any other is a reward in TRL's convention.

    Raises:
        RewardError: no such module, no such function, or importing it failed.
    """
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            raise RewardError(f"importing '{module_name}' failed: {_describe(error)}") from None
        folders = ", ".join(dict.fromkeys(sys.path[:2]))
        raise RewardError(
            f"there is no module '{module_name}'; it was looked for in {folders} and among the installed ones"
        ) from None
    except BaseException as error:
        raise RewardError(f"importing '{module_name}' failed: {_describe(error)}") from None
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardError(f"module '{module_name}' has no '{name}'; it offers {', '.join(names) or 'nothing to call'}")
    if module_name.startswith("rloo_kit.") and not module_name.startswith("rloo_kit.rewards"):
        return function
    check_no_class(function, f"'{target}'")
    if not callable(function) and hasattr(function, "get_rewards"):
        function = RewardsObject(function)
    if not callable(function):
        raise RewardError(f"'{target}' is {type(function).__name__}; a reward is a function")
    return _Reward(function)


class _Reward:
    """A reward for a worker's request: `sent` are its arguments, `logged` the log functions that it is handed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.signature = read_signature(function)

    def __call__(self, sent: dict[str, Any], logged: list[str]) -> tuple[Any, list[Any]]:
        records: list[Any] = []
        recorders = {key: lambda *args, _key=key, **kwargs: records.append((_key, args, kwargs)) for key in logged}
        result = self.function(**sent, **recorders)
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
        return make_sendable(result), records


async def _await(result: Any) -> Any:
    return await result


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = frames and frames[-1].filename != __file__
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {error}{where}"


def _reply(stream: BinaryIO, kind: str, content: Any) -> None:
    try:
        payload = pickle.dumps((kind, content))
    except Exception as error:
        payload = pickle.dumps(("error", f"the result cannot be sent: {type(error).__name__}: {error}"))
    stream.write(payload)
    stream.flush()


def _arm(seconds: float) -> None:
    """Let the kernel end this process after `seconds` (0: never): the parent may be gone, and code that holds the
    interpreter lock reacts to nothing else."""
    if hasattr(signal, "setitimer"):
        if seconds:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
