"""Which learning rate trains a minimal config? Figures go to `results/learning_rates.json`.

    python benchmarks/learning_rates.py                     # adapter and all parameters, seeds 0 and 1: ten minutes
    python benchmarks/learning_rates.py --trained adapter --rates 1e-4 1e-3 --seeds 0

The run is the shortest config that trains: model, data, reward, number of steps. The rest is the kit's defaults (K = 8,
4 prompts a step, no KL penalty, a linear schedule, LoRA of rank 16). `rloo-kit train` measures accuracy on held-out
prompts before and after. A seed sets the problems and their split, the adapter and the sampling; the embedded model
is the same in all runs.

Exit code 0 with any result: this measures and has no bar. Left out: every other model. One with half a million
parameters needs a larger rate than one with billions.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "learning_rates.json"
FILE = """\
model: {name: embedded/thinking}
data: {source: embedded/addition, num_prompts: 2000, test_size: 1000}
rewards: [{name: answer_reward}]
rloo: {max_steps: 60}
"""
RATES = {"adapter": [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3], "all parameters": [1e-6, 1e-5, 1e-4, 1e-3]}
FIGURES = ("num_prompts", "accuracy", "low", "high", "greedy_accuracy")


def run_rate(trained: str, rate: float, seed: int, output: Path) -> dict[str, Any]:
    """The figures of one run before and after training."""
    output.mkdir(parents=True, exist_ok=True)
    file = output / "small.yaml"
    file.write_text(FILE, encoding="utf-8")
    name = f"{trained.replace(' ', '_')}-{rate:g}-{seed}"
    keys = [f"rloo.learning_rate={rate}", f"run.seed={seed}", f"data.seed={seed}"]
    keys += ["model.lora=null"] if trained != "adapter" else []
    keys += [f"run.output_dir={output}", f"run.name={name}", "run.report=false", "--overwrite"]
    command = [sys.executable, "-m", "rloo_kit.cli", "train", str(file), *keys]
    done = subprocess.run(command, cwd=reporting.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    before, after = (json.loads((output / name / f"{when}.json").read_text("utf-8")) for when in ("before", "after"))
    rows = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        "trained": trained, "rate": rate, "seed": seed, "steps": rows[-1]["step"], "training_s": rows[-1]["seconds"],
        "before": {key: before[key] for key in FIGURES}, "after": {key: after[key] for key in FIGURES},
    }  # fmt: skip


def main() -> int:
    """Measure the selected rates and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", choices=sorted(RATES), nargs="+", default=list(RATES))
    parser.add_argument("--rates", type=float, nargs="+", help="instead of the default ones")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output", type=Path, default=reporting.ROOT / "outputs" / "learning_rates")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    started, runs = time.monotonic(), []
    head = reporting.header("benchmarks/learning_rates.py")
    for trained in options.trained:
        for rate in options.rates or RATES[trained]:
            for seed in options.seeds:
                runs.append(run_rate(trained, rate, seed, options.output))
                pair = [runs[-1][when]["accuracy"] for when in ("before", "after")]
                print(f"{trained}, {rate:g}, seed {seed}: {pair[0]:.3f} -> {pair[1]:.3f}", flush=True)
    reporting.write(head | {"file": FILE, "runs": runs, "seconds": round(time.monotonic() - started)}, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
