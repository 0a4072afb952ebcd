"""RAM of this process: how much it uses, how much it may still take, returning it, and out-of-memory errors."""

import ctypes
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from rloo_kit.system.gpu import GIB

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
LARGE_BLOCK = 2**20  # bytes; smaller ones cost more time in page faults than they save memory (docs/log.md)


def resident_gib() -> float | None:
    """Resident memory of this process in GiB; None without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


def clear_last_error() -> None:
    """Drop the local variables in the frames of the last uncaught error, which keep a model in memory; its text
    stays."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def trim_heap() -> None:
    """Return free memory of the C heap to the system; only glibc can."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def return_large_blocks() -> None:
    """Have the C heap return blocks of LARGE_BLOCK bytes as soon as they are free; only glibc can.

    Its own threshold rises as such blocks are freed, and then torch's are hardly reused
    (https://sourceware.org/bugzilla/show_bug.cgi?id=14581): up to 1.6 GiB on a CPU. A user's threshold stays.
    """
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and "mmap_threshold" not in os.environ.get("GLIBC_TUNABLES", ""):
        with suppress(AttributeError, OSError, TypeError):  # another C library
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that a GPU or the machine has no memory left; torch has no class for the CPU's.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    >>> is_out_of_memory(RuntimeError("size mismatch"))
    False
    """
    texts = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "MPS backend out of memory")
    return type(error).__name__ == "OutOfMemoryError" or any(text in str(error) for text in texts)


def available_gib() -> float:
    """RAM in GiB that this process can use: what it uses now plus what the machine or its container has free."""
    import psutil

    held = int(psutil.Process().memory_info().rss)
    return (held + min(int(psutil.virtual_memory().available), _free_in_container())) / GIB


def _free_in_container(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes below the limit of this control group (v2), its page cache counted as free; sys.maxsize without a limit."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        held = int((folder / "memory.current").read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        files = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
    except (OSError, ValueError):  # no such file, or "max"
        return sys.maxsize
    return max(0, limit - held + files)
