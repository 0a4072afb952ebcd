"""Output of a running batch: a line per change, and one about the active runs every 30 seconds."""

import os
import sys
import time
from contextlib import suppress

from rloo_kit.batch.comparison import WORDS, change, leading_figure, read_figures
from rloo_kit.batch.status import BatchDir, RunStatus, count_states
from rloo_kit.system.console import format_seconds

EVERY_S = 30.0


class BatchDisplay:
    """Prints the states of a batch's runs. A closed terminal or pipe ends the output, not the batch."""

    def __init__(self, place: BatchDir):
        self.place = place
        self._begun: dict[str, float] = {}
        self._printed_at = time.monotonic()

    def print(self, text: str) -> None:
        """Print a line of text. Once the terminal or the pipe is closed, all output is discarded."""
        self._printed_at = time.monotonic()
        try:
            print(text, flush=True)
        except OSError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

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
        """Print a line about the active runs if the last one is older than `EVERY_S`."""
        if time.monotonic() - self._printed_at >= EVERY_S:
            going = [status for status in self.place.statuses.values() if status.state == "running"]
            counts = count_states(self.place.statuses.values())
            rest = ", ".join(f"{count} {state}" for state, count in counts.items() if state != "running")
            parts = [f"{status.name}: {self._where(status)}" for status in going]
            self.print(" | ".join([*parts, rest] if rest else parts))

    def _where(self, status: RunStatus) -> str:
        """A run's progress: its training step, if it trains, and its time."""
        training = self.place.training(status.name).status()
        seconds = format_seconds(time.monotonic() - self._begun.get(status.name, time.monotonic()))
        if training.get("max_steps") and training.get("state") == "running":
            return f"step {training.get('step', 0)}/{training['max_steps']}, {seconds}"
        return seconds


def first_line(text: str, limit: int = 200) -> str:
    """The first line of an error, shortened."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
