"""A GPU's memory as torch counts it, and a cap that makes a large GPU act like a small one.

A GPU of 12 GB has 12e9 bytes, and CUDA's context is not torch's: the cap is the rest. A cap cannot show the bandwidth,
the shared memory and the speed of a small GPU.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GIB = 2**30
GB = 1e9  # as in the GPU's specification


def held_gib(cuda: Any) -> float:
    """Memory of tensors."""
    return cuda.memory_allocated() / GIB


def context_gib(cuda: Any) -> float:
    """Memory of the GPU in use outside torch's allocator: the context, and that of other programs."""
    free, total = cuda.mem_get_info()
    return (total - free - cuda.memory_reserved()) / GIB


def settle(cuda: Any) -> None:
    """Free garbage and the allocator's cache."""
    gc.collect()
    if cuda.is_available():
        cuda.synchronize()
        cuda.empty_cache()


class TooSmall(ValueError):
    """This GPU is no larger than the simulated one."""


@contextmanager
def capped(cuda: Any, gpu_gb: float) -> Iterator[float]:
    """Simulate a GPU of `gpu_gb` (1e9 bytes each) inside the block; yields torch's share in GiB, without the context.
    Without a GPU nothing is capped.

    Raises:
        TooSmall: the GPU is no larger than that.
    """
    if not cuda.is_available():
        yield gpu_gb * GB / GIB
        return
    settle(cuda)
    limit, total = gpu_gb * GB / GIB - context_gib(cuda), cuda.mem_get_info()[1] / GIB
    if not 0 < limit < total:
        raise TooSmall(f"a GPU of {gpu_gb:g} GB cannot be simulated on one of {total:.1f} GiB")
    cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield limit
    finally:
        cuda.set_per_process_memory_fraction(1.0)
