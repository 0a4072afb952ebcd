"""A run's folder: what lies in it, who may write to it, and how a run that was cut short goes on.

`outputs/<name>/` holds `config.yaml` (resolved), `versions.json`, `status.json`, `metrics.jsonl` (one line a logged
step), `rollouts.jsonl` (one line a completion), `prompts.json` (where prompts were chosen), `checkpoints/`, `adapter/`,
`before.json`, `after.json` and `report.html`. Files that others poll are replaced in one piece, so no reader sees half
of one; whether a run is done is said by `status.json` alone. While a process has the folder open it holds a lock on it,
which the system lets go of however that process ends. Of a run's processes only the main one writes; in the others
a `RunDir` reads, and its writing does nothing, but for the error that nobody else could tell.
"""

import json
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Protocol
from weakref import WeakKeyDictionary

from rloo_kit.config.resume import refuse_changes
from rloo_kit.errors import ConfigError, RlooKitError, RunExistsError, RunNotFoundError, SetupError
from rloo_kit.system.processes import count_processes, is_main_process, process_index
from rloo_kit.system.versions import installed_versions

FILES = (
    "config.yaml",
    "versions.json",
    "status.json",
    "metrics.jsonl",
    "rollouts.jsonl",
    "prompts.json",
    "before.json",
    "after.json",
    "report.html",
)
FOLDERS = ("checkpoints", "adapter")
SECONDS_FOR_MAIN = 3.0  # that another process waits with an error: the main one may have the same to tell
STATES = ("running", "finished", "interrupted", "failed")

_open: "WeakKeyDictionary[RunDir, threading.Thread]" = WeakKeyDictionary()  # each with the thread that opened it


class Run(Protocol):
    """What this module needs of a `RunConfig`."""

    @property
    def folder(self) -> Path: ...

    def to_yaml(self) -> str: ...


