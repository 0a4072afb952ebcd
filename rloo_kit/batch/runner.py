"""Runs a batch in a single loop: starts, watches, ends, records and compares its runs.

Signals only set a flag that the loop reads, so a Ctrl-C during a save breaks nothing.
"""

import importlib.util
import shutil
import signal
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rloo_kit.batch.comparison import make_text_table, write_comparison
from rloo_kit.batch.file import Batch, BatchRun
from rloo_kit.batch.notebooks import find_error
from rloo_kit.batch.process import KERNEL_DIED, RunProcess, end_left_over, last_line, make_watchdog, papermill_command
from rloo_kit.batch.progress import BatchDisplay, first_line
from rloo_kit.batch.status import BatchDir, RunStatus
from rloo_kit.errors import SetupError
from rloo_kit.runs.checkpoints import STEM
from rloo_kit.runs.files import now
from rloo_kit.system.console import render_text
from rloo_kit.system.input_files import working_folder

POLL_S = 0.2
SAVE_TIMEOUT_S = 120.0  # time for an interrupted training run to finish its step and save a checkpoint
LONGEST_ERROR = 2000
NEEDED = ("papermill", "ipykernel", "psutil")


@dataclass
class BatchResult:
    """The result of a batch.

    Attributes:
        statuses: one per run. interrupted: whether a signal ended it. files: comparison.html and comparison.csv.
    """

    folder: Path
    statuses: list[RunStatus]
    interrupted: bool
    files: list[Path]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "folder": str(self.folder),
            "interrupted": self.interrupted,
            "not_done": self.not_done,
            "runs": [asdict(status) for status in self.statuses],
            "files": [str(path) for path in self.files],
        }

    @property
    def not_done(self) -> int:
        """The number of runs that are not done."""
        return sum(status.state != "done" for status in self.statuses)


def run_batch(
    batch: Batch, *, resume: bool = False, overwrite: bool = False, command: str = "run_batch(..., resume=True)"
) -> BatchResult:
    """Run every run of `batch` that is not done; a failing run does not stop the others.

    Args:
        batch: the checked batch.
        resume, overwrite: see `BatchDir.create`.
        command: the printed command that resumes the batch.

    Raises:
        RunExistsError, RunNotFoundError, ConfigError, SetupError: see `BatchDir.create`. SetupError also if papermill
            is missing.
    """
    check_packages()
    with Signals() as signals, BatchDir.create(batch, resume=resume, overwrite=overwrite) as place:
        return _BatchRun(place, signals, command).run_to_end()


