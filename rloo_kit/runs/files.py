"""What this process saved, and what it is saving right now.

Whoever ends a process asks here first: a kernel that is ended while an adapter is being written leaves half of one
behind. `saving` is entered around every save of the kit; your own saves may enter it too. Left out: files that are
replaced in one piece within milliseconds (`run_dir.write_text`).
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_changed = threading.Condition()
_running: list[Path] = []
_saved: dict[Path, None] = {}  # an ordered set


@contextmanager
def saving(path: str | Path) -> Iterator[None]:
    """Around the writing of `path`, a file or a folder: whoever waits for running saves waits for this one.

    One that raises is over, and does not count as saved.
    """
    path = Path(path).absolute()
    with _changed:
        _running.append(path)
    try:
        yield
        with _changed:
            _saved.pop(path, None)  # what is saved again goes to the end
            _saved[path] = None
    finally:
        with _changed:
            _running.remove(path)
            _changed.notify_all()


def running_saves() -> list[Path]:
    """What is being written right now, by any thread; the longest-running first."""
    with _changed:
        return list(dict.fromkeys(_running))


def saved_paths() -> list[Path]:
    """What this process saved, once each, the last save at the end; it may have been deleted since."""
    with _changed:
        return list(_saved)


def wait_for_saves(timeout_s: float | None = None) -> bool:
    """Wait until no save is running.

    Args:
        timeout_s: give up after so many seconds; None: wait as long as it takes.
    Returns:
        Whether no save is running any more.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with _changed:
        while _running:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            _changed.wait(left)
        return True
