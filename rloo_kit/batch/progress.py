"""Output of a running batch: a live table in a terminal; elsewhere a line per change, and one about the active runs
every 30 seconds.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rloo_kit.batch.comparison import WORDS, change, leading_figure, read_figures
from rloo_kit.batch.status import BatchDir, RunStatus, count_states
from rloo_kit.system.console import format_seconds

EVERY_S = 30.0
LINES_AROUND = 8  # of the table's frame and of the output above it
STYLES = {"done": "green", "failed": "red", "killed": "red", "interrupted": "yellow", "running": "bold"}


class BatchDisplay:
    """Prints the states of a batch's runs; a context manager. A closed terminal or pipe ends the output, not the
    batch."""

    def __init__(self, place: BatchDir):
        self.place = place
        self.console = Console()
        self._live: Live | None = None
        self._begun: dict[str, float] = {}
        self._printed_at = time.monotonic()

    def __enter__(self) -> "BatchDisplay":
        if self.console.file.isatty():  # not is_terminal, which FORCE_COLOR from a kernel makes true in a pipe
            self._live = Live(self.table(), console=self.console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        live, self._live = self._live, None
        if live is not None:
            self._try(live.stop)

    def _try(self, show: Callable[[], object]) -> None:
        """Write to the screen; once it is closed, all output is discarded."""
        try:
            show()
        except OSError:
            self._live = None
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def print(self, text: str) -> None:
        """Print a line of text, above the live table if there is one."""
        self._printed_at = time.monotonic()
        if self._live is not None:
            self._try(lambda: self.console.print(Text(text)))
        else:
            self._try(lambda: print(text, flush=True))

    def report(self, status: RunStatus) -> None:
        """Print that a run has started or ended."""
        number = list(self.place.statuses).index(status.name) + 1
        where = f"[{number}/{len(self.place.statuses)}] {status.name}"
        if status.state == "running":
            self._begun[status.name] = time.monotonic()
            self.print(f"{where}: started{' again' if status.attempts > 1 else ''}")
            return
        parts = [f"{where}: {status.state} after {format_seconds(status.seconds)}"]
        figures = read_figures(self.place.training(status.name))
        lead = leading_figure([figures])
        if status.state == "done" and figures.get(f"{lead}_after") is not None:
            parts.append(f"{WORDS[lead][0]} {change(figures, lead, '.3f', ' -> ')}")
        if status.error:
            parts.append(first_line(status.error))
        if status.state != "done":
            parts.append(f"log: {self.place.run_folder(status.name) / 'log.txt'}")
        self.print("; ".join(parts))

    def show(self) -> None:
        """Redraw the table; outside a terminal, print a line if the last one is older than `EVERY_S`."""
        if self._live is not None:
            table = self.table()
            self._try(lambda: self._live.update(table, refresh=True) if self._live else None)
        elif time.monotonic() - self._printed_at >= EVERY_S:
            going = [status for status in self.place.statuses.values() if status.state == "running"]
            counts = count_states(self.place.statuses.values())
            rest = ", ".join(f"{count} {state}" for state, count in counts.items() if state != "running")
            parts = [f"{status.name}: {self._where(status)}" for status in going]
            self.print(" | ".join([*parts, rest] if rest else parts))

    def table(self) -> Table:
        """Every run with its state; on a small screen without waiting and finished ones."""
        statuses = list(self.place.statuses.values())
        counts = ", ".join(f"{count} {state}" for state, count in count_states(statuses).items())
        table = Table(title=f"batch {self.place.batch.name}: {counts}", title_justify="left")
        for name in ("run", "state", "where", "note"):
            table.add_column(name, overflow="fold", no_wrap=name == "state")
        if len(statuses) + LINES_AROUND > self.console.height:
            statuses = [status for status in statuses if status.state not in ("waiting", "done")]
        for status in statuses:
            where = self._where(status) if status.state == "running" else format_seconds(status.seconds)
            where = "" if status.state == "waiting" else where
            state = Text(status.state, style=STYLES.get(status.state, ""))
            table.add_row(Text(status.name), state, Text(where), Text(first_line(status.error or "", 80)))
        return table

    def _where(self, status: RunStatus) -> str:
        """A run's progress: its training step, if it trains, and its time."""
        training = self.place.training(status.name).status()
        seconds = format_seconds(time.monotonic() - self._begun.get(status.name, time.monotonic()))
        if training.get("max_steps") and training.get("state") == "running":
            return f"step {training.get('step', 0)}/{training['max_steps']}, {seconds}"
        return seconds


def first_line(text: str, limit: int = 200) -> str:
    """The first line of an error, shortened for a table."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
