"""Functions of the kit in a process of their own, with a real time limit, since a thread cannot be stopped.

Both ends of the pipe: `Worker` in the run, `serve` in the process. Whatever a process starts inherits a mark in its
environment, by which all are ended, if need be by a watchdog.
"""

import atexit
import functools
import json
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import psutil

from rloo_kit.errors import DataError, RewardError, RlooKitError, WholeBatchError, hide, mask, shorten

END_TIMEOUT_S = 15.0
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

_WATCH = "import sys; sys.path[:] = sys.argv[3:]; from rloo_kit.system.isolation import watch; watch(sys.stdin.buffer)"


def end_marked(mark: str, value: str) -> list[int]:
    """Kill every process, but this one, with this value of the variable `mark`, and what they start meanwhile; returns
    the ids of those that would not end in time, because they hang in a system call."""
    until = time.monotonic() + END_TIMEOUT_S
    while True:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                is_marked = process.pid != os.getpid() and process.environ().get(mark) == value
                if is_marked and process.status() not in _ENDED:
                    found.append(process)
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        if not found or time.monotonic() > until:
            return [process.pid for process in found]
        psutil.wait_procs(found, timeout=1.0)


def module_path() -> list[str]:
    """`sys.path` for another process: absolute, whatever its working folder."""
    return [entry or os.getcwd() for entry in sys.path]


def watch(pipe: IO[bytes]) -> None:
    """Once the process at the other end of `pipe` is gone, kill those with the mark that the command line names."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe.read()
    end_marked(*sys.argv[1:3])


POLL_S = 0.05  # between two checks that the process is alive: a detached child may keep its end of the pipe open
LONGEST_S = 1e7  # of a time limit: a timer takes no larger number
GRACE_S = 5.0  # for a process that has closed its pipe to leave an exit code
MAX_REPLY_BYTES = 16 * 2**20
RUN_MARK, WORKER_MARK = "RLOO_KIT_WORKERS", "RLOO_KIT_WORKER"  # of this process; of one worker
HIDDEN = "RLOO_KIT_HIDDEN"  # names of the variables whose values no reply shows
WORKERS: "weakref.WeakSet[Worker]" = weakref.WeakSet()

# fmt: off
PASSED_NAMES = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP", "NO_COLOR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "HF_HOME",
    "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY",
    "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "NLTK_DATA", "RANK", "LOCAL_RANK", "WORLD_SIZE",
}
# fmt: on
PASSED_BEGINNINGS = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "RLOO_KIT_")
SECRET = re.compile("TOKEN(?!IZERS)|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.IGNORECASE)

_SERVE = "import sys; sys.path[:] = sys.argv[2:]; from rloo_kit.system.isolation import serve; serve()"
_RAISED: dict[str, type[RlooKitError]] = {error.__name__: error for error in (DataError, WholeBatchError)}


class LateError(WholeBatchError):
    """A call took longer than its limit, and its process was killed."""


def worker_environment(further: Iterable[str] = ()) -> dict[str, str]:
    """The variables that a worker gets: of an allow-list, none that looks like a secret, and those named in `further`,
    whose values no reply shows."""
    listed = {name for name in os.environ if name in PASSED_NAMES or name.startswith(PASSED_BEGINNINGS)}
    passed = {name for name in listed if not SECRET.search(name)} | (named := set(further))
    return {name: value for name, value in os.environ.items() if name in passed} | {HIDDEN: ",".join(sorted(named))}


class Worker:
    """One process for the calls of one owner, `name` in errors. A call starts it if it is not running, with the
    variables `environment` (None: `worker_environment()`)."""

    def __init__(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.environment = worker_environment() if environment is None else environment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._finalizer: weakref.finalize | None = None
        WORKERS.add(self)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def call(
        self, function: Callable[..., Any], *args: Any, timeout_s: float, name: str = "", restart: bool = True
    ) -> Any:
        """The result of a function of the kit, called in the process.

        Args:
            function: of a module's top level; its result has to fit JSON.
            timeout_s: limit in seconds, with the interpreter's start.
            name: of this call, for errors; by default the worker's.
            restart: whether a process that is gone is replaced; False after a call that prepared it.

        Raises:
            LateError: the limit is over. WholeBatchError: the process died, cannot be started, or sent no reply that
                can be read.
            DataError, WholeBatchError: the function raised it. RewardError: it raised anything else.
        """
        request = pickle.dumps((function, args))  # an error here leaves the process intact
        if not self.running and (restart or self._process is None):
            try:
                self._start()
            except OSError as error:
                self.close()
                raise WholeBatchError(f"{name or self.name} has no process: {error}") from None
        process, connection = self._process, self._connection
        assert process is not None and connection is not None
        late = threading.Event()
        try:
            with _limit(process, connection, timeout_s, late):
                if connection.poll():  # a reply to no call, or the process has closed its end
                    connection.recv_bytes(MAX_REPLY_BYTES)
                    raise ValueError
                connection.send_bytes(request)
                while not connection.poll(POLL_S):
                    if process.poll() is not None and not connection.poll():
                        raise EOFError
                problem, result = json.loads(connection.recv_bytes(MAX_REPLY_BYTES))
        except (EOFError, OSError, ValueError, TypeError, RecursionError) as error:
            if late.is_set():
                what = f"took longer than {timeout_s:g} s and was killed"
            elif isinstance(error, (EOFError, ConnectionError)):
                what = _cause(process)
            else:
                what = "sent a reply that cannot be read"
            self.close()
            raise (LateError if late.is_set() else WholeBatchError)(f"{name or self.name} {what}") from None
        except BaseException:  # an interrupt: this call's reply must not be read as the next one's
            self.close()
            raise
        if late.is_set():  # killed as it replied
            self.close()
        if problem is not None:
            raise _RAISED.get(str(problem), RewardError)(result)
        return result

    def close(self) -> None:
        """End the process and everything it started, hung or not."""
        if self._finalizer is not None:
            self._finalizer()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _start(self) -> None:
        self.close()
        mark = uuid.uuid4().hex
        marks = {RUN_MARK: _watch_over(os.getpid()), WORKER_MARK: mark}
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            command = [sys.executable, "-c", _SERVE, str(theirs.fileno()), *module_path()]
            self._process = subprocess.Popen(  # what a reward prints goes to stderr
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
                env={**self.environment, **marks}, start_new_session=True,
            )  # fmt: skip
        self._finalizer = weakref.finalize(self, _end, self._process, mark, os.getpid())


@functools.cache
def _watch_over(pid: int) -> str:
    """The mark of this process's workers. A watchdog, a small process, kills all with it once this one is gone."""
    mark = uuid.uuid4().hex
    watchdog = subprocess.Popen(
        [sys.executable, "-c", _WATCH, RUN_MARK, mark, *module_path()],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=worker_environment(), start_new_session=True,
    )  # fmt: skip
    atexit.register(_end_watchdog, watchdog)
    return mark


