"""The one place where the driver is asked for memory: `torch.cuda` on a GPU, `HostMemory` in a rehearsal.

All that a check does with memory goes through `Memory`: what is held, the peak of a block, and a cap that makes a large
GPU a small one. A GPU of 12 GB has 12e9 bytes, and torch's context is not torch's to count: the cap is what is left.
"""

import gc
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GIB = 2**30
GB = 1e9  # what is printed on a GPU's box


class HostMemory:
    """`torch.cuda`'s calls, answered for the memory of the machine (Linux). A cap is one on the address space."""

    def __init__(self) -> None:
        self.start = self._read("VmRSS")

    def memory_allocated(self) -> int:
        return self._read("VmRSS") - self.start

    memory_reserved = memory_allocated

    def max_memory_allocated(self) -> int:
        return self._read("VmHWM") - self.start

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes of a GPU of 80 GiB of which nobody else has anything."""
        return 80 * GIB - self.memory_reserved(), 80 * GIB

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        limit = resource.RLIM_INFINITY if fraction >= 1 else int(self._read("VmSize") + fraction * 80 * GIB)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def synchronize(self) -> None:
        """Nothing runs behind one's back here."""

    def empty_cache(self) -> None:
        from rloo_kit.system.memory import trim_heap

        trim_heap()

    def _read(self, field: str) -> int:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(re.findall(rf"^{field}:\s+(\d+) kB", text, re.M)[0])


class Memory:
    """Figures in GiB of the memory that `cuda` speaks of: `torch.cuda`, or a `HostMemory`."""

    def __init__(self, cuda: Any, device: str) -> None:
        self.cuda, self.device = cuda, device
        self.limit_gib: float | None = None

    @property
    def held_gib(self) -> float:
        """What tensors hold."""
        return self.cuda.memory_allocated() / GIB

    @property
    def context_gib(self) -> float:
        """What is taken of the GPU and not by torch's allocator: the context, and whatever other programs hold."""
        free, total = self.cuda.mem_get_info()
        return (total - free - self.cuda.memory_reserved()) / GIB

    def settle(self) -> None:
        """Let go of garbage and of the allocator's cache."""
        self.cuda.synchronize()
        gc.collect()
        self.cuda.empty_cache()

    @contextmanager
    def measure(self) -> Iterator[dict[str, float]]:
        """Figures of a block: seconds, the peak of what tensors held and of what the allocator took, held after."""
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()
        found: dict[str, float] = {}
        started = time.monotonic()
        yield found
        self.cuda.synchronize()
        found["seconds"] = round(time.monotonic() - started, 2)
        found["peak_gib"] = round(self.cuda.max_memory_allocated() / GIB, 3)
        found["peak_reserved_gib"] = round(self.cuda.max_memory_reserved() / GIB, 3)
        found["held_gib"] = round(self.held_gib, 3)

    @contextmanager
    def capped(self, gpu_gb: float) -> Iterator[float]:
        """Play a GPU of `gpu_gb` (1e9 bytes each): what torch may take of it, in GiB, the context left out."""
        self.settle()
        limit = gpu_gb * GB / GIB - self.context_gib
        total = self.cuda.mem_get_info()[1] / GIB
        if not 0 < limit < total:
            raise ValueError(f"a GPU of {gpu_gb:g} GB cannot be played on one of {total:.1f} GiB")
        self.limit_gib = limit
        self.cuda.set_per_process_memory_fraction(limit / total)
        try:
            yield limit
        finally:
            self.cuda.set_per_process_memory_fraction(1.0)
            self.limit_gib = None


def holds(memory: Memory, gib: float) -> bool:
    """Whether a tensor of that many GiB can be made."""
    import torch

    from rloo_kit.system.memory import is_out_of_memory

    try:
        torch.empty(int(gib * GIB), dtype=torch.uint8, device=memory.device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        memory.settle()
    return True
