"""NVIDIA GPUs as the driver reports them through NVML: no torch, no CUDA context, a few milliseconds.

For a MIG slice that CUDA_VISIBLE_DEVICES names, the slice's own memory is read.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU; `index` counts by PCI bus, as nvidia-smi does, and `capability` is (major, minor)."""

    index: int
    name: str
    memory_gib: float
    free_gib: float
    capability: tuple[int, int]
    driver: str

    @property
    def compute_capability(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}"


@dataclass(frozen=True)
class Gpus:
    """The GPU of this process (None: `reason` says why), and how many GPUs it may see."""

    gpu: Gpu | None
    count: int
    reason: str


@dataclass(frozen=True)
class Holder:
    """A process that uses memory of a GPU. Its name is the program alone: command lines can contain secrets."""

    pid: int
    name: str
    memory_gib: float | None


def find_gpus() -> Gpus:
    """The GPU of this process as CUDA would see it (CUDA_VISIBLE_DEVICES, LOCAL_RANK), with its memory right now."""

    def find(nvml: Any) -> Gpus:
        own, count = _visible(nvml)
        if own is None:
            value, there = os.environ.get("CUDA_VISIBLE_DEVICES"), nvml.nvmlDeviceGetCount()
            hidden = f"CUDA_VISIBLE_DEVICES={value!r} hides the {there} NVIDIA GPU(s)"
            return Gpus(None, 0, hidden if there else "the NVIDIA driver lists no GPU")
        memory = nvml.nvmlDeviceGetMemoryInfo(own)
        with suppress(nvml.NVMLError):  # a MIG slice has its own memory; its other properties are its GPU's
            own = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(own)
        gpu = Gpu(
            index=nvml.nvmlDeviceGetIndex(own),
            name=nvml.nvmlDeviceGetName(own),
            memory_gib=memory.total / GIB,
            free_gib=memory.free / GIB,
            capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(own)),
            driver=nvml.nvmlSystemGetDriverVersion(),
        )
        return Gpus(gpu, count, "")

    found, reason = _ask(find)
    return found or Gpus(None, 0, reason)


def find_holders(gpu: Gpu) -> list[Holder]:
    """The processes that use memory of `gpu`, the largest first; empty if the driver does not answer."""

    def find(nvml: Any) -> list[Holder]:
        handle, holders = nvml.nvmlDeviceGetHandleByIndex(gpu.index), []
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle) + nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        for pid, used in {one.pid: one.usedGpuMemory for one in found}.items():
            name = "unknown"  # another container's, or gone
            with suppress(nvml.NVMLError):
                name = os.path.basename(nvml.nvmlSystemGetProcessName(pid).split(" ")[0])
            holders.append(Holder(pid, name, None if used is None else used / GIB))
        return sorted(holders, key=lambda holder: -(holder.memory_gib or 0.0))

    return _ask(find)[0] or []


def describe_machine() -> str:
    """The GPU with its memory, or the CPU with cores and RAM; never a host's name."""
    import psutil

    found = find_gpus()
    if found.gpu is not None:
        several = f"{found.count} x " if found.count > 1 else ""
        return f"{several}{found.gpu.name}, {found.gpu.memory_gib:.0f} GiB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = None
    with suppress(OSError):  # as Linux reports it
        name = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8", "replace"), re.MULTILINE)
    cpu = re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b|@.*", "", name[1]).strip() if name else ""
    return f"{cpu and cpu + ', '}{cores} CPU cores, {psutil.virtual_memory().total / GIB:.0f} GiB"


def _ask(question: Callable[[Any], Any]) -> tuple[Any, str]:
    """The answer of `question(nvml)`, or None and the reason."""
    try:
        import pynvml as nvml
    except ImportError:
        return None, "NVML's Python bindings (nvidia-ml-py) are not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"no NVIDIA driver: {error}"
    try:
        return question(nvml), ""
    except nvml.NVMLError as error:
        return None, f"the NVIDIA driver does not answer: {error}"
    finally:
        nvml.nvmlShutdown()


def _visible(nvml: Any) -> tuple[Any | None, int]:
    """The device of this process (the visible one at index LOCAL_RANK, else the first) and how many are visible, by
    CUDA_VISIBLE_DEVICES as CUDA reads it: up to the first entry that names none."""
    everything = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    value, handles = os.environ.get("CUDA_VISIBLE_DEVICES"), []
    for entry in map(str.strip, value.split(",")) if value is not None else ():
        named = [everything[int(entry)]] if entry.isdigit() and int(entry) < len(everything) else []
        if entry.startswith("GPU-"):  # a UUID, or the start of one
            named = [handle for handle in everything if nvml.nvmlDeviceGetUUID(handle).startswith(entry)]
        elif entry.startswith("MIG-"):
            with suppress(nvml.NVMLError):
                named = [nvml.nvmlDeviceGetHandleByUUID(entry)]
        if not named:
            break
        handles.append(named[0])
    handles = everything if value is None else handles
    rank = os.environ.get("LOCAL_RANK", "")
    own = int(rank) if rank.isdigit() and int(rank) < len(handles) else 0
    return (handles[own] if handles else None), len(handles)
