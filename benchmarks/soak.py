"""Checks that a long run and a long batch stay flat: memory, open files and threads of the real command, from outside.

    python benchmarks/soak.py --steps 2000      `rloo-kit train` on the embedded model
    python benchmarks/soak.py --batch 50        `rloo-kit batch` of 50 notebooks that each leave a process behind

The run has eight short completions a step, a checkpoint every 100 steps and enough completions to start new files. The
first and the last quarter of the samples are compared, without the first tenth, in which things are loaded: the
smallest number of open files and of threads, which must not grow, and the mean resident memory. Memory may grow by
AT_MOST, because the kit and the trainer keep the metrics of each step. Exit code 1 if something grew, a run of the
batch is not done, or a process is left behind.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reporting

reporting.settle()

AT_MOST = {"step": 20.0, "run": 200.0}  # KiB
SETTINGS = [
    "configs/arithmetic_thinking.yaml", "run.name=soak", "run.evaluate=false", "run.report=false",
    "rloo.num_generations=4", "rloo.per_device_train_batch_size=8",
    "rloo.max_completion_length=16", "rloo.save_steps=100", "rloo.save_total_limit=2",
]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, metavar="RUNS", help="a batch of RUNS runs instead of one run")
    parser.add_argument("--out", type=Path, help="(default: benchmarks/results/soak.json or batch_soak.json)")
    options = parser.parse_args(arguments)
    unit = "run" if options.batch else "step"
    result = reporting.header("benchmarks/soak.py") | {f"{unit}s": options.batch or options.steps}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        watched = watch_batch(options.batch, Path(folder)) if options.batch else watch_run(options.steps, Path(folder))
    result |= {"seconds": round(time.monotonic() - started, 1)} | judge(watched["samples"], AT_MOST[unit]) | watched
    names = ("at", "memory_mib", "files", "threads")
    rows = [[f"{one[name]:g}" for name in names] for one in result["samples"]]
    print("\n".join(reporting.table([unit, "memory (MiB)", "open files", "threads"], rows)))
    result["holds"] = result["flat"] and not result.get("left") and result.get("done") == options.batch
    growth = f"{result['memory_kib']:.2f} KiB a {unit} (at most {result['at_most']:g})"
    growth += f", open files {result['more_files']:+d}, threads {result['more_threads']:+d}"
    print(f"{growth}: {'holds' if result['holds'] else 'MISSED'}")
    reporting.write(result, options.out or reporting.RESULTS / ("batch_soak.json" if options.batch else "soak.json"))
    return 0 if result["holds"] else 1


def watch_run(steps: int, folder: Path) -> dict[str, Any]:
    """Train for `steps` steps; 40 samples, or one a step."""
    from rloo_kit.runs.reader import RunReader

    run_dir = RunReader(folder / "soak")
    words = ["train", *SETTINGS, f"rloo.max_steps={steps}", f"run.output_dir={folder}"]
    return {"samples": watch(words, folder, lambda: run_dir.status().get("step") or 0, max(steps // 40, 1))}


def watch_batch(runs: int, folder: Path) -> dict[str, Any]:
    """A batch of notebooks; a sample at the end of each run but the last, after which it compares the runs."""
    notebooks = reporting.load_file("tests/notebooks/batch_notebooks.py")
    file = notebooks.write_batch(
        folder, [{"name": f"run{number}", "parameters": {"mode": "child", "number": number}} for number in range(runs)]
    )

    def done() -> int:
        return sum('"state": "done"' in one.read_text(encoding="utf-8") for one in folder.glob("out/b/*/status.json"))

    samples = [one for one in watch(["batch", str(file)], folder, done, 1) if one["at"] < runs]
    return {"samples": samples, "done": done(), "left": notebooks.processes_of(folder)}


def watch(words: list[str], folder: Path, progress: Callable[[], int], every: int) -> list[dict[str, Any]]:
    """Run `rloo-kit words` and sample it after every `every` steps or runs."""
    import psutil

    samples: list[dict[str, Any]] = []
    with open(folder / "log.txt", "wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "rloo_kit.cli", *words], cwd=reporting.ROOT, stdout=log, stderr=log,
            env=os.environ | {"PYTHONPATH": str(reporting.ROOT)},
        )  # fmt: skip
        process = psutil.Process(child.pid)
        while child.poll() is None:
            at = progress()
            if at // every > (samples[-1]["at"] // every if samples else 0):
                try:
                    memory = round(process.memory_info().rss / 2**20, 1)
                    samples.append({
                        "at": at, "memory_mib": memory, "files": process.num_fds(), "threads": process.num_threads(),
                    })  # fmt: skip
                except psutil.Error:  # it has just ended
                    break
            time.sleep(0.02)
    if child.wait() != 0:
        raise SystemExit(f"the command failed:\n{(folder / 'log.txt').read_text(errors='replace')[-3000:]}")
    return samples


def judge(samples: list[dict[str, Any]], at_most_kib: float) -> dict[str, Any]:
    """The growth from the first to the last quarter of the samples, without the first tenth, in which things load.

    >>> samples = [{"at": at, "memory_mib": 600 + at, "files": 4 + at // 3, "threads": 5} for at in range(4)]
    >>> judge(samples, 20)
    {'memory_kib': 1024.0, 'at_most': 20, 'more_files': 1, 'more_threads': 0, 'flat': False}
    """
    samples = samples[len(samples) // 10 :]
    size = max(len(samples) // 4, 1)
    first, last = samples[:size], samples[-size:]

    def rise(name: str) -> float:
        return (sum(one[name] for one in last) - sum(one[name] for one in first)) / size

    slope = rise("memory_mib") * 1024 / max(rise("at"), 1)
    files, threads = (min(one[name] for one in last) - min(one[name] for one in first) for name in ("files", "threads"))
    found = {"memory_kib": round(slope, 3), "at_most": at_most_kib, "more_files": files, "more_threads": threads}
    return found | {"flat": slope <= at_most_kib and files <= 0 and threads <= 0}


if __name__ == "__main__":
    sys.exit(main())
