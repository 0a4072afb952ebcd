"""Bars and tables where they are read: whole lines in a pipe, the usual bar in a terminal.

Each in a fresh process, since `tqdm.auto` settles its class when it is first imported. The clock is the test's own: no
sleeping, exact lines.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

SET_UP = """
rloo_kit.setup_environment()
import tqdm.std
now = [0.0]
tqdm.std.time = lambda: now[0]
def work(seconds): now[0] += seconds
from tqdm.auto import tqdm as bar, trange
"""


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What came on stderr, where bars are written outside a kernel."""
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "\r" not in done.stderr and "\x1b" not in done.stderr
    assert done.stderr == "" or done.stderr.endswith("\n")
    return done.stderr.splitlines()


def on_a_terminal(code: str, repository: Path, folder: Path, width: int = 100, **variables: str) -> str:
    """Output of code on a pseudo-terminal of `width` columns, as the terminal gets it."""
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env |= {"PYTHONPATH": str(repository), "HOME": str(folder), "TERM": "xterm-256color"} | variables
    code = "import os, sys\nimport rloo_kit\n" + code
    with subprocess.Popen([sys.executable, "-c", code], env=env, cwd=folder, stdout=child, stderr=child) as process:
        os.close(child)
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        seen = b""
        with suppress(OSError):  # how Linux says that the other side is closed
            while chunk := os.read(main, 65536):
                seen += chunk
        watchdog.cancel()
    os.close(main)
    assert process.returncode == 0, seen.decode()
    return seen.decode()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        # a redrawn bar left ten carriage returns a second in each log and in each saved notebook
        (
            "for _ in trange(60, desc='Map', unit=' rows'): work(0.25)",
            [
                "Map: 33% | 20/60 | 4.00 rows/s | eta 00:10",
                "Map: 67% | 40/60 | 4.00 rows/s | eta 00:05",
                "Map: 100% | 60/60 | 4.00 rows/s | took 00:15",
            ],
        ),
        # a dozen of bars, a millisecond each, stood above the first line that mattered
        ("for _ in trange(100, desc='Map'): work(0.049)\nfor _ in trange(0): pass", []),
        # a bar whose only step took a minute, one file of one, ended without a word
        ("for _ in trange(1, desc='Fetching'): work(61)", ["Fetching: 100% | 1/1 | 61.00s/it | took 01:01"]),
        # a loop that asks for a redraw without getting on filled the log with one line
        (
            "with bar(total=10, desc='Wait') as waiting:\n"
            "    for _ in range(9): work(10); waiting.refresh(); waiting.set_description('Wait')\n"
            "    waiting.update(4)\n"
            "    for _ in range(9): work(10); waiting.refresh(); waiting.display('')",
            ["Wait: 40% | 4/10 | 22.50s/it | eta 02:15", "Wait: 40% | 4/10 | 45.00s/it | took 03:00"],
        ),
        # the last line of a log is where people take a broken loop to have been
        (
            "import contextlib\n"
            "with contextlib.suppress(KeyError):\n"
            "    for step in trange(100, desc='Map'):\n"
            "        work(3)\n"
            "        if step == 3: raise KeyError",
            ["Map: 2% | 2/100 | 3.00s/it | eta 04:53", "Map: 3% | 3/100 | 4.00s/it | took 00:12"],
        ),
    ],
)
def test_a_pipe_gets_a_line_every_five_seconds(run_fresh: Run, code: str, expected: list[str]) -> None:
    """And the last one, of a loop that took at least as long."""
    assert lines(run_fresh(SET_UP + code)) == expected


def test_bars_that_are_open_together_share_the_line(run_fresh: Run) -> None:
    """Eight downloads at once wrote eight lines every five seconds."""
    code = SET_UP + (
        "files = [bar(total=1000, desc=f'file{n}') for n in range(8)]\n"
        "for _ in range(600):\n"
        "    work(0.25)\n"
        "    for file in files: file.update(1)\n"
        "print(file=sys.stderr)\n"
        "os._exit(0)\n"
    )
    shown = lines(run_fresh(code))[:-1]
    assert 20 <= len(shown) <= 30, "150 seconds"
    assert {line.split(":")[0] for line in shown} == {f"file{number}" for number in range(8)}


def test_a_terminal_has_the_bar_that_redraws_itself(repository: Path, tmp_path: Path) -> None:
    """A line every five seconds would be a step back where one line can move."""
    seen = on_a_terminal(SET_UP + "for _ in trange(100, desc='Map'): work(0.25)", repository, tmp_path)
    assert seen.count("\r") > 50 and seen.count("\n") == 1 and "█" in seen and "100/100 [00:25<00:00" in seen


TABLE = """
from rich.table import Table
from rloo_kit.system.console import print_table
table = Table(title="a table", title_justify="left")
table.add_column("name", style="red")
table.add_row("caf\\u00e9 " * 40)
print_table(table)
"""


@pytest.mark.parametrize(
    ("variables", "width"),
    [
        ({"FORCE_COLOR": "1"}, 100),
        ({"PYTHONIOENCODING": "ascii"}, 100),
        ({"COLUMNS": "80"}, 80),
        ({"COLUMNS": "x"}, 100),
    ],
)
def test_tables_are_plain_outside_a_terminal(run_fresh: Run, variables: dict[str, str], width: int) -> None:
    """ipykernel sets FORCE_COLOR: a batch log was colour codes. A frame's characters ended a run in an ASCII stream."""
    done = run_fresh(TABLE, **variables)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "a table\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) == width


def test_tables_have_colour_and_the_terminals_width(repository: Path, tmp_path: Path) -> None:
    """Plain text everywhere would be easy; and tables of 100 columns wrapped every line in a terminal of 80."""
    for columns in (80, 120):
        seen = on_a_terminal(TABLE, repository, tmp_path, width=columns, NO_COLOR="", COLORTERM="")
        assert "\x1b[31m" in seen
        plain = re.sub(r"\x1b\[[\d;]*m", "", seen)
        assert max(len(line.rstrip()) for line in plain.splitlines()) == columns
