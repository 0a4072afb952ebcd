"""A run's completions, a file for each step: what is read back from a running run, after a cut, and after SIGKILL."""

import functools
import gzip
import multiprocessing
import os
import random
import signal
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.runs.files import to_lines
from rloo_kit.runs.rollouts import Rollouts, read_rollouts, read_step, step_files


def rows_of(step: int, count: int = 4, length: int = 40) -> list[dict[str, Any]]:
    noise = random.Random(step)
    return [{"step": step, "row": row, "text": noise.randbytes(length // 2).hex()} for row in range(count)]


def every(first: int, last: int) -> list[dict[str, Any]]:
    return [row for step in range(first, last + 1) for row in rows_of(step)]


def write(folder: Path, last: int, first: int = 1, **options: Any) -> Rollouts:
    writer = Rollouts(folder, **options)
    for step in range(first, last + 1):
        writer.append(rows_of(step))
    return writer


def write_older(folder: Path) -> None:
    """Steps 1 to 8 as earlier versions left them: a compressed part, one that was killed while it was compressed, and
    the file that was appended to, with a line that was cut off."""
    (folder / "rollouts-00000003.jsonl.gz").write_bytes(gzip.compress(to_lines(every(1, 3))))
    (folder / "rollouts-00000006.jsonl").write_bytes(to_lines(every(4, 6)))
    (folder / "rollouts-00000006.jsonl.gz").write_bytes(gzip.compress(to_lines(every(4, 4)))[:-9])
    (folder / "rollouts.jsonl").write_bytes(to_lines(every(7, 8)) + b'{"step": 9, "te')


def test_what_was_written_is_read_in_order(tmp_path: Path) -> None:
    """A single file had grown to 276 MB, and would have been 5 GB after a night."""
    assert list(read_rollouts(tmp_path)) == [] == read_step(tmp_path) == read_step(tmp_path / "missing", 1)
    write(tmp_path, 5).append([])
    write(tmp_path, 12, first=6)  # a resumed run
    assert list(read_rollouts(tmp_path)) == every(1, 12)
    assert [path.name for path in step_files(tmp_path).values()][9:11] == ["00000010.jsonl.gz", "00000011.jsonl.gz"]
    assert all(read_step(tmp_path, step) == rows_of(step) for step in range(1, 13))
    assert read_step(tmp_path) == rows_of(12) and read_step(tmp_path, 13) == []


def test_a_second_batch_of_a_step_joins_the_first(tmp_path: Path) -> None:
    """Two rollouts within one optimizer step."""
    writer = write(tmp_path, 2)
    writer.append(rows_of(2))
    assert list(read_rollouts(tmp_path)) == [*every(1, 2), *rows_of(2)] and len(step_files(tmp_path)) == 2


def test_a_cut_at_any_step_leaves_what_was_written_up_to_it(tmp_path: Path) -> None:
    """A resumed run repeats everything after its checkpoint."""
    for step in range(7):
        folder = tmp_path / str(step)
        folder.mkdir()
        write(folder, 5).cut(step)
        assert list(read_rollouts(folder)) == every(1, min(step, 5))
        write(folder, 9, first=step + 1)
        assert list(read_rollouts(folder)) == [row for row in every(1, 9) if not 5 < row["step"] <= step]


def test_deletion_takes_nothing_else(tmp_path: Path) -> None:
    """`--overwrite` deletes a run's files; a user's notes may lie next to them."""
    write(tmp_path, 3)
    write_older(tmp_path)
    notes = [tmp_path / "rollouts-my_notes.jsonl", tmp_path / "rollouts" / "notes.gz"]
    for path in notes:
        path.write_text("mine")
    Rollouts(tmp_path).delete()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(notes)
    notes[1].unlink()
    Rollouts(tmp_path).delete()
    assert not (tmp_path / "rollouts").exists()


def test_the_oldest_are_deleted_above_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run.rollouts_gib`: a run of a week must not fill the disk; the deletion is reported once."""
    write(tmp_path, 200, keep_gib=8000 / 2**30)
    kept = list(read_rollouts(tmp_path))
    assert kept == every(kept[0]["step"], 200) and kept[0]["step"] > 100
    assert 6000 < sum(path.stat().st_size for path in step_files(tmp_path).values()) <= 8000
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "run.rollouts_gib" in printed and "null" in printed
    write(tmp_path, 201, first=201, keep_gib=1 / 2**30)
    assert list(read_rollouts(tmp_path)) == rows_of(201), "the last step is what a report needs most"


def test_damage_costs_one_step(tmp_path: Path) -> None:
    """A flipped bit or an editor in one file must not hide the others, or stop a resume."""
    write(tmp_path, 5)
    files = step_files(tmp_path)
    files[2].write_bytes(files[2].read_bytes()[:-60])
    files[5].write_bytes(b"not compressed")
    files[3].write_bytes(gzip.compress(to_lines([{"step": "3"}, {"step": 4}])))
    found = list(read_rollouts(tmp_path))
    assert [row for row in found if row["step"] != 2] == [*rows_of(1), *rows_of(4)]
    assert read_step(tmp_path) == rows_of(4) and read_step(tmp_path, 5) == []
    Rollouts(tmp_path).cut(1)
    assert list(read_rollouts(tmp_path)) == rows_of(1)


@pytest.mark.parametrize("step", range(10))
def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path, step: int) -> None:
    """It is read as it is; a resume converts what it keeps."""
    write_older(tmp_path)
    assert list(read_rollouts(tmp_path)) == every(1, 8)
    assert read_step(tmp_path) == rows_of(8) and read_step(tmp_path, 5) == rows_of(5) and read_step(tmp_path, 9) == []
    Rollouts(tmp_path).cut(step)
    assert list(read_rollouts(tmp_path)) == every(1, min(step, 8))
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts"] * (step > 0)


def test_an_older_file_that_cannot_be_read_whole_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The conversion deleted a part that a network disk did not let it read, and all but the beginning of a damaged
    one."""
    content = gzip.compress(to_lines(every(1, 3)))[:-60]
    (tmp_path / "rollouts-00000003.jsonl.gz").write_bytes(content)
    (tmp_path / "rollouts.jsonl").write_bytes(to_lines(every(4, 8)))
    Rollouts(tmp_path).cut(8)
    found = list(read_rollouts(tmp_path))
    assert found == [row for row in every(1, 8) if row in found] and len(every(4, 8)) < len(found) < len(every(1, 8))
    assert (tmp_path / "damaged-rollouts-00000003.jsonl.gz").read_bytes() == content
    assert "cannot be read whole" in capsys.readouterr().out
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_a_reader_follows_a_writer(tmp_path: Path) -> None:
    """`show` and `report` may be called while the run trains: no row is lost or read twice."""
    writer = threading.Thread(target=write, args=(tmp_path, 300))
    writer.start()
    while writer.is_alive():
        found = list(read_rollouts(tmp_path))
        assert found == every(1, found[-1]["step"] if found else 0)
    writer.join()
    assert list(read_rollouts(tmp_path)) == every(1, 300)


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

    def run() -> None:
        for place, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
            setattr(place, name, dying(getattr(place, name)))
        work()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("cut_at", [None, 6, 3, 0])
def test_sigkill_anywhere_loses_and_doubles_no_row(tmp_path: Path, cut_at: int | None, older: bool) -> None:
    """Killed before each rename, deletion and sync of a write or a cut; then read, then resumed."""
    last = 8 if older else 5
    kept = last if cut_at is None else min(cut_at, last)
    changes, killed = 0, True
    while killed:
        folder = tmp_path / str(changes)
        folder.mkdir()
        write_older(folder) if older else write(folder, last)
        killed = die_after(
            changes,
            functools.partial(write, folder, last + 3, last + 1)
            if cut_at is None
            else functools.partial(Rollouts(folder).cut, cut_at),
        )
        found = list(read_rollouts(folder))
        assert found[: 4 * kept] == every(1, kept) and len(found) == len({(row["step"], row["row"]) for row in found})
        Rollouts(folder).cut(kept)
        assert list(read_rollouts(write(folder, 12, kept + 1).folder)) == every(1, 12)
        changes += 1
    assert changes > 1 or kept == last, "it was never killed in between"


def test_any_number_of_rows_takes_the_same_memory(tmp_path: Path) -> None:
    """Writing, reading and cutting 40 MB takes the memory of a few steps."""
    tracemalloc.start()
    writer = Rollouts(tmp_path)
    for step in range(1, 401):
        writer.append([{"step": step, "text": "x" * 100_000}])
    assert sum(1 for _ in read_rollouts(tmp_path)) == 400 and len(read_step(tmp_path, 200)) == 1
    writer.cut(100)
    assert read_step(tmp_path)[0]["step"] == 100
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21
