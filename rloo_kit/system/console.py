"""Progress bars, tables and durations as plain lines of text wherever a terminal cannot redraw them."""

import io
import os
import re
import shutil
import sys
import textwrap
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rloo_kit.errors import ConfigError

if TYPE_CHECKING:
    from tqdm.std import tqdm as _TqdmBar
else:
    _TqdmBar = object  # tqdm reads its TQDM_* variables when it is imported: not before set-up has read `.env`

VARIABLE = "TQDM_NOTEBOOK"  # set by many recipes, read by no library
INTERVAL_S = 5.0  # between two lines of all open bars together; a shorter loop prints nothing
WIDTH = 100  # columns of a file, a pipe or a notebook: a cell of JupyterLab on a laptop, with its file browser open
NARROWEST = 40  # columns that tables are laid out for
_FALSE, _TRUE = ("false", "0", "no", "off"), ("true", "1", "yes", "on")
# A model may write control characters; pages and terminals get the symbols that picture them. Those of C1 (0x9b starts
# a sequence like ESC [) and those that reverse a text have none, nor have lone surrogates, which UTF-8 cannot encode.
_PICTURED = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_PICTURED |= dict.fromkeys(
    (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)), 0xFFFD
)
_SECRET_OF_URL = re.compile(r"//\S*[@?#]\S*")
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_NOTEBOOK_BARS = "tqdm.autonotebook"  # where tqdm.auto looks for the notebook bar


def set_up_progress() -> str:
    """Write TQDM_NOTEBOOK=false unless it is set, and act on it, before `tqdm.auto` is first imported. Returns what the
    bars will be, in words; raises ConfigError if it is neither true nor false."""
    value = os.environ.get(VARIABLE, "").strip().lower() or "false"
    if value not in _FALSE + _TRUE:
        raise ConfigError(f"{VARIABLE}={value!r} is neither true nor false: set {VARIABLE}=false for text bars")
    os.environ[VARIABLE] = "true" if value in _TRUE else "false"
    if value in _TRUE:
        return f"left to tqdm ({VARIABLE}=true)"
    from tqdm import std

    if _NOTEBOOK_BARS not in sys.modules:
        module = ModuleType(_NOTEBOOK_BARS, "rloo-kit's text bars, in notebooks too (TQDM_NOTEBOOK=false).")
        module.__spec__ = ModuleSpec(_NOTEBOOK_BARS, loader=None)  # importlib.util.find_spec raises without one
        bar = type("TextBar", (TextBar, std.tqdm), {"__module__": __name__})
        module.__dict__.update(tqdm=bar, trange=lambda *args, **kwargs: bar(range(*args), **kwargs))
        sys.modules[_NOTEBOOK_BARS] = module
    found = sys.modules[_NOTEBOOK_BARS].tqdm
    if issubclass(found, TextBar) or (found is std.tqdm and _is_terminal(sys.stderr)):
        return f"text ({VARIABLE}=false)"
    bars = "text that redraws itself, for terminals only" if found is std.tqdm else "notebook widgets"
    return f"{bars}: tqdm.auto was imported before set-up; restart the kernel and run set-up first"


