"""A run's folder `outputs/<name>/`: its files, who may write them, and how an interrupted run resumes.

`status.json` alone decides whether a run is done. The main process holds a lock and writes; in others a `RunDir` does
not.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

from rloo_kit.config.resume import refuse_changes
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError, RlooKitError, RunExistsError, RunNotFoundError, SetupError
from rloo_kit.runs.files import finite, git_revision, lock_folder, now, read_json, write_json, write_text
from rloo_kit.system.processes import count_processes, is_main_process, process_index
from rloo_kit.system.versions import installed_versions

FILES = (
    "config.yaml", "versions.json", "status.json", "metrics.jsonl", "rollouts.jsonl", "prompts.json", "before.json",
    "after.json", "report.html",
)  # fmt: skip
FOLDERS = ("checkpoints", "adapter")
SECONDS_FOR_MAIN = 3.0  # that another process waits with an error: the main one may raise the same
STATES = ("running", "finished", "interrupted", "failed")

_open: "WeakKeyDictionary[RunDir, threading.Thread]" = WeakKeyDictionary()  # each with the thread that opened it


class RunDir:
    """The open folder of one run; a context manager that releases it at the end and records how the run ended.

    Attributes:
        writes: whether this process writes; the main one does.
        resumed: whether it holds an earlier part of the run, which is continued.
        resume_command: how to resume the run, for people; the command line sets its own.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.writes = is_main_process()
        self.resumed = False
        self.resume_command = "train(run, policy, data, reward_funcs, resume=True)"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, run: RunConfig, *, resume: bool = False, overwrite: bool = False) -> "RunDir":
        """Open the folder of `run` for writing, and record its configuration and versions.

        Args:
            resume: continue the run in it.
            overwrite: delete the files of the run in it, and nothing else, and start again.

        Raises:
            RunExistsError: it holds a run and neither flag is given, another process is writing it, or it holds
                something else than a run. A run that failed before its first step does not count.
            RunNotFoundError: `resume`, and there is no run.
            ConfigError: both flags; or `resume` with a configuration that would train something else.
            SetupError: the folder cannot be made or written.
        """
        self = cls(Path(run.folder))
        if not self.writes:  # what the folder refuses, it refuses the main process
            self.resumed = resume
            return self
        try:
            self._open(run, resume, overwrite)
        except RlooKitError:  # some of them are an OSError too
            raise
        except OSError as error:
            self.close()
            raise SetupError(
                f"the run's folder {self.folder} cannot be written: {error.strerror or error}; choose another place "
                "with run.output_dir=... or another name with run.name=..."
            ) from error
        return self

    def _open(self, run: RunConfig, resume: bool, overwrite: bool) -> None:
        self._check(run, resume, overwrite)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self.resumed = resume
        if overwrite or self._never_began():
            self._delete_run()
        self.write_text("config.yaml", run.to_yaml())
        self.write_json("versions.json", describe_versions())
        self.set_status("running", **({} if resume else {"step": 0}))
        _open[self] = threading.current_thread()

    def _never_began(self) -> bool:
        """Whether the run failed before its first step (a mistyped model): there is nothing to resume."""
        status = self.status()
        return status.get("state") == "failed" and not status.get("step")

    def _check(self, run: RunConfig, resume: bool, overwrite: bool) -> None:
        """The refusals of `create`, before anything is touched."""
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite were both given: one keeps the run, the other deletes it")
        state = self.status().get("state")
        if resume:
            if state is None:
                raise RunNotFoundError(f"there is no run to resume in {self.folder}; start it without --resume")
            refuse_changes(self.folder / "config.yaml", run.to_yaml())
            self._refuse_other_number()
        elif state is not None and not overwrite and not self._never_began():
            step = self.status().get("step")
            raise RunExistsError(
                f"{self.folder} holds a run already ({state}{f' at step {step}' if step else ''}): go on with it with "
                "--resume (resume=True in Python), delete it and start again with --overwrite (overwrite=True), or "
                "give this one another name with run.name=..."
            )
        elif state is None and self.folder.is_dir() and not _holds_nothing_but_a_run(self.folder):
            raise RunExistsError(
                f"{self.folder} is not empty and not the folder of a run (it has no status.json): choose another "
                "place with run.name=... or run.output_dir=..."
            )

    def _refuse_other_number(self) -> None:
        """Another number of processes makes rollouts of another size: the place in the data would not be the same."""
        now = count_processes()
        before = (self.read_json("versions.json") or {}).get("processes", now)
        if before != now:
            how = "without --launch" if before == 1 else f"with as many (--launch FILE --processes {before})"
            raise ConfigError(
                f"the run in {self.folder} was trained in {before} process{'es' if before > 1 else ''} and would go on "
                f"in {now}: start it {how}, or start again: --overwrite or run.name=..."
            )

    def _take_lock(self) -> None:
        try:
            self._lock = lock_folder(self.folder)
        except BlockingIOError:
            raise RunExistsError(
                f"{self.folder} is being written by another process ({self.status().get('pid', 'unknown')}): wait for "
                "it, stop it, or give this run another name with run.name=..."
            ) from None

    def _delete_run(self) -> None:
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        _open.pop(self, None)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is not None:
                self._record_error(error)
        finally:
            self.close()

    def _record_error(self, error: BaseException) -> None:
        """Record how the run ended; a process that failed alone does so if the main one, which hangs then, has not."""
        interrupted = isinstance(error, KeyboardInterrupt)
        if not self.writes:
            if interrupted:
                return
            time.sleep(SECONDS_FOR_MAIN)
        if self.status().get("state") == "running":
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = text if self.writes else f"process {process_index()} of {count_processes()}: {text}"
            self._set_status("interrupted" if interrupted else "failed", error=text, resume=self.resume_command)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def write_text(self, name: str, text: str) -> Path:
        """Replace a file in one piece: a reader sees the old text or the new one, even after a crash."""
        return write_text(self.folder / name, text) if self.writes else self.folder / name

    def write_json(self, name: str, value: Any) -> Path:
        """`write_text` of `value` as JSON; NaN and infinities become null."""
        return write_json(self.folder / name, value) if self.writes else self.folder / name

    def read_json(self, name: str) -> Any:
        """The value of a JSON file; None where there is none that can be read."""
        return read_json(self.folder / name)

    def append_jsonl(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Add one line a row, all in one write, so that a crash loses none of them."""
        if not self.writes:
            return
        text = "".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows)
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(text)

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file, without a last line that a crash cut off."""
        try:
            lines = (self.folder / name).read_text(encoding="utf-8").split("\n")
        except OSError:
            return []
        rows = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def status(self) -> dict[str, Any]:
        """`status.json`; empty where there is no run."""
        return self.read_json("status.json") or {}

    def set_status(self, state: str, **fields: Any) -> None:
        """Write `status.json`: the state (one of STATES), the process, the time, and `fields` over the ones it had.

        Fields are `step`, `max_steps`, `error` and `resume` (the command that resumes the run).
        """
        if state not in STATES:
            raise ValueError(f"a run's state is one of {', '.join(STATES)}; got {state!r}")
        if self.writes:
            self._set_status(state, **fields)

    def _set_status(self, state: str, **fields: Any) -> None:
        kept = self.status()
        if state in ("running", "finished"):  # what was wrong before is over
            kept = {key: value for key, value in kept.items() if key not in ("error", "resume")}
        status = kept | {"state": state, "pid": os.getpid(), "updated": now()} | fields
        write_json(self.folder / "status.json", status)

    def last_checkpoint(self) -> tuple[Path, int] | None:
        """The newest complete checkpoint and its step: one whose `trainer_state.json`, written last, is readable."""
        found = []
        for folder in (self.folder / "checkpoints").glob("checkpoint-*"):
            step = folder.name.rpartition("-")[2]
            if step.isdigit() and self.read_json(f"checkpoints/{folder.name}/trainer_state.json") is not None:
                found.append((int(step), folder))
        if not found:
            return None
        newest, path = max(found)
        return path, newest

    def rewind(self, step: int) -> None:
        """Drop what came after `step` from `metrics.jsonl` and `rollouts.jsonl`: a resumed run repeats it."""
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            if self.writes and (self.folder / name).exists():
                kept = [row for row in self.read_jsonl(name) if row.get("step", 0) <= step]
                self.write_text(name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def open_runs() -> list[Path]:
    """Folders of the runs that this process is training; one that is over, or whose thread has ended, is not."""
    return [
        run_dir.folder
        for run_dir, thread in list(_open.items())
        if thread.is_alive() and run_dir.status().get("state") == "running"
    ]


def describe_versions() -> dict[str, Any]:
    """Versions of Python and the libraries, git revision of the kit's checkout (None without one), processes."""
    found = {"versions": installed_versions(), "git": git_revision(Path(__file__)), "processes": count_processes()}
    return found | {"written": now()}


def _holds_nothing_but_a_run(folder: Path) -> bool:
    return all(entry.name in (*FILES, *FOLDERS, ".lock") for entry in folder.iterdir())
