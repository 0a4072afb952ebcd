"""NVIDIA GPUs as the driver reports them through NVML: no torch, no CUDA context, a few milliseconds.

For a MIG slice that CUDA_VISIBLE_DEVICES names, the slice's own memory is read.
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
    """A process that uses memory of a GPU. Its name is the program alone: command lines can contain secrets."""

    pid: int
    name: str
    memory_gib: float | None


@dataclass(frozen=True)
class Gpus:
    """The GPU of this process (None: `reason` says why), and how many GPUs it may see."""

    gpu: Gpu | None
    count: int
    reason: str


class _NoDriver(Exception):
    """NVML's bindings or the driver's library are missing, or the driver does not answer."""


@contextmanager
def _driver() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        raise _NoDriver("NVML's Python bindings (nvidia-ml-py) are not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _NoDriver(f"no NVIDIA driver: {error}") from None
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _NoDriver(f"the NVIDIA driver does not answer: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, entry: str) -> Any | None:
    """The device that one entry of CUDA_VISIBLE_DEVICES (an index, a UUID or the start of one) names, or None."""
    count = nvml.nvmlDeviceGetCount()
    if entry.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry)) if int(entry) < count else None
    if entry.startswith("MIG-"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(entry)
    if entry.startswith("GPU-"):
        for index in range(count):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(handle).startswith(entry):
                return handle
    return None


def _visible_handles(nvml: Any) -> list[Any]:
    """Devices in CUDA's order, up to the first entry of CUDA_VISIBLE_DEVICES that names none, as CUDA reads it."""
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
    """The device of this process: the visible one at index LOCAL_RANK, else the first."""
    rank = os.environ.get("LOCAL_RANK", "")
    return handles[int(rank)] if rank.isdigit() and int(rank) < len(handles) else handles[0]


def find_gpus() -> Gpus:
    """The GPU of this process as CUDA would see it (CUDA_VISIBLE_DEVICES, LOCAL_RANK), with its memory right now."""
    try:
        with _driver() as nvml:
            if handles := _visible_handles(nvml):
                handle = _own(handles)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                with suppress(nvml.NVMLError):  # a MIG slice has its own memory; its other properties are its GPU's
                    handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
                major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
                gpu = Gpu(
                    index=nvml.nvmlDeviceGetIndex(handle),
                    name=nvml.nvmlDeviceGetName(handle),
                    memory_gib=memory.total / GIB,
                    free_gib=memory.free / GIB,
                    capability=(major, minor),
                    driver=nvml.nvmlSystemGetDriverVersion(),
                )
                return Gpus(gpu, len(handles), "")
            if count := nvml.nvmlDeviceGetCount():
                value = os.environ["CUDA_VISIBLE_DEVICES"]
                return Gpus(None, 0, f"CUDA_VISIBLE_DEVICES={value!r} hides the {count} NVIDIA GPU(s)")
            return Gpus(None, 0, "the NVIDIA driver lists no GPU")
    except _NoDriver as reason:
        return Gpus(None, 0, str(reason))


def find_holders(gpu: Gpu) -> list[Holder]:
    """The processes that use memory of `gpu`, the largest first; empty if the driver does not answer."""
    try:
        with _driver() as nvml:
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
            found = {one.pid: one.usedGpuMemory for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            found |= {one.pid: one.usedGpuMemory for one in nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)}
            holders = []
            for pid, used in found.items():
                name = "unknown"  # another container's, or gone
                with suppress(nvml.NVMLError):
                    name = os.path.basename(nvml.nvmlSystemGetProcessName(pid).split(" ")[0])
                holders.append(Holder(pid, name, None if used is None else used / GIB))
    except _NoDriver:
        return []
    return sorted(holders, key=lambda holder: -(holder.memory_gib or 0.0))


def read_energy() -> float | None:
    """Joules that this process's GPU has used since its driver was loaded, by all programs; None if NVML does not
    report it (GPUs before Volta, MIG slices, no GPU)."""
    try:
        with _driver() as nvml:
            handles = _visible_handles(nvml)
            return nvml.nvmlDeviceGetTotalEnergyConsumption(_own(handles)) / 1000 if handles else None
    except _NoDriver:
        return None
