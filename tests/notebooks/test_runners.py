"""The end of a kernel in every runner, with real kernels and real runners; the table of docs/notebook.md.

Every runner gets the notebook of `runner_cells` twice: with the shutdown as its last cell, and with one in the middle
and two at the end.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.notebooks.runner_cells import (
    CASES,
    SAVED_BYTES,
    SHUT_DOWN,
    START,
    kernel_pid,
    memory_released,
    outputs_complete,
)
from tests.notebooks.runners import COMMANDS, HERE, REPOSITORY, Ended, all_gone, environment, processes, run, wait_until
from tests.notebooks.server import JupyterServer, jupyter_lab, own_certificate

PAGE = REPOSITORY / "docs" / "notebook.md"
TERMINAL = "IPython in a terminal"
SERVER = "JupyterLab's server"
RUNNERS = [*COMMANDS, TERMINAL]
ALIKE = ("jupyter execute", "nbclient", "jupyter_client")  # what papermill and nbconvert stand on: long


def measure(case: str, ended: Ended, folder: Path) -> list[str | bool]:
    """A row of the table from one case; only "middle and twice" saves something."""
    return [
        ended.exit_code,
        outputs_complete(case, ended.text),
        save_finished(case, folder),
        all_gone(ended.mark) and not Path(f"/proc/{kernel_pid(ended.text)}").exists(),
        memory_released(ended.text),
    ]


def check_row(runner: str, cells: list[str | bool]) -> None:
    """The table of docs/notebook.md has what was measured; a cell is a text, or whether it held."""
    texts = [cell if isinstance(cell, str) else "yes" if cell else "no" for cell in cells]
    assert f"| {' | '.join([runner, *texts])} |\n" in PAGE.read_text(encoding="utf-8"), (runner, texts)


def merge(first: list[str | bool], second: list[str | bool]) -> list[str | bool]:
    """One row of both cases: what holds, holds in both."""
    texts = [first[0] if first[0] == second[0] else f"{first[0]}, {second[0]}"]
    return texts + [one and other for one, other in zip(first[1:], second[1:], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner", [pytest.param(one, marks=pytest.mark.long) if one in ALIKE else one for one in RUNNERS]
)
def test_a_runner(runner: str, tmp_path: Path) -> None:
    """`do_shutdown` in the last cell raced with the runner: papermill ended with 138 and lost the last outputs."""
    measured = []
    for number, (case, cells) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        measured.append(measure(case, run(runner, cells, folder), folder))
    check_row(runner, merge(*measured))


@pytest.mark.slow
def test_jupyter_servers(tmp_path: Path) -> None:
    """Under a server a kernel that ended itself came back within three seconds, with its memory.

    Two servers of one user run side by side: one with a token, a base_url and its own certificate, one open.
    """
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    closed = ["--ServerApp.base_url=/user/someone/", *own_certificate(tmp_path)]
    with (
        jupyter_lab(tmp_path / "closed", *closed, token="a-token", runtime=runtime) as one,
        jupyter_lab(tmp_path / "open", runtime=runtime) as other,
    ):
        measured = [run_on(server, case) for server, case in ((one, "last"), (other, "middle and twice"))]
        time.sleep(4)  # the restarter looks every three seconds
        for server in (one, other):
            assert server.kernels() == [] and server.ask("GET", "api/sessions") == []
            assert "restart" not in server.log.read_text().lower()
            assert processes(server.mark) == [server.process.pid]
    check_row(SERVER, merge(*measured))


def run_on(server: JupyterServer, case: str) -> list[str | bool]:
    kernel_id = server.start_session("notebook.ipynb")
    text = server.run_all(kernel_id, CASES[case])
    gone = server.kernels() == [] and wait_until(lambda: not Path(f"/proc/{kernel_pid(text)}").exists(), 10)
    goes_on = "the server goes on" if server.process.poll() is None else f"server: {server.process.poll()}"
    return [goes_on, outputs_complete(case, text), save_finished(case, server.folder), gone, memory_released(text)]


def save_finished(case: str, folder: Path) -> bool:
    """Whether the file that a thread was writing is whole; "last" writes none."""
    file = folder / "slow.bin"
    return case == "last" or (file.exists() and file.stat().st_size == SAVED_BYTES)


@pytest.mark.slow
def test_a_kernel_with_torch_loaded(tmp_path: Path) -> None:
    """Threads of a large library must neither keep the process alive nor change its exit code."""
    cells = ["import torch; torch.set_num_threads(1); kept = torch.ones(1000, 1000) @ torch.ones(1000, 1000)", START]
    ended = run("jupyter_client", [*cells, SHUT_DOWN], tmp_path)
    assert ended.exit_code == "0" and memory_released(ended.text) and all_gone(ended.mark)


@pytest.mark.slow
def test_a_client_that_sleeps_gets_everything(tmp_path: Path) -> None:
    """A laptop that was closed for a while lost what its kernel had not sent yet when it ended: a second was all it
    had. Longer, and the kernel crashed: the memory of its messages went before the thread that sends them."""
    cells = [
        "import rloo_kit as kit",
        "print('x' * 30_000_000)",
        "for _ in range(5): print('y' * 3_000_000)",
        SHUT_DOWN,
    ]
    with environment(tmp_path) as (env, mark):
        command = [sys.executable, str(HERE / "sleeping_client.py"), *cells]
        client = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        try:
            assert client.stdout.readline() == "sent\n"
            os.kill(client.pid, signal.SIGSTOP)
            time.sleep(7)  # the kernel would have ended after two
            os.kill(client.pid, signal.SIGCONT)
            output, _ = client.communicate(timeout=60)
        finally:
            client.kill()
    assert output == "30000000 15000000 0\n"
    assert all_gone(mark)


@pytest.mark.slow
def test_a_training_run_in_a_thread_is_not_ended(tmp_path: Path) -> None:
    """Somebody trains in a thread to keep the notebook usable, and runs the last cell too early."""
    train = f"""
import threading
from rloo_kit import load_config
from rloo_kit.runs.run_dir import RunDir
done = threading.Event()

def train():
    config = load_config("{REPOSITORY}/configs/arithmetic_thinking.yaml", "run.output_dir=.", "run.name=run")
    with RunDir.create(config) as run_dir:
        opened.set()
        done.wait(60)
        run_dir.set_status("finished")

opened = threading.Event()
thread = threading.Thread(target=train)
thread.start()
opened.wait(30)
"""
    wait = "import time; time.sleep(3); print('still here')"
    ended = run("jupyter_client", [START, train, SHUT_DOWN, wait, "done.set(); thread.join()", SHUT_DOWN], tmp_path)
    assert ended.exit_code == "0" and all_gone(ended.mark)
    refusal = f"Kernel not shut down: the run in {Path('run')} is still training."
    assert refusal in ended.text and ended.text.index(refusal) < ended.text.index("still here")
    assert ended.text.endswith("The kernel ends when nothing is left to run.\n")

    ended = run("papermill", [START, train, "kit.shutdown_kernel(wait_s=1)"], tmp_path / "batch")
    assert ended.exit_code == "1" and all_gone(ended.mark)
