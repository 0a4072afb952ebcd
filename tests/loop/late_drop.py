"""Pairs of processes that leave their group while a thread of gloo's may still hold a tensor, for `test_launch`.

    python late_drop.py        (the exit codes of each pair, until such a thread was seen in one of them)

Each process starts a call, drops its tensor and leaves. Whether Python or gloo drops the tensor last is chance; a
`__del__` of 0.2 s makes it late enough to meet the end of the interpreter. Pairs are forked: torch is imported once.
"""

import os
import socket
import sys
import threading
import time
from pathlib import Path

PAIRS = 20


def main() -> None:
    import torch
    from accelerate import PartialState  # noqa: F401  (imported once, for all pairs)

    from rloo_kit import collective

    read, write = os.pipe()
    os.set_blocking(read, False)
    for _ in range(PAIRS):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(2):
            child = os.fork()
            if not child:
                os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE="2")
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
                return leave(torch, collective, write)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(*codes, flush=True)  # or a forked process would print it again
        try:
            os.read(read, 1)
        except BlockingIOError:
            continue
        return print("seen")


def leave(torch, collective, write) -> None:
    """A process of a pair; it ends as every interpreter ends."""

    class Held:
        def __del__(self) -> None:
            if threading.current_thread() is not threading.main_thread():
                os.write(write, b"!")
                time.sleep(0.2)

    def reduce() -> None:
        tensor = torch.ones(1)
        tensor.held = Held()
        torch.distributed.all_reduce(tensor, async_op=True)

    collective.start_processes()
    torch.kept = torch.distributed.group.WORLD  # as DDP's reducer and a device mesh do
    collective.wait_for_all()
    if os.environ["RANK"] == "1":
        time.sleep(0.1)  # the other process has a call under way when it leaves
    reduce()
    collective.end_processes()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
