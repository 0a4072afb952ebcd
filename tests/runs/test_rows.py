"""The reader and writer of a run's JSONL files: lines that are not rows, and lines that were cut off."""

import gzip
import json
import math
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from rloo_kit.runs.files import append_rows, read_rows

NO_ROWS = {
    "a number": b"123\n",
    "a list": b"[1]\n",
    "a text": b'"x"\n',
    "empty": b"\n",
    "cut off": b'{"step": 2, "rew\n',
    "cut off inside a character": '{"text": "数'.encode()[:-1] + b"\n",
    "not UTF-8": b'{"text": "\xff"}\n',
    "NUL bytes": b"\0" * 4096 + b"\n",
    "NUL bytes before a row": b'\0\0{"step": 2}\n',
    "too deep": b'{"a":' * 100_000 + b"\n",
    "a list that is too deep, in a row": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "more digits than Python reads": b'{"a": ' + b"9" * 5000 + b"}\n",
    "two rows in a line": b'{"step": 2}{"step": 3}\n',
    "UTF-16": '{"step": 2}\n'.encode("utf-16") + b"\n",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("line", NO_ROWS.values(), ids=NO_ROWS)
def test_a_line_that_is_no_row_is_passed_over(path: Path, line: bytes) -> None:
    """A line cut off inside a Chinese character blocked every resume, and a line `123` ended in a traceback."""
    path.write_bytes(b'{"step": 1}\n' + line + b'{"step": 3}\r\n')
    assert list(read_rows(path)) == [{"step": 1}, {"step": 3}]
    path.write_bytes(b'{"step": 1}\n' + line.removesuffix(b"\n"))  # as a full disk leaves it
    assert list(read_rows(path)) == [{"step": 1}]
    append_rows(path, [{"step": 2}])
    assert list(read_rows(path)) == [{"step": 1}, {"step": 2}], "a torn line took the row after it along"
    assert path.read_bytes().endswith(line.removesuffix(b"\n") + b'\n{"step": 2}\n')


def test_a_file_that_cannot_be_read_has_no_rows(tmp_path: Path) -> None:
    """A folder or a pipe instead of the file, a name that is too long, a compressed file that is not one."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text.gz").write_bytes(b'{"step": 1}\n')
    for name in ("missing", ".", "pipe", "x" * 5000, "nul\0"):
        assert list(read_rows(tmp_path / name)) == []
    assert list(read_rows(tmp_path / "text.gz")) == []


def test_a_damaged_compressed_file_has_the_rows_before_the_damage(tmp_path: Path) -> None:
    """A flipped bit in the last megabyte must not hide the hundreds of megabytes before it."""
    path = tmp_path / "x.jsonl.gz"
    generator = random.Random(0)
    written = [{"step": step, "noise": generator.random()} for step in range(20_000)]
    data = gzip.compress("".join(json.dumps(row) + "\n" for row in written).encode())
    path.write_bytes(data)
    assert list(read_rows(path)) == written
    for damaged in (data[: len(data) // 2], data[: len(data) // 2] + b"\0" * 100 + data[len(data) // 2 + 100 :]):
        path.write_bytes(damaged)
        found = list(read_rows(path))
        assert len(found) < 20_000 and found[:8000] == written[:8000]


def test_rows_are_written_as_json_for_every_reader(path: Path) -> None:
    """NaN is not JSON, and UTF-8 cannot encode a lone surrogate: `json.dumps(..., ensure_ascii=False)` raised on
    encoding."""
    texts = ["数 é", "\ud83d", "\\\ud83d", "\0\n\u2028", "\ude00 x"]
    append_rows(path, [{"kl": math.nan, "most": math.inf}, {"texts": texts}])
    append_rows(path, [])
    assert list(read_rows(path)) == [{"kl": None, "most": None}, {"texts": texts}]
    assert "数 é" in path.read_text(encoding="utf-8") and path.read_bytes().count(b"\n") == 2
    path.write_bytes(b'{"kl": NaN, "most": -Infinity}\n')
    assert list(read_rows(path)) == [{"kl": None, "most": None}], "as other writers leave it"


def test_a_file_is_read_in_bounded_memory(path: Path) -> None:
    """276 MB of rollouts took 1.6 GB to read."""
    path.write_bytes((json.dumps({"step": 1, "text": "x" * 1000}).encode() + b"\n") * 30_000)
    tracemalloc.start()
    assert sum(1 for _ in read_rows(path)) == 30_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
