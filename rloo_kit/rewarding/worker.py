"""A reward function in a process of its own (`worker_main`), with a real time limit: a thread cannot be stopped.

Started with `-c`: a fork would copy locks and CUDA contexts, multiprocessing's spawn would run the caller's script
again.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_kit.errors import RewardError, WholeBatchError
from rloo_kit.rewarding.guard import read_call
from rloo_kit.rewarding.signature import Signature
from rloo_kit.rewarding.worker_main import GRACE_S
from rloo_kit.rewards.text import as_ids

START_TIMEOUT_S = 120.0  # to start the interpreter and import the module, which may import torch
NOT_SENT = ("trainer_state", "log_extra", "log_metric")  # calls of the last two come back and are made in this process

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from rloo_kit.rewarding.worker_main import serve; serve()"


class Worker:
    """Calls `module:function` in its own process.

    Args:
        target: `module:function`, searched in `folders` first, then on this process's module path.
        folders: put in front of the module path. timeout_s: limit for one call, in seconds.

    Attributes:
        signature: what the function accepts, once the process is up; None for a function of the kit.
    """

    def __init__(self, target: str, *, folders: Sequence[Path | str] = (), timeout_s: float = 30.0) -> None:
        self.target = target
        self.folders = [str(folder) for folder in folders]
        self.timeout_s = timeout_s
        self.signature: Signature | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def running(self) -> bool:
        """Whether a process is up."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and import the module, unless one is up; raises WholeBatchError where either fails."""
        if self.running:
            return
        self.close()
        path = [entry or os.getcwd() for entry in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        subject = f"importing '{self.target}'"
        kind, content = self._exchange((self.target, self.folders), START_TIMEOUT_S, subject)
        if kind == "error":
            self.close()
            raise WholeBatchError(content)
        self.signature = content

    def call(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """What the function returns for these arguments, within `timeout_s` (by default the worker's).

        Raises:
            WholeBatchError: the call took too long or the process died; the next call starts another process.
            RewardError: the function raised, or its result cannot be sent.
        """
        self.start()
        limit = self.timeout_s if timeout_s is None else timeout_s
        kind, content = self._exchange((args, kwargs, limit), limit, f"'{self.target}'")
        if kind == "error":
            raise RewardError(content)
        return content

    def close(self) -> None:
        """End the process, hung or not."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = None

    def _exchange(self, message: Any, limit_s: float, subject: str) -> tuple[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        payload = pickle.dumps(message)  # before anything is sent: an error here leaves the worker intact
        expired = threading.Event()
        timer = threading.Timer(limit_s, _expire, (expired, process))
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(payload)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            timer.cancel()
            how = self._cause(process, expired.is_set(), limit_s)
            self.close()
            raise WholeBatchError(f"{subject} {how}") from None
        except BaseException:  # an interrupt: this call's reply must not be read as the next one's
            self.close()
            raise
        finally:
            timer.cancel()

    def _cause(self, process: "subprocess.Popen[bytes]", expired: bool, limit_s: float) -> str:
        if expired:
            return f"took longer than {limit_s:g} s and was killed (timeout_s)"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
        code = process.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"crashed with {signal.Signals(-code).name}"
        return f"ended its process with exit code {code}"


class WorkerReward:
    """A `module:function` from a config as a reward in TRL's calling convention, run by a `Worker`.

    Args:
        params: keyword arguments added to each call. target, folders, timeout_s: as for `Worker`.
    """

    def __init__(
        self,
        target: str,
        *,
        params: dict[str, Any] | None = None,
        folders: Sequence[Path | str] = (),
        timeout_s: float = 30.0,
    ) -> None:
        self.__name__ = target.rpartition(":")[2]
        self.params = params or {}
        self.worker = Worker(target, folders=folders, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"WorkerReward({self.worker.target!r}, timeout_s={self.worker.timeout_s:g})"

    @property
    def signature(self) -> Signature:
        """What the function accepts besides `params`; starts the process, which alone imports its module."""
        if self.worker.signature is None:
            self.worker.start()
        found = self.worker.signature or Signature(anything=True)
        required, optional = (
            tuple(name for name in names if name not in self.params) for names in (found.required, found.optional)
        )
        return replace(found, required=required, optional=optional, in_worker=True)

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """The function's rewards; see `Worker.call` for what it raises."""
        batch = self.signature.select(read_call(args, columns))
        sent = {key: value for key, value in batch.items() if key not in NOT_SENT} | self.params
        if batch.get("completion_ids") is not None:
            sent["completion_ids"] = [None if ids is None else as_ids(ids) for ids in batch["completion_ids"]]
        logged = [key for key in ("log_extra", "log_metric") if batch.get(key) is not None]
        rewards, records = self.worker.call(sent, logged)
        for key, args, kwargs in records:
            batch[key](*args, **kwargs)
        return rewards


def _expire(expired: threading.Event, process: "subprocess.Popen[bytes]") -> None:
    expired.set()
    _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its children. The process group keeps its id until the process has been waited for."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()


def _end(process: "subprocess.Popen[bytes]") -> None:
    _kill(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
