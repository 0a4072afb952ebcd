"""Runs a batch: one notebook after the other by papermill, each in a kernel of its own, and compares them.

A run is done when its `status.json` says so. Signals are only noted, for the thread that watches a run, so a Ctrl-C
during a save breaks nothing. A kernel ends by itself when this process is gone.
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
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from rloo_kit.batch.batch_file import Batch, BatchRun
from rloo_kit.config.run import changed_keys
from rloo_kit.errors import ConfigError, RunExistsError, RunNotFoundError, SetupError, shorten
from rloo_kit.results.pages import TONES, Cell, Table, make_page
from rloo_kit.results.versus import RunComparison, compare_runs, page_values
from rloo_kit.runs.checkpoints import STEM
from rloo_kit.runs.files import now, read_object, write_json, write_text
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
POLL_S = 0.2
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


@dataclass
class BatchResult:
    """The result of a batch: one status per run, and the comparison's file. `interrupted`: a signal ended it."""

    folder: Path
    statuses: list[RunStatus]
    interrupted: bool
    files: list[Path]

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"folder": str(self.folder), "files": list(map(str, self.files))}
        return values | {"not_done": self.not_done, "runs": values.pop("statuses")}

    @property
    def not_done(self) -> int:
        return sum(status.state != "done" for status in self.statuses)


def run_batch(batch: Batch, *, resume: bool, overwrite: bool, command: str) -> BatchResult:
    """Run every run of `batch` that is not done, one after the other; a failing run does not stop the others.

    Args:
        resume: keep what is done, and run what is not.
        overwrite: delete the files of the batch in its folder (nothing else in it) and start over.
        command: the printed command that resumes the batch.

    Raises:
        RunExistsError: the folder contains a batch and neither flag is given, or something other than a batch.
        RunNotFoundError: `resume`, and the folder has no batch.
        ConfigError: both flags; or `resume`, and a run's parameters have changed since it started.
        SetupError: papermill is missing, or the folder cannot be written.
    """
    if missing := [name for name in ("papermill", "ipykernel") if importlib.util.find_spec(name) is None]:
        raise SetupError(f"a batch needs {', '.join(missing)}; install with: pip install 'rloo-kit[notebook]'")
    if not hasattr(signal, "SIGKILL"):
        raise SetupError("a batch needs the signals of Linux and macOS; on Windows run it in WSL")
    runner = BatchRunner(batch, open_batch(batch, resume, overwrite), command)
    with handle_signals(ENDING, runner.note):
        return runner.run()


def open_batch(batch: Batch, resume: bool = False, overwrite: bool = False) -> dict[str, RunStatus]:
    """The statuses of the batch's runs, in order; raises and deletes as `run_batch` says."""
    statuses = find_statuses(batch.folder)
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
            f"{batch.folder} already contains a batch ({count_states(statuses)}): run what is missing or failed with "
            "--resume, delete it and start over with --overwrite, or choose another name with name=..."
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
    except OSError as error:
        raise SetupError(
            f"the batch's folder {batch.folder} cannot be written: {error.strerror or error}; choose another place "
            "with output_dir=... or another name with name=..."
        ) from error
    opened, changed = {}, []
    for run in batch.runs:
        fresh = RunStatus(run.name, str(run.notebook.path), run.parameters)
        status = opened[run.name] = statuses.get(run.name, fresh) if resume else fresh
        given = ({"the notebook": side.notebook, **side.parameters} for side in (status, fresh))
        changes = [f"{name} was {old!r}, is {new!r}" for name, (old, new) in changed_keys(*given).items()]
        changed += [f"{run.name}: {', '.join(changes)}"] if changes else []
        if status.state == "running":
            status.state, status.error = "killed", "its batch was killed (SIGKILL, a crash, a power failure)"
    if changed:
        fix = "change them back, give them another name, or start the batch over with --overwrite"
        raise ConfigError("\n".join(["--resume, but runs have changed since they started:", *changed, fix]))
    return opened


def find_statuses(folder: Path) -> dict[str, RunStatus]:
    """The statuses of all runs of a batch in the folder, by the names of their folders."""
    statuses = {}
    for path in sorted(folder.glob(f"*/{STATUS}")):
        with suppress(ValidationError):  # damaged, or of something else
            statuses[path.parent.name] = TypeAdapter(RunStatus).validate_python(read_object(path))
    return statuses


def count_states(statuses: dict[str, RunStatus]) -> str:
    """How many runs are in each state: "2 done, 1 failed"."""
    counts = Counter(status.state for status in statuses.values())
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def first_line(error: str) -> str:
    return shorten(error.strip().partition("\n")[0], 200)


