"""External faults on the real command line: kills, signals, a full disk, damaged files.

RLOO_KIT_KILLS sets the number of random kills (2; the long run is 25). A fault that a user sees is in docs/runs.md.
"""

import contextlib
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.place import Place, assert_equal

KILLS = int(os.environ.get("RLOO_KIT_KILLS", "2"))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory, tiny_folder):
    """A run without a fault; nothing writes into it."""
    place = Place(tmp_path_factory.mktemp("reference") / "work", tiny_folder)
    assert place.run() == 0, place.printed()
    return place


def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(place, reference):
    """SIGKILL at any moment, including during a checkpoint and during the resume of a killed run."""
    generator, words, kills = random.Random(0), [], []
    (place.folder / "slow").write_text("0.3")
    while len(kills) < KILLS:
        process = place.start(*words)
        if generator.random() < 0.2:  # while it starts
            place.wait_for(lambda: place.status().get("state") == "running", process, "the start")
            time.sleep(generator.uniform(0.0, 4.0))
        else:
            place.wait_for(lambda: "\ndata:" in place.printed(), process, "the data")
            time.sleep(generator.uniform(0.5, 4.0))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            saving = "saving " if (place.run_folder / "checkpoints" / "unfinished").exists() else ""
            kills.append(f"{saving}{place.status().get('step', 0)}")
        assert process.wait() in (-signal.SIGKILL, 0), place.printed()
        words = ["--resume"]
        if place.status().get("state") == "finished":
            assert_equal(place.result(), reference.result())
            words = ["--overwrite"]
    print(f"killed {KILLS} times, at step {', '.join(kills)}")
    (place.folder / "slow").unlink()
    if place.status().get("state") != "finished":
        assert place.run("--resume") == 0, place.printed()
    assert_equal(place.result(), reference.result())


def test_every_file_of_a_real_checkpoint_counts(reference):
    """A file of the newest checkpoint is damaged: the one before it is used, and the run ends as it would have."""
    from rloo_kit.runs.checkpoints import read_checkpoint
    from tests.runs.test_run_dir import WAYS

    checkpoint = read_checkpoint(reference.run_folder / "checkpoints" / "checkpoint-8")
    assert {"adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "loop_state.json"} < checkpoint.files.keys()
    assert {*checkpoint.files, "manifest.json"} == {path.name for path in checkpoint.folder.iterdir()}
    place = reference.copy("damaged")
    WAYS["flipped"](place.run_folder / "checkpoints" / "checkpoint-8" / "optimizer.pt")
    shutil.rmtree(place.run_folder / "adapter")  # what is complete is not run again
    assert place.run("--resume") == 0, place.printed()
    assert_equal(place.result(), reference.result())


def test_a_damaged_adapter_of_a_finished_run_is_saved_again(reference):
    """Two of 500 damaged folders ended in a traceback of safetensors."""
    from tests.runs.test_run_dir import WAYS

    place = reference.copy("truncated")
    WAYS["truncated"](place.run_folder / "adapter" / "adapter_model.safetensors")
    (place.run_folder / "report.html").unlink()  # else nothing is left to do, and nothing is loaded
    assert place.run("--resume") == 0, place.printed()
    assert_equal(place.result(), reference.result())


def test_a_signal_while_it_trains_ends_with_a_checkpoint(place):
    """SIGHUP killed the run at once, without a checkpoint; below and in test_cli.py are SIGHUP and Ctrl-C."""
    (place.folder / "slow").write_text("0.3")
    process = place.start("rloo.save_steps=100")
    place.wait_for(place.at_step(2), process, "step 2")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130, place.printed()
    status = place.status()
    assert status["state"] == "interrupted" and "--resume" in status["resume"]
    assert place.checkpoints() == [status["step"]]


def test_an_ssh_session_that_drops_leaves_a_checkpoint(place):
    """The terminal closes with the session, and every later print raises in Python."""
    (place.folder / "slow").write_text("0.3")
    master, slave = pty.openpty()
    process = place.start("rloo.save_steps=100", stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                          preexec_fn=lambda: _own_terminal())  # fmt: skip
    os.close(slave)
    os.set_blocking(master, False)
    place.wait_for(lambda: (_drain(master), place.at_step(2)())[1], process, "step 2")
    os.close(master)
    assert process.wait(timeout=60) == 130
    status = place.status()
    assert status["state"] == "interrupted" and place.checkpoints() == [status["step"]]


def _own_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _drain(master):
    with contextlib.suppress(OSError):
        os.read(master, 65536)


def test_a_signal_during_an_evaluation_leaves_no_stale_status(tmp_path, tiny_folder):
    """`status.json` said "running" forever."""
    place = Place(tmp_path / "work", tiny_folder, evaluate=True)
    process = place.start("eval.num_samples=32")
    place.wait_for(lambda: "data:" in place.printed(), process, "the data")
    time.sleep(0.5)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 130, place.printed()
    assert not (place.run_folder / "before.json").exists(), "it came too late for this test"
    assert place.status()["state"] == "interrupted" and "--resume" in place.status()["resume"]


def test_a_run_whose_folder_is_removed_ends(place):
    """Such a run went on for hours, ended with exit code 0 and had kept nothing."""
    (place.folder / "slow").write_text("0.3")
    process = place.start("rloo.save_steps=100")
    place.wait_for(place.at_step(3), process, "step 3")
    shutil.rmtree(place.run_folder, ignore_errors=True)
    assert process.wait(timeout=120) == 2, place.printed()
    (line,) = place.errors()
    assert "was removed during the run" in line and "Traceback" not in place.printed()


FEW = "rloo.save_total_limit=1"  # checkpoints would fit: what fills the disk are the rollouts


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="this system does not let users mount a small disk (unshare -rm)",
)
def test_a_full_disk_ends_in_one_line(place, reference, tmp_path):
    """It ended in a traceback, and the status stayed "running". The test uses a real disk of 260 KiB."""
    disk = place.output
    disk.mkdir()
    kept = tmp_path / "kept"
    script = (
        f"mount -t tmpfs -o size=260k none {disk} && {sys.executable} -m rloo_kit.cli train tiny.yaml {FEW}; "
        f"code=$?; cp -r {disk} {kept}; exit $code"
    )
    with open(place.log, "wb") as log:
        code = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script], cwd=place.folder, stdout=log, stderr=log, timeout=120
        ).returncode
    assert code == 2, place.printed()[-3000:]
    line = place.errors()[-1]
    assert "disk is full" in line and "free some space" in line and "--resume" in line
    assert "Traceback" not in place.printed()
    status = json.loads((kept / "tiny" / "status.json").read_text())
    assert status["state"] == "failed" and "resume" in status
    shutil.rmtree(disk)
    shutil.copytree(kept, disk)  # there is room now
    assert place.run("--resume") == 0, place.printed()
    assert_equal(place.result(), reference.result())


def test_time_saves_a_checkpoint_too(place):
    """The default `rloo.save_steps`, 500, can lose a night of training."""
    (place.folder / "slow").write_text("0.3")
    assert place.run("rloo.save_steps=100", "run.save_every_minutes=0.01", "rloo.save_total_limit=null") == 0
    assert len(place.checkpoints()) >= 4
