"""Atomic file writes, the git revision of a checkout, and what ending a kernel needs: running saves and open runs."""

import json
import subprocess
import threading
from pathlib import Path

import pytest

from rloo_kit.runs import files as saves
from rloo_kit.runs import folder
from rloo_kit.runs.files import git_revision, running_saves, saved_paths, saving, wait_for_saves, write_text
from rloo_kit.runs.folder import RunDir
from tests.runs.test_run_dir import Run


@pytest.fixture(autouse=True)
def nothing_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "_saved", {})


def test_a_save_that_fails_is_over_and_did_not_save(tmp_path: Path) -> None:
    """A full disk would otherwise keep the kernel alive forever, or be reported as the adapter's location."""
    with pytest.raises(OSError, match="full"), saving(tmp_path / "adapter"):
        raise OSError("the disk is full")
    assert wait_for_saves(0) and saved_paths() == []


def test_what_is_saved_again_is_named_once_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's checkpoint saves the model into the same folder, inside its own save."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "a"):
        with saving(name), saving(name):
            assert running_saves() == [tmp_path / name]
    assert saved_paths() == [tmp_path / "b", tmp_path / "a"]


def test_a_run_whose_thread_died_is_not_open(tmp_path: Path) -> None:
    """It is no longer training, but it kept the kernel alive."""
    kept = []
    thread = threading.Thread(target=lambda: kept.append(RunDir.create(Run(tmp_path / "two"))))
    thread.start()
    thread.join()
    assert kept[0].status()["state"] == "running" and folder.open_runs() == []
    kept[0].close()


def test_a_run_that_failed_is_not_open(tmp_path: Path) -> None:
    """The traceback of a failed cell keeps the run's folder object alive, although the run is over."""
    with pytest.raises(ValueError, match="reward"), RunDir.create(Run(tmp_path / "one")) as opened:
        assert folder.open_runs() == [opened.folder]
        raise ValueError("a reward failed")
    assert folder.open_runs() == []


def test_files_are_replaced_in_one_piece(tmp_path: Path) -> None:
    """A poller that reads half of a status.json would report a healthy run as broken."""
    path = tmp_path / "status.json"
    texts = [json.dumps({"step": n, "pad": "x" * 50_000}) for n in range(2)]
    write_text(path, texts[0])
    done = threading.Event()

    def write() -> None:
        for n in range(100):
            write_text(path, texts[n % 2])
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        json.loads(path.read_text())
    thread.join()
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"], "no temporary file stays behind"


def test_git_revision_is_that_of_the_checkout_that_tracks_the_file(tmp_path: Path) -> None:
    """Installed in an environment inside another repository, the kit recorded that repository's revision."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    tracked, untracked = tmp_path / "a.py", tmp_path / "b.py"
    tracked.write_text("1")
    untracked.write_text("1")
    subprocess.run([*git, "add", "a.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
    found = git_revision(tracked)
    assert found is not None and len(found["revision"]) == 40 and not found["changed"]
    tracked.write_text("2")
    assert git_revision(tracked)["changed"]
    assert git_revision(untracked) is None
