"""Processes found by a mark in their environment, which children inherit whatever session or parent they move to.

`end_marked` kills them; a `Watchdog` does when the process that started them is gone, even by SIGKILL.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO

import psutil

END_TIMEOUT_S = 15.0
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

_BOOT = "import sys; sys.path[:] = sys.argv[3:]; from rloo_kit.system.marked import watch; watch(sys.stdin.buffer)"


def end_marked(wanted: Callable[[Mapping[str, str]], bool]) -> list[int]:
    """Kill every process whose environment is `wanted`, and what they start meanwhile; returns the ids of those that
    would not end in time, because they hang in a system call. This process is never one of them."""
    until = time.monotonic() + END_TIMEOUT_S
    while True:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and wanted(process.environ()) and process.status() not in _ENDED:
                    found.append(process)
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        if not found or time.monotonic() > until:
            return [process.pid for process in found]
        psutil.wait_procs(found, timeout=1.0)


def module_path() -> list[str]:
    """`sys.path` for another process: absolute, whatever its working folder; without one that was deleted."""
    found = []
    for entry in sys.path:
        with suppress(FileNotFoundError):
            found.append(entry or os.getcwd())
    return found


def starting_folder() -> str | None:
    """The working folder for another Python process, which cannot start in a deleted one; None: this process's."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.sep
    return None


class Watchdog:
    """A small process that kills everything marked `mark=value` once this process is gone.

    Args:
        environment: the watchdog's own; it must not contain the mark, nor another one that could end it too early.
    """

    def __init__(self, mark: str, value: str, environment: Mapping[str, str]) -> None:
        self.mark, self.value, self.environment = mark, value, environment
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Watchdog":
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _BOOT, self.mark, self.value, *module_path()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(self.environment),
            cwd=starting_folder(),
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen is not None:
            with suppress(OSError):
                self._popen.stdin.close()  # type: ignore[union-attr]
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(2 * END_TIMEOUT_S)


def watch(pipe: IO[bytes]) -> None:
    """Wait until the other process is gone and the system closes its end of `pipe`; then kill the processes
    with the mark that the command line names."""
    mark, value = sys.argv[1:3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe.read()
    end_marked(lambda marks: marks.get(mark) == value)
