"""The end of a kernel in every runner, with real kernels and real runners; the table of docs/notebook.md.

Every runner gets the same notebook twice: with the shutdown as its last cell, and with one in the middle and two at the
end. It is plain code without torch: a kernel starts in a second, and what is tested is the end of it.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.notebooks.runners import COMMANDS, REPOSITORY, Ended, processes, run
from tests.notebooks.server import JupyterServer, jupyter_lab, own_certificate

pytestmark = pytest.mark.slow

LINES = 4000
DIGITS = "0123456789" * 3_000_000  # 30 MB
HELD_GIB = 0.1  # of the 0.125 below
SAVED_BYTES = 15 * 2**20

START = """
import os, sys
import rloo_kit as kit

def fails():
    held = [bytearray(4096) for _ in range(32_768)]  # 128 MiB, in the frame of the last error
    raise RuntimeError("the last error")

try:
    fails()
except RuntimeError as error:
    sys.last_value = error
    if sys.version_info >= (3, 12):
        sys.last_exc = error
"""
# Not flushed one by one: ZeroMQ drops messages of a kernel that is some 2,000 ahead of its client, shutdown or not.
PRINT = f"""
for number in range({LINES}):
    print(f"line {{number}}")
"""
BIG = 'print("<" + "0123456789" * 3_000_000 + ">")'
SAVE = f"""
import threading, time
from rloo_kit.runs.files import saving

def save():
    with saving("slow.bin"), open("slow.bin", "wb") as file:
        for _ in range(15):
            file.write(bytes({SAVED_BYTES // 15}))
            file.flush()
            time.sleep(0.1)

threading.Thread(target=save, daemon=True).start()
while not os.path.exists("slow.bin"):
    time.sleep(0.01)
"""
SHUT_DOWN = "kit.shutdown_kernel()"
LAST = [START, PRINT, BIG, SHUT_DOWN]
TWICE = [START, SHUT_DOWN, 'print("still runs")', PRINT, BIG, SAVE, SHUT_DOWN, SHUT_DOWN]
Both = tuple[Ended, Ended]


def run_command(name: str, folder: Path) -> Both:
    return run(name, LAST, folder / "last"), run(name, TWICE, folder / "twice")


def run_servers(name: str, folder: Path) -> Both:
    """Side by side: one with a token, a base_url and its own certificate, one open; a kernel must not come back."""
    runtime = folder / "runtime"
    runtime.mkdir()
    closed = ["--ServerApp.base_url=/user/someone/", *own_certificate(folder)]
    with (
        jupyter_lab(folder / "last", *closed, token="a-token", runtime=runtime) as one,
        jupyter_lab(folder / "twice", runtime=runtime) as other,
    ):
        texts = [
            server.run_all(server.start_session("x.ipynb"), cells) for server, cells in ((one, LAST), (other, TWICE))
        ]
        time.sleep(4)  # the restarter looks every three seconds
        return _left_by(one, texts[0]), _left_by(other, texts[1])


def _left_by(server: JupyterServer, text: str) -> Ended:
    ended, log = server.process.poll(), server.log.read_text()
    is_empty = server.kernels() == [] and server.ask("GET", "api/sessions") == [] and "restart" not in log.lower()
    goes_on = "the server goes on" if ended is None else f"server: {ended}"
    return Ended(goes_on, text, log, is_empty and processes(server.mark) == [server.process.pid])


@dataclass(frozen=True)
class Runner:
    """A row of the table. `is_long`: nbconvert, and what it and papermill stand on."""

    name: str
    run: Callable[[str, Path], Both] = run_command
    is_long: bool = False


ROWS = [*(Runner(name, is_long="jupyter" in name) for name in COMMANDS), Runner("JupyterLab's server", run_servers)]


@pytest.mark.parametrize(
    "runner", [pytest.param(row, id=row.name, marks=[pytest.mark.long] * row.is_long) for row in ROWS]
)
def test_the_table_of_the_page_is_what_a_runner_leaves(runner: Runner, tmp_path: Path) -> None:
    """`do_shutdown` in the last cell raced with the runner: papermill ended with 138 and lost the last outputs."""
    last, twice = both = runner.run(runner.name, tmp_path)
    saved = next((tmp_path / "twice").rglob("slow.bin"), None)
    codes = sorted({ended.exit_code for ended in both})
    holds = [
        outputs_complete(last.text, 1) and outputs_complete(twice.text, 3) and "still runs" in twice.text,
        saved is not None and saved.stat().st_size == SAVED_BYTES,
        last.all_gone and twice.all_gone,
        memory_released(last.text) and memory_released(twice.text),
    ]
    row = " | ".join([runner.name, ", ".join(codes), *("yes" if one else "no" for one in holds)])
    assert f"| {row} |\n" in (REPOSITORY / "docs" / "notebook.md").read_text(encoding="utf-8"), row


def outputs_complete(text: str, calls: int) -> bool:
    """Whether every line is there, in order, the large output to its last byte, and what each of the calls said."""
    lines = re.findall(r"^line \d+$", text, re.MULTILINE)
    digits = text[text.find("<") + 1 : text.find(">")]
    return lines == [f"line {number}" for number in range(LINES)] and digits == DIGITS and len(_figures(text)) == calls


def memory_released(text: str) -> bool:
    """Whether the first call gave back what the last error held; the kernel's own line says so."""
    before, after = next(iter(_figures(text)), (0.0, 0.0))
    return before - after >= HELD_GIB


def _figures(text: str) -> list[tuple[float, float]]:
    found = re.findall(r"memory held by this process: ([\d.]+) GiB before, ([\d.]+) after", text)
    return [(float(before), float(after)) for before, after in found]


def test_a_training_run_in_a_thread_is_not_ended(tmp_path: Path) -> None:
    """Somebody runs the last cell too early; threads of torch must not keep the process alive either."""
    train = f"""
import threading
import torch; torch.set_num_threads(1); kept = torch.ones(1000, 1000) @ torch.ones(1000, 1000)
from rloo_kit import load_config
from rloo_kit.runs.folder import RunDir
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
    assert ended.exit_code == "0" and ended.all_gone
    refusal = f"Kernel not shut down: the run in {Path('run')} is still training."
    assert refusal in ended.text and ended.text.index(refusal) < ended.text.index("still here")
    assert ended.text.endswith("The kernel ends when nothing is left to run.\n")
