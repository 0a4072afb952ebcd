"""Rows of a run's JSONL files: read, added and cut line by line, as bytes, whatever a crash or an editor left in them.

Only a line that is one JSON object is a row. Every other line (torn, also inside a character; `123`; NUL bytes; nested
too deeply; longer than LONGEST_ROW) is passed over.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from rloo_kit.runs.files import finite

LONGEST_ROW = 64 * 2**20  # bytes
BLOCK = 2**20  # bytes read at once from the end
UNREADABLE = (OSError, EOFError, zlib.error)  # the last two: a damaged .gz


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, one in memory at a time; compressed where its name ends in `.gz`.

    A file that is missing, no plain file or not readable has none; of a damaged one come those before the damage.
    """
    try:
        if path.is_file():  # a FIFO would block
            with open_rows(path) as file:
                yield from rows_in(file)
    except (*UNREADABLE, ValueError):  # ValueError: a NUL byte in the path
        return


def open_rows(path: Path) -> BinaryIO:
    """The file for reading bytes, decompressed where its name ends in `.gz`. Raises OSError."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def rows_in(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The rows of an open file from where it stands."""
    while line := file.readline(LONGEST_ROW + 1):
        if len(line) <= LONGEST_ROW:
            row = parse_row(line)
            if row is not None:
                yield row
        else:
            while line and not line.endswith(b"\n"):
                line = file.readline(BLOCK)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None where there is none. NaN and infinities become None, as `append_rows` writes them."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        return json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def row_step(row: dict[str, Any] | None) -> int | None:
    """A row's `step`; None where it has no integer one."""
    step = None if row is None else row.get("step")
    return step if type(step) is int else None


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add one line a row, all in one write; behind a line that a crash cut off they begin on a new one.

    NaN and infinities become null. A lone surrogate, which UTF-8 cannot hold, is written as its JSON escape.
    """
    text = "".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows)
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode("utf-8", errors="backslashreplace"))


def read_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file that is not compressed from the last to the first; none where `read_rows` has none."""
    try:
        if path.is_file():
            with open(path, "rb") as file:
                for _, line in _lines_backwards(file):
                    row = parse_row(line)
                    if row is not None:
                        yield row
    except (OSError, ValueError):
        return


def cut_rows(path: Path, step: int) -> None:
    """Drop the rows behind step `step`, in place; a missing file is left missing.

    It reads backwards, as far as the first row of `step` or an earlier one, so its cost is what it drops. The file is
    cut where the first row of a later step begins: the steps of a file must never decrease, and then nothing of a
    later step can stand before the cut. Lines that are no row, or have no integer step, stay where they are before it;
    a torn last line goes.
    """
    if not path.exists():
        return
    with open(path, "rb+") as file:
        size = cut = file.seek(0, os.SEEK_END)
        for number, (offset, line) in enumerate(_lines_backwards(file)):
            row = parse_row(line)
            found = row_step(row)
            if found is not None and found <= step:
                break
            if found is not None or (number == 0 and row is None):  # the first one has no newline behind it
                cut = offset
        if cut < size:
            file.truncate(cut)
            file.flush()
            os.fsync(file.fileno())


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line from the last one, without its newline; that of one above LONGEST_ROW is empty.

    The first is what stands behind the last newline: empty in a file that ends with one.
    """
    position = file.seek(0, os.SEEK_END)
    rest, too_long = b"", False  # of the line whose start is still to come
    while position:
        start = max(position - BLOCK, 0)
        file.seek(start)
        block = file.read(position - start)
        position, end = start, len(block)
        while (newline := block.rfind(b"\n", 0, end)) >= 0:
            yield start + newline + 1, b"" if too_long else block[newline + 1 : end] + rest
            rest, too_long, end = b"", False, newline
        rest = block[:end] + rest
        if len(rest) > LONGEST_ROW:
            rest, too_long = b"", True
    yield 0, b"" if too_long else rest
