"""A reward function in a separate process (`worker_main`) with a real time limit, since a thread cannot be stopped.

The process starts with `-c`: a fork would copy locks and CUDA contexts, and multiprocessing's spawn would run the
caller's script again. Requests are pickled and replies are JSON, so the worker cannot make this process run code.
"""

import ast
import contextlib
import functools
import hashlib
import os
import pickle
import re
import signal
import subprocess
import sys
import uuid
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from rloo_kit.errors import ConfigError, RewardError, WholeBatchError
from rloo_kit.rewarding.environment import worker_environment
from rloo_kit.rewarding.guard import batch_size, read_call
from rloo_kit.rewarding.pipe import MalformedReply, Pipe
from rloo_kit.rewarding.replies import LOGS, Failure, Rewards, read_reply
from rloo_kit.rewarding.signature import Signature
from rloo_kit.rewards.text import as_ids
from rloo_kit.system.gpu import GIB
from rloo_kit.system.marked import Watchdog, end_marked, end_tree, module_path, starting_folder
from rloo_kit.system.processes import say

START_TIMEOUT_S = 120.0  # to start the interpreter and import the module, which may import torch
MOST_FILES = 100  # that are read for a digest: a large package of the user's would take seconds
GRACE_S = 5.0  # for a worker that has closed its pipe to leave an exit code
MAX_GROWTH_GIB = 4.0  # a worker that grows by more after its first call leaks and is replaced
NOT_SENT = ("trainer_state", *LOGS)  # calls of the last two come back and are made in this process
RUN_MARK, WORKER_MARK = "RLOO_KIT_REWARDS", "RLOO_KIT_REWARD_WORKER"  # of this process; of one worker

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from rloo_kit.rewarding.worker_main import serve; serve()"
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
        self._pipe: Pipe | None = None
        self._finalizer: weakref.finalize | None = None
        self._calls = 0
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
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *module_path()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=worker_environment(self.env) | marks,
            cwd=starting_folder(),
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _end, process, mark, os.getpid())
        self._pipe = Pipe(process)
        self._calls, self._first_gib = 0, None
        late = f"took longer than {START_TIMEOUT_S:g} s and was killed; import what takes long inside the function"
        content = self._exchange((self.target, self.folders), {}, START_TIMEOUT_S, f"importing '{self.target}'", late)
        if isinstance(content, Failure):
            self.close()
            raise WholeBatchError(content.text)
        self.signature = content if isinstance(content, Signature) else None

    def call(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """The function's result for these arguments, within `timeout_s` (by default the worker's).

        A reward's result is a `Rewards`; a function of the kit returns a number, a text or None.

        Raises:
            WholeBatchError: the call took too long, the process died or its reply is malformed (the next call starts
                another process); or the function did not return a list with one reward per completion.
            RewardError: the function raised, or its result cannot be sent.
        """
        self.start()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        late = f"took longer than {limit_s:g} s and was killed (timeout_s)"
        content = self._exchange(args, kwargs, limit_s, f"'{self.target}'", late)
        self._end_if_it_leaks()
        if isinstance(content, Failure):
            raise WholeBatchError(content.text) if content.whole_batch else RewardError(content.text)
        return content

    def find_edited(self) -> str:
        """What to do if a further process would run other code than the first one; "" if it would not."""
        now = read_files(self.target.rpartition(":")[0], self.folders)
        files = ", ".join(sorted({name for name, _ in now.items() ^ self.sources.items()}))
        return files and f"{files} changed after the reward '{self.target}' was loaded: put it back, or load it again"

    def close(self) -> None:
        """End the process and everything it started, hung or not."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._pipe = None

    def _exchange(self, args: Any, kwargs: Any, limit_s: float, subject: str, late: str) -> Any:
        process, pipe = self._process, self._pipe
        assert process is not None and pipe is not None
        self._calls += 1
        payload = pickle.dumps(self._calls) + pickle.dumps((args, kwargs))  # an error here leaves the worker intact
        try:
            return read_reply(pipe.exchange(payload, limit_s), self._calls)
        except TimeoutError:
            problem = late
        except EOFError:
            problem = _cause(process)
        except MalformedReply as error:
            problem = f"sent a reply that cannot be read: {error}"
        except BaseException:  # an interrupt: this call's reply must not be read as the next one's
            self.close()
            raise
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
        if not isinstance(found, Rewards):
            self.worker.close()
            raise WholeBatchError(f"'{self.worker.target}' sent a reply that cannot be read: it contains no rewards")
        for key, name, value in found.records:
            batch[key](name, value)
        return found.values


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


def _end(process: "subprocess.Popen[bytes]", mark: str, owner: int) -> None:
    """Kill the process, its descendants and its group, then everything with its mark.

    The mark is all that a detached child keeps. The group keeps its id until the process has been waited for. A fork of
    the owner ends nothing."""
    if os.getpid() != owner:
        return
    if process.returncode is None:
        end_tree(process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_marked(lambda marks: marks.get(WORKER_MARK) == mark)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def read_files(module: str, folders: list[str]) -> dict[str, str]:
    """Digests of a module, given by its name or its file, and of those that it imports; installed ones are left out."""
    folders, installed = [*folders, starting_folder() or os.getcwd()], (sys.prefix, sys.base_prefix)
    todo = [Path(module)] if module.endswith(".py") else _find(module, folders)
    todo = [] if module.startswith(installed) or re.search("/(?:site|dist)-packages/", module) else todo
    files: dict[Path, str] = {}
    while todo and len(files) < MOST_FILES:
        if (file := todo.pop().resolve()) in files or not file.is_file():
            continue
        files[file] = file.read_text(encoding="utf-8-sig", errors="replace")
        with contextlib.suppress(SyntaxError, ValueError, IndexError, RecursionError):  # reported when it is imported
            tree = ast.parse(files[file])
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    base = getattr(node, "module", None)
                    names = [base or "", *(f"{base}.{one.name}" if base else one.name for one in node.names)]
                    above = file.parents[max(getattr(node, "level", 0), 1) - 1]
                    todo += [one for name in names for one in _find(name, [above, *folders])]
            files[file] = ast.unparse(tree)  # without comments and layout
    named = {file.name: [text for one, text in sorted(files.items()) if one.name == file.name] for file in files}
    return {name: digest_texts(texts) for name, texts in named.items()}


def _find(module: str, folders: Sequence[str | Path]) -> list[Path]:
    """The user's file of a module, in the first folder that has it; the kit's own are left out."""
    name = module.replace(".", "/")
    places = [Path(folder, name + end) for folder in folders for end in (".py", "/__init__.py")]
    return [] if module.partition(".")[0] in ("", "rloo_kit") else list(filter(Path.is_file, places))[:1]


def digest_texts(texts: Iterable[str]) -> str:
    """A digest of the texts in their order, 16 characters."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
