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


def measure_rollout(policy: Any, run: Any, rows: int, tokens: int, decoded: int) -> Any:
    """The `MemoryPeak` of decoding the last `decoded` of `tokens` tokens of `rows` rows by the run's engine, after full
    caches, in the number format in which the trainer samples."""
    import torch

    from rloo_kit.loop.arguments import mixed_precision
    from rloo_kit.loop.memory import MemoryPeak
    from rloo_kit.preflight.steps import decode_ends, full_engine

    engine, precision = full_engine(policy, run, rows), mixed_precision(run)
    dtype = torch.bfloat16 if precision["bf16"] else torch.float16
    with MemoryPeak() as peak, torch.autocast(policy.model.device.type, dtype, enabled=any(precision.values())):
        decode_ends(engine, rows, tokens, decoded)
    return peak


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
