"""A run's completions in several files: what is read back after many parts, after a cut, and after SIGKILL."""

import gzip
import multiprocessing
import os
import random
import shutil
import signal
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.runs import rollouts
from rloo_kit.runs.rollouts import Rollouts, is_rollouts, parts, read_rollouts, read_step


def rows_of(step: int, count: int = 4, length: int = 40) -> list[dict[str, Any]]:
    noise = random.Random(step)
    return [{"step": step, "row": row, "text": noise.randbytes(length // 2).hex()} for row in range(count)]


def every(first: int, last: int) -> list[dict[str, Any]]:
    return [row for step in range(first, last + 1) for row in rows_of(step)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "FILE_BYTES", 800)  # three steps of four rows


def write(folder: Path, last: int, first: int = 1, **options: Any) -> Rollouts:
    writer = Rollouts(folder, **options)
    for step in range(first, last + 1):
        writer.append(rows_of(step))
    return writer


@pytest.mark.usefixtures("small")
def test_older_steps_are_compressed_and_read_in_order(tmp_path: Path) -> None:
    """A single file had grown to 276 MB, and would have been 5 GB after a night."""
    assert list(read_rollouts(tmp_path)) == [] == read_step(tmp_path) == read_step(tmp_path / "missing", 1)
    write(tmp_path, 5)
    write(tmp_path, 10, first=6)  # a resumed run
    assert names(tmp_path) == [f"rollouts-{last:08}.jsonl.gz" for last in (3, 6, 9)] + ["rollouts.jsonl"]
    assert list(read_rollouts(tmp_path)) == every(1, 10)
    assert gzip.decompress((tmp_path / "rollouts-00000006.jsonl.gz").read_bytes()).count(b"\n") == 12
    for step in range(1, 11):
        assert read_step(tmp_path, step) == rows_of(step)
    assert read_step(tmp_path) == rows_of(10) and read_step(tmp_path, 11) == []
    (tmp_path / "rollouts.jsonl").unlink()
    assert read_step(tmp_path) == rows_of(9), "a writer has just renamed it"
    assert all(is_rollouts(name) for name in names(tmp_path)) and not is_rollouts("rollouts-my_notes.jsonl")


@pytest.mark.usefixtures("small")
def test_a_step_stays_in_one_file(tmp_path: Path) -> None:
    """A second batch of a step would have replaced the part that is named after the step."""
    writer = Rollouts(tmp_path)
    for _ in range(10):
        writer.append(rows_of(1))
    writer.append(rows_of(2))
    assert names(tmp_path) == ["rollouts-00000001.jsonl.gz", "rollouts.jsonl"]
    assert list(read_rollouts(tmp_path)) == rows_of(1) * 10 + rows_of(2) and read_step(tmp_path, 1) == rows_of(1) * 10


@pytest.mark.usefixtures("small")
def test_a_cut_at_any_step_leaves_what_was_written_up_to_it(tmp_path: Path) -> None:
    """A resumed run repeats everything after its checkpoint."""
    for step in range(13):
        folder = tmp_path / str(step)
        folder.mkdir()
        writer = write(folder, 11)
        with open(folder / "rollouts.jsonl", "a") as file:
            file.write('{"step": 12, "te')
        writer.cut(step)
        assert list(read_rollouts(folder)) == every(1, min(step, 11))
        assert [part.last for part in parts(folder)] == [last for last in (3, 6, 9) if last <= step]
        write(folder, 15, first=step + 1)
        assert list(read_rollouts(folder)) == [row for row in every(1, 15) if not 12 <= row["step"] <= step]


@pytest.mark.usefixtures("small")
def test_the_oldest_are_deleted_above_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run.rollouts_gib`: a run of a week must not fill the disk; the deletion is reported once."""
    write(tmp_path, 200, keep_gib=8000 / 2**30)
    kept = list(read_rollouts(tmp_path))
    assert kept == every(kept[0]["step"], 200) and kept[0]["step"] > 100
    assert 4000 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 8000
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "run.rollouts_gib" in printed and "null" in printed
    Rollouts(tmp_path).cut(kept[0]["step"])
    assert list(read_rollouts(tmp_path)) == rows_of(kept[0]["step"]), "the part before it is not there to ask"


@pytest.mark.usefixtures("small")
def test_of_a_damaged_part_the_rest_is_read(tmp_path: Path) -> None:
    """One flipped bit in a part of 64 MiB must not hide the other parts or stop a resume."""
    write(tmp_path, 11)
    part = tmp_path / "rollouts-00000006.jsonl.gz"
    part.write_bytes(part.read_bytes()[:-60])
    found = list(read_rollouts(tmp_path))
    assert [row for row in found if not 4 <= row["step"] <= 6] == every(1, 3) + every(7, 11)
    Rollouts(tmp_path).cut(5)
    assert [row for row in read_rollouts(tmp_path) if row["step"] <= 3] == every(1, 3)
    part.write_bytes(b"not compressed")
    Rollouts(tmp_path).cut(4)
    assert list(read_rollouts(tmp_path)) == every(1, 3)


@pytest.mark.usefixtures("small")
def test_a_part_that_cannot_be_compressed_stays_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without room for the compressed copy must not end a run while rows can still be appended."""
    whole = os.fsync

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    write(tmp_path, 5)
    assert names(tmp_path) == ["rollouts-00000003.jsonl", "rollouts.jsonl"]
    assert list(read_rollouts(tmp_path)) == every(1, 5)
    monkeypatch.setattr(os, "fsync", whole)
    write(tmp_path, 8, first=6)
    assert names(tmp_path)[:2] == ["rollouts-00000003.jsonl.gz", "rollouts-00000006.jsonl.gz"]
    assert list(read_rollouts(tmp_path)) == every(1, 8)


def test_a_reader_follows_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollouts.jsonl` becomes a part while it is being read: no row is lost or read twice."""
    monkeypatch.setattr(rollouts, "FILE_BYTES", 800)
    for _ in range(20):
        reader = read_rollouts(tmp_path)
        writer = threading.Thread(target=write, args=(tmp_path, 60))
        writer.start()
        found = list(reader)
        while writer.is_alive():
            found = list(read_rollouts(tmp_path))
            assert found == every(1, 60)[: len(found)]
        writer.join()
        assert list(read_rollouts(tmp_path)) == every(1, 60)
        for path in tmp_path.iterdir():
            path.unlink()


def die_after(changes: int, work: Callable[[], object]) -> bool:
    """Run `work` in a process that kills itself after a number of file changes or renames; returns whether it was
    killed."""
    left = [changes]

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*args, **options)

        return call

    def run() -> None:
        for place, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (rollouts, "append_rows")):
            setattr(place, name, dying(getattr(place, name)))
        copy = shutil.copyfileobj
        shutil.copyfileobj = lambda source, target, size: (target.write(source.read(99)), dying(copy)(source, target))
        work()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("cut_at", [None, 9, 5, 3, 0])
def test_sigkill_anywhere_loses_and_doubles_no_row(tmp_path: Path, cut_at: int | None) -> None:
    """Killed before each rename, deletion, write and sync of a write or cut; then read, then resumed."""
    changes, seen = 0, set()
    while True:
        folder = tmp_path / str(changes)
        folder.mkdir()
        if cut_at is None:
            killed = die_after(changes, lambda folder=folder: write(folder, 11))  # type: ignore[misc]
        else:
            write(folder, 11)
            killed = die_after(changes, lambda folder=folder: Rollouts(folder).cut(cut_at))  # type: ignore[misc]
        seen.add(tuple(names(folder)))
        found = list(read_rollouts(folder))
        last = found[-1]["step"] if found else 0
        assert found == every(1, last), names(folder)
        assert cut_at is None or cut_at <= last <= 11
        assert read_step(folder) == (rows_of(last) if last else [])
        if not killed:
            assert cut_at is None or last == cut_at
            break
        for back in (2, 4):  # of a resume that falls back further than the one that was killed, too
            again = tmp_path / f"{changes}-{back}"
            shutil.copytree(folder, again)
            start = max(min(last, last if cut_at is None else cut_at) - back, 0)
            Rollouts(again).cut(start)
            assert list(read_rollouts(again)) == every(1, start), names(folder)
            write(again, 20, first=start + 1)
            assert list(read_rollouts(again)) == every(1, 20), names(folder)
            assert all(name == "rollouts.jsonl" or name.endswith(".jsonl.gz") for name in names(again))
        changes += 1
    assert changes > 0 and (cut_at == 9 or len(seen) > 3), "it was never killed in between"


def test_any_number_of_rows_takes_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut, a step and all rows of 40 MB in files of 2 MB take memory within 10 % of each other."""
    monkeypatch.setattr(rollouts, "FILE_BYTES", 2 * 2**20)
    monkeypatch.setattr(rollouts, "LEVEL", 1)
    tracemalloc.start()
    writer = Rollouts(tmp_path)
    for step in range(1, 401):
        writer.append([{"step": step, "text": "x" * 100_000}])
    assert len(parts(tmp_path)) > 15
    assert sum(1 for _ in read_rollouts(tmp_path)) == 400 and len(read_step(tmp_path, 200)) == 1
    writer.cut(100)
    assert read_step(tmp_path)[0]["step"] == 100
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20 + 2**20
