"""Does RLOO improve on supervised training? Figures go to `results/sft_then_rloo.json`.

    python benchmarks/sft_then_rloo.py                 # seeds 0, 1 and 2: about five minutes
    python benchmarks/sft_then_rloo.py --seeds 0

For each seed: `rloo-kit sft configs/sft_arithmetic.yaml`, then the command that it prints; and the same RLOO from the
model without supervised training. A seed sets the random weights, the problems with their split and demonstrations,
and the sampling. Accuracy is measured on 1,000 held-out problems, at temperature 1 and greedy.

Exit code 1 if the bar is missed: nothing solved before, more after supervised training, more again after RLOO, with
separate 95 % intervals each time, and nothing solved by RLOO alone.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "sft_then_rloo.json"
CONFIG = "configs/sft_arithmetic.yaml"
FIGURES = ("num_prompts", "accuracy", "low", "high", "greedy_accuracy")


def call(words: list[str]) -> tuple[str, float]:
    """What `rloo-kit words` prints, and its seconds, imports included."""
    started = time.monotonic()
    command = [sys.executable, "-m", "rloo_kit.cli", *words]
    done = subprocess.run(command, cwd=reporting.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout, round(time.monotonic() - started, 1)


def figures(folder: Path, when: str) -> dict[str, Any]:
    """The accuracy in a run's folder."""
    found = json.loads((folder / f"{when}.json").read_text("utf-8"))
    return {key: found[key] for key in FIGURES}


def run_seed(seed: int, output: Path) -> dict[str, Any]:
    """Accuracy before, after supervised training, after RLOO on top of it, and after RLOO alone."""
    keys = [f"run.seed={seed}", f"data.seed={seed}", f"model.build_seed={seed}", f"run.output_dir={output / str(seed)}"]
    keys += ["run.report=false", "run.sample_every_steps=0"]
    printed, sft_s = call(["sft", CONFIG, *keys, "--overwrite"])
    signal = next(line for line in printed.splitlines() if line.startswith("signal: "))
    words = shlex.split(printed.rpartition("next: ")[2])[1:]
    _, rloo_s = call([*words, "--overwrite"])
    sft, rloo = output / str(seed) / "sft_arithmetic-sft", output / str(seed) / "sft_arithmetic"
    found = {"before": figures(sft, "before"), "after_sft": figures(sft, "after"), "after_rloo": figures(rloo, "after")}
    call(["train", CONFIG, *keys, "run.name=alone", "--overwrite"])
    found["rloo_alone"] = figures(output / str(seed) / "alone", "after")
    return {"seed": seed, **found, "signal": signal, "sft_s": sft_s, "rloo_s": rloo_s}


def holds(run: dict[str, Any]) -> bool:
    """The bar; see above."""
    before, sft, rloo, alone = (run[name] for name in ("before", "after_sft", "after_rloo", "rloo_alone"))
    is_higher = before["high"] < sft["low"] and sft["high"] < rloo["low"]
    return is_higher and before["accuracy"] <= 0.01 and alone["accuracy"] <= 0.01


def show(found: dict[str, Any]) -> str:
    return f"{found['accuracy']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def main() -> int:
    """Measure the selected seeds and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=reporting.ROOT / "outputs" / "sft_then_rloo")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    head = reporting.header("benchmarks/sft_then_rloo.py")
    names = ("before", "after_sft", "after_rloo", "rloo_alone")
    runs, rows = [], []
    for seed in options.seeds:
        run = run_seed(seed, options.output)
        runs.append(run | {"holds": holds(run)})
        rows.append([str(seed), *(show(run[name]) for name in names), f"{run['sft_s']:.0f}", f"{run['rloo_s']:.0f}"])
        print(f"seed {seed}: " + ", ".join(f"{name} {show(run[name])}" for name in names), flush=True)
    reporting.write(head | {"runs": runs}, options.results)
    titles = ["seed", "before", "after SFT", "after RLOO", "RLOO without SFT", "s of sft", "s of train"]
    print("\n".join(reporting.table(titles, rows)), flush=True)
    return 0 if all(run["holds"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
