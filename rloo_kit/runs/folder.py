"""Opens a run's folder `outputs/<name>/` for writing: its files, its lock, its status, and how it ended.

`status.json` alone decides whether a run is done. Only the main process holds the lock and writes.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError, RlooKitError, RunExistsError, RunNotFoundError, SetupError, shorten
from rloo_kit.runs.checkpoints import UNFINISHED, Checkpoint, list_checkpoints
from rloo_kit.runs.files import (
    append_rows,
    git_revision,
    is_count,
    is_disk_full,
    lock_folder,
    now,
    read_object,
    row_step,
    to_json,
    to_lines,
    write_bytes,
    write_json,
    write_text,
)
from rloo_kit.runs.reader import ID_LINE, RunReader, id_in_config, read_run_id
from rloo_kit.runs.resume import find_place
from rloo_kit.runs.rollouts import Rollouts
from rloo_kit.system.console import hide_secrets
from rloo_kit.system.gpu import describe_machine
from rloo_kit.system.processes import (
    FROM_OUTSIDE,
    count_processes,
    handle_signals,
    interrupt,
    is_distributed,
    is_main_process,
    process_index,
)
from rloo_kit.system.versions import installed_versions

FILES = (
    "config.yaml", "versions.json", "status.json", "metrics.jsonl", "health.jsonl", "inputs.json",
    "evaluations.jsonl", "prompts.json", "before.json", "after.json", "memory.json", "report.html", "images.jsonl",
)  # fmt: skip
INPUTS = "inputs.json"  # digests of what the configuration only names: rows, rewards, weights
BASE = "weights of the base"  # a key of it
SECONDS_FOR_MAIN = 3.0  # another process waits this long with an error, because the main one may raise the same

_COMMANDS = ("command", "resume")  # may have overrides with passwords in addresses, which are hidden
_OF_A_FAILURE = ("error", "resume", "stopped_by")
_OF_ITS_END = (*_OF_A_FAILURE, "stopped_early", "adapter_step", "seconds", "verdict")  # invalid once a run continues
_OWN_TRACES = re.compile(r"\.lock|\..*\.tmp")  # left by a process that was killed before it wrote anything

_open: "WeakKeyDictionary[RunDir, threading.Thread]" = WeakKeyDictionary()  # with the thread that opened each


class RunDir(RunReader):
    """The folder of one run, open for writing. As a context manager it releases the folder at the end and records how
    the run ended; SIGTERM and SIGHUP end it like Ctrl-C.

    Attributes:
        writes: whether this process writes; only the main one does. resumed: whether this continues an earlier part.
        resumes_from: the checkpoint to continue from; None for the start.
        inputs: a digest of INPUTS, which evaluations are recorded with; "" before they are known.
        accepts_changes: whether a resumed run may go on with changed inputs.
        resume_command: how to resume the run, for the user; the command line sets its own.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.writes = is_main_process()
        self.resumed = False
        self.resumes_from: Checkpoint | None = None
        self.resume_command = "train(run, policy, data, reward_funcs, resume=True)"
        self.inputs = ""
        self.accepts_changes = False
        self._ended: dict[str, Any] = {}  # the status before a resume, until the run trains further
        self._config = ""
        self._lock: IO[str] | None = None
        self._signals = ExitStack()

    @classmethod
    def create(cls, run: RunConfig, *, resume: bool = False, overwrite: bool = False) -> "RunDir":
        """Open the folder of `run` for writing, and record its configuration and versions.

        Args:
            resume: continue the run in it from the newest intact checkpoint.
            overwrite: delete the run's files, and nothing else, and start over.

        Raises:
            RunExistsError: the folder contains a run (not one that failed before its first step) and neither flag is
                given, another process is writing it, or it is none of this kit's. RunNotFoundError: `resume`, and there
                is no run, or none of its checkpoints is intact.
            ConfigError: both flags; or `resume` with a configuration that would train differently.
            SetupError: the folder cannot be created or written.
        """
        self = cls(Path(run.folder))
        if not self.writes:  # the main process does the checks
            self.resumed = resume
            return self
        try:
            self._open(run, resume, overwrite)
        except RlooKitError:  # some of them are an OSError too
            self.close()
            raise
        except OSError as error:
            self.close()
            raise SetupError(
                f"the run's folder {self.folder} cannot be written: {error.strerror or error}; choose another place "
                "with run.output_dir=... or another name with run.name=..."
            ) from error
        return self

    @classmethod
    def check(cls, run: RunConfig, *, resume: bool = False, overwrite: bool = False) -> None:
        """Refuse what `create` would refuse, without touching anything; the lock and checkpoints are not checked."""
        self = cls(Path(run.folder))
        self._check(resume, overwrite)
        place = self.folder.absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise SetupError(
                f"the run's folder {self.folder} cannot be written, because of {place}; choose another place with "
                "run.output_dir=... or another name with run.name=..."
            )

    def _open(self, run: RunConfig, resume: bool, overwrite: bool) -> None:
        self._check(resume, overwrite)
        self._config = run.to_yaml()
        written = run.with_absolute_files().to_yaml()  # a checkpoint holds the other: a project may be moved
        if not resume:
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_folder(self.folder)
        except BlockingIOError:
            raise RunExistsError(
                f"{self.folder} is being written by another process ({self.status().get('pid', 'unknown')}): wait for "
                "it, stop it, or choose another name with run.name=..."
            ) from None
        self.id = read_run_id(self.folder)
        self._check(resume, overwrite)  # again: another process may have written before the lock
        self.resumed = resume
        if resume:
            known = read_object(self.folder / INPUTS)
            by_content = (["data", "rewards"] if known else []) + (["model"] if BASE in known else [])
            self.resumes_from = find_place(self, self._config, written, by_content)
        else:
            self._delete_run()
            self.id = uuid4().hex[:12]
        write_text(self.folder / "config.yaml", f"{ID_LINE.decode()}{self.id}: what it trains with\n{written}")
        self.write_json("versions.json", describe_versions())
        self._ended = self.read_status() if resume else {}
        self.set_status("running", step=self.resumes_from.step if self.resumes_from else 0)
        _open[self] = threading.current_thread()

    def _check(self, resume: bool, overwrite: bool) -> None:
        """The refusals of `create` that need no lock, before anything is touched."""
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite were both given: one keeps the run, the other deletes it")
        for path in (self.folder / name for name in ("adapter", "best")):
            if path.is_symlink():  # it is replaced as a whole
                raise SetupError(
                    f"{path} is a link: replace it with a folder. checkpoints/ may be a link to a larger disk, and "
                    "run.output_dir moves everything"
                )
        there = sorted(path.name for path in self.folder.glob("*") if not _OWN_TRACES.fullmatch(path.name))
        carriers = "neither config.yaml nor a checkpoint's manifest"
        if resume and not self.id:
            unknown = f": {carriers} carries a run's id" if there else ""
            raise RunNotFoundError(f"no run to resume in {self.folder}{unknown}; start it without --resume")
        if resume or not there:
            return
        if not self.id:
            raise RunExistsError(
                f"{self.folder} is not empty ({', '.join(there[:3])}) and not the folder of a run of this kit "
                f"({carriers} carries an id), so nothing in it is touched: choose another folder with run.name=... or "
                "run.output_dir=..."
            )
        status = self.status()
        began = any(any(self.folder.glob(name)) for name in ("checkpoints/*", "metrics.jsonl", "rollouts*"))
        never_began = status.get("state") == "failed" and not status.get("step") and not began  # a mistyped model
        if not overwrite and not never_began:
            step = f" at step {status['step']}" if status.get("step") else ""
            raise RunExistsError(
                f"{self.folder} already contains a run ({status.get('state')}{step}): continue it with --resume "
                "(resume=True in Python), delete it and start over with --overwrite (overwrite=True), or choose "
                "another name with run.name=..."
            )

    def _delete_run(self) -> None:
        """Delete the old run's files. Its configuration, with the id, is replaced last: a deletion can be repeated."""
        checkpoints = self.folder / "checkpoints"
        mine = [checkpoint.folder for checkpoint in list_checkpoints(checkpoints, self.id)] if self.id else []
        made = ("adapter", "best", "export", UNFINISHED)
        for path in (*mine, checkpoints / UNFINISHED, *(self.folder / name for name in made)):
            if path.is_dir():
                shutil.rmtree(path)
        with suppress(OSError):  # it contains something else
            checkpoints.rmdir()
        for name in FILES:
            if name != "config.yaml":
                (self.folder / name).unlink(missing_ok=True)
        Rollouts(self.folder).delete()

    def check_there(self) -> None:
        """Raise RunNotFoundError if the folder that this process opened was removed, or replaced by another run's."""
        if self._is_lost():
            raise RunNotFoundError(
                f"{self.folder} was removed during the run, so training stops. What it contained is lost; in Python "
                "the policy still has the weights trained so far (rloo_kit.save_adapter(policy, FOLDER) saves them). "
                "Start over, with run.output_dir=... where nothing removes it"
            )

    def _is_lost(self) -> bool:
        """Whether this process has opened the folder, and it is not there any more."""
        return self.writes and bool(self._config) and id_in_config(self.folder) != self.id

    def set_status(self, state: str, **fields: Any) -> None:
        """Write `status.json`: the state (one of STATES), and `fields`, which update old ones (see docs/runs.md)."""
        if self.writes:
            self._set_status(state, **fields)

    def _set_status(self, state: str, **fields: Any) -> None:
        self.check_there()
        kept = self.read_status()
        over = {"running": _OF_ITS_END, "finished": _OF_A_FAILURE}.get(state, ())
        kept = {key: value for key, value in kept.items() if key not in over}
        fields |= {key: hide_secrets(fields[key]) for key in _COMMANDS if isinstance(fields.get(key), str)}
        status = kept | {"run": self.id, "state": state, "pid": os.getpid(), "updated": now()} | fields
        write_json(self.folder / "status.json", status)

    @property
    def checkpoint_record(self) -> dict[str, Any]:
        """Arguments of `checkpoints.seal`."""
        return {"run": self.id, "config": self._config, "processes": count_processes()}

    def drop_results(self, *others: str) -> None:
        """Delete results of an earlier end of the run, and `others`, which are out of date once it continues."""
        self._ended = {}
        if self.writes:
            for name in ("after.json", "report.html", *others):
                (self.folder / name).unlink(missing_ok=True)

    def rewind(self, step: int) -> None:
        """Drop all rows after `step` from the logs, and `best/` if its step is later; a resumed run repeats them."""
        if not self.writes:
            return
        best = read_object(self.folder / "best" / "evaluation.json").get("step")
        if is_count(best) and best > step:
            shutil.rmtree(self.folder / "best")
        for name in ("metrics.jsonl", "health.jsonl", "evaluations.jsonl"):
            if (self.folder / name).exists():
                self.replace_jsonl(name, [row for row in self.read_jsonl(name) if (row_step(row) or 0) <= step])
        Rollouts(self.folder).cut(step)

    def write_text(self, name: str, text: str) -> Path:
        """Replace a file atomically: a reader sees the old text or the new one, even after a crash."""
        self.check_there()
        return write_text(self.folder / name, text) if self.writes else self.folder / name

    def write_json(self, name: str, value: Any) -> Path:
        return self.write_text(name, to_json(value))

    def append_jsonl(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Append one line per row in a single write, so that a crash loses none of them."""
        self.check_there()
        if self.writes:
            append_rows(self.folder / name, rows)

    def replace_jsonl(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        self.check_there()
        if self.writes:
            write_bytes(self.folder / name, to_lines(rows))

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        _open.pop(self, None)
        self._signals.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunDir":
        self._signals.enter_context(handle_signals(() if is_distributed() else FROM_OUTSIDE, interrupt))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        is_lost = self._is_lost()
        try:
            if error is not None and not is_lost:
                with suppress(OSError):  # a full disk; the original error matters more
                    self._record_error(error)
        finally:
            self.close()
        if error is None or isinstance(error, RlooKitError):
            return
        if is_lost and isinstance(error, Exception):  # a save reports it in its own way
            self.check_there()
        if is_disk_full(error):
            last = self.last_checkpoint()
            kept = f"the checkpoint of step {last.step}" if last else "no checkpoint yet"
            raise SetupError(
                f"the disk is full, or a quota is used up ({type(error).__name__}: {shorten(str(error))}). "
                f"{self.folder} has {kept}; free some space, then resume: {self.resume_command}"
            ) from error
        if isinstance(error, OSError) and str(error.filename).startswith(f"{self.folder}{os.sep}"):
            why = f"{error.filename}: {error.strerror or error}"
            raise SetupError(f"a file of the run is unusable ({why}); move it away, then resume: {self.resume_command}")

    def _record_error(self, error: BaseException) -> None:
        """Record how the run ended; a refused resume leaves the record of its end. If only another process failed, the
        main one hangs, so that process records it."""
        interrupted = isinstance(error, KeyboardInterrupt)
        if not self.writes:
            if interrupted or id_in_config(self.folder) != self.id:
                return
            time.sleep(SECONDS_FOR_MAIN)
        if self.status().get("state") == "running":
            if isinstance(error, RlooKitError) and self._ended.get("state") in ("finished", "interrupted"):
                write_json(self.folder / "status.json", self._ended)
                return
            text = shorten(f"{type(error).__name__}: {error}".removesuffix(": "))
            text = text if self.writes else f"process {process_index()} of {count_processes()}: {text}"
            self._set_status("interrupted" if interrupted else "failed", error=text, resume=self.resume_command)


def open_runs() -> list[Path]:
    """Folders of the runs that this process is training; finished ones, and those whose thread has ended, excluded."""
    return [
        run_dir.folder
        for run_dir, thread in list(_open.items())
        if thread.is_alive() and run_dir.status().get("state") == "running"
    ]


def describe_versions() -> dict[str, Any]:
    """Versions of Python and the libraries, the git revision of the kit's checkout, the machine and its processes."""
    versions = {"versions": installed_versions(), "git": git_revision(Path(__file__)), "processes": count_processes()}
    return versions | {"machine": describe_machine(), "written": now()}


# Trainings before RLOO, by the method in their status: what it is in words, and the call that starts over.
BEFORE = {
    "sft": ("supervised training", "fine_tune(run, policy, data, overwrite=True)"),
    "reward_model": ("reward model's training", "train_reward_model(run, overwrite=True)"),
}


def run_before(run: RunConfig, method: str) -> RunConfig:
    """`run` with the name of such a training, NAME-sft or NAME-reward-model, which is also its folder's name."""
    changed = run.model_copy(deep=True)
    changed.run.name = f"{run.name}-{method.replace('_', '-')}"
    return changed


def check_folder(run: RunConfig, overwrite: bool = False, method: str = "sft") -> None:
    """Refuse, with RunExistsError, a folder that `open_folder` would not overwrite."""
    changed, (what, _) = run_before(run, method), BEFORE[method]
    there = RunDir(changed.folder)
    if there.id and there.status().get("method") != method:
        raise RunExistsError(
            f"{changed.folder} contains a run that is no {what}: set another run.name=..., or move it away"
        )
    try:
        RunDir.check(changed, overwrite=overwrite)
    except RunExistsError as error:
        if not (changed.folder / "status.json").is_file():  # not a folder of ours
            raise
        raise RunExistsError(
            f"{changed.folder} already contains the {what} of {run.name}: delete it and start over with "
            "--overwrite (overwrite=True), or choose another name with run.name=..."
        ) from error


def open_folder(run: RunConfig, overwrite: bool = False, method: str = "sft") -> RunDir:
    """The folder of `run_before`, open for writing; raises like `check_folder` and `RunDir.create`."""
    check_folder(run, overwrite, method)
    run_dir = RunDir.create(run_before(run, method), overwrite=overwrite)
    run_dir.resume_command = BEFORE[method][1]
    run_dir.set_status("running", method=method)
    return run_dir
