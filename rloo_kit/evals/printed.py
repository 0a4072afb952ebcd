"""Prints an answer while it is sampled: thinking dim in a terminal, under a title elsewhere."""

import os
import sys

from rloo_kit.rollout.text_stream import THINKING
from rloo_kit.system.console import picture_controls

BASE = "base"  # title of the base model's answer, which comes first
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Printed:
    """Prints pieces of text to stdout as they arrive. In a kernel nothing is flushed, because each flush would be a
    separate output.

    Args:
        title: printed first if two models are asked.
    """

    def __init__(self, title: str = "") -> None:
        self._file = sys.stdout
        self._dims = self._file.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._part, self._is_mid_line, self._title = "", False, title
        if title:
            self._write(f"{title}:\n")

    def __call__(self, part: str, text: str) -> None:
        """Print a piece of `part`, "thinking" or "answer"."""
        if part != self._part:
            self.end_line()
            if not self._dims and (part == THINKING or self._part):
                self._write(f"{part}:\n")
            self._part = part
        self._write(picture_controls(text), dim=part == THINKING)

    def close(self, summary: str) -> None:
        """Print the summary line."""
        self.end_line()
        self._write(f"{summary if self._dims else f'({summary})'}\n", dim=True)
        if self._title == BASE:
            self._write("\n")

    def end_line(self) -> None:
        """Start a new line, unless the current one is empty."""
        if self._is_mid_line:
            self._write("\n")

    def _write(self, text: str, dim: bool = False) -> None:
        self._is_mid_line = not text.endswith("\n")
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if dim and self._dims:
            line = text.rstrip("\n")
            text = f"{DIM}{line}{PLAIN}{text[len(line) :]}"
        self._file.write(text)
        if "ipykernel" not in sys.modules:
            self._file.flush()
