"""Batches with real papermill and kernels: what fails, what is killed, what goes on, what is left behind."""

import json
import os
import signal
import time

import pytest

from tests.notebooks.batch_notebooks import (
    call_batch,
    processes_of,
    read_status,
    running_batch,
    starts,
    wait_for,
    write_batch,
    write_notebook,
)

pytestmark = pytest.mark.slow


def test_failing_and_killed_runs_are_not_done_and_resume_does_nothing_else(tmp_path):
    """papermill says `completed` for a cell whose kernel was killed; a loop from the first run throws hours away."""
    names = ["small-mode=ok", "small-mode=fail", "small-mode=kernel", "small-mode=child"]
    odd = {"parameters": {"notes": str(tmp_path), "text": "no", "rate": 1e-6, "odd": ["1", True, None, "ü: #{x}"]}}
    file = write_batch(tmp_path, [{"mode": mode} for mode in ("ok", "fail", "kernel", "child")], **odd)
    code, printed = call_batch(file)
    assert code == 2, printed
    ok, fail, kernel, child = (read_status(tmp_path, name) for name in names)
    assert [status["state"] for status in (ok, fail, kernel, child)] == ["done", "failed", "killed", "done"]
    assert fail["error"] == "cell [4]: ValueError: number is 0; it must be above 3"
    assert "the kernel died" in kernel["error"] and ok["parameters"] == odd["parameters"] | {"mode": "ok"}
    folder = tmp_path / "out" / "b"
    assert f"=fail: started; log: {folder / names[1] / 'log.txt'}" in printed and "=fail: failed after " in printed
    assert "to go on: rloo-kit batch" in printed and "--resume" in printed
    assert "given no 1e-06 ['1', True, None, 'ü: #{x}']" in (folder / names[0] / "log.txt").read_text("utf-8")
    assert processes_of(tmp_path) == [], "also not what a notebook has started in its own session"

    done_at = {name: (folder / name / "notebook.ipynb").stat().st_mtime_ns for name in (names[0], names[3])}
    (tmp_path / "fixed").touch()
    code, printed = call_batch(file, "--resume")
    assert code == 0, printed
    assert starts(tmp_path)[4:] == ["fail 0", "kernel 0"]
    assert {name: (folder / name / "notebook.ipynb").stat().st_mtime_ns for name in done_at} == done_at
    assert [read_status(tmp_path, name)["attempts"] for name in names] == [1, 2, 2, 1]
    assert (folder / names[1] / "log.txt").read_text().count("=== started ") == 2, "the first attempt's log is kept"


@pytest.mark.parametrize("early", [True, False], ids=["before the kernel is there", "a closed terminal"])
def test_a_signal_ends_the_batch_and_everything_it_started(tmp_path, early):
    """A kernel has its own session: it went on after Ctrl-C, or after one in the second in which it starts."""
    file = write_batch(tmp_path, [{"mode": "sleep"}, {"mode": "ok"}])
    with running_batch(file) as batch:
        if early:
            wait_for(lambda: read_status(tmp_path, "small-mode=sleep").get("state") == "running", "the run begins")
        else:
            wait_for((tmp_path / "asleep").exists, "the first run sleeps")
            assert len(processes_of(tmp_path)) == 2, "the kernel, the kernel's child"
        os.kill(batch.pid, signal.SIGTERM if early else signal.SIGHUP)
        printed, _ = batch.communicate(timeout=30)
    assert batch.returncode == 130 and processes_of(tmp_path) == [], printed
    assert not early or ("1 interrupted" in printed and "to go on: rloo-kit batch" in printed), printed
    assert read_status(tmp_path, "small-mode=sleep")["state"] == "interrupted"
    assert read_status(tmp_path, "small-mode=ok") == {}


def test_a_killed_batch_leaves_no_kernel_and_is_resumed(tmp_path):
    """After SIGKILL nothing is left to end the kernels: ipykernel looks whether its parent is still there."""
    file = write_batch(tmp_path, [{"mode": "ok"}, {"mode": "wait"}])
    with running_batch(file) as batch:
        wait_for((tmp_path / "waits").exists, "the last run waits")
        os.kill(batch.pid, signal.SIGKILL)
        batch.communicate(timeout=30)
        wait_for(lambda: not processes_of(tmp_path), "the kernel ends itself", 20)
    assert read_status(tmp_path, "small-mode=wait")["state"] == "running", "nothing was left to write anything else"
    (tmp_path / "fixed").touch()
    code, printed = call_batch(file, "--resume")
    assert code == 0, printed
    assert starts(tmp_path).count("ok 0") == 1 and read_status(tmp_path, "small-mode=wait")["state"] == "done"


