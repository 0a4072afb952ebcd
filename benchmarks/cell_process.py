"""The process of a cell: whatever ends it, or the command that runs it, nothing that it started stays on the GPU.

Left out: what it said (`cells`).
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import reporting


def run(command: list[str], environment: dict[str, str], sink: Any, limit: float) -> int | None:
    """The exit code; None where the time was over. Whatever the process started ends with it."""
    with _ended_by_signals():
        child = subprocess.Popen(
            command, cwd=reporting.ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(child)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM (a job's end) takes the same way out as Ctrl-C, so that the cell's process does not stay on the GPU."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the process group of a child that may have ended by itself: its own children may not have."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        waited = time.monotonic() + 5
        while child.poll() is None and time.monotonic() < waited:
            time.sleep(0.05)
    child.wait()