class TextBar(_TqdmBar):
    """tqdm's bar: unchanged in a terminal; elsewhere a line every `INTERVAL_S`, and a last one after those. In a kernel
    they go to stdout, because JupyterLab shows stderr as an error, even with `disable=None` (off outside a
    terminal)."""

    _line_at = 0.0  # of the last line: when, and at which count
    _line_n: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        file = kwargs.get("file") or sys.stderr
        self._is_lines = not _is_terminal(file)
        if self._is_lines:
            kwargs["gui"] = True  # tqdm then leaves the output to the subclass
        if self._is_lines and _is_in_kernel():
            kwargs |= {"disable": bool(kwargs.get("disable")), "file": sys.stdout if file is sys.stderr else file}
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Called by tqdm whenever it would redraw."""
        if not self._is_lines:
            return super().display(msg, pos)
        if self._is_due() and not (self.total and self.n >= self.total):  # the last line is written by close()
            self._write_line("eta {remaining}" if self.total else "after {elapsed}")
        return True

    def clear(self, nolock: bool = False) -> None:
        if not self._is_lines:
            super().clear(nolock)

    def close(self) -> None:
        if self._is_lines and not getattr(self, "disable", True) and (self._line_n is not None or self._is_due()):
            self._ema_dt = lambda: None  # the rate over the whole loop, as tqdm does
            self._write_line("took {elapsed}")
        super().close()

    def _is_due(self) -> bool:
        has_moved = self.n not in (self.initial, self._line_n)
        since = max(self.start_t, self._line_at)
        return has_moved and self._time() - since >= INTERVAL_S * len(self._instances)

    def _write_line(self, end: str) -> None:
        values = self.format_dict
        if not values["bar_format"]:
            name = values["prefix"].removesuffix(": ")
            values["prefix"] = f"{name}: " if name else ""
            count = "{percentage:.0f}% | {n_fmt}/{total_fmt}" if self.total else "{n_fmt} {unit}"
            values |= {"ncols": None, "bar_format": f"{{desc}}{count} | {{rate_fmt}} | {end}{{postfix}}"}
        self.fp.write(" ".join(self.format_meter(**values).split()) + "\n")
        self.fp.flush()
        self._line_at, self._line_n = self._time(), self.n


def columns() -> int:
    """Columns for tables and paragraphs: those of the terminal, or COLUMNS if set; else `WIDTH`."""
    if _is_in_kernel() or not (_is_terminal(sys.stdout) or os.environ.get("COLUMNS")):
        return WIDTH
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST)


def fill_text(text: str) -> str:
    """A paragraph wrapped at `columns()`; lines after the first are indented by two more."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(
        text, columns(), subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )


def render_text(renderable: Any, width: int | None = None) -> str:
    """A rich renderable as plain lines of at most `width` columns (None: `columns()`), without trailing blanks."""
    file = io.StringIO()
    width = width or columns()
    options: dict[str, Any] = {"file": file, "color_system": None, "force_terminal": False, "force_jupyter": False}
    Console(width=width, markup=False, emoji=False, **options).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def print_table(renderable: Any) -> None:
    """Print a rich renderable, coloured only in a terminal; a kernel's FORCE_COLOR would make rich colour any file."""
    if sys.stdout.isatty():
        Console(force_jupyter=False, width=columns(), markup=False, emoji=False).print(renderable)
    else:
        print_text(render_text(renderable))


def print_text(text: str, end: str = "\n") -> None:
    """Print text, with ? for what stdout cannot encode: a table's frame must not crash a run."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)


def format_seconds(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> format_seconds(75), format_seconds(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _is_terminal(file: Any) -> bool:
    return bool(getattr(file, "isatty", bool)())


def _is_in_kernel() -> bool:
    """Whether this is a Jupyter kernel, as opposed to a script or IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def chat_messages(prompt: str) -> list[tuple[str, str]]:
    """Role and text of each message of a rendered ChatML prompt; none of another one."""
    return [(role, text.strip()) for role, text in _MESSAGE.findall(prompt)]


def plain_prompt(prompt: str) -> str:
    """The readable text of a rendered ChatML prompt; any other prompt unchanged.

    >>> plain_prompt("<|im_start|>user\\n12+30=<|im_end|>\\n<|im_start|>assistant\\n<think>\\n")
    '12+30='
    """
    messages = chat_messages(prompt)
    if [role for role, _ in messages] == ["user"]:
        return messages[0][1]
    return "\n".join(f"{role}: {text}" for role, text in messages) or prompt.strip()


def hide_secrets(text: str) -> str:
    """Text without the passwords and tokens that an address may contain.

    >>> hide_secrets("url=http://me:word@host:1 and http://host:1/ and http://host/?token=1")
    'url=http://(hidden) and http://host:1/ and http://(hidden)'
    """
    return _SECRET_OF_URL.sub("//(hidden)", text)


def picture_controls(text: str) -> str:
    """Text without control characters: each is shown by its symbol.

    >>> picture_controls("a\\x1b[31m \\u202eb")
    'a␛[31m �b'
    """
    return text.translate(_PICTURED)
