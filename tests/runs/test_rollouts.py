"""A run's completions, a file for each step: what is read back from a running run, after a cut, and after SIGKILL; and
the rows of JSONL files: lines that are not rows, lines that were cut off."""

import functools
import gzip
import os
import random
import signal
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.runs.files import append_rows, read_rows, to_lines
from rloo_kit.runs.rollouts import Rollouts, read_rollouts, read_step, step_files


def rows_of(step: int, count: int = 4, length: int = 40) -> list[dict[str, Any]]:
    noise = random.Random(step)
    return [{"step": step, "row": row, "text": noise.randbytes(length // 2).hex()} for row in range(count)]


def every(first: int, last: int) -> list[dict[str, Any]]:
    return [row for step in range(first, last + 1) for row in rows_of(step)]


def write(folder: Path, last: int, first: int = 1) -> Rollouts:
    writer = Rollouts(folder)
    for step in range(first, last + 1):
        writer.append(rows_of(step))
    return writer


def test_what_was_written_is_read_in_order(tmp_path: Path) -> None:
    """A single file had grown to 276 MB, and would have been 5 GB after a night."""
    assert list(read_rollouts(tmp_path)) == [] == read_step(tmp_path) == read_step(tmp_path / "missing", 1)
    write(tmp_path, 5).append([])
    write(tmp_path, 12, first=6)  # a resumed run
    assert list(read_rollouts(tmp_path)) == every(1, 12)
    assert [path.name for path in step_files(tmp_path).values()][9:11] == ["00000010.jsonl.gz", "00000011.jsonl.gz"]
    assert all(read_step(tmp_path, step) == rows_of(step) for step in range(1, 13))
    assert read_step(tmp_path) == rows_of(12) and read_step(tmp_path, 13) == []
    Rollouts(tmp_path).append(rows_of(12))  # a second rollout within one optimizer step
    assert list(read_rollouts(tmp_path)) == [*every(1, 12), *rows_of(12)] and len(step_files(tmp_path)) == 12


def test_deletion_takes_nothing_else(tmp_path: Path) -> None:
    """`--overwrite` deletes a run's files; a user's notes may lie next to them."""
    write(tmp_path, 3)
    notes = [tmp_path / "rollouts-my_notes.jsonl", tmp_path / "rollouts" / "notes.gz"]
    for path in notes:
        path.write_text("mine")
    Rollouts(tmp_path).delete()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(notes)
    notes[1].unlink()
    Rollouts(tmp_path).delete()
    assert not (tmp_path / "rollouts").exists()


def test_damage_costs_one_step(tmp_path: Path) -> None:
    """A flipped bit or an editor in one file must not hide the others, or stop a resume."""
    write(tmp_path, 5)
    files = step_files(tmp_path)
    files[2].write_bytes(files[2].read_bytes()[:-60])
    files[3].write_bytes(gzip.compress(to_lines([{"step": "3"}, {"step": 4}])))
    files[5].write_bytes(b"not compressed")
    assert [row for row in read_rollouts(tmp_path) if row["step"] != 2] == [*rows_of(1), *rows_of(4)]
    assert read_step(tmp_path) == rows_of(4) and read_step(tmp_path, 5) == []
    Rollouts(tmp_path).cut(1)
    assert list(read_rollouts(tmp_path)) == rows_of(1)


def test_a_reader_follows_a_writer(tmp_path: Path) -> None:
    """`show` and `report` may be called while the run trains: no row is lost or read twice."""
    writer = threading.Thread(target=write, args=(tmp_path, 60))
    writer.start()
    while writer.is_alive():
        found = list(read_rollouts(tmp_path))
        assert found == every(1, found[-1]["step"] if found else 0)
    writer.join()
    assert list(read_rollouts(tmp_path)) == every(1, 60)


def die_after(changes: int, work: Callable[[], object]) -> bool:
    """Run `work` in a process that kills itself after a number of file changes; returns whether it was killed."""
    left = [changes]

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*args, **options)

        return call

    child = os.fork()
    if child == 0:
        for place, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
            setattr(place, name, dying(getattr(place, name)))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize("cut_at", [None, 0, 1])
def test_sigkill_anywhere_loses_and_doubles_no_row(tmp_path: Path, cut_at: int | None) -> None:
    """Killed before each rename, deletion and sync of a write or a cut; then read, then resumed."""
    last = 3
    kept = last if cut_at is None else cut_at
    changes, killed = 0, True
    while killed:
        folder = tmp_path / str(changes)
        folder.mkdir()
        write(folder, last)
        if cut_at is None:
            killed = die_after(changes, functools.partial(write, folder, last + 2, last + 1))
        else:
            killed = die_after(changes, functools.partial(Rollouts(folder).cut, cut_at))
        found = list(read_rollouts(folder))
        assert found[: 4 * kept] == every(1, kept) and len(found) == len({(row["step"], row["row"]) for row in found})
        Rollouts(folder).cut(kept)
        assert list(read_rollouts(write(folder, kept + 2, kept + 1).folder)) == every(1, kept + 2)
        changes += 1
    assert changes > 1, "it was never killed in between"


def test_any_number_of_rows_takes_the_same_memory(tmp_path: Path) -> None:
    """Writing, reading and cutting 10 MB takes the memory of a few steps; 276 MB of rollouts took 1.6 GB to read."""
    (tmp_path / "rows.jsonl").write_bytes((b'{"step": 1, "text": "' + b"x" * 1000 + b'"}\n') * 4_000)
    tracemalloc.start()
    writer = Rollouts(tmp_path)
    for step in range(1, 101):
        writer.append([{"step": step, "text": "x" * 100_000}])
    assert sum(1 for _ in read_rollouts(tmp_path)) == 100 and len(read_step(tmp_path, 50)) == 1
    writer.cut(30)
    assert read_step(tmp_path)[0]["step"] == 30
    assert sum(1 for _ in read_rows(tmp_path / "rows.jsonl")) == 4_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


# ------------------------------------------------------------------------------------------ rows of JSONL files

NO_ROWS = {
    "a number": b"123\n",
    "cut off inside a character": '{"text": "数'.encode()[:-1] + b"\n",
    "not UTF-8": b'{"text": "\xff"}\n',
    "NUL bytes before a row": b'\0\0{"step": 2}\n',
    "a list that is too deep, in a row": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "more digits than Python reads": b'{"a": ' + b"9" * 5000 + b"}\n",
    "two rows in a line": b'{"step": 2}{"step": 3}\n',
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
    """A folder, a pipe, a name that is too long, a compressed file that is not one; NaN, which is not JSON, is None."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text.gz").write_bytes(b'{"step": 1}\n')
    for name in ("missing", ".", "pipe", "x" * 5000, "nul\0"):
        assert list(read_rows(tmp_path / name)) == []
    assert list(read_rows(tmp_path / "text.gz")) == []
    (tmp_path / "nan").write_bytes(b'{"kl": NaN, "most": -Infinity}\n')
    assert list(read_rows(tmp_path / "nan")) == [{"kl": None, "most": None}]
