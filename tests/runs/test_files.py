"""Atomic file writes, the git revision of a checkout, what ending a kernel needs (running saves, open runs), and which
checkpoints are deleted and which stay."""

import json
import math
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rloo_kit.cli import print_found
from rloo_kit.results.pages import embed_json, make_page, show_text
from rloo_kit.runs import files as saves
from rloo_kit.runs import folder
from rloo_kit.runs.checkpoints import list_checkpoints, prune, publish, seal
from rloo_kit.runs.files import append_rows, git_revision, read_json, read_rows, running_saves, saving, wait_for_saves
from rloo_kit.runs.folder import RunDir
from rloo_kit.runs.rollouts import Rollouts, read_rollouts
from rloo_kit.system.processes import say
from tests.runs.test_run_dir import Run


def test_a_running_save_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk kept the kernel alive forever; a checkpoint saves the model into its folder, inside its own save."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="full"), saving("adapter"):
        raise OSError("the disk is full")
    assert wait_for_saves(0)
    with saving("a"), saving("a"):
        assert running_saves() == [tmp_path / "a"]
    assert running_saves() == []


def test_a_run_that_failed_or_whose_thread_died_is_not_open(tmp_path: Path) -> None:
    """Both kept the kernel alive: the traceback of a failed cell holds the run's folder object."""
    with pytest.raises(ValueError, match="reward"), RunDir.create(Run(tmp_path / "one")) as opened:
        assert folder.open_runs() == [opened.folder]
        raise ValueError("a reward failed")
    kept: list[RunDir] = []
    thread = threading.Thread(target=lambda: kept.append(RunDir.create(Run(tmp_path / "two"))))
    thread.start()
    thread.join()
    assert kept[0].status()["state"] == "running" and folder.open_runs() == []
    kept[0].close()


def test_git_revision_is_that_of_the_checkout_that_tracks_the_file(tmp_path: Path) -> None:
    """Installed in an environment inside another repository, the kit recorded that repository's revision."""
    tracked, untracked = tmp_path / "a.py", tmp_path / "b.py"
    tracked.write_text("1")
    untracked.write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "a.py"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    found = git_revision(tracked)
    assert found is not None and len(found["revision"]) == 40 and not found["changed"]
    tracked.write_text("2")
    assert git_revision(tracked)["changed"] and git_revision(untracked) is None


# ------------------------------------------------------------------------------------------ checkpoints

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
    """A foreign checkpoint-99999 counted as the newest, and the run's own were deleted; or an old one was kept."""
    write(4, run="", at=100)
    write(2, run="", at=200)
    prune(tmp_path, 1, "", needed=(2,))
    assert steps(tmp_path, "") == [2]
    shutil.rmtree(tmp_path / "checkpoint-2")
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


HOSTILE = "\ud83d|\ude00|\0|\u2028|\x1b[31m|\u202eabc|</script><!--|\x85|\r\n" + "x" * 1_000_000
ROW = {"step": 1, "text": HOSTILE, HOSTILE: [HOSTILE, math.nan]}


def test_files_survive_every_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`before.json` raised UnicodeEncodeError on half of an emoji, after the evaluation that it was to keep."""
    wanted = {"step": 1, "text": HOSTILE, HOSTILE: [HOSTILE, None]}
    assert read_json(saves.write_json(tmp_path / "a.json", ROW)) == wanted
    append_rows(tmp_path / "a.jsonl", [ROW, ROW])
    append_rows(tmp_path / "a.jsonl", [])
    assert list(read_rows(tmp_path / "a.jsonl")) == [wanted] * 2
    Rollouts(tmp_path).append([ROW])
    assert next(iter(read_rollouts(tmp_path)))["text"] == HOSTILE
    page = make_page("comparison.html.jinja", title=HOSTILE, heading="", summary=[HOSTILE], tables=[], curves=None)
    assert "</script><!--" not in saves.write_text(tmp_path / "a.html", page).read_text(encoding="utf-8")
    assert "</script" not in embed_json({"text": show_text(HOSTILE)})
    say(HOSTILE)
    capsys.readouterr()
    print_found(SimpleNamespace(to_dict=lambda: wanted), json=True)
    assert json.loads(capsys.readouterr().out) == wanted
