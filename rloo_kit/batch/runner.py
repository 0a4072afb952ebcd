"""Runs a batch: one notebook after the other by papermill, each in a kernel of its own, and compares them.

A run is done when its `status.json` says so. A kernel ends by itself when this process is gone.
"""

import importlib.util
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from rloo_kit.batch.batch_file import Batch
from rloo_kit.config.run import changed_keys
from rloo_kit.errors import ConfigError, RunExistsError, RunNotFoundError, SetupError, shorten
from rloo_kit.results.versus import compare_runs, write_comparison_page
from rloo_kit.runs.checkpoints import STEM
from rloo_kit.runs.files import now, read_object, write_json
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.console import format_seconds
from rloo_kit.system.input_files import working_folder
from rloo_kit.system.isolation import end_marked
from rloo_kit.system.processes import ENDING, handle_signals

State = Literal["waiting", "running", "done", "failed", "killed", "interrupted"]
NOTEBOOK, LOG, STATUS = RUN_FILES = ("notebook.ipynb", "log.txt", "status.json")
PAGE = "comparison.html"
TRAINING = "run"  # subfolder of a run with its training run
RUN_MARK = "RLOO_KIT_BATCH_RUN"  # in the environment of a kernel and of all that it starts: the run's folder
POLL_S = 0.5
SAVE_TIMEOUT_S = 120.0  # time for an interrupted training run to finish its step and save a checkpoint


@dataclass
class RunStatus:
    """The status of one run: its `status.json`."""

    name: str
    notebook: str
    parameters: dict[str, Any] = field(default_factory=dict)  # those of the batch file
    state: State = "waiting"
    started: str | None = None  # the last attempt
    ended: str | None = None
    seconds: float = 0.0  # of all attempts that contributed to the result
    error: str | None = None  # why it is not done
    attempts: int = 0


def run_batch(batch: Batch, *, resume: bool, overwrite: bool, command: str) -> tuple[int, bool]:
    """Run every run of `batch` that is not done, one after the other; a failing run does not stop the others.

    Args:
        resume: keep what is done. overwrite: delete the files of the batch's runs (nothing else in its folder) and
            start over. command: resumes the batch.

    Returns:
        the number of runs that are not done, and whether a signal ended the batch.

    Raises:
        RunExistsError: the folder contains a batch and neither flag is given, or something other than a batch.
        RunNotFoundError: `resume`, and the folder has no batch.
        ConfigError: both flags; or `resume`, and a run's parameters have changed since it started.
        SetupError: papermill is missing, or the folder cannot be written.
    """
    if missing := [name for name in ("papermill", "ipykernel") if importlib.util.find_spec(name) is None]:
        raise SetupError(f"a batch needs {', '.join(missing)}; install with: pip install 'rloo-kit[notebook]'")
    runner = BatchRunner(batch, open_batch(batch, resume, overwrite), command)
    with handle_signals(ENDING, runner.handle):
        return runner.run()


def open_batch(batch: Batch, resume: bool = False, overwrite: bool = False) -> dict[str, RunStatus]:
    """The statuses of the batch's runs, in order; raises and deletes as `run_batch` says."""
    statuses = {}
    for path in sorted(batch.folder.glob(f"*/{STATUS}")):
        with suppress(ValidationError):  # damaged, or of something else
            statuses[path.parent.name] = TypeAdapter(RunStatus).validate_python(read_object(path))
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite were both given: one keeps the runs, the other deletes them")
    if resume and not statuses:
        raise RunNotFoundError(f"no batch to resume in {batch.folder}; start it without --resume")
    if not statuses and batch.folder.is_dir() and any(batch.folder.iterdir()):
        raise RunExistsError(
            f"{batch.folder} is not empty and not a batch's folder (no run's {STATUS} is in it): choose another folder "
            "with name=... or output_dir=..."
        )
    if statuses and not (resume or overwrite):
        raise RunExistsError(
            f"{batch.folder} already contains a batch ({count_states(statuses)}): run what is missing or "
            "failed with --resume, delete it and start over with --overwrite, or choose another name with name=..."
        )
    try:
        batch.folder.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for folder in map(batch.folder.joinpath, statuses):
                for name in RUN_FILES:
                    (folder / name).unlink(missing_ok=True)
                shutil.rmtree(folder / TRAINING, ignore_errors=True)
                if not any(folder.iterdir()):
                    folder.rmdir()
            (batch.folder / PAGE).unlink(missing_ok=True)
            statuses = {}
    except OSError as error:
        raise SetupError(
            f"the batch's folder {batch.folder} cannot be written: {error.strerror or error}; choose another place "
            "with output_dir=... or another name with name=..."
        ) from error
    opened, changed = {}, []
    for name, parameters in batch.runs.items():
        fresh = RunStatus(name, str(batch.notebook.path), parameters)
        status = opened[name] = statuses.get(name, fresh)
        given = ({"the notebook": side.notebook, **side.parameters} for side in (status, fresh))
        changes = [f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed_keys(*given).items()]
        changed += [f"{name}: {', '.join(changes)}"] if changes else []
        if status.state == "running":
            status.state, status.error = "killed", "its batch was killed (SIGKILL, a crash, a power failure)"
    if changed:
        fix = "change them back, or start the batch over with --overwrite"
        raise ConfigError("\n".join(["--resume, but runs have changed since they started:", *changed, fix]))
    return opened


