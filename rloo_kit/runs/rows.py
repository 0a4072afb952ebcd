"""Rows of a run's JSONL files, read, appended and truncated as bytes, so that damage from a crash or an editor is safe.

Only a line with a single JSON object is a row. Any other line (cut off, also inside a character; `123`; NUL bytes;
nested too deeply; longer than LONGEST_ROW) is skipped.
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
    """Yield the rows of a JSONL file, one in memory at a time; a name that ends in `.gz` is decompressed.

    A missing, special or unreadable file has no rows; a damaged one has those before the damage.
    """
    try:
        if path.is_file():  # a FIFO would block
            with open_rows(path) as file:
                yield from rows_in(file)
    except (*UNREADABLE, ValueError):  # ValueError: a NUL byte in the path
        return


def open_rows(path: Path) -> BinaryIO:
    """Open a file for reading bytes, decompressed if its name ends in `.gz`. Raises OSError."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def rows_in(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The rows of an open file from its current position."""
    while line := file.readline(LONGEST_ROW + 1):
        if len(line) <= LONGEST_ROW:
            row = parse_row(line)
            if row is not None:
                yield row
        else:
            while line and not line.endswith(b"\n"):
                line = file.readline(BLOCK)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row in a line, or None. NaN and infinities become None, as `append_rows` writes them."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        return json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def row_step(row: dict[str, Any] | None) -> int | None:
    """A row's `step`; None if it is not an integer."""
    step = None if row is None else row.get("step")
    return step if type(step) is int else None


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append one line per row in a single write. After a line that a crash cut off, they start on a new line.

    NaN and infinities become null. A lone surrogate, which UTF-8 cannot encode, is written as its JSON escape.
    """
    text = "".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows)
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode("utf-8", errors="backslashreplace"))


def read_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an uncompressed JSONL file from last to first; none if `read_rows` has none."""
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
    """Drop the rows after step `step`, in place; a missing file stays missing.

    Reads backwards to the first row of `step` or an earlier one, so its cost is proportional to what it drops. The file
    is truncated where the first row of a later step begins; steps in a file must never decrease, so no later step is
    before that. Lines before it that are not rows, or have no integer step, stay; a last line that was cut off goes.
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
            if found is not None or (number == 0 and row is None):  # the first one has no newline after it
                cut = offset
        if cut < size:
            file.truncate(cut)
            file.flush()
            os.fsync(file.fileno())


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line, from the last, without its newline; a line above LONGEST_ROW comes empty.

    The first item is whatever follows the last newline: empty in a file that ends with one.
    """
    position = file.seek(0, os.SEEK_END)
    rest, too_long = b"", False  # of the line whose start is not read yet
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
