"""A run's completions on disk: `rollouts.jsonl`, which is appended to, and older ones in compressed parts.

Before a step is appended to a `rollouts.jsonl` above `FILE_BYTES`, the file becomes a part,
`rollouts-<its last step>.jsonl.gz`: it is renamed to `rollouts-<its last step>.jsonl`, compressed under a temporary
name, renamed, and the plain part is removed. So a step is always in one file, and part names only increase.
A kill in between leaves a part that is plain, or plain and compressed; then the plain one counts, and the next writer
finishes the work.
"""

import gzip
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rloo_kit.runs.rows import UNREADABLE, append_rows, cut_rows, open_rows, read_backwards, row_step, rows_in
from rloo_kit.system.processes import say

LIVE = "rollouts.jsonl"
FILE_BYTES = 64 * 2**20
LEVEL = 1  # of gzip; a higher one takes far longer for little
COPIED = 2**20  # bytes at once
NAMES = re.compile(r"rollouts-(\d{8,18})\.jsonl(\.gz)?")
HALF = re.compile(r"\.rollouts-\d{8,18}\.jsonl(\.gz)?\.tmp")


class Part(NamedTuple):
    """An older part of the rollouts: its last step and its file, the plain one if both exist."""

    last: int
    path: Path


def is_rollouts(name: str) -> bool:
    """Whether a file of this name belongs to a run's rollouts, unfinished ones included."""
    return name == LIVE or bool(NAMES.fullmatch(name) or HALF.fullmatch(name))


def parts(folder: Path) -> list[Part]:
    """The parts in a run's folder, oldest first."""
    found: dict[int, Path] = {}
    with suppress(OSError):
        for name in sorted(os.listdir(folder), reverse=True):  # x.jsonl.gz before x.jsonl, which replaces it
            match = NAMES.fullmatch(name)
            if match:
                found[int(match[1])] = folder / name
    return [Part(*item) for item in sorted(found.items())]