class BatchRunner:
    """One call of `run_batch`; `statuses`: of the batch's runs, in order."""

    def __init__(self, batch: Batch, statuses: dict[str, RunStatus], command: str):
        self.batch, self.statuses, self.command = batch, statuses, command
        self.signals: list[str] = []

    def note(self, number: signal.Signals) -> None:
        """Handle a signal; the third one ends the program like Ctrl-C."""
        self.signals.append(number.name.replace("SIGINT", "Ctrl-C"))
        if len(self.signals) > 2:
            raise KeyboardInterrupt

    def run(self) -> BatchResult:
        waiting = [run for run in self.batch.runs if self.statuses[run.name].state != "done"]
        done = len(self.statuses) - len(waiting)
        kept = f", {done} done already" if done else ""
        gone = ", ".join(find_statuses(self.batch.folder).keys() - self.statuses.keys())
        left = f"; no longer in the file, left alone: {gone}" if gone else ""
        self.print(f"batch {self.batch.name}: {len(waiting)} runs to do{kept}; all in {self.batch.folder}{left}")
        for run in waiting:
            if not self.signals:
                self._run(run)
        comparison, files = self._compare()
        self.print("\n".join([*([str(comparison)] if comparison else []), *(f"comparison: {path}" for path in files)]))
        result = BatchResult(self.batch.folder, list(self.statuses.values()), False, files)
        result.interrupted = bool(self.signals and result.not_done)
        go_on = f"; to go on: {self.command}" if result.not_done else ""
        self.print(f"batch {self.batch.name}: {count_states(self.statuses)}{go_on}")
        return result

    def training(self, name: str) -> RunDir:
        """The folder of a run's training run, which need not exist."""
        return RunDir(self.batch.folder / name / TRAINING)

    def _run(self, run: BatchRun) -> None:
        status, folder = self.statuses[run.name], self.batch.folder / run.name
        training = self.training(run.name)
        resumes = "resume" in run.notebook.declared and any((training / "checkpoints").glob(f"{STEM}*"))
        if not resumes:
            shutil.rmtree(training.folder, ignore_errors=True)  # it starts over
            status.seconds = 0.0
        folder.mkdir(exist_ok=True)
        (folder / NOTEBOOK).unlink(missing_ok=True)  # of an earlier attempt
        own = {"run_name": TRAINING, "output_dir": str(folder), "resume": resumes, "overwrite": not resumes}
        own = {name: value for name, value in own.items() if name in run.notebook.declared}
        status.attempts += 1
        status.state, status.error, status.started, status.ended = "running", None, now(), None
        write_json(folder / STATUS, asdict(status))
        where = f"[{list(self.statuses).index(run.name) + 1}/{len(self.statuses)}] {run.name}"
        self.print(f"{where}: started{' again' if status.attempts > 1 else ''}; log: {folder / LOG}")
        begun = time.monotonic()
        status.state, error = self._execute(run, folder, run.parameters | own)
        status.error = shorten(error) if error else None
        status.seconds, status.ended = round(status.seconds + time.monotonic() - begun, 1), now()
        write_json(folder / STATUS, asdict(status))
        verdict = training.status().get("verdict")
        why = f"; {verdict.get('kind')}: {verdict.get('sentence')}" if isinstance(verdict, dict) else ""
        why = f"; {first_line(error)}" if error else why
        self.print(f"{where}: {status.state} after {format_seconds(status.seconds)}{why}")
        self._compare()

    def _execute(self, run: BatchRun, folder: Path, parameters: dict[str, Any]) -> tuple[State, str | None]:
        """Run the notebook; state and error. All that it has started is ended with it."""
        from jupyter_client.manager import AsyncKernelManager
        from nbclient.exceptions import DeadKernelError
        from papermill import PapermillExecutionError, execute_notebook

        kernels: list[Any] = []
        environment = os.environ | {RUN_MARK: str(folder)}
        environment.pop("JPY_SESSION_NAME", None)  # of a notebook that starts the batch
        log = logging.FileHandler(folder / LOG, encoding="utf-8", errors="backslashreplace")

        class Kernel(AsyncKernelManager):
            """A kernel whose processes have a mark, and whose own messages go to the log."""

            async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
                if self.has_trait("transport_encryption"):  # newer ipykernels warn about plain text
                    self.transport_encryption = "auto"
                options |= {"env": environment, "stdout": log.stream, "stderr": log.stream}
                await super().start_kernel(**options)
                kernels.append(self.provisioner)

        logger = logging.getLogger("papermill")
        logger.setLevel(logging.INFO)
        logger.addHandler(log)
        logger.info(f"=== started {now()}")  # an earlier attempt's output is above
        over, late = threading.Event(), threading.Event()
        watch = threading.Thread(target=self._watch, args=(run, kernels, over, late), daemon=True)
        watch.start()
        # papermill would fill in what stands in braces.
        paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (run.notebook.path, folder / NOTEBOOK)]
        state: State = "failed"
        try:
            execute_notebook(
                *paths, parameters, kernel_name="python3", progress_bar=False, log_output=True,
                cwd=working_folder().absolute(), kernel_manager_class=Kernel,
            )  # fmt: skip
            training = self.training(run.name).status().get("state")
            trains = {"run_name", "output_dir"} <= run.notebook.declared.keys()
            if training == "finished" or (training is None and not trains):
                return "done", None
            left = f"its training run is '{training}'" if training else "it left no training run"
            why = f"the notebook ended cleanly, but {left} ({TRAINING}/status.json)"
        except PapermillExecutionError as error:
            why = f"cell [{error.exec_count}]: {error.ename}: {error.evalue}"
            logger.error(str(error))
        except DeadKernelError:
            state, why = "killed", "the kernel died; the system ends it with SIGKILL when memory runs out"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            logger.exception("papermill failed")
        finally:
            over.set()
            watch.join()
            end_marked(lambda marks: marks.get(RUN_MARK) == str(folder))
            logger.removeHandler(log)
            log.close()
        if self.signals:
            return "interrupted", f"the batch was ended by {self.signals[0]}"
        return ("killed", f"took longer than timeout_s={run.timeout_s:g}") if late.is_set() else (state, why)

    def _watch(self, run: BatchRun, kernels: list[Any], over: threading.Event, late: threading.Event) -> None:
        """Until the run is `over`: end it when its time is up (then it is `late`), or after a signal as soon as a
        training run has saved its checkpoint or a second signal comes."""
        begun, until = time.monotonic(), None  # when a signal's time is up
        while not over.wait(POLL_S):
            is_training = self.training(run.name).status().get("state") == "running"
            if self.signals and until is None and kernels:
                until = time.monotonic() + SAVE_TIMEOUT_S
                saving = "the training run saves a checkpoint first; a second signal ends it at once"
                self.print(f"{self.signals[0]}: {saving if is_training else 'ending the run'}")
                with suppress(ProcessLookupError):
                    os.kill(kernels[0].pid, signal.SIGINT)  # as Jupyter interrupts a cell
                continue
            if run.timeout_s is not None and time.monotonic() - begun > run.timeout_s:
                late.set()
            is_up = until is not None and (time.monotonic() > until or not is_training or len(self.signals) > 1)
            if is_up or late.is_set():
                end_marked(lambda marks: marks.get(RUN_MARK) == str(self.batch.folder / run.name))

    def _compare(self) -> tuple[RunComparison | None, list[Path]]:
        """The training runs that are done, compared with the first of them if there are two; and the page, written."""
        trained = [run for run in self.batch.runs if self.statuses[run.name].state == "done"]
        trained = [run for run in trained if (self.training(run.name) / "config.yaml").is_file()]
        names = [run.name.removeprefix(f"{run.notebook.path.stem}-") for run in trained]
        if len(set(names)) < len(names):
            names = [run.name for run in trained]
        folders = [self.training(run.name).folder for run in trained]
        try:
            comparison = compare_runs(folders, names) if len(trained) > 1 else None
            return comparison, [self._write_page(comparison)]
        except Exception as error:  # the files may come from any notebook; a figure must not end a batch
            self.print(f"the comparison could not be written: {type(error).__name__}: {error}")
            return None, []

    def _write_page(self, comparison: RunComparison | None) -> Path:
        rows = []
        for name, status in self.statuses.items():
            pages = [f"{name}/{TRAINING}/report.html", f"{name}/{NOTEBOOK}", f"{name}/{LOG}"]
            link = next((page for page in pages if (self.batch.folder / page).is_file()), "")
            seconds = format_seconds(status.seconds) if status.seconds else "-"
            state = Cell(status.state, tone=TONES.get(status.state, ""), under=first_line(status.error or ""))
            rows.append((Cell(name, link=link), state, seconds))
        values: dict[str, Any] = {"summary": [], "tables": [], "curves": None}
        values |= page_values(comparison, self.batch.folder) if comparison else {}
        values["summary"].insert(0, f"{len(rows)} runs: {count_states(self.statuses)}.")
        values["tables"].append(("The batch", Table("The batch", ("run", "state", "time"), rows), ""))
        values |= {"heading": self.batch.name, "title": f"{self.batch.name} - batch of RLOO runs"}
        return write_text(self.batch.folder / PAGE, make_page("comparison.html.jinja", **values))

    def print(self, text: str) -> None:
        """Print lines of text. A closed terminal or pipe ends the output, not the batch."""
        try:
            print(text, flush=True)
        except OSError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
