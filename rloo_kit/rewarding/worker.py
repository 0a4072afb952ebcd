"""A reward function in a separate process (`worker_main`) with a real time limit, since a thread cannot be stopped.

The process starts with `-c`: a fork would copy locks and CUDA contexts, and multiprocessing's spawn would run the
caller's script again. Requests are pickled and replies are JSON, so the worker cannot make this process run code.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from rloo_kit.errors import ConfigError, RewardError, WholeBatchError
from rloo_kit.rewarding.environment import worker_environment
from rloo_kit.rewarding.guard import batch_size, read_call
from rloo_kit.rewarding.signature import Signature
from rloo_kit.rewarding.sources import read_files
from rloo_kit.rewarding.worker_main import MAX_REPLY_BYTES
from rloo_kit.rewards.text import as_ids
from rloo_kit.system.gpu import GIB
from rloo_kit.system.marked import Watchdog, end_marked, module_path, starting_folder
from rloo_kit.system.processes import say

START_TIMEOUT_S = 120.0  # to start the interpreter and import the module, which may import torch
POLL_S = 0.05  # between two checks that the process is alive: a detached child may keep its end of the pipe open
GRACE_S = 5.0  # for a worker that has closed its pipe to leave an exit code
MAX_GROWTH_GIB = 4.0  # a worker that grows by more after its first call leaks and is replaced
LOGS = ("log_extra", "log_metric")  # their calls come back with the reply and are made in this process
NOT_SENT = ("trainer_state", *LOGS)
RUN_MARK, WORKER_MARK = "RLOO_KIT_REWARDS", "RLOO_KIT_REWARD_WORKER"  # of this process; of one worker

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from rloo_kit.rewarding.worker_main import serve; serve()"
_WORKERS: "weakref.WeakSet[Worker]" = weakref.WeakSet()


class Worker:
    """Calls `module:function` in its own process.

    Args:
        target: `module:function`, searched in `folders` first, then on this process's module path.
        folders: put in front of the module path. timeout_s: limit for one call, in seconds.
        env: further variables of this process's environment that the worker gets (`worker_environment`).

    Attributes:
        signature: what the function accepts, once the process runs; None for a function of the kit.
        sources: `read_files` of its module when it was made; no later process runs other code.
    """

    def __init__(
        self, target: str, *, folders: Sequence[Path | str] = (), timeout_s: float = 30.0, env: Sequence[str] = ()
    ) -> None:
        self.target = target
        self.folders = [str(folder) for folder in folders]
        self.timeout_s = timeout_s
        self.env = tuple(env)
        self.signature: Signature | None = None
        self.sources = read_files(target.rpartition(":")[0], self.folders)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._finalizer: weakref.finalize | None = None
        self._first_gib: float | None = None
        _WORKERS.add(self)

    @property
    def running(self) -> bool:
        """Whether a process is running."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and import the module, unless one is running; raises WholeBatchError if either fails."""
        if self.running:
            return
        self.close()
        if edited := self.find_edited():
            raise WholeBatchError(edited)
        mark = uuid.uuid4().hex
        marks = {RUN_MARK: _watch_over(os.getpid()).value, WORKER_MARK: mark}
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *module_path()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the reward prints
                pass_fds=[theirs.fileno()],
                env=worker_environment(self.env) | marks,
                cwd=starting_folder(),
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _end, self._process, mark, os.getpid())
        self._first_gib = None
        late = f"took longer than {START_TIMEOUT_S:g} s and was killed; import what takes long inside the function"
        reply = self._exchange((self.target, self.folders), {}, START_TIMEOUT_S, f"importing '{self.target}'", late)
        if "error" in reply:
            self.close()
            raise WholeBatchError(reply["error"])
        names = reply["signature"]
        self.signature = names and Signature(**{key: _frozen(value) for key, value in names.items()})

    def call(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """The function's result for these arguments, within `timeout_s` (by default the worker's).

        A reward's result is a mapping with `values` and `records`, its calls of log functions; a function of the kit
        returns a number, a text or None.

        Raises:
            WholeBatchError: the call took too long, the process died or its reply is malformed (the next call starts
                another process); or the function did not return a list with one reward per completion.
            RewardError: the function raised, or its result cannot be sent.
        """
        self.start()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        late = f"took longer than {limit_s:g} s and was killed (timeout_s)"
        reply = self._exchange(args, kwargs, limit_s, f"'{self.target}'", late)
        self._end_if_it_leaks()
        if "error" in reply:
            raise WholeBatchError(reply["error"]) if reply["whole_batch"] else RewardError(reply["error"])
        return reply["result"]

    def find_edited(self) -> str:
        """What to do if a further process would run other code than the first one; "" if it would not."""
        now = read_files(self.target.rpartition(":")[0], self.folders)
        files = ", ".join(sorted({name for name, _ in now.items() ^ self.sources.items()}))
        return files and f"{files} changed after the reward '{self.target}' was loaded: put it back, or load it again"

    def close(self) -> None:
        """End the process and everything it started, hung or not."""
        if self._finalizer is not None:
            self._finalizer()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _exchange(self, args: Any, kwargs: Any, limit_s: float, subject: str, late: str) -> dict[str, Any]:
        process, connection = self._process, self._connection
        assert process is not None and connection is not None
        request = pickle.dumps((args, kwargs))  # an error here leaves the worker intact
        ends_at = time.monotonic() + limit_s
        timer = threading.Timer(limit_s, _kill, [process])  # also ends a send or a reply that goes no further
        timer.start()
        try:
            connection.send_bytes(request)
            while not connection.poll(POLL_S):
                if process.poll() is not None and not connection.poll():
                    raise EOFError
            return json.loads(connection.recv_bytes(MAX_REPLY_BYTES))
        except (EOFError, OSError, ValueError, RecursionError) as error:
            if time.monotonic() >= ends_at:
                problem = late
            elif isinstance(error, (EOFError, ConnectionError)):
                problem = _cause(process)
            else:
                problem = "sent a reply that cannot be read"
        except BaseException:  # an interrupt: this call's reply must not be read as the next one's
            self.close()
            raise
        finally:
            timer.cancel()
        self.close()
        raise WholeBatchError(f"{subject} {problem}")

    def _end_if_it_leaks(self) -> None:
        with contextlib.suppress(psutil.Error, AttributeError):
            gib = psutil.Process(self._process.pid).memory_info().rss / GIB  # type: ignore[union-attr]
            if self._first_gib is None:
                self._first_gib = gib
            elif gib > self._first_gib + MAX_GROWTH_GIB:
                grown = f"its worker has grown from {self._first_gib:.1f} to {gib:.1f} GiB since its first call"
                say(f"WARNING: reward '{self.target}': {grown}; a fresh one takes its place")
                self.close()


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def end_workers() -> None:
    """End the workers of this process and everything they started; a reward that is called again starts another."""
    for worker in list(_WORKERS):
        worker.close()


def refuse_edited() -> None:
    """Raise ConfigError if a reward of this process would start again with other code than it began with."""
    if edited := next(filter(None, (worker.find_edited() for worker in list(_WORKERS))), ""):
        raise ConfigError(f"{edited} (--resume --accept-changes measures everything with the new ones)")


def close_worker(reward: Any) -> None:
    """End a reward's process, if it has one; a later call starts another."""
    worker = vars(reward).get("worker") if hasattr(reward, "__dict__") else None  # the property would start one
    if worker is not None:
        worker.close()


class WorkerReward:
    """A `module:function` from a config as a reward in TRL's calling convention, run by a `Worker`.

    Args:
        params: keyword arguments added to each call. target, folders, timeout_s, env: as for `Worker`.
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
        self.__name__ = target.rpartition(":")[2]
        self.params = params or {}
        self.worker = Worker(target, folders=folders, timeout_s=timeout_s, env=env)

    def __repr__(self) -> str:
        return f"WorkerReward({self.worker.target!r}, timeout_s={self.worker.timeout_s:g})"

    @property
    def signature(self) -> Signature:
        """What the function accepts in addition to `params`; starts the process, because only it imports the module."""
        if self.worker.signature is None:
            self.worker.start()
        found = self.worker.signature or Signature(anything=True)
        required, optional = (
            tuple(name for name in names if name not in self.params) for names in (found.required, found.optional)
        )
        return replace(found, required=required, optional=optional, in_worker=True)

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """The function's rewards; see `Worker.call` for what it raises."""
        called = read_call(args, columns)
        batch = self.signature.select(called)
        sent = {key: value for key, value in batch.items() if key not in NOT_SENT} | self.params
        if batch.get("completion_ids") is not None:
            sent["completion_ids"] = [None if ids is None else as_ids(ids) for ids in batch["completion_ids"]]
        logged = [key for key in LOGS if batch.get(key) is not None]
        found = self.worker.call(sent, logged, batch_size(called))
        for key, name, value in found["records"]:
            batch[key](name, value)
        return found["values"]


@functools.cache
def _watch_over(pid: int) -> Watchdog:
    """The watchdog that ends this process's workers, and what they started, when the process is killed."""
    watchdog = Watchdog(RUN_MARK, uuid.uuid4().hex, worker_environment())
    watchdog.__enter__()
    weakref.finalize(watchdog, watchdog.__exit__)
    return watchdog


def _cause(process: "subprocess.Popen[bytes]") -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_S)
    code = process.returncode
    if code is None:
        return "closed the pipe of its replies"
    if code == -signal.SIGKILL:
        return "was killed with SIGKILL (by the system, if memory ran out)"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"crashed with {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its descendants; it is stopped first, or it could start another."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process.pid)
        root.suspend()
        tree = root.children(recursive=True)
    process.kill()
    for child in tree:
        with contextlib.suppress(psutil.Error):
            child.kill()


def _end(process: "subprocess.Popen[bytes]", mark: str, owner: int) -> None:
    """Kill the process, its descendants and everything with its mark, which is all that a detached child keeps; a fork
    of the owner ends nothing."""
    if os.getpid() == owner:
        _kill(process)
        process.wait()
        end_marked(lambda marks: marks.get(WORKER_MARK) == mark)
