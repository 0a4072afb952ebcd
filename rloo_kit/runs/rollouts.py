"""A run's completions: `rollouts/STEP.jsonl.gz`, one file for each step with the completions that it trains on.

A file is replaced whole, so a kill leaves whole steps, and a resume removes the files after its step.
"""

import gzip
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rloo_kit.runs.files import read_rows, row_step, to_lines, write_bytes

FOLDER = "rollouts"
LEVEL = 1  # of gzip; a higher one takes far longer for little
STEP_FILE = re.compile(r"(\d{8,18})\.jsonl\.gz")


def read_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield every stored completion of a run, oldest first, one in memory at a time. The run may still be writing."""
    files = step_files(Path(folder)).items()
    return itertools.chain.from_iterable(_read_file(step, file) for step, file in files)


def read_step(folder: str | Path, step: int | None = None) -> list[dict[str, Any]]:
    """The completions of one step of a run (from 1; by default the last); only its file is read."""
    files = step_files(Path(folder))
    for number in reversed(files):
        if step in (None, number) and (rows := list(_read_file(number, files[number]))):
            return rows
    return []


def step_files(folder: Path) -> dict[int, Path]:
    """The files of a run's rollouts by their step, oldest first."""
    names = ((STEP_FILE.fullmatch(path.name), path) for path in (folder / FOLDER).glob("*.gz"))
    return dict(sorted((int(match[1]), path) for match, path in names if match))


def _read_file(step: int, file: Path) -> Iterator[dict[str, Any]]:
    return (row for row in read_rows(file) if row_step(row) == step)


class Rollouts:
    """Writes a run's completions. Only the process that holds the run's lock may use it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows to the files of their steps, after those that they have: gzip files may be joined."""
        for step, group in itertools.groupby(rows, key=lambda row: row["step"]):
            file = self.folder / FOLDER / f"{step:08}.jsonl.gz"
            file.parent.mkdir(exist_ok=True)
            there = file.read_bytes() if file.exists() else b""
            write_bytes(file, there + gzip.compress(to_lines(group), LEVEL, mtime=0))

    def cut(self, step: int) -> None:
        """Drop every completion after step `step`, newest first, so that a kill in between leaves a shorter run."""
        for number, file in reversed(step_files(self.folder).items()):
            if number > step:
                file.unlink()
        for path in (self.folder / FOLDER).glob(".*.tmp"):  # of a process that was killed
            path.unlink()

    def delete(self) -> None:
        """Delete every completion, and the folder if it has nothing else."""
        self.cut(-1)
        with suppress(OSError):
            (self.folder / FOLDER).rmdir()
