"""Small notebooks for the tests of batches, and what is needed to see what a batch leaves behind. No torch."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import yaml

from rloo_kit.batch.runner import RUN_MARK
from tests.notebooks.runners import processes, wait_until

PARAMETERS = """# Parameters
mode = "ok"
number = 0
notes = ""
text = ""
rate = 0.0
odd = None
"""
# What each mode does. `notes` is a folder: a file `fixed` in it makes every mode behave.
BODY = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(notes)
with open(folder / "starts.txt", "a") as file:
    file.write(f"{mode} {number} {os.getpid()}\\n")
behave = (folder / "fixed").exists()
print("mode", mode, "number", number)
print("given", text, rate, odd)
"""
MODES = """
if mode == "fail" and not behave:
    raise ValueError(f"number is {number}; it must be above 3")
if mode == "kernel" and not behave:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if mode == "wait" and not behave:
    (folder / "waits").write_text("")
    time.sleep(600)
if mode == "sleep" and not behave:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "asleep").write_text("")
    time.sleep(600)
"""


def write_notebook(path: Path, *cells: str, parameters: str | None = PARAMETERS) -> Path:
    """A notebook of code cells, the first one tagged `parameters` where there are any."""
    new = nbformat.v4.new_code_cell
    first = [] if parameters is None else [new(parameters, metadata={"tags": ["parameters"]})]
    notebook = nbformat.v4.new_notebook(
        cells=[*first, *map(new, cells)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, path)
    return path


def write_batch(folder: Path, runs: list[dict[str, Any]], **values: Any) -> Path:
    """A batch file in `folder` with a notebook that has every mode; its runs note what they do in `folder`."""
    write_notebook(folder / "small.ipynb", BODY, MODES, "print('end')")
    content = {"notebook": "small.ipynb", "output_dir": str(folder / "out"), "parameters": {"notes": str(folder)}}
    file = folder / "batch.yaml"
    file.write_text(yaml.safe_dump(content | {"name": "b", "runs": runs} | values))
    return file


@contextmanager
def running_batch(*words: Any) -> Iterator[subprocess.Popen[str]]:
    """`rloo-kit batch words` in its own process group, killed at the end; it hears signals under nohup too."""

    def hear() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "rloo_kit.cli", "batch", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=hear,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def call_batch(*words: Any) -> tuple[int, str]:
    """Exit code and everything that `rloo-kit batch words` printed."""
    with running_batch(*words) as process:
        printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


def processes_of(folder: Path) -> list[int]:
    """The living processes of a batch in `folder`."""
    return processes(str(folder), RUN_MARK)


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
    assert wait_until(condition, timeout), f"{what}: not within {timeout} s"


def read_status(folder: Path, run: str) -> dict[str, Any]:
    """A run's `status.json`; empty where there is none."""
    path = folder / "out" / "b" / run / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def starts(folder: Path) -> list[str]:
    """The mode and number of every start of a notebook, in order."""
    path = folder / "starts.txt"
    return [" ".join(line.split()[:2]) for line in path.read_text().splitlines()] if path.exists() else []