def count_states(statuses: dict[str, RunStatus]) -> str:
    """How many runs are in each state: "2 done, 1 failed"."""
    counts = Counter(status.state for status in statuses.values())
    return ", ".join(f"{count} {state}" for state, count in counts.items())


class BatchRunner:
    """One call of `run_batch`; `statuses`: of the batch's runs, in order."""

    def __init__(self, batch: Batch, statuses: dict[str, RunStatus], command: str):
        self.batch, self.statuses, self.command = batch, statuses, command
        self.signals: list[str] = []
        self.trains = {"run_name", "output_dir"} <= batch.notebook.declared.keys()  # in the folder of its run
        self.folder = batch.folder  # the current run's
        self.kernel: int | None = None  # id of the running kernel's process

    def run(self) -> tuple[int, bool]:
        waiting = [status for status in self.statuses.values() if status.state != "done"]
        done = len(self.statuses) - len(waiting)
        kept = f", {done} done already" if done else ""
        self.print(f"batch {self.batch.name}: {len(waiting)} runs to do{kept}; all in {self.batch.folder}")
        for status in waiting:
            if not self.signals:
                self._run(status)
        self._compare()
        not_done = sum(status.state != "done" for status in self.statuses.values())
        go_on = f"; to go on: {self.command}" if not_done else ""
        self.print(f"batch {self.batch.name}: {count_states(self.statuses)}{go_on}")
        return not_done, bool(self.signals and not_done)

    def handle(self, number: signal.Signals) -> None:
        """The first signal interrupts the cell, as Jupyter does, so that a training run saves its checkpoint; the
        second kills the kernel, the third ends the program."""
        self.signals.append(number.name.replace("SIGINT", "Ctrl-C"))
        if len(self.signals) > 2:
            raise KeyboardInterrupt
        if self.kernel is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.kernel, signal.SIGINT if len(self.signals) == 1 else signal.SIGKILL)
        if len(self.signals) == 1:
            threading.Thread(target=self._end_run, daemon=True).start()

    def _end_run(self) -> None:
        """After a signal: end the run once it has saved, or `SAVE_TIMEOUT_S` later, as its cell may go on."""
        saving = "ending the run; a training run saves a checkpoint first, a second signal ends it"
        self.print(f"{self.signals[0]}: {saving}")
        until = time.monotonic() + SAVE_TIMEOUT_S
        while self.kernel is not None:
            time.sleep(POLL_S)
            if time.monotonic() > until or not self._may_save():
                end_marked(RUN_MARK, str(self.folder))

    def _may_save(self) -> bool:
        """Whether a training in the current run's folder, supervised ones too, is running, or one may be elsewhere."""
        states = [read_object(path).get("state") for path in self.folder.glob(f"*/{STATUS}")]
        return "running" in states or not (states or self.trains)

    def check_signals(self, **_: Any) -> None:
        """Before each cell: end the notebook after a signal."""
        if self.signals:
            raise KeyboardInterrupt

    def training(self, name: str) -> RunDir:
        """The folder of a run's training run, which need not exist."""
        return RunDir(self.batch.folder / name / TRAINING)

    def _run(self, status: RunStatus) -> None:
        folder, training = self.batch.folder / status.name, self.training(status.name)
        self.folder = folder
        declared = self.batch.notebook.declared
        resumes = "resume" in declared and any((training / "checkpoints").glob(f"{STEM}*"))
        if not resumes:
            shutil.rmtree(training.folder, ignore_errors=True)  # it starts over
            status.seconds = 0.0
        folder.mkdir(exist_ok=True)
        (folder / NOTEBOOK).unlink(missing_ok=True)  # of an earlier attempt
        own = {"run_name": TRAINING, "output_dir": str(folder), "resume": resumes, "overwrite": not resumes}
        own = {name: value for name, value in own.items() if name in declared}
        status.attempts += 1
        status.state, status.error, status.started, status.ended = "running", None, now(), None
        write_json(folder / STATUS, asdict(status))
        where = f"[{list(self.statuses).index(status.name) + 1}/{len(self.statuses)}] {status.name}"
        again = " again" if status.attempts > 1 else ""
        self.print(f"{where}: started{again}; log: {folder / LOG}")
        begun = time.monotonic()
        status.state, error = self._execute(status.name, status.parameters | own)
        status.error = shorten(error) if error else None
        status.seconds, status.ended = round(status.seconds + time.monotonic() - begun, 1), now()
        write_json(folder / STATUS, asdict(status))
        verdict = training.status().get("verdict")
        why = f"; {verdict.get('kind')}: {verdict.get('sentence')}" if isinstance(verdict, dict) else ""
        if error:
            why = f"; {shorten(error.strip().splitlines()[0], 200)}"
        self.print(f"{where}: {status.state} after {format_seconds(status.seconds)}{why}")

    def _execute(self, name: str, parameters: dict[str, Any]) -> tuple[State, str | None]:
        """Run the notebook; state and error. All that it has started is ended with it."""
        from jupyter_client.manager import AsyncKernelManager
        from nbclient.exceptions import DeadKernelError
        from papermill import PapermillExecutionError, execute_notebook

        runner, folder = self, self.batch.folder / name
        environment = os.environ | {RUN_MARK: str(folder)}
        log = logging.FileHandler(folder / LOG, encoding="utf-8", errors="backslashreplace")

        class Kernel(AsyncKernelManager):
            """A kernel whose processes have a mark, and whose own messages go to the log."""

            async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
                await super().start_kernel(**options | {"env": environment, "stdout": log.stream, "stderr": log.stream})
                runner.kernel = getattr(self.provisioner, "pid", None)

        logger = logging.getLogger("papermill")
        logger.setLevel(logging.INFO)
        logger.addHandler(log)
        logger.info(f"=== started {now()}")  # an earlier attempt's output is above
        # papermill would fill in what stands in braces.
        places = (self.batch.notebook.path, folder / NOTEBOOK)
        paths = [str(path).replace("{", "{{").replace("}", "}}") for path in places]
        state: State = "failed"
        try:
            execute_notebook(
                *paths, parameters, kernel_name="python3", progress_bar=False, log_output=True,
                cwd=working_folder().absolute(), kernel_manager_class=Kernel, on_cell_start=self.check_signals,
            )  # fmt: skip
            training = self.training(name).status().get("state")
            if training == "finished" or (training is None and not self.trains):
                return "done", None
            left = f"its training run is '{training}'" if training else "it left no training run"
            why = f"the notebook ended cleanly, but {left} ({TRAINING}/status.json)"
        except PapermillExecutionError as error:
            why = f"cell [{error.exec_count}]: {error.ename}: {error.evalue}"
            logger.error(str(error))
        except DeadKernelError:
            state, why = "killed", "the kernel died; the system ends it with SIGKILL when memory runs out"
        except (Exception, KeyboardInterrupt) as error:
            why = f"{type(error).__name__}: {error}"
            logger.exception("papermill failed")
        finally:
            self.kernel = None
            end_marked(RUN_MARK, str(folder))
            logger.removeHandler(log)
            log.close()
        return ("interrupted", f"the batch was ended by {self.signals[0]}") if self.signals else (state, why)

    def _compare(self) -> None:
        """Print and write how the training runs that are done compare with the first of them, if there are two."""
        done = [name for name, status in self.statuses.items() if status.state == "done"]
        trained = [name for name in done if (self.training(name) / "config.yaml").is_file()]
        names = [name.removeprefix(f"{self.batch.notebook.path.stem}-") for name in trained]
        if len(trained) < 2:
            return
        try:
            comparison = compare_runs([self.training(name).folder for name in trained], names)
            self.print(f"{comparison}\ncomparison: {write_comparison_page(comparison, self.batch.folder / PAGE)}")
        except Exception as error:  # the files may come from any notebook; a figure must not end a batch
            self.print(f"the comparison could not be written: {type(error).__name__}: {error}")

    def print(self, text: str) -> None:
        """Print lines of text. A closed terminal or pipe ends the output, not the batch."""
        try:
            print(text, flush=True)
        except OSError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