# A stand-in for training: it writes the files of a run's folder as `rloo_kit.train` does, step by step.
TRAINING = """
import json, os, pathlib, signal, time
folder = pathlib.Path(output_dir) / run_name
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
def state(word, step):
    text = json.dumps({"state": word, "step": step, "max_steps": 3, "pid": os.getpid()})
    (folder / "status.tmp").write_text(text)
    os.replace(folder / "status.tmp", folder / "status.json")
def save(step):
    path = folder / "checkpoints" / f"checkpoint-{step}"
    path.mkdir(exist_ok=True)
    (path / "trainer_state.json").write_text("{}")
first = 1 + max([int(p.name.split("-")[1]) for p in (folder / "checkpoints").iterdir()], default=0) if resume else 1
with open(pathlib.Path(notes) / "starts.txt", "a") as file:
    file.write(f"from {first} {os.getpid()}\\n")
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1) if mode != "deaf" else None)
state("running", first - 1)
slow = mode in ("slow", "deaf") and not (pathlib.Path(notes) / "fixed").exists()
for step in range(first, 4):
    for _ in range(3000 if slow and step == 2 else 1):
        if asked:
            break
        time.sleep(0.1)
    if asked:
        save(step)
        state("interrupted", step)
        break
    state("running", step)
if mode != "leaves" and not asked:
    state("finished", 3)
"""
AFTER = "import time; time.sleep(600 if asked else 0)"
TRAINING_PARAMETERS = """# Parameters
mode = "slow"
notes = ""
run_name = ""
output_dir = "outputs"
resume = False
overwrite = False
"""


def read_step(folder):
    file = folder / "status.json"
    return json.loads(file.read_text())["step"] if file.exists() else None


def write_training(folder, *modes):
    write_notebook(folder / "training.ipynb", TRAINING, AFTER, parameters=TRAINING_PARAMETERS)
    return write_batch(folder, [{"mode": mode} for mode in modes], notebook="training.ipynb")


def test_ctrl_c_lets_a_training_run_save_and_resume_goes_on_from_there(tmp_path):
    """Ctrl-C ten steps after the last checkpoint, and those ten were trained again, at minutes each."""
    file = write_training(tmp_path, "slow")
    training = tmp_path / "out" / "b" / "training-mode=slow" / "run"
    with running_batch(file) as batch:
        wait_for(lambda: read_step(training) == 1, "step 1 is done")
        os.kill(batch.pid, signal.SIGINT)
        printed, _ = batch.communicate(timeout=60)
    assert batch.returncode == 130 and "a training run saves a checkpoint first" in printed, printed
    assert processes_of(tmp_path) == []
    assert (training / "checkpoints" / "checkpoint-2").is_dir()
    assert read_status(tmp_path, "training-mode=slow")["state"] == "interrupted"
    (tmp_path / "fixed").touch()
    before = read_status(tmp_path, "training-mode=slow")["seconds"]
    code, printed = call_batch(file, "--resume")
    assert code == 0 and [line.split()[1] for line in starts(tmp_path)] == ["1", "3"], printed
    given = json.loads((training.parent / "notebook.ipynb").read_text())["metadata"]["papermill"]["parameters"]
    assert given["resume"] is True and given["overwrite"] is False and given["run_name"] == "run"
    assert read_status(tmp_path, "training-mode=slow")["seconds"] > before, "the time of both attempts"


def test_a_second_ctrl_c_kills_the_runs_at_once(tmp_path):
    """A run that does not listen (it hangs in a driver) must not hold the terminal for two minutes."""
    file = write_training(tmp_path, "deaf")
    with running_batch(file) as batch:
        wait_for(lambda: read_step(tmp_path / "out" / "b" / "training-mode=deaf" / "run") == 1, "step 1 is done")
        os.kill(batch.pid, signal.SIGINT)
        time.sleep(2)
        assert batch.poll() is None and len(processes_of(tmp_path)) == 1, "the first one lets it save"
        os.kill(batch.pid, signal.SIGINT)
        printed, _ = batch.communicate(timeout=30)
    assert batch.returncode == 130 and processes_of(tmp_path) == [], printed
    assert read_status(tmp_path, "training-mode=deaf")["state"] == "interrupted"


def test_a_clean_exit_without_a_finished_training_run_is_not_done(tmp_path):
    """A notebook whose training was stopped goes on to its last cell and ends with exit code 0."""
    code, printed = call_batch(write_training(tmp_path, "leaves"))
    assert code == 1, printed
    status = read_status(tmp_path, "training-mode=leaves")
    assert status["state"] == "failed"
    assert status["error"] == "the notebook ended cleanly, but its training run is 'running' (run/status.json)"
