"""Starting the real runners, each with its own process group and home, and finding what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PYTHON = Path(sys.executable)
JUPYTER = PYTHON.with_name("jupyter")
LIMIT_S = 120
MARK = "RLOO_KIT_TEST_RUN"
# nbclient gives a cell's output 4 s to follow its reply; on a machine that is busy elsewhere 30 MB do not make it. A
# kernel may find one of Jupyter's ports taken by the time it listens.
UPSTREAM_FAULTS = ("Timeout waiting for IOPub output", "ZMQError: Address already in use")
ATTEMPTS = 3

NBCONVERT = [JUPYTER, "nbconvert", "--to", "notebook", "--execute"]
# Of a notebook IN.ipynb, whose outputs are saved in out.ipynb or texts.json, or are the program's own.
COMMANDS: dict[str, list[str | Path]] = {
    "papermill": [PYTHON, "-m", "papermill", "IN.ipynb", "out.ipynb", "--no-progress-bar"],
    "jupyter nbconvert --execute": [*NBCONVERT, "IN.ipynb", "--output", "out", "--output-dir", "."],
    "jupyter_client": [PYTHON, HERE / "client.py", "cells.json", "texts.json"],
    "script": [PYTHON, "IN.py"],
}


@dataclass
class Ended:
    """What a runner left; `text` is what its user sees, `log` its own lines, `exit_code` in words."""

    exit_code: str
    text: str
    log: str
    all_gone: bool


def run(runner: str, cells: Sequence[str], folder: Path) -> Ended:
    """Run the cells to the end; raises subprocess.TimeoutExpired after LIMIT_S seconds."""
    write_cells(cells, folder)
    return call([str(word).replace("IN.", "in.") for word in COMMANDS[runner]], folder)


def write_cells(cells: Sequence[str], folder: Path) -> None:
    """The cells in every form that a runner takes."""
    folder.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code.strip()) for code in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "in.ipynb")
    (folder / "cells.json").write_text(json.dumps(cells))
    (folder / "in.py").write_text("\n".join(cells))


def call(command: Sequence[Any], folder: Path, limit_s: float = LIMIT_S, **variables: Any) -> Ended:
    """Run a command in `folder`, again where upstream faults ended it."""
    words, more = [str(word) for word in command], {name: str(value) for name, value in variables.items()}
    with environment(folder) as (env, mark):
        for _ in range(ATTEMPTS):
            done = subprocess.run(words, cwd=folder, env=env | more, capture_output=True, text=True, timeout=limit_s)
            if not any(fault in done.stderr for fault in UPSTREAM_FAULTS):
                break
        if done.returncode:
            print(f"{words[:4]} exited with {done.returncode}:\n{done.stderr[-3000:]}")
    text = done.stdout
    if (folder / "out.ipynb").exists():
        text = text_of(folder / "out.ipynb")
    elif (folder / "texts.json").exists():
        text = "".join(json.loads((folder / "texts.json").read_text()))
    return Ended(str(done.returncode), text, done.stdout + done.stderr, all_gone(mark))


def text_of(notebook: Path) -> str:
    """Everything that a saved notebook's cells have printed."""
    cells = nbformat.read(notebook, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


@contextmanager
def environment(folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Variables of a process with its own home, and the mark of all that it starts, killed after an error."""
    mark = uuid.uuid4().hex
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "JPY_", "PYTEST"))}
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join((str(PYTHON.parent), os.environ["PATH"]))
    own = {"HOME": str(home), "IPYTHONDIR": str(home / "ipython"), "JUPYTER_RUNTIME_DIR": str(home / "runtime")}
    own |= {"PYTHONPATH": str(REPOSITORY), "PATH": path, MARK: mark, "TERM": "dumb"}
    own |= {"JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_DATA_DIR": str(home / "data")}
    try:
        yield kept | own, mark
    except BaseException:
        all_gone(mark, 0)
        raise


def processes(mark: str, variable: str = MARK) -> list[int]:
    """The living processes whose variable begins with this mark, by whichever way they were started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{variable}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # ended by now, or somebody else's
            continue
    return found


def all_gone(mark: str, within_s: float = 15) -> bool:
    """Whether every process of the mark is gone, or goes within some seconds; what stays is killed."""
    gone = wait_until(lambda: not processes(mark), within_s)
    for pid in processes(mark):
        os.kill(pid, signal.SIGKILL)
    return gone


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
