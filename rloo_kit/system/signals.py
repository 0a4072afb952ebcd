"""The signals that end a run: Ctrl-C, SIGTERM, and SIGHUP, which is sent when a terminal or an ssh session closes."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ENDING = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
FROM_OUTSIDE = tuple(number for number in ENDING if number != signal.SIGINT)  # Python's own Ctrl-C raises already


@contextmanager
def handle_signals(numbers: Sequence[signal.Signals], handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `handler(number)` for each of the signals while the block runs. Does nothing outside the main thread.

    A signal that the process ignores stays ignored (`nohup` ignores SIGHUP). After SIGHUP output is discarded, because
    writing to a closed terminal raises.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        if name.name == "SIGHUP":
            _let_output_go()
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
    """Signals that arrive while the block runs are handled after it, so that none interrupts its code halfway. Does
    nothing outside the main thread."""
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


def _let_output_go() -> None:
    """Discard standard output and error if they are a terminal, or a pipe: its reader had the same terminal."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            number = stream.fileno()
            mode = os.fstat(number).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), number)
