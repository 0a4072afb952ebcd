"""Files of a run: written atomically and under a lock; JSONL rows, of which a damaged line is skipped."""

import errno
import fcntl
import gzip
import json
import math
import os
import subprocess
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeGuard
from weakref import WeakSet

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SIGNS_OF_A_FULL_DISK = (*map(os.strerror, _FULL), "PytorchStreamWriter failed writing", " requested and ")
LARGEST = 1e150  # largest value of a metric, so that sums and squares stay finite
_locks: "WeakSet[IO[str]]" = WeakSet()
_changed = threading.Condition()
_running: list[Path] = []


@contextmanager
def saving(path: str | Path) -> Iterator[None]:
    """Mark `path`, a file or a folder, as being written: around every save except those of `write_text`, and your
    own."""
    path = Path(path).absolute()
    with _changed:
        _running.append(path)
    try:
        yield
    finally:
        with _changed:
            _running.remove(path)
            _changed.notify_all()


def running_saves() -> list[Path]:
    """Paths being written now, by any thread; the longest-running first."""
    with _changed:
        return list(dict.fromkeys(_running))


def wait_for_saves(timeout_s: float | None = None) -> bool:
    """Wait until no save is running, for at most `timeout_s` seconds (None: no limit). Returns whether none is."""
    with _changed:
        return _changed.wait_for(lambda: not _running, timeout_s)


def write_text(path: Path, text: str) -> Path:
    """`write_bytes` of `text` as UTF-8; a lone surrogate, which that cannot encode, is escaped as in JSON."""
    return write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> Path:
    """Replace the file at `path` atomically; its folder must exist."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_json(path: Path, value: Any) -> Path:
    """`write_text` of `value` as JSON; NaN and infinities become null."""
    return write_text(path, to_json(value))


def to_json(value: Any) -> str:
    return json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n"


def now() -> str:
    """Local time with its zone, in the format of status files."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def read_json(path: Path) -> Any:
    """The value of a JSON file; None if it is missing or unreadable."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None  # a pipe would block
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it is missing or unreadable."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is an exhausted disk, quota or file size limit; torch and numpy do not say the
    reason."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(sign in str(error) for sign in _SIGNS_OF_A_FULL_DISK):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_number(value: Any) -> bool:
    """Whether a metric's value is a finite number of moderate size."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -LARGEST <= value <= LARGEST  # False for NaN; math.isfinite raises on an integer of 400 digits


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value read from a file is an integer of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def lock_folder(folder: Path) -> IO[str]:
    """Lock the folder until the returned file is closed or the process ends; BlockingIOError if it is locked."""
    lock = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 (held until closed)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise BlockingIOError(f"{folder} is locked") from None
    _locks.add(lock)
    return lock


def _drop_locks() -> None:
    """Close the locks in a forked child, which would otherwise hold them after its parent ended."""
    for lock in _locks:
        with suppress(OSError, ValueError):
            os.close(lock.fileno())


os.register_at_fork(after_in_child=_drop_locks)


def finite(value: Any) -> Any:
    """`value` made valid for JSON: NaN and infinities as None, keys and unknown objects as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


def git_revision(file: Path) -> dict[str, Any] | None:
    """Revision of the checkout that tracks `file`, and whether it has uncommitted changes; None without a checkout."""
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


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file (`.gz`: compressed), one in memory at a time; a missing, special or unreadable
    file has none, a damaged one those before the damage."""
    try:
        if path.is_file():  # a FIFO would block
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                for line in file:
                    row = None
                    with suppress(ValueError, RecursionError):  # NaN and infinities become None, as they are written
                        row = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
                    if isinstance(row, dict):
                        yield row
    except (OSError, EOFError, zlib.error, ValueError):  # the middle ones: a damaged .gz; the last: a NUL in the path
        return


def row_step(row: dict[str, Any]) -> int | None:
    """A row's `step`; None if it is not an integer."""
    step = row.get("step")
    return step if type(step) is int else None


def to_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """One line per row. NaN and infinities become null; a lone surrogate is escaped."""
    text = "".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows)
    return text.encode("utf-8", "backslashreplace")


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append one line per row in a single write. After a line that a crash cut off, they start on a new line."""
    lines = to_lines(rows)
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        file.write(lines)
