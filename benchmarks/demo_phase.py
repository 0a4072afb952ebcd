"""The demo's RLOO phase before and after a change, alternating; figures go to `results/demo_phase.json`.

    python benchmarks/demo_phase.py                       # against the revision before the loop was rewritten
    python benchmarks/demo_phase.py --before v0.3 --repeats 5 --at-most 1 --results FILE

Times only `kit.train` of `configs/arithmetic_thinking.yaml`: no installation, no cold start (the embedded
model is built once and shared through the cache), no evaluation. Each measurement is a fresh process, the revisions
take turns, and each pair gives a ratio; the median is reported with the smallest and the largest, for processor time
and wall clock. One thread each, like a demo on a busy laptop; `--threads` changes that. Exit code 1 if the phase takes
more than `--at-most` (0.8) of its earlier time. `demo_learning.py` measures what it learns; the rewards of the last
ten steps are reported with the times. Left out: memory.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "demo_phase.json"
BEFORE = "d775a6f"  # the last revision whose loop pads
AT_MOST = 0.8

# Runs in either tree, so it uses only what both have.
PROGRAM = """
import json, statistics, sys, time
import rloo_kit as kit
kit.setup_environment()
import torch
torch.set_num_threads(int(sys.argv[3]))
run = kit.load_config(sys.argv[1], f"run.output_dir={sys.argv[2]}", "run.name=demo-phase", f"run.seed={sys.argv[4]}",
                      *sys.argv[5:])
policy = kit.load_policy(run)
data = kit.load_data(run, policy.tokenizer)
rewards = kit.build_rewards(run, policy.tokenizer)
wall, cpu = time.perf_counter(), time.process_time()
result = kit.train(run, policy, data, rewards, overwrite=True)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
last = [row["reward"] for row in result.metrics if row.get("reward") is not None][-10:]
figures = {"wall_s": wall, "cpu_s": cpu, "steps": result.steps, "reward_last_steps": statistics.fmean(last)}
print("figures: " + json.dumps(figures))
"""


def train_once(tree: Path, threads: int, seed: int, overrides: list[str]) -> dict[str, Any]:
    """`kit.train` of the demo in a fresh process, with the package of a tree."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory() as folder:
        config = str(tree / "configs" / "arithmetic_thinking.yaml")
        command = [sys.executable, "-c", PROGRAM, config, folder, str(threads), str(seed), *overrides]
        done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("figures: ")]
    if done.returncode or not lines:
        raise RuntimeError(f"training in {tree} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("figures: ")) | {"seed": seed}


def measure(before: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """`--repeats` runs of each tree, in turn, in changing order; a short run of each comes first and is discarded."""
    trees = {"before": before, "after": reporting.ROOT}
    for tree in trees.values():
        train_once(tree, options.threads, 0, ["rloo.max_steps=1", *options.overrides])
    runs: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for turn in range(options.repeats):
        for name in ("before", "after") if turn % 2 == 0 else ("after", "before"):
            found = train_once(trees[name], options.threads, turn, options.overrides)
            runs[name].append(found)
            print(
                f"{name}, seed {turn}: {found['cpu_s']:.1f} s processor, {found['wall_s']:.1f} s wall clock, "
                f"reward of the last steps {found['reward_last_steps']:.3f}",
                flush=True,
            )
    return runs


def main() -> int:
    """Measure and write; the exit code says whether the bar is met."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, help="revision to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-most", type=float, default=AT_MOST, help="the bar, as a share of the earlier time")
    parser.add_argument("--results", type=Path, default=RESULT)
    parser.add_argument("overrides", nargs="*", help="for example rloo.max_steps=10")
    options = parser.parse_args()
    head = reporting.header("benchmarks/demo_phase.py")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktree below is removed
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", tree, options.before], cwd=reporting.ROOT, check=True)
        try:
            runs = measure(tree, options)
        finally:
            reporting.git("worktree", "remove", "--force", str(tree))
    result = head | {"before": reporting.git("rev-parse", options.before), "threads": options.threads, "runs": runs}
    for kind in ("cpu", "wall"):
        pairs = zip(runs["after"], runs["before"], strict=True)
        shares = [after[f"{kind}_s"] / before[f"{kind}_s"] for after, before in pairs]
        result[f"{kind}_share"] = {"value": statistics.median(shares), "low": min(shares), "high": max(shares)}
    share = result["cpu_share"]
    result |= {"at_most": options.at_most, "holds": share["value"] <= options.at_most}
    reporting.write(result, options.results)
    spread = f"{share['low']:.2f} to {share['high']:.2f}"
    print(f"{share['value']:.2f} of the time before ({spread}); at most {options.at_most}")
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
