"""One process of the first hour: it loads one backend, then runs the checks that it reads from its input, one a line.

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
from on_gpu.checks import Check, append, list_checks

DRIVER_LOST = 4  # exit code


class OverBudget(BaseException):
    """A check took longer than its budget; no `except Exception` catches it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--process", required=True, help="its name")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--imports", action="store_true", help="load the backend's libraries first")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    bench = benches.Bench(options.backend, options.scratch, options.lines, options.rehearse)
    started = time.monotonic()
    if options.imports:
        try:
            benches.start(options.backend, options.rehearse)
        except BaseException as error:
            append(options.lines, "note", text=f"{options.process} cannot start: {describe(error)}")
            raise
    append(options.lines, "ready", process=options.process, seconds=round(time.monotonic() - started, 1))
    for line in sys.stdin:
        name, budget_s = json.loads(line)
        if carry_out(bench, list_checks()[name], budget_s):
            return DRIVER_LOST
    return 0


def carry_out(bench: benches.Bench, check: Check, budget_s: float) -> bool:
    """Run one check and report its end. Returns whether the driver is lost."""
    append(bench.lines, "begin", check=check.name, budget_s=budget_s)
    print(f"== {check.name}", flush=True)
    started = time.monotonic()
    state, reason, is_lost = run_one(bench, check, budget_s)
    if check.imports and state not in ("passed", "skipped"):
        bench.release()  # an interrupted check may have left the model in between
    seconds = round(time.monotonic() - started, 1)
    append(bench.lines, "end", check=check.name, state=state, reason=reason, seconds=seconds)
    return is_lost


def run_one(bench: benches.Bench, check: Check, budget_s: float) -> tuple[str, str, bool]:
    """State, reason, and whether the driver is lost."""
    from rloo_kit.system.memory import is_out_of_memory

    if bench.rehearsed and check.not_rehearsed:
        return "skipped", check.not_rehearsed, False
    bench.check, bench.ends = check, time.monotonic() + budget_s
    try:
        with interrupted_after(budget_s):
            check.run(bench)
    except (benches.Skipped, memory.TooSmall) as reason:
        return "skipped", str(reason), False
    except OverBudget:
        return "over budget", f"longer than {budget_s:.0f} s", False
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
