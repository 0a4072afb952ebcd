"""The kit's step vs. stock TRL's, in one process, alternating step by step; figures go to `results/rloo_step.json`.

    python benchmarks/rloo_step.py                        # 15 to 20 minutes on a free core
    python benchmarks/rloo_step.py --only training --repeats 5
    python benchmarks/tables.py                           # the figures into README and docs

Both sides get the same model, adapter, prompts, completions and rewards, and are driven through `trainer.train()` one
optimizer step at a time. The first step of each is discarded; then they take turns, and each pair of steps gives a
ratio. The median is reported with the smallest and the largest. Everything runs on one thread and the seconds are
processor time, which other load on the machine does not change (wall clock is recorded too).

- training: a step with canned completions and a trivial reward, less the time of both. The kit's gradient is compared
  with stock's from the same first steps, in float32, as the relative error over all LoRA parameters.
- whole: real rollouts, with the same completion lengths imposed on both sides; generation is the trainer's own
  `_generate_single_turn` within them.
- memory: a fresh process for each side; the peak of the resident memory during a step (Linux's VmHWM) above the level
  before it, after a short first step. malloc returns freed blocks at once there.

Stock TRL's head is a Triton kernel; here it gets the stand-in of `trl_head.py`. Exit code 1 if a row misses its "at
least". Left out: several processes, and a GPU (`first_hour.py`).
"""

import argparse
import gc
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import reporting
from step_workload import BACKBONE, LORA, Workload, completion_lengths, prompt_rows

RESULT = reporting.RESULTS / "rloo_step.json"
PARTS = ("training", "whole", "memory")
KIT_SIDES = ["fast", "balanced", "low"]
K4, K8 = Workload(num_generations=4), Workload(num_generations=8)


TRAINING_LIMITS = {  # of the ratio, at least
    K4: 4.5, K8: 4.5, replace(K8, checkpointing=True): 4.5, replace(K4, vocabulary=151936): 2.0,
    replace(K4, beta=0.0, tied=True): 10,
}  # fmt: skip
WHOLE_LIMIT = 4.0  # of generation, too
MEMORY_LIMITS = {"fast": 0.42, "low": 0.25}  # of stock's, at most
GRADIENT_LIMIT = 1e-5


def judge(value: float, limit: float | None, lower: bool = False) -> dict[str, Any]:
    """The limit and whether the value meets it, for a row of the results. `lower`: smaller is better."""
    holds = None if limit is None else value <= limit if lower else value >= limit
    return {"at_most" if lower else "at_least": limit, "holds": holds}


# ------------------------------------------------------------------------------------------------------- timing


def take_turns(sides: list[Any], repeats: int, canned: bool) -> dict[str, list[Any]]:
    """`repeats` steps of each side in turn, in changing order, after a discarded one."""
    times: dict[str, list[Any]] = {side.name: [] for side in sides}
    for turn in range(repeats + 1):
        for side in sides if turn % 2 else reversed(sides):
            step = side.step(canned=canned)
            if turn:
                times[side.name].append(step)
    return times


def row_of(what: str, workload: Workload, side: str) -> dict[str, Any]:
    return {"what": what, "workload": workload.label, "settings": asdict(workload), "side": side}


def compare(what: str, workload: Workload, side: str, times: dict[str, list[Any]], part: str) -> dict[str, Any]:
    """A row: how many times faster the kit's side is in a part ("training", "generation", "whole") of the steps."""
    row = row_of(what, workload, side)
    for name, steps in (("stock", times["stock"]), ("ours", times[side])):
        row[f"{name}_cpu_s"] = [round(getattr(step, f"{part}_cpu_s"), 4) for step in steps]
        row[f"{name}_wall_s"] = [round(getattr(step, f"{part}_s"), 4) for step in steps]
    ratios = [theirs / mine for theirs, mine in zip(row["stock_cpu_s"], row["ours_cpu_s"], strict=True)]
    return row | {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}


def measure_training(workload: Workload, repeats: int) -> Iterator[dict[str, Any]]:
    """Rows for the training part, and for the gradients; of every memory setting with the first workload."""
    from step_sides import build_side, gradient_error

    built = [build_side(name, workload) for name in ("stock", *(KIT_SIDES if workload == K4 else ["fast"]))]
    times = take_turns(built, repeats, canned=True)
    for side in built[1:]:
        row = compare("training part", workload, side.name, times, "training")
        yield row | judge(row["ratio"], TRAINING_LIMITS[workload] if side.name == "fast" else None)
        error = gradient_error(side, built[0])
        yield row_of("gradient", workload, side.name) | {"relative_error": error} | judge(error, GRADIENT_LIMIT, True)


