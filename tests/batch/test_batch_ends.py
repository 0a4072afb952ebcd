"""How a batch ends with real papermill and kernels: a cell that goes on after the interrupt, a closed pipe."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rloo_kit.batch import runner
from rloo_kit.batch.batch_file import Batch, read_notebook
from rloo_kit.batch.runner import run_batch
from tests.notebooks.batch_notebooks import (
    processes_of,
    read_status,
    running_batch,
    wait_for,
    write_batch,
    write_notebook,
)

pytestmark = pytest.mark.slow

# A stand-in for a training that is interrupted: it saves for two seconds, and the cell goes on.
GOES_ON = """
import json, pathlib, time
folder = pathlib.Path(output_dir) / training
folder.mkdir()
(folder / "status.json").write_text(json.dumps({"state": "running"}))
try:
    (folder / "waits").write_text("")
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(2)
    (folder / "saved").write_text("")
    (folder / "status.json").write_text(json.dumps({"state": "interrupted"}))
time.sleep(60)
"""
DEAF = """
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
folder = pathlib.Path(output_dir) / training
folder.mkdir()
(folder / "status.json").write_text('{"state": "running"}')
(folder / "waits").write_text("")
time.sleep(60)
"""


def interrupt(folder: Path, cell: str, training: str) -> Path:
    """A batch whose only cell is interrupted while it trains; returns the training's folder."""
    parameters = f"# Parameters\ntraining = '{training}'\nrun_name = ''\noutput_dir = ''\n"
    notebook = read_notebook(write_notebook(folder / "n.ipynb", cell, parameters=parameters))
    batch = Batch("b", folder / "out" / "b", notebook, {"n": {}})
    place = batch.folder / "n" / training

    def send() -> None:
        wait_for((place / "waits").exists, "the cell trains")
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    assert run_batch(batch, resume=False, overwrite=False, command="again") == (1, True)
    sender.join()
    assert read_status(folder, "n")["state"] == "interrupted" and processes_of(folder) == []
    return place


@pytest.mark.parametrize("training", ["run", "run-sft"])
def test_a_cell_that_goes_on_is_ended_after_the_training_has_saved(tmp_path: Path, training: str) -> None:
    """`kit.train` returns after Ctrl-C: the rest of its cell, an evaluation of an hour, held the terminal."""
    begun = time.monotonic()
    assert (interrupt(tmp_path, GOES_ON, training) / "saved").exists()
    assert time.monotonic() - begun < 50, "it did not wait for the cell's end"


def test_a_training_that_hangs_is_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's call hears no signal: `timeout 8h rloo-kit batch` held the GPU for as long as it hung."""
    monkeypatch.setattr(runner, "SAVE_TIMEOUT_S", 2.0)
    begun = time.monotonic()
    interrupt(tmp_path, DEAF, "run")
    assert time.monotonic() - begun < 50


def test_a_closed_pipe_ends_the_printing_and_not_the_batch(tmp_path: Path) -> None:
    """`| head -1` ended the batch at its second line, and Ctrl-C under `| tee`, which ends tee, too."""
    file = write_batch(tmp_path, [{"mode": "ok"}, {"mode": "wait"}])
    with running_batch(file) as batch:
        assert batch.stdout is not None and "2 runs to do" in batch.stdout.readline()
        batch.stdout.close()
        wait_for((tmp_path / "waits").exists, "the second run waits")
        os.kill(batch.pid, signal.SIGINT)
        assert batch.wait(30) == 130
    states = [read_status(tmp_path, f"small-mode={mode}")["state"] for mode in ("ok", "wait")]
    assert states == ["done", "interrupted"]
