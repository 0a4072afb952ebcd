"""Rows of a run's JSONL files.

Only a line with a single JSON object is a row; any other (cut off by a crash, damaged by an editor) is skipped.
"""

import gzip
import json
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from rloo_kit.errors import shorten
from rloo_kit.runs.files import finite

DAMAGE = (OSError, EOFError, zlib.error, ValueError)  # the middle ones: a damaged .gz; the last: a NUL in the path


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file, one in memory at a time; a name that ends in `.gz` is decompressed.

    A missing, special or unreadable file has no rows; a damaged one has those before the damage (`find_damage`).
    """
    try:
        if path.is_file():  # a FIFO would block
            with _open(path) as file:
                yield from filter(None, map(parse_row, file))
    except DAMAGE:
        return


def find_damage(path: Path) -> str:
    """Why `read_rows` cannot read a file to its end; "" if it can."""
    try:
        with _open(path) as file:
            deque(file, maxlen=0)
    except DAMAGE as error:
        return shorten(str(error))
    return ""


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row in a line, or None. NaN and infinities become None, as `append_rows` writes them."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        return json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def row_step(row: dict[str, Any]) -> int | None:
    """A row's `step`; None if it is not an integer."""
    step = row.get("step")
    return step if type(step) is int else None


def to_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """One line per row. NaN and infinities become null; a lone surrogate, which UTF-8 cannot encode, is escaped."""
    text = "".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows)
    return text.encode("utf-8", errors="backslashreplace")


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append one line per row in a single write. After a line that a crash cut off, they start on a new line."""
    lines = to_lines(rows)
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        file.write(lines)
