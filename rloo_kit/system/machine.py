"""This machine in a few words, for a run's record."""

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil

from rloo_kit.system.gpu import GIB, find_gpus


def describe_machine() -> str:
    """The GPU with its memory, or the CPU with cores and RAM; never a host's name."""
    found = find_gpus()
    if found.gpu is not None:
        several = f"{found.count} x " if found.count > 1 else ""
        return f"{several}{found.gpu.name}, {found.gpu.memory_gib:.0f} GiB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = f"{_cpu_name()}, " if _cpu_name() else ""
    return f"{name}{cores} CPU cores, {psutil.virtual_memory().total / GIB:.0f} GiB"


def _cpu_name() -> str:
    """As Linux reports it; empty elsewhere."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b|@.*", "", line.partition(":")[2]).strip()
    return ""
