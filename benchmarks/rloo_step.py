"""The kit's step vs. stock TRL's, in one process, alternating step by step; figures go to `results/rloo_step.json`.

    python benchmarks/rloo_step.py                        # the rows that the project promises (15 to 20 minutes)
    python benchmarks/rloo_step.py --full                 # plus every other K, vocabulary, checkpointing and beta
    python benchmarks/rloo_step.py --only training --repeats 5
    python benchmarks/rloo_step.py --write-table          # only write the figures into docs/benchmarks.md

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
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import reporting
from step_workload import BACKBONE, LORA, Workload, completion_lengths, padding_share, prompt_rows

RESULT = reporting.RESULTS / "rloo_step.json"
PARTS = ("training", "whole", "memory")
KIT_SIDES = ("fast", "balanced", "low")
K4, K8 = Workload(num_generations=4), Workload(num_generations=8)
LARGE = replace(K4, vocabulary=151936)
TIED = replace(K4, beta=0.0, tied=True)


@dataclass(frozen=True)
class Bar:
    """The limit that a figure has to reach. `lower`: smaller is better."""

    at_least: float | None = None
    aim: float | None = None
    lower: bool = False

    def judge(self, value: float) -> dict[str, Any]:
        """The bar and whether the value meets it, for a row of the results."""

        def reached(limit: float | None) -> bool | None:
            return None if limit is None else value <= limit if self.lower else value >= limit

        name = "at_most" if self.lower else "at_least"
        return {name: self.at_least, "aim": self.aim, "holds": reached(self.at_least), "aim_reached": reached(self.aim)}


NO_BAR = Bar()
TRAINING_BARS = {load: Bar(4.5, 5.5) for load in (K4, K8, replace(K8, checkpointing=True))}
TRAINING_BARS |= {LARGE: Bar(2.0, 2.4), TIED: Bar(10, 15)}
GENERATION_BAR, WHOLE_BAR = Bar(4.0, 5.5), Bar(4.0, 5.5)
MEMORY_BARS = {"fast": Bar(0.42, 0.2, lower=True), "low": Bar(0.25, 0.2, lower=True)}
GRADIENT_BAR = Bar(1e-5, 1e-6, lower=True)


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


def compare(what: str, workload: Workload, side: str, ours: list[Any], stock: list[Any], part: str, bar: Bar) -> Any:
    """A row: how many times faster the kit's side is in a part ("training", "generation", "whole") of the steps."""

    def seconds(steps: list[Any], kind: str) -> list[float]:
        return [round(getattr(step, f"{part}_{kind}"), 4) for step in steps]

    row = {"what": what, "workload": workload.label, "settings": asdict(workload), "side": side}
    row |= {"stock_cpu_s": seconds(stock, "cpu_s"), "ours_cpu_s": seconds(ours, "cpu_s")}
    row |= {"stock_wall_s": seconds(stock, "s"), "ours_wall_s": seconds(ours, "s")}
    for kind in ("cpu", "wall"):
        pairs = zip(row[f"stock_{kind}_s"], row[f"ours_{kind}_s"], strict=True)
        ratios = [theirs / mine for theirs, mine in pairs]
        name = "ratio" if kind == "cpu" else "wall_ratio"
        row |= {name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
    return row | bar.judge(row["ratio"])


def measure_training(workload: Workload, sides: list[str], repeats: int, bar: Bar) -> Iterator[dict[str, Any]]:
    """Rows for the training part of the kit's sides, and for their gradients."""
    from step_sides import build_side, gradient_error

    built = [build_side(name, workload) for name in ("stock", *sides)]
    times = take_turns(built, repeats, canned=True)
    for side in built[1:]:
        side_bar = bar if side.name == "fast" else NO_BAR
        yield compare("training part", workload, side.name, times[side.name], times["stock"], "training", side_bar)
        error = gradient_error(side, built[0])
        row = {"what": "gradient", "workload": workload.label, "settings": asdict(workload), "side": side.name}
        yield row | {"relative_error": error} | GRADIENT_BAR.judge(error)


def measure_whole(workload: Workload, sides: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Rows for generation and for the whole step, from the same steps."""
    from step_sides import build_side

    built = [build_side(name, workload) for name in ("stock", *sides)]
    times = take_turns(built, repeats, canned=False)
    for side in built:
        if side.completion_lengths != completion_lengths(workload):
            raise AssertionError(f"{side.name} generated other lengths than imposed: {side.completion_lengths}")
    for side in built[1:]:
        bars = (GENERATION_BAR, WHOLE_BAR) if side.name == "fast" else (NO_BAR, NO_BAR)
        for what, part, bar in (("generation", "generation", bars[0]), ("whole step", "whole", bars[1])):
            row = compare(what, workload, side.name, times[side.name], times["stock"], part, bar)
            yield row | {"engine": getattr(side.engine, "name", None)}


# ------------------------------------------------------------------------------------------------------- memory


def measure_memory(workload: Workload, sides: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Rows for the peak memory of the training part, each side in fresh processes."""
    peaks = {name: [peak_in_fresh_process(name, workload) for _ in range(repeats)] for name in ("stock", *sides)}
    stock = statistics.median(peaks["stock"])
    for name in sides:
        share = statistics.median(peaks[name]) / stock
        row = {"what": "peak memory", "workload": workload.label, "settings": asdict(workload), "side": name}
        row |= {"stock_mib": peaks["stock"], "ours_mib": peaks[name], "share": share}
        yield row | MEMORY_BARS.get(name, NO_BAR).judge(share)


def peak_in_fresh_process(name: str, workload: Workload) -> float:
    """MiB above the level before the step."""
    limits = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, __file__, "--peak-of", name, "--workload", json.dumps(asdict(workload))]
    done = subprocess.run(
        command, env=os.environ | limits, cwd=reporting.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the memory of {name} could not be measured:\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def peak_of(name: str, workload: Workload) -> float:
    """The peak in MiB, in the process that `peak_in_fresh_process` starts."""
    from step_sides import build_side

    side = build_side(name, workload)
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


def plan(full: bool) -> list[tuple[str, Workload, Bar]]:
    """The jobs: part, workload and bar of the training part."""
    jobs = [("training", workload, bar) for workload, bar in TRAINING_BARS.items()]
    jobs += [("whole", K4, NO_BAR), ("memory", K4, NO_BAR)]
    if full:
        every = itertools.product((4, 8), (2048, 151936), (False, True), (0.05, 0.0))
        rows = [Workload(k, size, saved, beta, tied=beta == 0) for k, size, saved, beta in every]
        jobs += [("training", workload, NO_BAR) for workload in rows if workload not in TRAINING_BARS]
        jobs += [("whole", workload, NO_BAR) for workload in (K8, LARGE)]
        jobs += [("memory", workload, NO_BAR) for workload in (K8, replace(K4, checkpointing=True), LARGE)]
    return jobs


def sides_of(part: str, workload: Workload, options: argparse.Namespace) -> list[str]:
    """The kit's sides in a job: the default settings; every memory setting for memory and gradients."""
    if options.side:
        return options.side
    return list(KIT_SIDES) if part == "memory" or (part == "training" and workload == K4) else ["fast"]


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the selected jobs, one by one."""
    import torch
    import trl_head

    torch.set_num_threads(1)
    with trl_head.installed():
        for part, workload, bar in plan(options.full):
            if part not in options.only:
                continue
            sides = sides_of(part, workload, options)
            repeats = options.repeats if workload.vocabulary == 2048 else min(options.repeats, 2)
            if part == "training":
                found = measure_training(workload, sides, repeats, bar)
            elif part == "whole":
                found = measure_whole(workload, sides, repeats)
            else:
                found = measure_memory(workload, sides, min(repeats, 2))
            yield from found
            gc.collect()


def describe() -> dict[str, Any]:
    """What the rows have in common."""
    import trl_head

    lengths = {f"K {load.num_generations}": completion_lengths(load) for load in (K4, K8)}
    return {
        "workload": {
            "backbone": BACKBONE,
            "lora": LORA,
            "completion_lengths": lengths,
            "mean_length": statistics.mean(lengths["K 4"]),
            "prompt_tokens": [len(row["prompt"]) for row in prompt_rows(K4)],
            "padding_share": padding_share(K4),
            "micro_batch": "one group, K completions; 16 / K micro-batches a step, on both sides",
            "precision": "float32",
        },
        "stand_in": trl_head.tile_sizes() | {"what": "TRL's Triton head in plain torch, benchmarks/trl_head.py"},
        "threads": 1,
        "imposed_lengths": "the end token is impossible before a row's target and certain at it, on both sides",
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every K, vocabulary, checkpointing and beta")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each side after the discarded one")
    parser.add_argument("--side", nargs="+", choices=KIT_SIDES, help="the kit's memory settings; default: the row's")
    parser.add_argument("--results", type=Path, default=RESULT)
    parser.add_argument("--write-table", action="store_true", help="only update docs/benchmarks.md")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--workload", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Measure and write; the exit code says whether every "at least" holds."""
    reporting.settle()
    options = parse()
    if options.write_table:
        import doc_tables

        doc_tables.write_tables()
        return 0
    import torch

    from rloo_kit._stack import load_stack

    load_stack()
    if options.peak_of:
        import trl_head

        torch.set_num_threads(1)
        with trl_head.installed():
            print(peak_of(options.peak_of, Workload(**options.workload)))
        return 0
    started = time.monotonic()
    header = reporting.header("benchmarks/rloo_step.py")
    rows: list[dict[str, Any]] = []
    for row in measure(options):
        print(reporting.step_line(row), flush=True)
        rows.append(row | {"revision": header["revision"][:7]})
        common = {"seconds": round(time.monotonic() - started), **describe()}
        reporting.write(header | common | {"rows": rows}, options.results, quiet=True)
    print(f"figures: {options.results}")
    missed = [row for row in rows if row["holds"] is False]
    for row in missed:
        print(f"MISSED: {reporting.step_line(row)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
