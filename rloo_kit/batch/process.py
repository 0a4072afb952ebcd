"""One papermill process per run of a batch. It leaves no processes behind and finds the reason for a failure.

A kernel has its own session, so processes are found by a mark in their environment, which children inherit.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from rloo_kit.batch.notebooks import ANSI
from rloo_kit.system.marked import END_TIMEOUT_S, Watchdog, end_marked

BATCH_MARK, RUN_MARK = "RLOO_KIT_BATCH", "RLOO_KIT_BATCH_RUN"  # id of the batch process; folder of the run
OF_A_KERNEL = ("JPY_SESSION_NAME", "JPY_PARENT_PID")  # set in a notebook that starts the batch
KERNEL_DIED = 138  # papermill's exit code for a dead kernel
KERNEL_GONE_S = 60.0  # time for papermill to save and end after its kernel is gone


class RunProcess:
    """A started run.

    Attributes:
        pid: papermill's.
        log_start: byte offset in the log where this attempt begins.
    """

    def __init__(self, command: list[str], folder: Path, log: Path, cwd: Path, batch_id: str):
        self.folder = folder
        self.log_start = log.stat().st_size if log.exists() else 0
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_KERNEL}
        environment |= {BATCH_MARK: batch_id, RUN_MARK: str(folder)}
        with open(log, "ab") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,  # papermill reads a notebook from a pipe
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=environment,
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._kernel_seen = False
        self._alone_since: float | None = None

    def poll(self) -> int | None:
        """papermill's exit code; None while it runs."""
        return self._popen.poll()

    def hangs(self) -> bool:
        """Whether papermill still runs long after its kernel is gone."""
        if self._has_kernel():
            self._kernel_seen, self._alone_since = True, None
        elif self._kernel_seen and self._alone_since is None:
            self._alone_since = time.monotonic()
        return self._alone_since is not None and time.monotonic() - self._alone_since > KERNEL_GONE_S

    def _has_kernel(self) -> bool:
        with suppress(psutil.Error):
            children = psutil.Process(self.pid).children()
            return any(child.status() != psutil.STATUS_ZOMBIE for child in children)
        return False

    def interrupt(self, pid: int) -> bool:
        """Send SIGINT, as Ctrl-C does, to process `pid` if it belongs to the run; returns whether it does."""
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get(RUN_MARK) == str(self.folder):
                process.send_signal(signal.SIGINT)
                return True
        return False

    def end(self) -> list[int]:
        """Kill every process of the run that is still alive. Returns the ids of those that did not end."""
        if self._popen.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(END_TIMEOUT_S)  # before psutil, whose wait would consume the exit code
        return end_marked(lambda marks: marks.get(RUN_MARK) == str(self.folder))


def papermill_command(notebook: Path, folder: Path, parameters: dict[str, Any]) -> list[str]:
    """The command that runs `notebook` in this interpreter's kernel; also writes `parameters` to `parameters.yaml` in
    `folder`."""
    file = folder / "parameters.yaml"
    # Not dump_yaml: papermill reads YAML 1.1, where 1e-06 is a string and 1.0e-06 a number.
    file.write_text(yaml.safe_dump(parameters, sort_keys=False, allow_unicode=True), encoding="utf-8")
    paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (notebook, folder / "notebook.ipynb")]
    options = ["-f", str(file), "-k", "python3", "--log-output", "--no-progress-bar"]
    return [sys.executable, "-m", "rloo_kit.batch.papermill", *paths, *options]


def last_line(log: Path, start: int = 0) -> str | None:
    """The last non-blank line of a log from byte `start` on; None without one."""
    try:
        with open(log, "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - 20_000))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    texts = (ANSI.sub("", line).strip() for line in reversed(lines))
    return next(filter(None, texts), None)


def end_left_over(folder: Path, batch_id: str) -> None:
    """Kill processes that an earlier batch in `folder` left running."""
    above = str(folder) + os.sep
    end_marked(lambda marks: marks.get(RUN_MARK, "").startswith(above) and marks.get(BATCH_MARK) != batch_id)


def make_watchdog(batch_id: str) -> Watchdog:
    """A watchdog that kills the runs of this batch if the batch is killed. An enclosing batch does not end it first."""
    environment = {name: value for name, value in os.environ.items() if name not in (BATCH_MARK, RUN_MARK)}
    return Watchdog(BATCH_MARK, batch_id, environment)
