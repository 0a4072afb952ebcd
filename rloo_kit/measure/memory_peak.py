"""The most memory that a block of code held: of the card where there is one, else of this process.

Left out: other processes, and memory that torch did not allocate on a card (CUDA's context, kernels' own).
"""

import gc
import threading
from pathlib import Path
from typing import Any

from rloo_kit._stack import load_stack
from rloo_kit.errors import BackendError
from rloo_kit.system.memory import GIB, resident_gib, trim_heap


class Peak:
    """The most memory that was held inside the `with` block, in GiB; torch's on a card, else resident.

    Attributes:
        gib: the peak. reserved_gib: of torch's allocator on a card, 0 elsewhere.
    """

    gib = reserved_gib = 0.0

    def __enter__(self) -> "Peak":
        torch = load_stack().torch
        gc.collect()
        self._cuda = torch.cuda if torch.cuda.is_available() else None
        self._watch = None
        if self._cuda is not None:
            self._cuda.synchronize()
            self._cuda.empty_cache()
            self._cuda.reset_peak_memory_stats()
        else:
            trim_heap()
            self._watch = _Watch()
        return self

    def __exit__(self, *_error: Any) -> None:
        if self._watch is not None:
            self.gib = self._watch.finish()
        elif self._cuda is not None:
            self._cuda.synchronize()
            self.gib = self._cuda.max_memory_allocated() / GIB
            self.reserved_gib = self._cuda.max_memory_reserved() / GIB


class _Watch:
    """The peak of this process's resident memory: the kernel's own where it can be reset, else looked at every 2 ms."""

    def __init__(self) -> None:
        self._most = resident_gib()
        if self._most is None:
            raise BackendError("memory cannot be measured here: there is neither a CUDA card nor /proc/self/statm")
        self._thread: threading.Thread | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self._done = threading.Event()
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def finish(self) -> float:
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            return max(self._most, resident_gib() or 0.0)
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024 / GIB

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, resident_gib() or 0.0)
