"""The worker's side of `worker`: runs in the process of a `module:function` reward. Never imports torch itself.

It reads pickled requests and writes JSON replies: numbers (exact; NaN and infinity allowed), texts and lists, never an
object that runs code when it is read. What the reward prints goes to the run's standard error.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from rloo_kit.errors import RewardError, WholeBatchError
from rloo_kit.rewarding.guard import RewardsObject, check_no_class
from rloo_kit.rewarding.signature import read_signature
from rloo_kit.rewarding.values import describe_error, make_sendable, read_result, show

MAX_REPLY_BYTES = 16 * 2**20


def serve() -> None:
    """Answer requests on the descriptor that the command line names, until the run closes its end: first the target and
    its folders, then one request per call."""
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    _offer_to_be_killed()
    process = os.getpid()
    function: Any = None
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            break
        try:
            args, kwargs = pickle.loads(request)
            if function is None:
                function = _load(*args)
                declared = getattr(function, "signature", None)
                reply = {"signature": declared and vars(declared)}
            else:
                reply = {"result": function(*args, **kwargs)}
        except BaseException as error:  # sys.exit and KeyboardInterrupt too: they are the reward's
            own = isinstance(error, WholeBatchError) or (function is None and isinstance(error, RewardError))
            text = str(error) if own else _describe(error)
            reply = {"error": text, "whole_batch": isinstance(error, WholeBatchError)}
        if os.getpid() != process:  # a child that the reward has forked would reply a second time
            os._exit(0)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # an alarm that the reward has left would fire in this loop
        connection.send_bytes(_encode(reply))
        if function is None:
            break
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(0)  # an atexit or a thread of the reward's may hang


def _encode(reply: dict[str, Any]) -> bytes:
    """The reply as JSON; for a result that cannot be sent, the reason."""
    try:
        payload = json.dumps(reply).encode()
    except Exception as error:
        text = f"the result cannot be sent: {describe_error(error)}"
        return json.dumps({"error": text, "whole_batch": False}).encode()
    if len(payload) > MAX_REPLY_BYTES:
        text = f"its rewards and what it logs have {len(payload):,} bytes; the limit is {MAX_REPLY_BYTES:,}: log less"
        return json.dumps({"error": f"{text} (log_extra)", "whole_batch": True}).encode()
    return payload


def _load(target: str, folders: list[str]) -> Callable[..., Any]:
    with suppress(FileNotFoundError):  # the working folder was deleted
        sys.path.insert(0, os.getcwd())
    sys.path[:0] = folders
    return resolve(target)


def _offer_to_be_killed() -> None:
    """If memory runs out, Linux kills this process and its children before the run."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def resolve(target: str) -> Callable[..., Any]:
    """The function behind `module:function` or `path/to/file.py:function`, ready for a worker's request.

    The kit's own functions are called directly; any other is a reward in TRL's convention.

    Raises:
        RewardError: no such module, no such function, or importing it failed.
    """
    module_name, _, name = target.rpartition(":")
    try:
        module = _import_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
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


def _import_file(path: str) -> ModuleType:
    """The module in a file, under a unique name: the user's types.py must not replace Python's. Its folder, and those
    above it that are packages, become packages for its relative imports; their `__init__` is not run."""
    folders, package = [Path(path).parent], "_reward_files"
    while (folders[0] / "__init__.py").is_file():
        folders.insert(0, folders[0].parent)
    for folder in folders:
        package += f".{folder.name}"
        parent = sys.modules[package] = ModuleType(package)
        parent.__path__ = [str(folder)]
    name = f"{package}.{Path(path).stem.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Reward:
    """A reward for a worker's request: `sent` are its arguments, `logged` the log functions that it gets, `size` the
    number of completions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.signature = read_signature(function)
        self.loop = asyncio.Runner()  # for all calls: a client that the reward keeps belongs to the loop of its first

    def __call__(self, sent: dict[str, Any], logged: list[str], size: int) -> dict[str, Any]:
        records: list[Any] = []

        def log_extra(column: str, values: list[Any]) -> None:
            records.append(("log_extra", str(column), make_plain(list(values))))

        def log_metric(name: str, value: float) -> None:
            records.append(("log_metric", str(name), float(value)))

        logs = {"log_extra": log_extra, "log_metric": log_metric}
        result = self.function(**sent, **{key: logs[key] for key in logged})
        if inspect.iscoroutine(result):
            result = self.loop.run(result)
        values, problem = read_result(result, size)
        if problem:
            raise WholeBatchError(problem)
        return {"values": make_sendable(values), "records": records}


def make_plain(value: Any) -> Any:
    """`value` in the types of JSON: arrays and tensors as numbers and lists, anything else as its text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): make_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [make_plain(item) for item in value]
    to_list = getattr(value, "tolist", None)
    return make_plain(to_list()) if callable(to_list) else show(value)


def _describe(error: BaseException) -> str:
    """An error with the file and line of the user's code that raised it; for a file with a syntax error, that file's
    line, which is in no frame."""
    if isinstance(error, SyntaxError):  # its text ends with the file and the line
        return describe_error(error, f": {error.text.strip()}" if error.text else "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    theirs = frames and frames[-1].filename != __file__
    return describe_error(error, f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if theirs else "")