class RunDir:
    """The open folder of one run; a context manager that lets go of it at the end and records how it ended.

    Attributes:
        folder: the folder itself.
        writes: whether this process writes; the main one does.
        resumed: whether it held an earlier part of the run that is being continued.
        resume_command: how this run is continued, for people; the command line puts its own here.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.writes = is_main_process()
        self.resumed = False
        self.resume_command = "train(run, policy, data, reward_funcs, resume=True)"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, run: Run, *, resume: bool = False, overwrite: bool = False) -> "RunDir":
        """Open the folder of `run` for writing, and record its configuration and the versions it runs with.

        Args:
            run: the resolved configuration.
            resume: go on with the run that lies there.
            overwrite: delete the files of the run that lies there (nothing else in the folder) and start anew.

        Raises:
            RunExistsError: a run lies there and neither flag is given, it is being written right now, or the folder
                holds something that is not a run. One that failed before its first step is no run.
            RunNotFoundError: `resume`, and no run lies there.
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

    def _open(self, run: Run, resume: bool, overwrite: bool) -> None:
        self.check(run, resume=resume, overwrite=overwrite)
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
        """Whether the run that lies here failed before its first step (a mistyped model): nothing to go on with."""
        status = self.status()
        return status.get("state") == "failed" and not status.get("step")

    def check(self, run: Run, *, resume: bool = False, overwrite: bool = False) -> None:
        """The refusals of `create`, without touching anything: to be asked before slow work is done."""
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
                "--resume (resume=True in Python), delete it and start anew with --overwrite (overwrite=True), or "
                "give this one another name with run.name=..."
            )
        elif state is None and self.folder.is_dir() and not _holds_nothing_but_a_run(self.folder):
            raise RunExistsError(
                f"{self.folder} is not empty and not the folder of a run (it has no status.json): choose another "
                "place with run.name=... or run.output_dir=..."
            )

    def _refuse_other_number(self) -> None:
        """A rollout of another number of processes is of another size: the place in the data would not be the same."""
        now = count_processes()
        before = (self.read_json("versions.json") or {}).get("processes", now)
        if before != now:
            how = "without --launch" if before == 1 else f"with as many (--launch FILE --processes {before})"
            raise ConfigError(
                f"the run in {self.folder} was trained in {before} process{'es' if before > 1 else ''} and would go on "
                f"in {now}: start it {how}, or start anew: --overwrite or run.name=..."
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
        """Let go of the folder; harmless a second time."""
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
        """How the run ended; a process that failed alone tells it when the main one, which cannot go on, has not."""
        interrupted = isinstance(error, KeyboardInterrupt)
        if not self.writes:
            if interrupted:
                return
            time.sleep(SECONDS_FOR_MAIN)
        if self.status().get("state") == "running":
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = text if self.writes else f"process {process_index()} of {count_processes()}: {text}"
            self._set_status("interrupted" if interrupted else "failed", error=text, resume=self.resume_command)

    # ------------------------------------------------------------------------------------------------ files

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def write_text(self, name: str, text: str) -> Path:
        """Replace a file in one piece: a reader sees the old text or the new one, also after a crash."""
        return write_text(self.folder / name, text) if self.writes else self.folder / name

    def write_json(self, name: str, value: Any) -> Path:
        """`write_text` of `value` as JSON; NaN and infinities, which JSON has not, become null."""
        return write_json(self.folder / name, value) if self.writes else self.folder / name

    def read_json(self, name: str) -> Any:
        """The value of a JSON file, or None where there is none (or none that can be read)."""
        return read_json(self.folder / name)

    def append_jsonl(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Add one line a row and hand them to the system at once, so that a crash loses none of them."""
        if not self.writes:
            return
        text = "".join(json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in rows)
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(text)

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file; a last line that a crash cut off is left out."""
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

    # ------------------------------------------------------------------------------------------------ state

    def status(self) -> dict[str, Any]:
        """`status.json`; empty where there is no run."""
        return self.read_json("status.json") or {}

    def set_status(self, state: str, **fields: Any) -> None:
        """Write `status.json`: the state, the process, the time, and `fields` over the ones it had.

        Args:
            state: one of STATES.
            fields: `step`, `max_steps`, `error`, `resume` (the command that goes on), ...
        """
        if state not in STATES:
            raise ValueError(f"a run's state is one of {', '.join(STATES)}; got {state!r}")
        if self.writes:
            self._set_status(state, **fields)

    def _set_status(self, state: str, **fields: Any) -> None:
        kept = self.status()
        if state in ("running", "finished"):  # what was wrong before is over
            kept = {key: value for key, value in kept.items() if key not in ("error", "resume")}
        status = kept | {"state": state, "pid": os.getpid(), "updated": _now()} | fields
        write_json(self.folder / "status.json", status)

    def last_checkpoint(self) -> tuple[Path, int] | None:
        """The newest complete checkpoint and its step.

        The trainer writes `trainer_state.json` last, so a folder in which it cannot be read was cut short while it was
        being saved and is passed over.
        """
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
        """Drop from `metrics.jsonl` and `rollouts.jsonl` what came after `step`: a resumed run does it again."""
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            if self.writes and (self.folder / name).exists():
                kept = [row for row in self.read_jsonl(name) if row.get("step", 0) <= step]
                self.write_text(name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def open_runs() -> list[Path]:
    """Folders of the runs that this process has open and that go on: training in a thread, above all.

    A run that is over (`status.json`), or whose thread has ended, does not count.
    """
    return [
        run_dir.folder
        for run_dir, thread in list(_open.items())
        if thread.is_alive() and run_dir.status().get("state") == "running"
    ]


def write_text(path: Path, text: str) -> Path:
    """Replace the file at `path` in one piece; its folder must exist."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_json(path: Path, value: Any) -> Path:
    """`write_text` of `value` as JSON; NaN and infinities, which JSON has not, become null."""
    return write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The value of a JSON file, or None where there is none (or none that can be read)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def lock_folder(folder: Path) -> IO[str] | None:
    """Take the folder's lock; it is let go when the file is closed or the process ends, however it ends.

    Returns:
        The open lock file; None on a system without locks (Windows), where two writers are not noticed.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    lock = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 (held until closed)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise BlockingIOError(f"{folder} is locked") from None
    return lock


def describe_versions() -> dict[str, Any]:
    """Versions of Python and the libraries, the git revision of the kit's own checkout (None if it is not one), and the
    number of processes."""
    found = {"versions": installed_versions(), "git": git_revision(Path(__file__)), "processes": count_processes()}
    return found | {"written": _now()}


def git_revision(file: Path) -> dict[str, Any] | None:
    """Revision of the checkout that tracks `file`, and whether anything in it was changed since; None without one."""
    command = ["git", "-C", str(file.parent)]

    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run([*command, *words], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    revision = ask("rev-parse", "HEAD")
    if revision is None or ask("ls-files", "--error-unmatch", file.name) is None:
        return None
    return {"revision": revision, "changed": bool(ask("status", "--porcelain", "--untracked-files=no"))}


def _holds_nothing_but_a_run(folder: Path) -> bool:
    return all(entry.name in (*FILES, *FOLDERS, ".lock") for entry in folder.iterdir())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
