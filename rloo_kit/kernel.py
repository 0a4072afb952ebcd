"""Giving memory back in a living process, a notebook's kernel above all.

Ending a kernel is not here yet. Nothing here imports torch: where nobody has, there is nothing on a card to free.
"""

import gc
import sys
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Released:
    """What this process held of the card's memory before and after, in GiB, caches of the allocator included."""

    before_gib: float
    after_gib: float


def release_memory(verbose: bool = True) -> Released | None:
    """Collect garbage and, where torch has used a CUDA card, empty its cache. Delete the names of your models first.

    Args:
        verbose: print one line with the GiB held before and after.
    Returns:
        The figures, or None where no CUDA memory was in use.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # asking further would open a CUDA context, and hold memory
        gc.collect()
        return None
    before = torch.cuda.memory_reserved() / GIB
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()
    released = Released(before, torch.cuda.memory_reserved() / GIB)
    if verbose:
        print(f"GPU memory held by this process: {released.before_gib:.2f} GiB before, {released.after_gib:.2f} after")
    return released
