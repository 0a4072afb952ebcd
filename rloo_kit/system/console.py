"""Text progress bars: what `TQDM_NOTEBOOK=false` is taken to mean, and what no library makes of it.

tqdm reads no such variable: in a notebook `tqdm.auto` takes widgets, which a batch runner's log shows once, frozen at
0 %. So set-up puts a module of its own in the place of `tqdm.autonotebook`, where `tqdm.auto` looks for the notebook
bar, before anything imports `tqdm.auto`; it offers `rloo_kit.system.text_bars`. `TQDM_NOTEBOOK=true` leaves tqdm alone.
The training loop's own progress line does not depend on it (`rloo_kit.loop.callbacks`).
"""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from rloo_kit.errors import ConfigError

VARIABLE = "TQDM_NOTEBOOK"
_FALSE = ("false", "0", "no", "off")
_TRUE = ("true", "1", "yes", "on")
_NAME = "tqdm.autonotebook"


def set_up_progress() -> str:
    """Write TQDM_NOTEBOOK=false unless it is set, and act on it. Call before `tqdm.auto` is first imported.

    Returns: what the bars will be, in words.
    Raises: ConfigError when TQDM_NOTEBOOK is neither true nor false.
    """
    value = os.environ.get(VARIABLE, "").strip().lower() or "false"
    if value not in _FALSE + _TRUE:
        raise ConfigError(f"{VARIABLE}={value!r} is neither true nor false: set {VARIABLE}=false for text bars")
    os.environ[VARIABLE] = "true" if value in _TRUE else "false"
    if value in _TRUE:
        return f"left to tqdm ({VARIABLE}=true)"
    bars = import_module("rloo_kit.system.text_bars")
    loaded = sys.modules.setdefault(_NAME, _text_module(bars))
    its_own = loaded.tqdm is import_module("tqdm.std").tqdm
    if loaded.tqdm is bars.TextBar or (its_own and bars.is_terminal(sys.stderr)):
        return f"text ({VARIABLE}=false)"
    late = "tqdm.auto was imported before set-up; restart the kernel and run set-up first"
    return f"{'text that redraws itself, for terminals only' if its_own else 'notebook widgets'}: {late}"


def _text_module(bars: ModuleType) -> ModuleType:
    module = ModuleType(_NAME, "rloo-kit's stand-in: text bars in notebooks too (TQDM_NOTEBOOK=false).")
    module.__spec__ = ModuleSpec(_NAME, loader=None)  # without one importlib.util.find_spec raises
    module.__dict__.update(tqdm=bars.TextBar, trange=bars.trange, __all__=["tqdm", "trange"])
    return module


def format_seconds(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> format_seconds(75), format_seconds(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
