"""A program for test_benchmarks.py, in the place of `benchmarks/on_gpu/worker.py`: checks are small stand-ins."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from on_gpu import bench as benches
from on_gpu import checks, worker
from on_gpu.checks import BACKENDS, Check

UNUSABLE = "RLOO_KIT_TEST_UNSLOTH"  # set: its start raises


class OutOfMemoryError(RuntimeError):
    """As torch's, which is known by its name."""


def passes(bench: Any) -> None:
    bench.report(a=1, d={"x": 1})
    bench.report(d={"y": 2})


def does_not_apply(bench: Any) -> None:
    raise benches.Skipped("nothing to read")


def fails(bench: Any) -> None:
    bench.report(a=1)
    raise ValueError("no such kernel")


def runs_out(bench: Any) -> None:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def depends(bench: Any) -> None:
    raise AssertionError("what it needs has failed")


def follows(bench: Any) -> None:
    bench.report(a=1)


def overruns(bench: Any) -> None:
    time.sleep(60)


def hangs(bench: Any) -> None:
    """As a kernel that never returns: no signal's handler runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    bench.report(pid=subprocess.Popen(["sleep", "99"]).pid)
    time.sleep(60)


def dies(bench: Any) -> None:
    bench.report(a=1)
    os._exit(5)


def loses_the_driver(bench: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def is_long(bench: Any) -> None:
    raise AssertionError("it was begun")


def meets_another(bench: Any) -> None:
    """Two lanes wait for each other."""
    mine, other = (bench.scratch / f"met-{name}" for name in sorted(BACKENDS, key=lambda name: name != bench.backend))
    mine.touch()
    while not other.exists():
        time.sleep(0.05)
    bench.report(a=1)


def sees_variables(bench: Any) -> None:
    bench.report(found={name: os.environ.get(name) for name in ("ON", "TORCH_CUDNN_SDPA_DEPRIORITIZED")})


BUDGETS: dict[Callable[[Any], None], int] = {
    passes: 9, does_not_apply: 9, fails: 9, runs_out: 9, depends: 9, follows: 9, dies: 9, loses_the_driver: 9,
    meets_another: 9, sees_variables: 9, overruns: 1, hangs: 1, is_long: 9999,
}  # fmt: skip
NEEDS = {depends: "fails", follows: "passes"}
VARIABLES = (("ON", "1"), ("TORCH_CUDNN_SDPA_DEPRIORITIZED", None))
CHECKS = {
    f"{backend}/{run.__name__}": Check(
        f"{backend}/{run.__name__}", 1, budget, run, needs=f"{backend}/{NEEDS[run]}" if run in NEEDS else "",
        lane=f"meets {backend}" if run is meets_another else "", environment=VARIABLES if run is sees_variables else (),
    )
    for backend in BACKENDS for run, budget in BUDGETS.items()
}  # fmt: skip


def start(backend: str, *_: Any) -> None:
    """As `on_gpu.bench.start`."""
    if backend == "unsloth" and os.environ.get(UNUSABLE):
        raise ImportError("no module named triton")


if __name__ == "__main__":
    benches.start = start
    benches.Bench.release = lambda *_: None  # without torch
    worker.list_checks = checks.list_checks = lambda: CHECKS
    sys.exit(worker.main())
