"""Which checkpoints are deleted and which stay."""

import os

import pytest

from rloo_kit.runs.checkpoints import list_checkpoints, prune, publish, read_checkpoint, seal

RUN = "0123456789ab"


@pytest.fixture
def write(tmp_path):
    """`write(step, run, at)`: a published checkpoint whose manifest has file time `at`, in seconds."""

    def build(step, run=RUN, at=0):
        staged = tmp_path / "unfinished" / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        (staged / "optimizer.pt").write_text(f"{run} {step}")
        (staged / "state..1").write_text("two dots in a name")
        seal(staged, step, run)
        os.utime(staged / "manifest.json", (at, at))
        publish(staged, tmp_path / f"checkpoint-{step}")
        return tmp_path / f"checkpoint-{step}"

    return build


def steps(folder, run=RUN):
    return [one.step for one in list_checkpoints(folder, run)]


def test_the_newest_stay_and_nothing_of_others_goes(tmp_path, write):
    """A foreign checkpoint-99999 counted as the newest, and the run's own checkpoints were deleted because of it."""
    for step in (1, 2, 10, 9):
        write(step)
    write(99999, run="ba9876543210")
    (tmp_path / "checkpoint-500").mkdir()
    prune(tmp_path, 2, RUN, needed=(10,))
    assert steps(tmp_path) == [10, 9] and (tmp_path / "checkpoint-500").is_dir()
    assert steps(tmp_path, "ba9876543210") == [99999]
    prune(tmp_path, 1, RUN, needed=(10, 9))
    assert steps(tmp_path) == [10, 9], "the best one stays"
    for keep in (None, 0, -1):
        prune(tmp_path, keep, RUN, needed=(10,))
        assert steps(tmp_path) == [10, 9]


def test_without_a_run_the_last_one_written_stays(tmp_path, write):
    """A second training in one output_dir deleted its own checkpoint-2 and kept an old checkpoint-4."""
    write(4, run="", at=100)
    write(2, run="", at=200)
    prune(tmp_path, 1, "", needed=(2,))
    assert steps(tmp_path, "") == [2]


def test_a_checkpoint_reads_back_as_it_was_sealed(write):
    """A file name with two dots made a checkpoint unreadable."""
    found = read_checkpoint(write(3))
    assert found.step == 3 and found.run == RUN and found.find_damage() == ""
    assert sorted(found.files) == ["optimizer.pt", "state..1"]
