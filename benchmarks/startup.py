"""The package's start-up time in fresh processes; figures go to `results/startup.json`.

    python benchmarks/startup.py

`import rloo_kit` and `rloo-kit --help` load no heavy library (a test checks it); `import torch` shows the cost of one.
`load_stack()` loads all libraries of a run. "train one small step" covers everything that a run of the embedded model
imports, and a step of four short completions. Everything runs once to warm the file cache, then `--repeats` times in
turn; the median wall-clock and processor seconds are reported with the smallest and the largest. Left out: the first
start after installing, which compiles.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "startup.json"
CONFIG = "configs/arithmetic_thinking.yaml"
TRAIN = f"""
import rloo_kit as kit, sys
kit.setup_environment("transformers")
from rloo_kit.models.embedded import build
run = kit.load_config("{CONFIG}", f"model.name={{build('thinking', steps=2)}}", f"run.output_dir={{sys.argv[1]}}",
    "rloo.max_steps=1", "rloo.per_device_train_batch_size=4", "rloo.num_generations=2",
    "rloo.max_completion_length=4", "data.num_prompts=40", "data.test_size=4")
policy = kit.load_policy(run)
data = kit.load_data(run, policy.tokenizer)
kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer))
"""
STARTS = {
    "python": "pass",
    "import rewards": "import rewards",
    "import torch": "import torch",
    "import rloo_kit": "import rloo_kit",
    "rloo-kit --help": "import sys; sys.argv = ['rloo-kit', '--help']; from rloo_kit.cli import main; main()",
    "load_config": f"import rloo_kit; rloo_kit.load_config('{CONFIG}')",
    "load_stack()": "from rloo_kit._stack import load_stack; load_stack()",
    "train one small step": TRAIN,
}


def start(code: str) -> tuple[float, float]:
    """Wall-clock and processor seconds of a process that runs the code."""
    environment = os.environ | {"RLOO_KIT_BACKEND": "transformers"}
    with tempfile.TemporaryDirectory() as folder:
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, cwd=reporting.ROOT, env=environment, capture_output=True, text=True, check=False)
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{code.strip()}\nended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(names: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row for each name, from starts in turn; the first turn is discarded."""
    turns = [{name: start(STARTS[name]) for name in names} for _ in range(repeats + 1)][1:]
    rows = []
    for name in names:
        wall, cpu = zip(*(turn[name] for turn in turns), strict=True)
        rows.append({
            "what": name, "seconds": statistics.median(wall), "low": min(wall), "high": max(wall),
            "cpu_s": statistics.median(cpu), "cpu_low": min(cpu), "cpu_high": max(cpu),
        })  # fmt: skip
    return rows


def startup_table(result: dict[str, Any]) -> list[str]:
    """startup.json as a table."""
    figures = ("seconds", "low", "high", "cpu_s")
    rows = [[f"`{row['what']}`", *(f"{row[name]:.2f}" for name in figures)] for row in result["rows"]]
    return reporting.table(["command", "seconds", "smallest", "largest", "processor s"], rows)


def main() -> int:
    """Start everything in turn and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=STARTS, default=list(STARTS), metavar="WHAT")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    result = reporting.header("benchmarks/startup.py") | {"repeats": options.repeats}
    result["rows"] = measure(options.only, options.repeats)
    print("\n".join(startup_table(result)), flush=True)
    reporting.write(result, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
