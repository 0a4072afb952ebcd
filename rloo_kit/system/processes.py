"""The processes of a run (RANK, LOCAL_RANK, WORLD_SIZE, which a launcher sets), signals and random numbers."""

import os
import random
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rloo_kit.errors import ConfigError
from rloo_kit.system.console import print_text

WORLD_SIZE, RANK, LOCAL_RANK = "WORLD_SIZE", "RANK", "LOCAL_RANK"
REFUSED, INTERRUPTED = 2, 130
# Signals that end a run: Ctrl-C, SIGTERM, and SIGHUP, which is sent when a terminal or an ssh session closes.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FROM_OUTSIDE = tuple(number for number in ENDING if number != signal.SIGINT)  # Python's own Ctrl-C raises already


def count_processes() -> int:
    """Processes of a run (WORLD_SIZE), 1 without a launcher; ConfigError if it is no whole number above 0."""
    return _read(WORLD_SIZE, 1, least=1)


def process_index() -> int:
    """The rank of this process (RANK), 0 without a launcher; ConfigError if it is not a rank of WORLD_SIZE."""
    index, count = _read(RANK, 0), count_processes()
    if index >= count:
        raise ConfigError(f"the environment's {RANK} is {index} and {WORLD_SIZE} {count}; it must be below that number")
    return index


def local_index() -> int:
    """The rank of this process on its machine (LOCAL_RANK), which is its GPU; 0 without a launcher."""
    return _read(LOCAL_RANK, 0)


def is_main_process() -> bool:
    """Whether this is the process that writes files and prints."""
    return process_index() == 0


def is_distributed() -> bool:
    """Whether the run has more than one process."""
    return count_processes() > 1


def say(text: object) -> None:
    """Print a line at once, in the main process only."""
    if is_main_process():
        print_text(str(text))


def _read(name: str, default: int, least: int = 0) -> int:
    text = os.environ.get(name) or str(default)  # an empty variable counts as none; accelerate's -1 means none too
    if text == "-1" and least == 0:
        return default
    if not text.isdigit() or int(text) < least:
        raise ConfigError(
            f"the environment's {name} is {text!r}; a launcher sets it to a whole number, {least} or more"
        )
    return int(text)


@contextmanager
def handle_signals(numbers: Sequence[signal.Signals], handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `handler(number)` for each of the signals while the block runs. Does nothing outside the main thread.

    What the process ignores stays ignored (`nohup`). After SIGHUP, output to a terminal or a pipe is discarded: its
    reader is gone, and writing would raise.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        for stream in (sys.stdout, sys.stderr) if name.name == "SIGHUP" else ():
            with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as nowhere:
                mode = os.fstat(stream.fileno()).st_mode
                if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
                    os.dup2(nowhere.fileno(), stream.fileno())
        handler(name)

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, handle) for number in taken}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Signals that arrive while the block runs are handled after it; nothing changes outside the main thread."""
    held: list[signal.Signals] = []
    try:
        with handle_signals(ENDING, held.append):
            yield
    finally:
        for number in held:
            signal.raise_signal(number)


def interrupt(number: signal.Signals) -> None:
    """A handler that ends the block like Ctrl-C."""
    raise KeyboardInterrupt(number.name)


@contextmanager
def keep_random_numbers() -> Iterator[None]:
    """A block after which Python's random numbers, and numpy's if it is loaded, continue as if it had not run."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
