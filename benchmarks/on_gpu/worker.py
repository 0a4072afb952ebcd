"""One process of the first hour: it loads one backend, waits for its list of checks, and runs them one after another.

Started by `first_hour.py`. A check that overruns its budget is interrupted; one that fails does not affect the others.
After an error of the CUDA driver itself the process ends, because no later call would succeed.
"""

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import reporting

from on_gpu import bench as benches
from on_gpu import memory
from on_gpu.checks import Check, append, read_part
from on_gpu.listing import list_checks

DRIVER_LOST = 4  # exit code
REHEARSAL_FACTOR = 4  # an interpreter on a shared machine is slow
ENOUGH = 0.3  # of a budget: with less time left, a check does not start


class OverBudget(BaseException):
    """A check took longer than its budget; no `except Exception` catches it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--ends", type=float, required=True, help="on the clock of time.time")
    parser.add_argument("--make", nargs="*", default=[], help="build these checkpoints and exit")
    parser.add_argument("--grpo", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    bench = benches.Bench(options.backend, options.scratch, options.lines, options.rehearse)
    started = time.monotonic()
    try:
        benches.start(options.backend, options.rehearse, options.grpo)
        for size in options.make:
            benches.make_checkpoint(bench, size)
    except BaseException as error:
        append(options.lines, "note", text=f"{options.backend} cannot start: {describe(error)}")
        raise
    if options.make:
        return 0
    append(options.lines, "ready", backend=options.backend, seconds=round(time.monotonic() - started, 1))
    names = json.loads(sys.stdin.readline() or "[]")
    return run_checks(bench, [list_checks()[name] for name in names], options.ends)


def run_checks(bench: benches.Bench, chosen: list[Check], ends: float) -> int:
    """Run the checks in order; the exit code is DRIVER_LOST if the rest needs another process."""
    part = read_part(bench.lines)  # an earlier, replaced worker may have passed some
    before = part.checks.items() if part else ()
    passed = {name.partition("/")[2] for name, found in before
              if found.state == "passed" and name.startswith(bench.backend)}  # fmt: skip
    for check in chosen:
        left, budget = ends - time.time(), check.budget_s * (REHEARSAL_FACTOR if bench.rehearsed else 1)
        reason = ""
        if check.needs and check.needs not in passed:
            reason = f"{check.needs} has not passed"
        elif left < ENOUGH * check.budget_s:
            reason = "no time left"
        if reason:
            append(bench.lines, "end", check=check.name, state="not run", reason=reason, seconds=0.0)
            continue
        append(bench.lines, "begin", check=check.name, budget_s=budget)
        print(f"== {check.name}", flush=True)
        started = time.monotonic()
        state, reason, is_lost = run_one(bench, check, min(budget, left))
        seconds = round(time.monotonic() - started, 1)
        append(bench.lines, "end", check=check.name, state=state, reason=reason, seconds=seconds)
        if state == "passed":
            passed.add(check.run.__name__)
        elif state != "skipped":
            bench.release()  # an interrupted check may have left the model in between
        if is_lost:
            return DRIVER_LOST
    return 0


def run_one(bench: benches.Bench, check: Check, budget: float) -> tuple[str, str, bool]:
    """State, reason, and whether the driver is lost."""
    from rloo_kit.system.memory import is_out_of_memory

    if bench.rehearsed and check.not_rehearsed:
        return "skipped", check.not_rehearsed, False
    bench.check, bench.ends = check, time.monotonic() + budget
    try:
        with interrupted_after(budget):
            check.run(bench)
    except (benches.Skipped, memory.TooSmall) as reason:
        return "skipped", str(reason), False
    except OverBudget:
        return "over budget", f"longer than {budget:.0f} s", False
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        is_lost = "CUDA error" in str(error) or "CUDA driver error" in str(error)
        is_full = is_out_of_memory(error) or isinstance(error, MemoryError)
        return ("out of memory" if is_full else "failed"), describe(error), is_lost
    finally:
        bench.check = None
    return "passed", "", False


def describe(error: BaseException) -> str:
    """An error and where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}{place}"


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise OverBudget in the block after `seconds`; a call into C++ ends first."""

    def stop(*_: Any) -> None:
        raise OverBudget

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    reporting.settle()
    sys.exit(main())
