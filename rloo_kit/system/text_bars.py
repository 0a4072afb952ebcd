"""tqdm's bar as whole lines wherever it cannot redraw itself: in a kernel, a pipe, a log.

A bar that redraws itself writes a carriage return ten times a second. A terminal shows one line; a saved notebook and
a batch runner's log keep all of them. Left out: bars of modules that say `from tqdm import tqdm`, which are tqdm's own
whatever is put in the place of `tqdm.autonotebook`, and `tqdm.notebook`, which asks for widgets by name.
"""

import sys
from typing import Any, ClassVar
from weakref import WeakSet

from tqdm.std import tqdm

INTERVAL_S = 5.0  # between two lines of all bars together; a loop that takes less prints nothing
_FILE = 4  # place of `file` among tqdm's positional arguments


class TextBar(tqdm):
    """tqdm's own bar in a terminal; elsewhere a line every `INTERVAL_S` seconds, and a last one if there was a first.

    In a kernel the lines go to stdout, because JupyterLab shows stderr as an error; `disable=None` ("not outside a
    terminal", which the hub's downloads say) does not hold there, as it does not for tqdm's notebook bar.
    """

    _open: ClassVar["WeakSet[TextBar]"] = WeakSet()
    _in_lines = False
    _line_at = float("inf")  # tqdm's monitor thread may ask before __init__ has ended
    _line_n: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        file = args[_FILE] if len(args) > _FILE else kwargs.get("file")
        file = sys.stderr if file is None else file
        self._in_lines = file is not None and not is_terminal(file)
        if self._in_lines:
            if _is_in_kernel():
                if len(args) <= _FILE and file is sys.stderr:
                    kwargs["file"] = sys.stdout
                kwargs["disable"] = bool(kwargs.get("disable", False))
            kwargs["gui"] = True  # tqdm's word for: the subclass displays
        super().__init__(*args, **kwargs)
        if self._in_lines and not self.disable:
            self._line_at = self._time()
            self._open.add(self)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Called by tqdm whenever it would redraw. Bars that are open together share one line every `INTERVAL_S`."""
        if not self._in_lines:
            return super().display(msg, pos)
        finished = bool(self.total) and self.n >= self.total  # close() has the last word
        if self._is_due() and not finished and self.n not in (self.initial, self._line_n):
            self._write_line("eta {remaining}" if self.total else "after {elapsed}")
        return True

    def clear(self, nolock: bool = False) -> None:
        if not self._in_lines:
            super().clear(nolock)

    def close(self) -> None:
        if self._in_lines and not getattr(self, "disable", True):
            if self._line_n is not None or (self._is_due() and self.n != self.initial):
                self._ema_dt = lambda: None  # the rate over the whole loop, as tqdm does
                self._write_line("took {elapsed}")
            self._open.discard(self)
        super().close()

    def _is_due(self) -> bool:
        return self._time() - self._line_at >= INTERVAL_S * max(len(self._open), 1)

    def _write_line(self, end: str) -> None:
        values = self.format_dict
        if not values["bar_format"]:
            name = str(values["prefix"]).removesuffix(": ")
            values["prefix"] = f"{name}: " if name else ""
            count = "{percentage:.0f}% | {n_fmt}/{total_fmt}" if self.total else "{n_fmt} {unit}"
            values["ncols"] = None  # the line's length is its own
            values["bar_format"] = f"{{desc}}{count} | {{rate_fmt}} | {end}{{postfix}}"
        self.fp.write(" ".join(self.format_meter(**values).split()) + "\n")
        self.fp.flush()
        self._line_at, self._line_n = self._time(), self.n


def trange(*args: int, **kwargs: Any) -> TextBar:
    """`TextBar(range(*args), **kwargs)`."""
    return TextBar(range(*args), **kwargs)


def is_terminal(file: Any) -> bool:
    """Whether what is written to file can be redrawn; a file that does not say cannot."""
    return bool(getattr(file, "isatty", bool)())


def _is_in_kernel() -> bool:
    """Whether this is a Jupyter kernel, as opposed to a script or IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None
