"""Tables of rich as text: coloured in a terminal, plain everywhere else.

In a Jupyter kernel rich's console displays HTML whatever it is told to write to. A batch runner's log then holds colour
codes instead of a table, and the saved notebook an output that no text tool reads. So nothing else in the kit
prints through rich.
"""

import io
import sys
from typing import Any

from rich.console import Console

WIDTH = 100  # columns that fit a cell of JupyterLab on a laptop, with its file browser open


def as_text(renderable: Any, width: int = WIDTH) -> str:
    """The renderable as plain lines without colour, `width` columns at most and no blanks at their ends."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def print_table(renderable: Any, width: int = WIDTH) -> None:
    """Print in one piece, flushed. A kernel tells rich by FORCE_COLOR that it is a terminal, so stdout is asked."""
    if sys.stdout.isatty():
        Console(force_jupyter=False).print(renderable)
        sys.stdout.flush()
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = as_text(renderable, width) + "\n"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))  # a frame must not end a run
    sys.stdout.flush()