def _end_watchdog(watchdog: "subprocess.Popen[bytes]") -> None:
    with suppress(OSError):
        watchdog.stdin.close()  # type: ignore[union-attr]
    with suppress(subprocess.TimeoutExpired):
        watchdog.wait(2 * END_TIMEOUT_S)


def _cause(process: "subprocess.Popen[bytes]") -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_S)
    code = process.returncode
    if code is None:
        return "closed the pipe of its replies"
    if code == -signal.SIGKILL:
        return "was killed with SIGKILL (by the system, if memory ran out)"
    if code < 0:
        with suppress(ValueError):
            return f"crashed with {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"


@contextmanager
def _limit(
    process: "subprocess.Popen[bytes]", connection: Connection, timeout_s: float, late: threading.Event
) -> Iterator[None]:
    """After `timeout_s` sets `late`, kills the process, and wakes who waits for a pipe that a detached child keeps."""

    def end() -> None:
        late.set()
        _kill(process)
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(min(timeout_s, LONGEST_S), end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be killing: the next call must not find a process that is about to die


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its descendants; it is stopped first, or it could start another."""
    tree: list[psutil.Process] = []
    with suppress(psutil.Error):
        root = psutil.Process(process.pid)
        root.suspend()
        tree = root.children(recursive=True)
    process.kill()
    for child in tree:
        with suppress(psutil.Error):
            child.kill()


def _end(process: "subprocess.Popen[bytes]", mark: str, owner: int) -> None:
    """Kill the process and all with its mark, which a detached child keeps; a fork of the owner ends nothing."""
    if os.getpid() == owner:
        _kill(process)
        process.wait()
        end_marked(WORKER_MARK, mark)


def serve() -> None:
    """In the process: answer requests on the descriptor that the command line names until the run closes its end. A
    reply is [null, the result], or [the error's class, its text]."""
    connection, process = Connection(int(sys.argv[1])), os.getpid()
    os.set_inheritable(connection.fileno(), False)
    with suppress(OSError):  # if memory runs out, Linux kills this process and its children before the run
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for name in os.environ.get(HIDDEN, "").split(","):
        value, least = os.environ.get(name, ""), 4 if SECRET.search(name) else 8  # a dummy such as 1 is no secret
        hide(line for line in map(str.strip, (value, *value.splitlines())) if len(line) >= least)
    with suppress(EOFError):
        while True:
            request = connection.recv_bytes()
            try:
                function, args = pickle.loads(request)
                reply = json.dumps([None, mask(function(*args))]).encode()
                if len(reply) > MAX_REPLY_BYTES:
                    found = f"its rewards and what it logs have {len(reply):,} bytes"
                    raise WholeBatchError(f"{found}; the limit is {MAX_REPLY_BYTES:,}: log less (log_extra)")
            except BaseException as error:  # sys.exit and KeyboardInterrupt too: they are the function's
                kind = type(error).__name__
                text = str(error) if isinstance(error, RlooKitError) else shorten(f"{kind}: {error}")
                reply = json.dumps([kind, text]).encode()
            if os.getpid() != process:  # a child that the function has forked would reply a second time
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # an alarm that it has left would fire in this loop
            connection.send_bytes(reply)
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(0)  # an atexit or a thread of the function's may hang
