"""Runs a batch in a single loop: starts, watches, ends, records and compares its runs, with a line per change.

A kernel has its own session, so a run's processes are found by a mark in their environment, which children inherit.
Signals are only noted, for the loop to read, so a Ctrl-C during a save breaks nothing.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from rloo_kit.errors import SetupError, shorten
from rloo_kit.notebook.batch import ANSI, Batch, BatchRun, find_error
from rloo_kit.notebook.batch_folder import (
    WORDS,
    BatchDir,
    RunStatus,
    State,
    change,
    count_states,
    leading_figure,
    make_text_table,
    read_figures,
    write_comparison,
)
from rloo_kit.runs.checkpoints import STEM
from rloo_kit.runs.files import now
from rloo_kit.system.console import format_seconds, render_text
from rloo_kit.system.input_files import working_folder
from rloo_kit.system.isolation import END_TIMEOUT_S, Watchdog, end_marked
from rloo_kit.system.processes import ENDING, handle_signals

BATCH_MARK, RUN_MARK = "RLOO_KIT_BATCH", "RLOO_KIT_BATCH_RUN"  # id of the batch process; folder of the run
OF_A_KERNEL = ("JPY_SESSION_NAME", "JPY_PARENT_PID")  # set in a notebook that starts the batch
POLL_S = 0.2
KERNEL_GONE_S = 60.0  # time for papermill to save and end after its kernel is gone
EVERY_S = 30.0  # between two lines about the active runs
SAVE_TIMEOUT_S = 120.0  # time for an interrupted training run to finish its step and save a checkpoint
KERNEL_DIED = 138  # papermill's exit code for a dead kernel
LONGEST_ERROR = 2000
LONGEST_LINE = 200  # of an error in a line
NEEDED = ("papermill", "ipykernel")


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
        values = asdict(self)
        runs, files = values.pop("statuses"), [str(path) for path in self.files]
        return values | {"folder": str(self.folder), "not_done": self.not_done, "runs": runs, "files": files}

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
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(f"a batch needs {', '.join(missing)}; install with: pip install 'rloo-kit[notebook]'")
    if not hasattr(signal, "SIGKILL"):
        raise SetupError("a batch needs the signals of Linux and macOS; on Windows run it in WSL")
    signals: list[signal.Signals] = []
    with (
        handle_signals(ENDING, signals.append),
        BatchDir.create(batch, resume=resume, overwrite=overwrite) as place,
    ):
        return Runner(place, signals, command).run()


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
            self._popen = subprocess.Popen(  # papermill would read a notebook from a pipe
                papermill_command(run.notebook.path, folder, parameters), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, cwd=working_folder().absolute(), env=environment, start_new_session=True,
            )  # fmt: skip
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
    return [sys.executable, "-m", "rloo_kit.notebook.papermill", *paths, *options]


class Runner:
    """One call of `run_batch` in an open folder; `signals` fills up while it runs."""

    def __init__(self, place: BatchDir, signals: list[signal.Signals], command: str):
        self.batch, self.place, self.signals, self.command = place.batch, place, signals, command
        self.active: list[RunProcess] = []
        self.batch_id = uuid.uuid4().hex
        self._printed_at = time.monotonic()

    def run(self) -> BatchResult:
        place, waiting = self.place, self.place.to_do()
        for run in waiting:
            place.save(place.statuses[run.name])
        above = str(place.folder) + os.sep  # an earlier batch's runs may still be there
        end_marked(lambda marks: marks.get(RUN_MARK, "").startswith(above) and marks.get(BATCH_MARK) != self.batch_id)
        done = len(self.batch.runs) - len(waiting)
        runs = "1 run" if len(waiting) == 1 else f"{len(waiting)} runs"
        kept = f", {done} done already" if done else ""
        side = f", {self.batch.jobs} side by side" if self.batch.jobs > 1 else ""
        left = f"; no longer in the file, left alone: {', '.join(place.left)}" if place.left else ""
        self.print(f"batch {self.batch.name}: {runs} to do{kept}{side}; all in {place.folder}{left}")
        # An enclosing batch does not end the watchdog before it has ended these runs.
        environment = {name: value for name, value in os.environ.items() if name not in (BATCH_MARK, RUN_MARK)}
        with Watchdog(BATCH_MARK, self.batch_id, environment):
            place.save_batch("running", resume=self.command)
            try:
                while (waiting or self.active) and not self.signals:
                    while waiting and len(self.active) < self.batch.jobs:
                        self._start(waiting.pop(0))
                    self._look()
                    self._print_progress()
                    time.sleep(POLL_S)
                if self.signals:
                    self._interrupt()
            finally:  # so that a bug or a full disk leaves no process behind
                for process in self.active:
                    process.end()
        left_to_do = place.to_do()
        interrupted = bool(self.signals and left_to_do)
        files = self._compare()
        place.save_batch("interrupted" if interrupted else "finished", resume=self.command)
        self.print(render_text(make_text_table(place)))
        for path in files:
            self.print(f"comparison: {path}")
        if left_to_do:
            self.print(f"not done: {len(left_to_do)} of {len(self.batch.runs)} runs; to go on: {self.command}")
        return BatchResult(place.folder, list(place.statuses.values()), interrupted, files)

    # ------------------------------------------------------------------------------------------------ one run

    def _start(self, run: BatchRun) -> None:
        status, folder = self.place.statuses[run.name], self.place.folder / run.name
        training = self.place.training(run.name)
        saved = any((training / "checkpoints").glob(f"{STEM}*"))  # the run itself refuses a damaged one
        resumes = "resume" in run.notebook.declared and saved
        if not resumes:
            shutil.rmtree(training.folder, ignore_errors=True)  # it starts over
            status.seconds = 0.0
        (folder / "notebook.ipynb").unlink(missing_ok=True)  # of an earlier attempt
        own = {"run_name": training.folder.name, "output_dir": str(folder), "resume": resumes, "overwrite": not resumes}
        own = {name: value for name, value in own.items() if name in run.notebook.declared}
        process = RunProcess(run, folder, run.parameters | own, self.batch_id)
        self.active.append(process)
        status.attempts += 1
        status.state, status.error, status.exit_code, status.pid = "running", None, None, process.pid
        status.started, status.ended = now(), None
        self._record(status)

    def _look(self) -> None:
        """Conclude runs that have ended, and kill those that take too long or hang."""
        for process in list(self.active):
            limit = process.run.timeout_s
            if process.poll() is not None:
                self._conclude(process, *self._judge(process))
            elif limit is not None and time.monotonic() - process.begun > limit:
                self._conclude(process, "killed", f"took longer than timeout_s={limit:g}")
            elif process.hangs():
                self._conclude(process, "killed", "the kernel is gone, and papermill hung")

    def _judge(self, process: RunProcess) -> tuple[State, str | None]:
        """State and error of a run whose papermill process has ended."""
        code = process.poll() or 0
        if code < 0:
            return "killed", f"papermill was ended by {signal.Signals(-code).name}"
        if code == KERNEL_DIED:
            return "killed", "the kernel died; the system ends it with SIGKILL when memory runs out"
        if code:
            error = find_error(process.folder / "notebook.ipynb") or process.last_line()
            return "failed", error or f"papermill ended with exit code {code}"
        training = self.place.training(process.run.name).status().get("state")
        if training == "finished" or (training is None and not process.run.notebook.trains):
            return "done", None
        found = f"its training run is '{training}'" if training else "it left no training run"
        return "failed", f"the notebook ended cleanly, but {found} (run/status.json)"

    def _conclude(self, process: RunProcess, state: State, error: str | None) -> None:
        """Kill the remaining processes of a run, and record how it ended."""
        left = process.end()
        self.active.remove(process)
        status = self.place.statuses[process.run.name]
        status.state, status.exit_code, status.ended = state, process.poll(), now()
        status.error = error[:LONGEST_ERROR] if error else None
        if left:
            status.error = f"{error or state}; processes that did not end: {', '.join(map(str, left))}"
        status.seconds = round(status.seconds + time.monotonic() - process.begun, 1)
        self._record(status)
        self._compare()

    def _compare(self) -> list[Path]:
        try:
            return write_comparison(self.place)
        except Exception as error:  # the files may come from any notebook; a figure must not end a batch
            self.print(f"the comparison could not be written: {type(error).__name__}: {error}")
            return []

    def _record(self, status: RunStatus) -> None:
        self.place.save(status)
        self.place.save_batch("running", resume=self.command)
        self.print_change(status)

    def _interrupt(self) -> None:
        """Let training runs save a checkpoint, then end everything; a second signal ends everything at once."""

        def is_saving(process: RunProcess) -> bool:
            return process.poll() is None and self.place.training(process.run.name).status().get("state") == "running"

        asked = []  # an interrupted training run finishes its step and saves
        for process in filter(is_saving, self.active):
            if process.interrupt(int(self.place.training(process.run.name).status().get("pid", 0))):
                asked.append(process)
        name = self.signals[0].name.replace("SIGINT", "Ctrl-C")
        many = "1 training run saves" if len(asked) == 1 else f"{len(asked)} training runs save"
        ending = f"{many} a checkpoint first; a second signal ends everything at once" if asked else "ending the runs"
        self.print(f"{name}: {ending}")
        until = time.monotonic() + SAVE_TIMEOUT_S
        while len(self.signals) < 2 and time.monotonic() < until and any(map(is_saving, asked)):
            self._print_progress()
            time.sleep(POLL_S)
        for process in list(self.active):
            code = process.poll()
            if code == 0 or (code is not None and process not in asked):
                self._conclude(process, *self._judge(process))
            else:
                self._conclude(process, "interrupted", f"the batch was ended by {name}")

    # ------------------------------------------------------------------------------------------------ lines

    def print(self, text: str) -> None:
        """Print lines of text. A closed terminal or pipe ends the output, not the batch."""
        self._printed_at = time.monotonic()
        try:
            print(text, flush=True)
        except OSError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def print_change(self, status: RunStatus) -> None:
        """Print that a run has started or ended."""
        number = list(self.place.statuses).index(status.name) + 1
        where = f"[{number}/{len(self.place.statuses)}] {status.name}"
        if status.state == "running":
            self.print(f"{where}: started{' again' if status.attempts > 1 else ''}")
            return
        parts = [f"{where}: {status.state} after {format_seconds(status.seconds)}"]
        figures = read_figures(self.place.training(status.name))
        lead = leading_figure([figures])
        if status.state == "done" and figures[f"{lead}_after"] is not None:
            parts.append(f"{WORDS[lead][0]} {change(figures, lead, '.3f', ' -> ')}")
        if status.error:
            parts.append(shorten(status.error.strip().partition("\n")[0], LONGEST_LINE))
        if status.state != "done":
            parts.append(f"log: {self.place.folder / status.name / 'log.txt'}")
        self.print("; ".join(parts))

    def _print_progress(self) -> None:
        """Print a line about the active runs if the last line is older than `EVERY_S`."""
        if time.monotonic() - self._printed_at < EVERY_S:
            return
        parts = []
        for process in self.active:
            step, training = "", self.place.training(process.run.name).status()
            if training.get("max_steps") and training.get("state") == "running":
                step = f"step {training.get('step', 0)}/{training['max_steps']}, "
            parts.append(f"{process.run.name}: {step}{format_seconds(time.monotonic() - process.begun)}")
        counts = count_states(self.place.statuses.values())
        rest = ", ".join(f"{count} {state}" for state, count in counts.items() if state != "running")
        self.print(" | ".join([*parts, rest] if rest else parts))
