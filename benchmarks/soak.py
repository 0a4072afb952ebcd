#!/usr/bin/env python3
"""A long run stays flat: memory, open files and threads of one real `rloo-kit train`, sampled from outside.

    python benchmarks/soak.py --steps 2000

The embedded model, eight short completions a step, a checkpoint every 100 steps, completions that start new files. Of
the samples in the first and in the last quarter of the steps are compared: the smallest number of open files and of
threads, which may not grow, and the mean of the resident memory. That may grow by MEMORY_KIB a step: the metrics of
each step are kept, by the kit and by the trainer. Exit code 1 where something grew.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import reporting

reporting.settle()

MEMORY_KIB = 20.0  # a step
SETTINGS = [
    "configs/arithmetic_thinking.yaml", "run.name=soak", "run.evaluate=false", "run.report=false",
    "run.rollouts_gib=0.01", "rloo.num_generations=4", "rloo.per_device_train_batch_size=8",
    "rloo.max_completion_length=16", "rloo.logging_steps=1", "rloo.save_steps=100", "rloo.save_total_limit=2",
]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=40, help="of the process, evenly over the steps")
    parser.add_argument("--out", type=Path, default=reporting.RESULTS / "soak.json")
    options = parser.parse_args(arguments)
    result = reporting.header("benchmarks/soak.py")
    with tempfile.TemporaryDirectory() as folder:
        samples, seconds = watch(options.steps, max(options.steps // options.samples, 1), Path(folder))
    result |= {"steps": options.steps, "seconds": round(seconds, 1)} | judge(samples)
    for line in reporting.table(
        ["step", "memory (MiB)", "open files", "threads"],
        [[f"{one[name]:g}" for name in ("step", "memory_mib", "files", "threads")] for one in samples],
    ):
        print(line)
    print(
        f"{options.steps} steps in {seconds:.0f} s: {result['memory_kib_a_step']:.2f} KiB a step (at most "
        f"{MEMORY_KIB:g}), open files {result['more_files']:+d}, threads {result['more_threads']:+d}: "
        f"{'flat' if result['flat'] else 'GROWS'}"
    )
    reporting.write(result | {"samples": samples}, options.out)
    return 0 if result["flat"] else 1


def watch(steps: int, every: int, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Train and sample at every `every`-th step; the samples and the seconds."""
    import psutil

    from rloo_kit.runs.run_dir import RunDir

    words = ["train", *SETTINGS, f"rloo.max_steps={steps}", f"run.output_dir={folder}"]
    samples: list[dict[str, Any]] = []
    started = time.monotonic()
    with open(folder / "log.txt", "wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "rloo_kit.cli", *words], cwd=reporting.ROOT, stdout=log, stderr=log,
            env=os.environ | {"PYTHONPATH": str(reporting.ROOT)},
        )  # fmt: skip
        process, run_dir = psutil.Process(child.pid), RunDir(folder / "soak")
        while child.poll() is None:
            step = run_dir.status().get("step") or 0
            if step and step // every > (samples[-1]["step"] // every if samples else 0):
                try:
                    with process.oneshot():
                        found = {"memory_mib": round(process.memory_info().rss / 2**20, 1), "files": process.num_fds()}
                        samples.append({"step": step} | found | {"threads": process.num_threads()})
                except psutil.Error:  # it has just ended
                    break
            time.sleep(0.02)
        if child.wait() != 0:
            raise SystemExit(f"the run failed:\n{(folder / 'log.txt').read_text(errors='replace')[-3000:]}")
    return samples, time.monotonic() - started


def judge(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What grew from the first quarter of the samples to the last."""
    size = max(len(samples) // 4, 1)
    first, last = samples[:size], samples[-size:]

    def mean(name: str, some: list[dict[str, Any]]) -> float:
        return sum(one[name] for one in some) / len(some)

    steps = max(mean("step", last) - mean("step", first), 1)
    slope = (mean("memory_mib", last) - mean("memory_mib", first)) * 1024 / steps
    more = {
        f"more_{name}": min(one[name] for one in last) - min(one[name] for one in first)
        for name in ("files", "threads")
    }
    flat = slope <= MEMORY_KIB and all(number <= 0 for number in more.values())
    return {"memory_kib_a_step": round(slope, 3), "at_most": MEMORY_KIB} | more | {"flat": flat}


if __name__ == "__main__":
    sys.exit(main())
