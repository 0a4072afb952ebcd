"""What the processes of a run tell one another: start together, wait, share an object, gather lists, agree.

Each function is called by all processes at the same place, or the run hangs; with one process each does nothing and
says so by its return value. They work on Python objects (pickled), which is fine for verdicts and file names; tensors
of the loop go through accelerate in the trainer. Left out: sub-groups, and mending a run that lost a process: its
launcher ends the others.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rloo_kit._stack import load_stack
from rloo_kit.errors import SetupError
from rloo_kit.system.processes import count_processes, is_distributed, is_main_process, local_index, process_index

PATIENCE = timedelta(hours=3)  # of a process that waits for another's long rollout; one that died ends all at once


def start_processes(on_cpu: bool = False) -> None:
    """Join the processes of the run and take this one's device, before a model is loaded; harmless a second time.

    accelerate does it (`PartialState`): NCCL and the GPU of LOCAL_RANK, or gloo on the CPU. Its launch file decides
    that as well (ACCELERATE_USE_CPU).

    Args:
        on_cpu: use gloo and the CPU also where there are GPUs.

    Raises:
        SetupError: there are more processes on this machine than GPUs.
    """
    if not is_distributed():
        return
    torch = load_stack().torch
    gpus = torch.cuda.device_count()
    if gpus and local_index() >= gpus and not on_cpu:
        raise SetupError(
            f"process {local_index()} of this machine has no GPU of its own: {gpus} can be used, one a process; "
            "start fewer processes (num_processes of the launch file, --nproc_per_node of torchrun)"
        )
    on_cpu = on_cpu or not gpus
    if on_cpu:  # accelerate would say cpu:0, and torch.load knows no such place: no run could be resumed
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    from accelerate import PartialState

    PartialState(cpu=on_cpu, timeout=PATIENCE)


def wait_for_all() -> None:
    """Return when every process has come here."""
    if _has_group():
        load_stack()
        from accelerate import PartialState

        PartialState().wait_for_everyone()


@contextmanager
def main_first() -> Iterator[None]:
    """The main process goes through the block before the others: it fills a cache that they then read.

    Where it fails, the others go in as well and meet the same obstacle.
    """
    if not is_main_process():
        wait_for_all()
    try:
        yield
    finally:
        if is_main_process():
            wait_for_all()


def share(value: Any) -> Any:
    """The main process's `value`, in every process; what the others pass is dropped.

    Args:
        value: anything that pickles.
    """
    if not _has_group():
        return value
    distributed = load_stack().torch.distributed
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """One `value` of each process, in the order of their ranks, in every process.

    Args:
        value: anything that pickles.
    """
    if not _has_group():
        return [value]
    distributed = load_stack().torch.distributed
    found = [None] * count_processes()
    distributed.all_gather_object(found, value)
    return found


def gather_lists(values: list[Any]) -> list[Any]:
    """The lists of all processes as one, in the order of their ranks, in every process.

    Args:
        values: this process's; they may differ in length.
    """
    return [value for part in gather_objects(values) for value in part]


def any_of(flag: bool) -> bool:
    """Whether `flag` is set in any process; the answer is the same in all of them."""
    return any(gather_objects(bool(flag)))


def share_of(values: Sequence[Any]) -> range:
    """Places of `values` that fall to this process: a run of neighbours, as even as it goes, and all of them together.

    Args:
        values: the same in every process.
    """
    count, index = count_processes(), process_index()
    return range(len(values) * index // count, len(values) * (index + 1) // count)


def end_processes() -> None:
    """Leave the group when all is done: NCCL complains of a process that ends inside one. Waits for all."""
    if not is_distributed():
        return
    distributed = load_stack().torch.distributed
    if distributed.is_initialized():
        wait_for_all()
        distributed.destroy_process_group()


def _has_group() -> bool:
    """Whether there are other processes to talk to; starts the group where nobody has yet."""
    if not is_distributed():
        return False
    distributed = load_stack().torch.distributed
    if not distributed.is_initialized():
        start_processes()
    return bool(distributed.is_initialized())
