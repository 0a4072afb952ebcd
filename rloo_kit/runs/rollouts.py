"""A run's completions: `rollouts/STEP.jsonl.gz`, one file for each step with the completions that it trains on.

A file is replaced whole, so a kill leaves whole steps, and a resume removes the files after its step. Runs of earlier
versions have `rollouts.jsonl` and older parts `rollouts-STEP.jsonl`, plain or compressed; a resume converts them.
"""

import gzip
import heapq
import itertools
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rloo_kit.runs.files import find_damage, read_rows, row_step, to_lines, write_bytes
from rloo_kit.system.processes import say

FOLDER = "rollouts"
LEVEL = 1  # of gzip; a higher one takes far longer for little
STEP_FILE = re.compile(r"(\d{8,18})\.jsonl\.gz")
OLDER = re.compile(r"rollouts(-\d{8,18})?\.jsonl(\.gz)?")


def read_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield every stored completion of a run, oldest first, one in memory at a time. The run may still be writing."""
    files = step_files(Path(folder))
    steps = itertools.chain.from_iterable(_read_file(step, file) for step, file in files.items())
    return heapq.merge(steps, _read_older(Path(folder), files), key=lambda row: row["step"])


def read_step(folder: str | Path, step: int | None = None) -> list[dict[str, Any]]:
    """The completions of one step of a run (from 1; by default the last); only its file is read."""
    files = step_files(Path(folder))
    for number in reversed(files):
        if step in (None, number) and (rows := list(_read_file(number, files[number]))):
            return rows
    found: list[dict[str, Any]] = []
    for older, group in itertools.groupby(_read_older(Path(folder), files), key=row_step):
        if step in (None, older):
            found = list(group)
    return found


def step_files(folder: Path) -> dict[int, Path]:
    """The files of a run's rollouts by their step, oldest first."""
    names = ((STEP_FILE.fullmatch(path.name), path) for path in (folder / FOLDER).glob("*.gz"))
    return dict(sorted((int(match[1]), path) for match, path in names if match))


def _read_file(step: int, file: Path) -> Iterator[dict[str, Any]]:
    return (row for row in read_rows(file) if row_step(row) == step)


def _find_older(folder: Path) -> list[Path]:
    return [path for path in folder.glob("rollouts*") if OLDER.fullmatch(path.name) and path.is_file()]


def _older_files(folder: Path) -> list[Path]:
    """The files of an earlier version, oldest first. Of a part that is there twice the plain one counts: the process
    was killed while it compressed it."""
    parts = {path.name.removesuffix(".gz"): path for path in sorted(_find_older(folder), reverse=True)}
    return [parts[name] for name in sorted(parts)]  # "rollouts-..." sorts before "rollouts.jsonl"


def _read_older(folder: Path, but: Container[int]) -> Iterator[dict[str, Any]]:
    """The rows of the files of an earlier version, without those of the steps in `but`."""
    rows = itertools.chain.from_iterable(map(read_rows, _older_files(folder)))
    return (row for row in rows if (step := row_step(row)) is not None and step not in but)


class Rollouts:
    """Writes a run's completions; above `keep_gib` on disk the oldest steps are deleted (None keeps all). Only the
    process that holds the run's lock may use it."""

    def __init__(self, folder: Path, keep_gib: float | None = None):
        self.folder, self.keep_gib = folder, keep_gib
        self._warned = False

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows to the files of their steps, after those that they have: gzip files may be joined."""
        for step, group in itertools.groupby(rows, key=lambda row: row["step"]):
            file = self.folder / FOLDER / f"{step:08}.jsonl.gz"
            file.parent.mkdir(exist_ok=True)
            there = file.read_bytes() if file.exists() else b""
            write_bytes(file, there + gzip.compress(to_lines(group), LEVEL, mtime=0))
            self._keep_fewer()

    def cut(self, step: int) -> None:
        """Drop every completion after step `step`, newest first, so that a kill in between leaves a shorter run."""
        for number, file in reversed(step_files(self.folder).items()):
            if number > step:
                file.unlink()
        for path in (self.folder / FOLDER).glob(".*.tmp"):  # of a process that was killed
            path.unlink()
        there = step_files(self.folder)  # of a resume that was killed while it converted
        used = _older_files(self.folder)
        for file in set(_find_older(self.folder)) - set(used):
            file.unlink()
        for file in used:
            damage = find_damage(file)
            rows = (row for row in read_rows(file) if row_step(row) is not None and row["step"] <= step)
            self.append(row for row in rows if row["step"] not in there)
            if damage:
                kept = file.rename(file.with_name(f"damaged-{file.name}"))
                say(f"WARNING: {file} cannot be read whole ({damage}); it is kept as {kept.name}")
            else:
                file.unlink()

    def delete(self) -> None:
        """Delete every completion, and the folder if it has nothing else."""
        halves = (self.folder / FOLDER).glob(".*.tmp")
        for path in (*step_files(self.folder).values(), *halves, *_find_older(self.folder)):
            path.unlink()
        with suppress(OSError):
            (self.folder / FOLDER).rmdir()

    def _keep_fewer(self) -> None:
        """Delete the oldest steps above `keep_gib`; the last one stays."""
        if self.keep_gib is None:
            return
        sizes = {step: (file, file.stat().st_size) for step, file in step_files(self.folder).items()}
        over = sum(size for _, size in sizes.values()) - self.keep_gib * 2**30
        for step, (file, size) in list(sizes.items())[:-1]:
            if over <= 0:
                return
            file.unlink()
            over -= size
            if not self._warned:
                self._warned = True
                say(
                    f"rollouts: the completions up to step {step} are deleted, and the oldest from now on: "
                    f"run.rollouts_gib is {self.keep_gib:g} (null keeps all)"
                )