def measure_whole(repeats: int) -> Iterator[dict[str, Any]]:
    """Rows for generation and for the whole step, from the same steps."""
    from step_sides import build_side

    built = [build_side(name, K4) for name in ("stock", "fast")]
    times = take_turns(built, repeats, canned=False)
    for side in built:
        if side.completion_lengths != completion_lengths(K4):
            raise AssertionError(f"{side.name} generated other lengths than imposed: {side.completion_lengths}")
    for what, part in (("generation", "generation"), ("whole step", "whole")):
        row = compare(what, K4, "fast", times, part)
        yield row | judge(row["ratio"], WHOLE_LIMIT) | {"engine": built[1].engine.name}


# ------------------------------------------------------------------------------------------------------- memory


def measure_memory(repeats: int) -> Iterator[dict[str, Any]]:
    """Rows for the peak memory of the training part, each side in fresh processes."""
    peaks = {name: [peak_in_fresh_process(name) for _ in range(repeats)] for name in ("stock", *KIT_SIDES)}
    for name in KIT_SIDES:
        share = statistics.median(peaks[name]) / statistics.median(peaks["stock"])
        row = row_of("peak memory", K4, name) | {"stock_mib": peaks["stock"], "ours_mib": peaks[name]}
        yield row | {"share": share} | judge(share, MEMORY_LIMITS.get(name), True)


def peak_in_fresh_process(name: str) -> float:
    """MiB above the level before the step."""
    limits = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, __file__, "--peak-of", name]
    done = subprocess.run(
        command, env=os.environ | limits, cwd=reporting.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the memory of {name} could not be measured:\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def peak_of(name: str) -> float:
    """The peak in MiB, in the process that `peak_in_fresh_process` starts."""
    from step_sides import build_side

    side = build_side(name, K4)
    full = side.canned_completions
    side.canned_completions = [ids[:7] + ids[-1:] for ids in full]  # creates the optimizer's state, does late imports
    side.step()
    side.canned_completions = full
    gc.collect()
    before = _memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again here
    side.step()
    return round(_memory_mib("VmHWM") - before, 1)


def _memory_mib(field: str) -> float:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.M)
    return int(found.group(1)) / 1024 if found else float("nan")


# ---------------------------------------------------------------------------------------------------- the command


def measure(parts: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of the selected parts, one by one."""
    if "training" in parts:
        for workload in TRAINING_LIMITS:
            yield from measure_training(workload, repeats if workload.vocabulary == 2048 else min(repeats, 2))
            gc.collect()
    if "whole" in parts:
        yield from measure_whole(repeats)
    if "memory" in parts:
        yield from measure_memory(min(repeats, 2))


def step_line(row: dict[str, Any]) -> str:
    """One row as text."""
    text = f"{row['what']}, {row['side']} ({row['workload']}): {reporting.step_value(row)}"
    if row["holds"] is None:
        return text
    name = "at_least" if "at_least" in row else "at_most"
    return f"{text}; {name.replace('_', ' ')} {row[name]:g}: {'held' if row['holds'] else 'MISSED'}"


def main() -> int:
    """Measure and write; the exit code says whether every "at least" holds."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each side after the discarded one")
    parser.add_argument("--results", type=Path, default=RESULT)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch
    import trl_head

    from rloo_kit._stack import load_stack

    load_stack()
    torch.set_num_threads(1)
    with trl_head.installed():
        if options.peak_of:
            print(peak_of(options.peak_of))
            return 0
        started = time.monotonic()
        workload = {"backbone": BACKBONE, "lora": LORA, "completion_lengths": completion_lengths(K4)}
        workload |= {"prompt_tokens": [len(row["prompt"]) for row in prompt_rows(K4)], "precision": "float32"}
        described = {"workload": workload, "stand_in": trl_head.tile_sizes(), "threads": 1}
        header = reporting.header("benchmarks/rloo_step.py")
        rows: list[dict[str, Any]] = []
        for row in measure(options.only, options.repeats):
            print(step_line(row), flush=True)
            rows.append(row | {"revision": header["revision"][:7]})
            common = {"seconds": round(time.monotonic() - started), **described}
            reporting.write(header | common | {"rows": rows}, options.results, quiet=True)
    print(f"figures: {options.results}")
    missed = [row for row in rows if row["holds"] is False]
    for row in missed:
        print(f"MISSED: {step_line(row)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
