"""A batch's folder: its lock, the status of each run, and the runs left to do.

A run is done when its `status.json` has the state `done`, written only after a clean exit. docs/batch.md lists the
files of the folder.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from rloo_kit.batch.file import FILES, Batch, BatchRun
from rloo_kit.errors import ConfigError, RunExistsError, RunNotFoundError, SetupError
from rloo_kit.runs.files import lock_folder, now, read_object, write_json, write_text
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.console import hide_secrets

State = Literal["waiting", "running", "done", "failed", "killed", "interrupted"]
RUN_FILES = ("notebook.ipynb", "parameters.yaml", "log.txt", "status.json")
TRAINING = "run"  # subfolder of a run with its training run


@dataclass
class RunStatus:
    """The status of one run: its `status.json`.

    Attributes:
        parameters: those of the batch file.
        exit_code, pid: of papermill; the negative signal number if a signal ended it.
        started, ended: of the last attempt. seconds: of all attempts that contributed to the result.
        error: why it is not done: the error of the cell or of the system.
        attempts: number of starts.
    """

    name: str
    notebook: str
    parameters: dict[str, Any] = field(default_factory=dict)
    state: State = "waiting"
    exit_code: int | None = None
    pid: int | None = None
    started: str | None = None
    ended: str | None = None
    seconds: float = 0.0
    error: str | None = None
    attempts: int = 0

    @classmethod
    def read(cls, path: Path) -> "RunStatus | None":
        """The status in a file; None without one, or if it is not a batch's."""
        try:
            return TypeAdapter(cls).validate_python(read_object(path))
        except ValidationError:
            return None


class BatchDir:
    """The open folder of a batch; a context manager that releases it at the end.

    Attributes:
        statuses: one per run, in the batch's order.
        left: folder names of runs that are no longer in the file.
    """

    def __init__(self, batch: Batch):
        self.batch, self.folder = batch, batch.folder
        self.statuses: dict[str, RunStatus] = {}
        self.left: list[str] = []
        self.started = now()
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, batch: Batch, *, resume: bool = False, overwrite: bool = False) -> "BatchDir":
        """Open the folder of `batch` for writing.

        Args:
            batch: the checked batch.
            resume: keep what is done, and run what is not.
            overwrite: delete the files of the batch in the folder (nothing else in it) and start over.

        Raises:
            RunExistsError: the folder contains a batch and neither flag is given, another process writes to it, or it
                contains something other than a batch.
            RunNotFoundError: `resume`, and the folder has no batch.
            ConfigError: both flags; or `resume`, and a run's parameters have changed since it started.
            SetupError: the folder cannot be created or written.
        """
        self = cls(batch)
        self._check(resume, overwrite)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.folder)
            if overwrite:
                self._delete()
            self._read(resume)
            write_text(self.folder / "batch.yaml", batch.to_yaml())
        except BlockingIOError:
            pid = read_object(self.folder / "batch.json").get("pid", "unknown")
            raise RunExistsError(
                f"{self.folder} is being written by another process ({pid}): wait for it, stop it, or choose another "
                "name with name=..."
            ) from None
        except ConfigError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise SetupError(
                f"the batch's folder {self.folder} cannot be written: {error.strerror or error}; choose another place "
                "with output_dir=... or another name with name=..."
            ) from error
        return self

    def _check(self, resume: bool, overwrite: bool) -> None:
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite were both given: one keeps the runs, the other deletes them")
        state = read_object(self.folder / "batch.json").get("state")
        if resume and state is None:
            raise RunNotFoundError(f"no batch to resume in {self.folder}; start it without --resume")
        if state is None and self.folder.is_dir() and any(item.name != ".lock" for item in self.folder.iterdir()):
            raise RunExistsError(
                f"{self.folder} is not empty and not a batch's folder (it has no batch.json): choose another folder "
                "with name=... or output_dir=..."
            )
        if state is not None and not (resume or overwrite):
            raise RunExistsError(
                f"{self.folder} already contains a batch ({state}): run what is missing or failed with --resume, "
                "delete it and start over with --overwrite, or choose another name with name=..."
            )

    def _read(self, resume: bool) -> None:
        """Read the statuses in the folder; a run that was running when its batch was killed counts as killed."""
        changed = []
        for run in self.batch.runs:
            fresh = RunStatus(run.name, str(run.notebook.path), run.parameters)
            found = (RunStatus.read(self.folder / run.name / "status.json") if resume else None) or fresh
            self.statuses[run.name] = found
            old, new = ({"the notebook": one.notebook, **one.parameters} for one in (found, fresh))
            changes = [
                f"{name} was {old.get(name, 'not given')!r}, is {new.get(name, 'not given')!r}"
                for name in sorted(old | new)
                if old.get(name, ...) != new.get(name, ...)
            ]
            changed += [f"{run.name}: {', '.join(changes)}"] if changes else []
        if changed:
            raise ConfigError(
                "--resume, but runs have changed since they started:\n"
                + "\n".join(changed)
                + "\nchange them back, give them another name, or start the batch over with --overwrite"
            )
        for status in self.statuses.values():
            if status.state == "running":
                status.state, status.error = "killed", "its batch was killed (SIGKILL, a crash, a power failure)"
                self.save(status)
        self.left = sorted({path.parent.name for path in self._status_files()} - self.statuses.keys())

    def _status_files(self) -> list[Path]:
        """The files of all runs of a batch in the folder."""
        return [path for path in self.folder.glob("*/status.json") if RunStatus.read(path)]

    def _delete(self) -> None:
        """Delete the files that a batch writes, also in its runs' folders; everything else stays."""
        for folder in [path.parent for path in self._status_files()]:
            for name in RUN_FILES:
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / TRAINING, ignore_errors=True)
            if not any(folder.iterdir()):
                folder.rmdir()
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)

    def training(self, name: str) -> RunDir:
        """The folder of a run's training run, which need not exist."""
        return RunDir(self.folder / name / TRAINING)

    def to_do(self) -> list[BatchRun]:
        """The runs that are not done, in order."""
        return [run for run in self.batch.runs if self.statuses[run.name].state != "done"]

    def save(self, status: RunStatus) -> None:
        """Replace a run's `status.json` atomically."""
        folder = self.folder / status.name
        folder.mkdir(exist_ok=True)
        write_json(folder / "status.json", asdict(status))

    def save_batch(self, state: str, resume: str) -> None:
        """Replace `batch.json`: the state (running, finished, interrupted), the command that resumes it, the counts,
        and a summary of every run."""
        values = {"name": self.batch.name, "state": state, "pid": os.getpid(), "started": self.started}
        values |= {"updated": now(), "counts": count_states(self.statuses.values())}
        values |= {"runs": [asdict(status) for status in self.statuses.values()], "resume": hide_secrets(resume)}
        write_json(self.folder / "batch.json", values)

    def close(self) -> None:
        """Release the folder; harmless a second time."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "BatchDir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def count_states(statuses: Iterable[RunStatus]) -> dict[str, int]:
    """The number of runs in each state, in the order of `State`; states without a run are left out."""
    counts = Counter(status.state for status in statuses)
    return {state: counts[state] for state in get_args(State) if counts[state]}