def check_packages() -> None:
    """Refuse to start without the packages that run a notebook."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(f"a batch needs {', '.join(missing)}; install with: pip install 'rloo-kit[notebook]'")
    if not hasattr(signal, "SIGKILL"):
        raise SetupError("a batch needs the signals of Linux and macOS; on Windows run it in WSL")


class Signals:
    """Counts Ctrl-C, SIGTERM and SIGHUP (`count`, `name` of the first) instead of raising; a context manager for the
    main thread. Signals that the process ignores (nohup, a background job of a script) stay ignored."""

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.name = self.name or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


@dataclass
class _Active:
    """A run in progress."""

    run: BatchRun
    status: RunStatus
    process: RunProcess
    begun: float  # time.monotonic()
    seconds_before: float


class _BatchRun:
    """One call of `run_batch` in an open folder."""

    def __init__(self, place: BatchDir, signals: Signals, command: str):
        self.batch, self.place, self.signals, self.command = place.batch, place, signals, command
        self.active: list[_Active] = []
        self.batch_id = uuid.uuid4().hex
        self.watchdog = make_watchdog(self.batch_id)
        self.progress = BatchDisplay(place)

    def run_to_end(self) -> BatchResult:
        waiting = self.place.to_do()
        for run in waiting:
            self.place.save(self.place.statuses[run.name])
        end_left_over(self.place.folder, self.batch_id)
        self.progress.print(self._describe_start(waiting))
        with self.watchdog:
            self.place.save_batch("running", resume=self.command)
            try:
                while (waiting or self.active) and not self.signals.count:
                    while waiting and len(self.active) < self.batch.jobs:
                        self._start(waiting.pop(0))
                    self._look()
                    self.progress.show()
                    time.sleep(POLL_S)
                if self.signals.count:
                    self._interrupt()
            finally:  # so that a bug or a full disk leaves no process behind
                for active in list(self.active):
                    active.process.end()
        interrupted = self.signals.count > 0 and bool(self.place.to_do())
        files = self._compare()
        self.place.save_batch("interrupted" if interrupted else "finished", resume=self.command)
        self._print_end(files)
        return BatchResult(self.place.folder, list(self.place.statuses.values()), interrupted, files)

    def _describe_start(self, waiting: list[BatchRun]) -> str:
        done = len(self.batch.runs) - len(waiting)
        left = f"; no longer in the file, left alone: {', '.join(self.place.left)}" if self.place.left else ""
        side = f", {self.batch.jobs} side by side" if self.batch.jobs > 1 else ""
        kept = f", {done} done already" if done else ""
        runs = "1 run" if len(waiting) == 1 else f"{len(waiting)} runs"
        return f"batch {self.batch.name}: {runs} to do{kept}{side}; all in {self.place.folder}{left}"

    def _print_end(self, files: list[Path]) -> None:
        self.progress.print(render_text(make_text_table(self.place)))
        for status in self.place.statuses.values():
            if status.error and status.attempts:
                log = self.place.run_folder(status.name) / "log.txt"
                self.progress.print(f"{status.name}: {status.state}: {first_line(status.error)}; log: {log}")
        for path in files:
            self.progress.print(f"comparison: {path}")
        left = self.place.to_do()
        if left:
            self.progress.print(f"not done: {len(left)} of {len(self.batch.runs)} runs; to go on: {self.command}")

    # ------------------------------------------------------------------------------------------------ one run

    def _start(self, run: BatchRun) -> None:
        place, status = self.place, self.place.statuses[run.name]
        folder = place.run_folder(run.name)
        saved = any((place.training(run.name) / "checkpoints").glob(f"{STEM}*"))  # the run itself refuses a damaged one
        resumes = "resume" in run.notebook.declared and saved
        if not resumes:
            shutil.rmtree(place.training(run.name).folder, ignore_errors=True)  # it starts over
            status.seconds = 0.0
        (folder / "notebook.ipynb").unlink(missing_ok=True)  # of an earlier attempt
        command = papermill_command(run.notebook.path, folder, self._parameters(run, resumes))
        status.attempts += 1
        status.state, status.error, status.exit_code = "running", None, None
        status.started, status.ended = now(), None
        log = folder / "log.txt"
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{'' if status.attempts == 1 else chr(10)}=== attempt {status.attempts}, {status.started}\n")
        process = RunProcess(command, folder, log, working_folder().absolute(), self.batch_id)
        self.active.append(_Active(run, status, process, time.monotonic(), status.seconds))
        status.pid = process.pid
        self._record(status)

    def _parameters(self, run: BatchRun, resumes: bool) -> dict[str, Any]:
        """The parameters for papermill: the file's, and those that the batch sets and the notebook declares."""
        own = {
            "run_name": "run",
            "output_dir": str(self.place.run_folder(run.name)),
            "resume": resumes,
            "overwrite": not resumes,
        }
        return run.parameters | {name: value for name, value in own.items() if name in run.notebook.declared}

    def _look(self) -> None:
        """Conclude runs that have ended, and kill those that take too long or hang."""
        for active in list(self.active):
            code = active.process.poll()
            limit = active.run.timeout_s
            if code is not None:
                self._conclude(active, *self._judge(active, code))
            elif limit is not None and time.monotonic() - active.begun > limit:
                self._conclude(active, "killed", f"took longer than timeout_s={limit:g}")
            elif active.process.hangs():
                self._conclude(active, "killed", "the kernel is gone, and papermill hung")

    def _judge(self, active: _Active, code: int) -> tuple[str, str | None]:
        """State and error of a run whose papermill process ended with `code`."""
        folder = self.place.run_folder(active.run.name)
        if code < 0:
            return "killed", f"papermill was ended by {signal.Signals(-code).name}"
        if code == KERNEL_DIED:
            return "killed", "the kernel died; the system ends it with SIGKILL when memory runs out"
        if code:
            error = find_error(folder / "notebook.ipynb") or last_line(folder / "log.txt", active.process.log_start)
            return "failed", error or f"papermill ended with exit code {code}"
        training = self._training(active).get("state")
        if training == "finished" or (training is None and not active.run.notebook.trains):
            return "done", None
        found = f"its training run is '{training}'" if training else "it left no training run"
        return "failed", f"the notebook ended cleanly, but {found} (run/status.json)"

    def _conclude(self, active: _Active, state: str, error: str | None) -> None:
        """Kill the remaining processes of a run, and record how it ended."""
        left = active.process.end()
        self.active.remove(active)
        status = active.status
        status.state, status.exit_code = state, active.process.poll()
        status.error = error[:LONGEST_ERROR] if error else None
        if left:
            status.error = f"{error or state}; processes that did not end: {', '.join(map(str, left))}"
        status.ended = now()
        status.seconds = round(active.seconds_before + time.monotonic() - active.begun, 1)
        self._record(status)
        self._compare()

    def _compare(self) -> list[Path]:
        try:
            return write_comparison(self.place)
        except Exception as error:  # the files may come from any notebook; a figure must not end a batch
            self.progress.print(f"the comparison could not be written: {type(error).__name__}: {error}")
            return []

    def _record(self, status: RunStatus) -> None:
        self.place.save(status)
        self.place.save_batch("running", resume=self.command)
        self.progress.report(status)

    # ------------------------------------------------------------------------------------------------ signals

    def _interrupt(self) -> None:
        """Let training runs save a checkpoint, then end everything; a second signal ends everything at once."""
        asked = [active for active in self.active if self._ask_to_save(active)]
        many = "1 training run saves" if len(asked) == 1 else f"{len(asked)} training runs save"
        ending = f"{many} a checkpoint first; a second signal ends everything at once" if asked else "ending the runs"
        self.progress.print(f"{self.signals.name}: {ending}")
        until = time.monotonic() + SAVE_TIMEOUT_S
        while self.signals.count < 2 and time.monotonic() < until and any(map(self._is_saving, asked)):
            self.progress.show()
            time.sleep(POLL_S)
        for active in list(self.active):
            code = active.process.poll()
            if code == 0 or (code is not None and active not in asked):
                self._conclude(active, *self._judge(active, code))
            else:
                self._conclude(active, "interrupted", f"the batch was ended by {self.signals.name}")

    def _ask_to_save(self, active: _Active) -> bool:
        """Interrupt a training run, which then finishes its step and saves. Returns whether there was one."""
        training = self._training(active)
        return training.get("state") == "running" and active.process.interrupt(int(training.get("pid", 0)))

    def _is_saving(self, active: _Active) -> bool:
        return active.process.poll() is None and self._training(active).get("state") == "running"

    def _training(self, active: _Active) -> dict[str, Any]:
        return self.place.training(active.run.name).status()