def read_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield every stored completion of a run, oldest first, one in memory at a time. The run may still be writing.

    Args:
        folder: the run's.
    """
    return _read_from(Path(folder), 0)


def read_step(folder: str | Path, step: int | None = None) -> list[dict[str, Any]]:
    """The completions of one step, by default the last. Only the file with that step is read; for the last step, from
    its end.

    Args:
        folder: the run's. step: as in `metrics.jsonl`, from 1.
    """
    folder = Path(folder)
    if step is None:
        return _last_step(folder)
    found = []
    for row in _read_from(folder, step):
        number = row_step(row)
        if number is not None and number > step:
            break
        if number == step:
            found.append(row)
    return found


def _last_step(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for row in read_backwards(folder / LIVE):
        if found and row_step(row) not in (None, row_step(found[0])):
            break
        if row_step(row) is not None:
            found.append(row)
    if found:
        return found[::-1]
    for part in reversed(parts(folder)):
        for row in _rows_of(part):
            if row_step(row) is not None:
                found = [*found, row] if found and row_step(found[0]) == row_step(row) else [row]
        if found:
            break
    return found


def _read_from(folder: Path, step: int) -> Iterator[dict[str, Any]]:
    """The rows of the files that may have `step` or a later one.

    A writer may rename the live file at any time, so it is opened before the parts are listed. When no part is left to
    read, the open file comes next, whatever its name is by then.
    """
    done = step - 1
    while True:
        live = _open_first(folder / LIVE)
        left = [part for part in parts(folder) if part.last > done]
        if not left:
            yield from _rows_and_close(live)
            return
        if live is not None:
            live.close()
        yield from _rows_of(left[0])
        done = left[0].last


def _rows_of(part: Part) -> Iterator[dict[str, Any]]:
    """The rows of a part, which a writer may have compressed in the meantime."""
    plain = part.path.with_name(part.path.name.removesuffix(".gz"))
    return _rows_and_close(_open_first(plain, plain.with_name(f"{plain.name}.gz")))


def _open_first(*paths: Path) -> BinaryIO | None:
    """The first file that exists and can be opened."""
    for path in paths:
        with suppress(OSError):
            if path.is_file():
                return open_rows(path)
    return None


def _rows_and_close(file: BinaryIO | None) -> Iterator[dict[str, Any]]:
    if file is not None:
        with file, suppress(*UNREADABLE):
            yield from rows_in(file)


class Rollouts:
    """Writes a run's completions. Only the process that holds the run's lock may use it.

    Args:
        folder: the run's.
        keep_gib: size on disk above which the oldest parts are deleted; None keeps all.
    """

    def __init__(self, folder: Path, keep_gib: float | None = None):
        self.folder, self.live = folder, folder / LIVE
        self.keep_gib = keep_gib
        self.keep_bytes = None if keep_gib is None else int(keep_gib * 2**30)
        self.file_bytes = FILE_BYTES if self.keep_bytes is None else min(FILE_BYTES, self.keep_bytes // 4)
        self._last: int | None = None
        self._warned = False

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Append the rows of one step; its number must not be smaller than that of earlier rows."""
        if not rows:
            return
        step = row_step(rows[0])
        if self.live.exists() and self.live.stat().st_size > self.file_bytes:
            if self._last is None:
                steps = (row_step(row) for row in read_backwards(self.live))
                self._last = next((last for last in steps if last is not None), None)
            if self._last is not None and step is not None and step > self._last:
                self._start_new_file(self._last)
        append_rows(self.live, rows)
        self._last = row_step(rows[-1])

    def cut(self, step: int) -> None:
        """Drop every completion after step `step`, newest first, so that a kill in between leaves a shorter run."""
        self._last = None
        cut_rows(self.live, step)
        found = parts(self.folder)
        for index in reversed(range(len(found))):
            part = found[index]
            if part.last <= step:
                break
            if index and found[index - 1].last >= step:  # its first step is later than `step`
                self.live.unlink(missing_ok=True)
                self._remove(part.last)
            else:
                self._make_live(part)
                cut_rows(self.live, step)

    def _start_new_file(self, last: int) -> None:
        os.replace(self.live, self._plain(last))
        for half in self.folder.glob(".rollouts-*.tmp"):
            half.unlink()
        for part in parts(self.folder):
            if part.path.suffix != ".gz":
                with suppress(OSError):  # a full disk: it stays plain; the next rotation retries
                    self._compress(part.path)
        self._keep_fewer()

    def _compress(self, plain: Path) -> None:
        with (
            self._replacing(plain.with_name(f"{plain.name}.gz")) as target,
            gzip.GzipFile("", "wb", LEVEL, target, mtime=0) as file,
            open(plain, "rb") as source,
        ):
            shutil.copyfileobj(source, file, COPIED)
        plain.unlink()

    def _make_live(self, part: Part) -> None:
        """The reverse of `_start_new_file`, with the same intermediate names. A damaged part keeps its readable
        rows."""
        plain = self._plain(part.last)
        self.live.unlink(missing_ok=True)
        if part.path.suffix == ".gz":
            with self._replacing(plain) as target, gzip.open(part.path, "rb") as source:
                while data := _read_some(source):
                    target.write(data)
        self._gz(part.last).unlink(missing_ok=True)
        os.replace(plain, self.live)

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[BinaryIO]:
        """A file for writing that replaces `path` atomically at the end, and is removed on failure."""
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _keep_fewer(self) -> None:
        """Delete the oldest parts until `keep_gib` leaves room for the new file."""
        if self.keep_bytes is None:
            return
        found = parts(self.folder)
        sizes = [part.path.stat().st_size for part in found]
        while found and sum(sizes) > self.keep_bytes - self.file_bytes:
            sizes.pop(0)
            last = found.pop(0).last
            self._remove(last)
            if not self._warned:
                self._warned = True
                say(
                    f"rollouts: the completions up to step {last} are deleted, and the oldest from now on: "
                    f"run.rollouts_gib is {self.keep_gib:g} (null keeps all)"
                )

    def _remove(self, last: int) -> None:
        self._gz(last).unlink(missing_ok=True)
        self._plain(last).unlink(missing_ok=True)  # last, because the plain part counts

    def _plain(self, last: int) -> Path:
        return self.folder / f"rollouts-{last:08}.jsonl"

    def _gz(self, last: int) -> Path:
        return self.folder / f"rollouts-{last:08}.jsonl.gz"


def _read_some(source: gzip.GzipFile) -> bytes:
    try:
        return source.read(COPIED)
    except UNREADABLE:
        return b""
