"""The table of runners in docs/notebook.md: what the tests measured, and nothing typed by hand.

Each runner's test compares its own row; `RUNNERS_TABLE=write` writes the row instead.
"""

import fcntl
import os
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notebook.md"
BEGIN, END = "<!-- runners: begin -->", "<!-- runners: end -->"
COLUMNS = ("runner", "exit code", "outputs complete", "running save finished", "kernel gone", "memory released")
REWRITE = "RUNNERS_TABLE=write .venv/bin/python -m pytest tests/notebooks/test_runners.py -m slow"

ORDER = ["papermill", "nbclient", "jupyter nbconvert --execute", "jupyter execute", "jupyter_client"]
ORDER += ["JupyterLab's server", "IPython in a terminal", "script"]


def rows() -> dict[str, str]:
    """The lines of the table by the runner's name."""
    return {line.split("|")[1].strip(): line for line in _table(PAGE.read_text(encoding="utf-8"))}


def check_row(runner: str, *cells: str | bool) -> None:
    """Compare a runner's row with the page, or write it there. A cell is a text, or whether it held."""
    texts = [{True: "yes", False: "no"}.get(cell, cell) if isinstance(cell, bool) else cell for cell in cells]
    line = f"| {' | '.join([runner, *texts])} |"
    if os.environ.get("RUNNERS_TABLE") == "write":
        _write_row(runner, line)
    found = rows().get(runner)
    assert found == line, f"{PAGE.name} says\n{found}\nmeasured was\n{line}\nTo write what is measured: {REWRITE}"


def _table(page: str) -> list[str]:
    inside = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    return [line for line in inside.split("\n") if line.startswith("|")][2:]


def _write_row(runner: str, line: str) -> None:
    """Under a lock: the tests of several processes write at the same time."""
    with open(PAGE, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        page = file.read()
        table = {row.split("|")[1].strip(): row for row in _table(page)} | {runner: line}
        lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        lines += [table[name] for name in ORDER if name in table]
        before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        file.seek(0)
        file.write("\n".join([before, *lines, after]))
        file.truncate()
