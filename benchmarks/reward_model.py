"""Preferences, a reward model, and RLOO with it, on a real language model and one CPU core.

    python benchmarks/reward_model.py --seeds 0 1        # 35 minutes a seed on a busy machine

Runs `rloo-kit reward-model` and `rloo-kit train` on configs/smollm2_preferences.yaml, and writes what they measured to
results/reward_model.json: how the model ranks held-out pairs and what length has to do with it; and held-out prompts
before and after RLOO, by the reward model and by the rule that the pairs follow, which nothing is trained on.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import reporting

CONFIG = "configs/smollm2_preferences.yaml"
MEASURES = ("rewards/reward_model", "rewards/names_topic")


def run(*words: str) -> float:
    """Run `rloo-kit`; returns its minutes."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "rloo_kit.cli", *words], check=True, cwd=reporting.ROOT)
    return round((time.monotonic() - started) / 60, 1)


def read_evaluation(file: Path) -> dict[str, Any]:
    """The two measures with their intervals, and the lengths."""
    found = json.loads(file.read_text(encoding="utf-8"))
    measures = {name.partition("/")[2]: found["measures"][name] for name in MEASURES}
    kept = {name: {key: one[key] for key in ("value", "low", "high")} for name, one in measures.items()}
    lengths = {key: found[key] for key in ("num_prompts", "num_samples", "mean_tokens", "truncated_share")}
    return lengths | kept | {"samples": [(one["prompt"], one["answer"]) for one in found["samples"][:3]]}


def measure(seed: int, output: Path) -> dict[str, Any]:
    """The whole road with one seed; folders below `output`."""
    options = [f"run.output_dir={output}", f"run.name=seed{seed}", f"run.seed={seed}", f"data.seed={seed}"]
    minutes = {"reward_model": run("reward-model", CONFIG, *options, "--overwrite")}
    model = output / f"seed{seed}-reward-model"
    params = f"rewards.0.params.model={model / 'reward_model'}"
    minutes["rloo"] = run("train", CONFIG, *options, params, "--overwrite")
    folder = output / f"seed{seed}"
    ranked = json.loads((model / "result.json").read_text(encoding="utf-8"))
    for one in ranked["measures"].values():
        one.pop("per_prompt")
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    return {
        "seed": seed,
        "minutes": minutes,
        "reward_model": ranked,
        "before": read_evaluation(folder / "before.json"),
        "after": read_evaluation(folder / "after.json"),
        "rloo_steps": status["step"],
        "verdict": status["verdict"]["sentence"],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/reward_model"), help="folder of the runs")
    arguments = parser.parse_args()
    result = reporting.header("benchmarks/reward_model.py") | {
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "runs": [],
    }
    for seed in arguments.seeds:
        result["runs"].append(measure(seed, arguments.output))
        reporting.write(result, reporting.RESULTS / "reward_model.json")


if __name__ == "__main__":
    reporting.settle()
    main()
