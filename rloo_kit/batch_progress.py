"""What a batch says while it runs: a live table in a terminal, elsewhere a line for each change.

Outside a terminal a line about the runs that are going comes every few seconds as well, so that a log of hours stays
short and still shows that something moves.
"""

import time
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rloo_kit.batch_report import read_figures
from rloo_kit.batch_status import BatchDir, RunStatus, count_states
from rloo_kit.progress import format_seconds

EVERY_S = 30.0
STYLES = {"done": "green", "failed": "red", "killed": "red", "interrupted": "yellow", "running": "bold"}


class Progress:
    """Prints how the runs of a batch stand; a context manager around them.

    A screen that is gone (a closed terminal, a broken pipe) ends the talking, not the batch.
    """

    def __init__(self, place: BatchDir):
        self.place = place
        self.console = Console()
        self._live: Live | None = None
        self._begun: dict[str, float] = {}
        self._printed_at = time.monotonic()

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self._live = Live(self.table(), console=self.console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """A line of text, above the table where there is one."""
        self._printed_at = time.monotonic()
        with suppress(OSError):
            if self._live is not None:
                self.console.print(Text(text))
            else:
                print(text, flush=True)

    def tell(self, status: RunStatus) -> None:
        """A run has started or ended."""
        number = list(self.place.statuses).index(status.name) + 1
        where = f"[{number}/{len(self.place.statuses)}] {status.name}"
        if status.state == "running":
            self._begun[status.name] = time.monotonic()
            self.say(f"{where}: started{' again' if status.attempts > 1 else ''}")
            return
        parts = [f"{where}: {status.state} after {format_seconds(status.seconds)}"]
        figures = read_figures(self.place.training(status.name))
        if status.state == "done" and figures.get("accuracy_after") is not None:
            parts.append(f"accuracy {_change(figures, 'accuracy', '.3f')}")
        if status.error:
            parts.append(first_line(status.error))
        if status.state != "done":
            parts.append(f"log: {self.place.run_folder(status.name) / 'log.txt'}")
        self.say("; ".join(parts))

    def show(self) -> None:
        """Draw the table again; outside a terminal a line, if the last one is some seconds old."""
        if self._live is not None:
            with suppress(OSError):
                self._live.update(self.table(), refresh=True)
        elif time.monotonic() - self._printed_at >= EVERY_S:
            going = [status for status in self.place.statuses.values() if status.state == "running"]
            counts = count_states(self.place.statuses.values())
            rest = ", ".join(f"{count} {state}" for state, count in counts.items() if state != "running")
            parts = [f"{status.name}: {self._where(status)}" for status in going]
            self.say(" | ".join([*parts, rest] if rest else parts))

    def table(self) -> Table:
        """Every run with its state."""
        table = Table(title=f"batch {self.place.batch.name}", title_justify="left")
        for name in ("run", "state", "where", "note"):
            table.add_column(name, overflow="fold")
        for status in self.place.statuses.values():
            where = self._where(status) if status.state == "running" else format_seconds(status.seconds)
            where = "" if status.state == "waiting" else where
            note = first_line(status.error or "")
            state = Text(status.state, style=STYLES.get(status.state, ""))
            table.add_row(Text(status.name), state, Text(where), Text(note))
        return table

    def _where(self, status: RunStatus) -> str:
        """How far a run that is going has come: its training step, if it trains, and its time."""
        training = self.place.training(status.name).status()
        seconds = format_seconds(time.monotonic() - self._begun.get(status.name, time.monotonic()))
        if training.get("max_steps") and training.get("state") == "running":
            return f"step {training.get('step', 0)}/{training['max_steps']}, {seconds}"
        return seconds


def first_line(text: str, limit: int = 200) -> str:
    """The first line of an error, short enough for a table."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _change(figures: dict[str, Any], name: str, form: str) -> str:
    """Before -> after, or the one that there is."""
    values = [figures.get(f"{name}_{when}") for when in ("before", "after")]
    return " -> ".join(format(value, form) for value in values if value is not None)
