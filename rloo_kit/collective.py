"""Communication between the processes of a run: start together, wait, share an object, gather lists, agree.

All processes must call each function at the same point, or the run hangs; with one process they return at once.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rloo_kit._stack import load_stack
from rloo_kit.errors import RlooKitError, SetupError
from rloo_kit.system.processes import count_processes, is_distributed, is_main_process, local_index, process_index

TIMEOUT = timedelta(hours=3)  # for processes that wait for another's long rollout; one that dies ends all at once
# For gloo's threads to drop their tensors: one that does so while the interpreter exits aborts the process, see
# https://github.com/pytorch/pytorch/issues/190489.
RELEASE_S = 0.5


def start_processes() -> None:
    """Join the processes of the run and take this one's device, before a model is loaded; harmless a second time. NCCL
    and the GPU of LOCAL_RANK; gloo and the CPU without a GPU or with ACCELERATE_USE_CPU. Raises SetupError if there are
    more processes on this machine than GPUs."""
    if not is_distributed():
        return
    torch = load_stack().torch
    gpus = torch.cuda.device_count()
    if gpus and local_index() >= gpus:
        raise SetupError(
            f"process {local_index()} of this machine has no GPU left: {gpus} available, one per process; "
            "start fewer processes (num_processes of the launch file, --nproc_per_node of torchrun)"
        )
    if not gpus:  # accelerate would name the device cpu:0, which torch.load refuses, so no run could resume
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    from accelerate import PartialState

    PartialState(cpu=not gpus, timeout=TIMEOUT)


def wait_for_all() -> None:
    """Return once every process has called this."""
    if _has_group():
        from accelerate import PartialState

        PartialState().wait_for_everyone()


@contextmanager
def main_first() -> Iterator[None]:
    """The main process runs the block before the others, to fill a cache that they read; they run even if it fails."""
    if not is_main_process():
        wait_for_all()
    try:
        yield
    finally:
        if is_main_process():
            wait_for_all()


def share(value: Any) -> Any:
    """The main process's `value`, in every process, pickled; the others' values are ignored."""
    if not _has_group():
        return value
    box = [value]
    load_stack().torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def share_from_main(work: Callable[[], Any]) -> Any:
    """The result of `work` in the main process, in every process; an error ends all of them, the others with one of the
    kit's."""
    result, error, refusal = None, None, None
    if is_main_process():
        try:
            result = work()
        except Exception as problem:
            error = problem
            refusal = problem if isinstance(problem, RlooKitError) else RlooKitError(f"the main process: {problem!r}")
    result, refusal = share((result, refusal))
    if refusal is not None:
        raise error or refusal
    return result


def gather_objects(value: Any) -> list[Any]:
    """The `value` of each process, pickled, in the order of their ranks, in every process."""
    if not _has_group():
        return [value]
    gathered = [None] * count_processes()
    load_stack().torch.distributed.all_gather_object(gathered, value)
    return gathered


def gather_lists(values: list[Any]) -> list[Any]:
    """The lists of all processes, of any lengths, concatenated in the order of their ranks, in every process."""
    return [value for part in gather_objects(values) for value in part]


def any_of(flag: bool) -> bool:
    """Whether `flag` is set in any process; the answer is the same in all of them."""
    return any(gather_objects(bool(flag)))


def share_of(values: Sequence[Any]) -> range:
    """The indices of `values`, which is the same in every process, that this one works on: contiguous, evenly split."""
    count, index = count_processes(), process_index()
    return range(len(values) * index // count, len(values) * (index + 1) // count)


def end_processes() -> None:
    """Wait for all and leave the group; the last call of a run's process. NCCL warns about one that exits inside it."""
    if is_distributed() and load_stack().torch.distributed.is_initialized():
        wait_for_all()
        distributed = load_stack().torch.distributed
        has_gloo = "gloo" in str(distributed.get_backend())
        distributed.destroy_process_group()
        if has_gloo:
            time.sleep(RELEASE_S)


def _has_group() -> bool:
    """Whether there are other processes; starts the group if need be."""
    if not is_distributed():
        return False
    if not load_stack().torch.distributed.is_initialized():
        start_processes()
    return bool(load_stack().torch.distributed.is_initialized())
