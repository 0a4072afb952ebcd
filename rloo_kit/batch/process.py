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

from rloo_kit.batch.file import BatchRun
from rloo_kit.batch.notebooks import ANSI
from rloo_kit.runs.files import now
from rloo_kit.system.input_files import working_folder
from rloo_kit.system.marked import END_TIMEOUT_S, end_marked

BATCH_MARK, RUN_MARK = "RLOO_KIT_BATCH", "RLOO_KIT_BATCH_RUN"  # id of the batch process; folder of the run
OF_A_KERNEL = ("JPY_SESSION_NAME", "JPY_PARENT_PID")  # set in a notebook that starts the batch
KERNEL_GONE_S = 60.0  # time for papermill to save and end after its kernel is gone


class RunProcess:
    """A started run, whose output goes to `log.txt` in its folder.

    Attributes:
        pid: papermill's. begun: `time.monotonic()` of the start.
    """

    def __init__(self, run: BatchRun, folder: Path, parameters: dict[str, Any], batch_id: str):
        self.run, self.folder = run, folder
        self.begun = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_KERNEL}
        environment |= {BATCH_MARK: batch_id, RUN_MARK: str(folder)}
        with open(folder / "log.txt", "ab") as log:
            log.write(f"=== started {now()}\n".encode())
            log.flush()
            self._log_start = log.tell()  # an earlier attempt's output is above
            self._popen = subprocess.Popen(
                papermill_command(run.notebook.path, folder, parameters),
                stdin=subprocess.DEVNULL,  # papermill reads a notebook from a pipe
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=working_folder().absolute(),
                env=environment,
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._kernel_seen: float | None = None  # when it was last alive

    def poll(self) -> int | None:
        """papermill's exit code; None while it runs."""
        return self._popen.poll()

    def hangs(self) -> bool:
        """Whether papermill still runs long after its kernel is gone."""
        with suppress(psutil.Error):
            children = psutil.Process(self.pid).children()
            if any(child.status() != psutil.STATUS_ZOMBIE for child in children):
                self._kernel_seen = time.monotonic()
        return self._kernel_seen is not None and time.monotonic() - self._kernel_seen > KERNEL_GONE_S

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
        self._popen.kill()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_TIMEOUT_S)  # before psutil, whose wait would consume the exit code
        return end_marked(lambda marks: marks.get(RUN_MARK) == str(self.folder))

    def last_line(self) -> str | None:
        """The last non-blank line of its output; None without one."""
        lines: list[str] = []
        with suppress(OSError), open(self.folder / "log.txt", "rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 20_000))
            lines = log.read().decode("utf-8", "replace").splitlines()
        return next(filter(None, (ANSI.sub("", line).strip() for line in reversed(lines))), None)


def papermill_command(notebook: Path, folder: Path, parameters: dict[str, Any]) -> list[str]:
    """The command that runs `notebook` in this interpreter's kernel; also writes `parameters` to `parameters.yaml` in
    `folder`."""
    file = folder / "parameters.yaml"
    # Not dump_yaml: papermill reads YAML 1.1, where 1e-06 is a string and 1.0e-06 a number.
    file.write_text(yaml.safe_dump(parameters, sort_keys=False, allow_unicode=True), encoding="utf-8")
    paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (notebook, folder / "notebook.ipynb")]
    options = ["-f", str(file), "-k", "python3", "--log-output", "--no-progress-bar"]
    return [sys.executable, "-m", "rloo_kit.batch.papermill", *paths, *options]
