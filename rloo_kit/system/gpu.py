"""What the NVIDIA driver says about the GPUs, read through NVML: no torch, no CUDA context, a few milliseconds.

Left out on purpose: AMD, Intel and Apple devices (the kit runs on them as on a CPU), and the size of a MIG slice that
CUDA picks by itself (name the slice in CUDA_VISIBLE_DEVICES and its own memory is read).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
class Holder:
    """A process that holds memory of a GPU. Its name is the program alone: command lines can hold secrets."""

    pid: int
    name: str
    memory_gib: float | None


@dataclass(frozen=True)
class Gpus:
    """The GPU of this process (None: `reason` says why), and how many GPUs it may see."""

    gpu: Gpu | None
    count: int
    reason: str


class _NoNvml(Exception):
    """NVML's bindings or the driver's library are not there."""


@contextmanager
def _driver() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        raise _NoNvml("NVML's Python bindings (nvidia-ml-py) are not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _NoNvml(f"no NVIDIA driver: {error}") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, entry: str) -> Any | None:
    """The device that one entry of CUDA_VISIBLE_DEVICES (an index, a UUID or the start of one) names, or None."""
    count = nvml.nvmlDeviceGetCount()
    if entry.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry)) if int(entry) < count else None
    if entry.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError:
            return None
    if entry.startswith("GPU-"):
        for index in range(count):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(handle).startswith(entry):
                return handle
    return None


def _visible_handles(nvml: Any) -> list[Any]:
    """Devices in CUDA's order. Like CUDA, stop at the first entry of CUDA_VISIBLE_DEVICES that names nothing."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for entry in value.split(","):
        handle = _handle(nvml, entry.strip())
        if handle is None:
            break
        handles.append(handle)
    return handles


def _own(handles: list[Any]) -> Any:
    """The device of this process: LOCAL_RANK counts among the visible ones, as the launchers do; else the first."""
    rank = os.environ.get("LOCAL_RANK", "")
    return handles[int(rank)] if rank.isdigit() and int(rank) < len(handles) else handles[0]


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    with suppress(nvml.NVMLError):  # a MIG slice has memory of its own; its other properties are its GPU's
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=nvml.nvmlDeviceGetIndex(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_gib=memory.total / GIB,
        free_gib=memory.free / GIB,
        capability=(major, minor),
        driver=nvml.nvmlSystemGetDriverVersion(),
    )


def find_gpus() -> Gpus:
    """The GPU of this process as CUDA would see it (CUDA_VISIBLE_DEVICES, LOCAL_RANK), with its memory right now."""
    try:
        with _driver() as nvml:
            try:
                handles = _visible_handles(nvml)
                if handles:
                    return Gpus(_read_gpu(nvml, _own(handles)), len(handles), "")
                count = nvml.nvmlDeviceGetCount()
                if count == 0:
                    return Gpus(None, 0, "the NVIDIA driver lists no GPU")
                value = os.environ["CUDA_VISIBLE_DEVICES"]
                return Gpus(None, 0, f"CUDA_VISIBLE_DEVICES={value!r} hides the {count} NVIDIA GPU(s)")
            except nvml.NVMLError as error:
                return Gpus(None, 0, f"the NVIDIA driver does not answer: {error}")
    except _NoNvml as reason:
        return Gpus(None, 0, str(reason))


def find_holders(gpu: Gpu) -> list[Holder]:
    """The processes that hold memory of `gpu`, the largest first; empty where the driver does not tell."""
    try:
        with _driver() as nvml:
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
                processes = {
                    process.pid: process
                    for query in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses)
                    for process in query(handle)
                }
                holders = [_read_holder(nvml, process) for process in processes.values()]
            except nvml.NVMLError:
                return []
    except _NoNvml:
        return []
    return sorted(holders, key=lambda holder: -(holder.memory_gib or 0.0))


def _read_holder(nvml: Any, process: Any) -> Holder:
    try:
        name = os.path.basename(nvml.nvmlSystemGetProcessName(process.pid).split(" ")[0])
    except nvml.NVMLError:
        name = "unknown"  # another container's, or gone
    used = process.usedGpuMemory
    return Holder(process.pid, name, None if used is None else used / GIB)
