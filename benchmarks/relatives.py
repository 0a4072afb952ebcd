"""Does RLOO's baseline matter, or its K? RLOO, its relatives and four K at equal budget; `results/relatives.json`.

    python benchmarks/relatives.py --jobs 2                    # every arm, five seeds: half an hour on two cores
    python benchmarks/relatives.py --methods rloo grpo --seeds 0 1 --steps 20 --results /tmp/try.json
    python benchmarks/relatives.py --report-only               # picture and tables again, from the results file

Each run is `rloo-kit train configs/arithmetic_thinking.yaml` with the keys of its arm (`config/methods.py`). Equal in
all arms: 128 completions a step, steps, model, problems, learning rate and schedule. A seed sets everything
random (model, problems, adapter, sampling), so arms are compared seed by seed. With K completions a prompt a step has
128 / K prompts: K is compared at equal samples. Evaluated: held-out accuracy at temperature 1, before and after.

The learning rate is shared. A constant factor on all advantages (the (K - 1) / K of a group's mean) cancels in Adam,
which divides the gradient by its own size, up to adam_epsilon; clipping the norm would undo that, so no arm clips
(max_grad_norm 1e9). Factors that weigh completions against each other (a group's standard deviation, 1 over a
completion's length) do not cancel. `--rate` repeats the comparison at another rate.

On-policy, every ratio is 1, so differences in the ratio alone do not show: Dr. GRPO is RLOO times a constant, GSPO (no
arm) is GRPO. `dapo` is GRPO with the mean over all tokens; the comparison separates the effects of GRPO's two
divisions. `rloo_again` is RLOO with another seed for sampling and adapter on the same model and problems, which shows
the effect of chance.

Runs already in the output folder with the same keys are not repeated; another set of keys has its own folders.
Exit code 0 with any result: this measures and has no bar. Left out: other tasks, other models, off-policy steps, a
rate for each method.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "relatives.json"
CONFIG = reporting.ROOT / "configs" / "arithmetic_thinking.yaml"
COMPLETIONS, STEPS, EVAL_PROMPTS = 128, 40, 500
# By arm: its name in `config/methods.py`, and K.
ARMS = {
    "rloo": ("RLOO", 8), "rloo_again": ("RLOO", 8), "grpo": ("GRPO", 8), "dr_grpo": ("Dr. GRPO", 8),
    "reinforce_pp": ("REINFORCE++", 8), "reinforce": ("REINFORCE", 8),
    "rloo_k2": ("RLOO", 2), "rloo_k4": ("RLOO", 4), "rloo_k16": ("RLOO", 16),
    "dapo": ("DAPO", 8), "reinforce_pp_baseline": ("REINFORCE++-baseline", 8),
}  # fmt: skip
USUAL = [arm for arm in ARMS if arm != "reinforce_pp_baseline"]
AGAIN = 1000  # added to a seed for the sampling and the adapter of `rloo_again`
FIGURES = ("num_prompts", "accuracy", "low", "high", "closed_share", "mean_thinking_tokens")
CURVES = ("reward", "grad_norm", "frac_score_zero_std", "entropy")


def keys_of(arm: str, seed: int, options: argparse.Namespace) -> list[str]:
    """The overrides of one run: everything that differs from the config."""
    from rloo_kit.config.methods import METHODS

    method, size = ARMS[arm]
    keys = [f"rloo.{name}={str(value).lower()}" for name, value in METHODS[method].items()]
    keys += [f"rloo.num_generations={size}", f"rloo.per_device_train_batch_size={COMPLETIONS}"]
    keys += [f"rloo.max_steps={options.steps}", "rloo.max_grad_norm=1e9"]
    keys += [f"rloo.learning_rate={options.rate}"] if options.rate else []
    keys += [f"eval.num_prompts={options.prompts}", "eval.greedy=false", "run.report=false", "run.sample_every_steps=0"]
    sampling = seed + AGAIN if arm == "rloo_again" else seed
    return [*keys, f"run.seed={sampling}", f"data.seed={seed}", f"model.build_seed={seed}"]


def run_arm(arm: str, seed: int, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run; not repeated if its folder, named by keys and `model`, has a finished run."""
    keys = keys_of(arm, seed, options)
    name = f"{arm}-{seed}-{zlib.crc32(' '.join([model, *keys]).encode()):08x}"
    folder = options.output / name
    record = folder / "relatives.json"
    if record.is_file():
        found = json.loads(record.read_text("utf-8"))
        print(f"{describe(found)}, there already", flush=True)
        return dict(found)
    command = [str(Path(sys.executable).with_name("rloo-kit")), "train", str(CONFIG), *keys]
    where = [f"run.output_dir={options.output}", f"run.name={name}", "--overwrite"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *where], cwd=reporting.ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    wall_s = round(time.monotonic() - started, 1)
    found = {"arm": arm, "seed": seed, "model": model, "keys": keys, "wall_s": wall_s} | read_run(folder)
    record.write_text(json.dumps(found), encoding="utf-8")
    print(describe(found), flush=True)
    return found


def read_run(folder: Path) -> dict[str, Any]:
    """Accuracy before and after, and one value per step of each curve (null if a step has none)."""
    before, after = (json.loads((folder / f"{when}.json").read_text("utf-8")) for when in ("before", "after"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    rows = [row for row in rows if row.get("reward") is not None]
    curves = {name: [_round(row.get(name)) for row in rows] for name in CURVES}
    return {
        "before": {name: before[name] for name in FIGURES}, "after": {name: after[name] for name in FIGURES},
        "steps": rows[-1]["step"], "training_s": round(rows[-1]["seconds"], 1), "curves": curves,
    }  # fmt: skip


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def describe(run: dict[str, Any]) -> str:
    """One run on one line."""
    mean = sum(run["curves"]["reward"]) / len(run["curves"]["reward"])
    accuracy = [run[when]["accuracy"] for when in ("before", "after")]
    return (
        f"{run['arm']}, seed {run['seed']}: accuracy {accuracy[0]:.3f} -> {accuracy[1]:.3f}, reward over the run "
        f"{mean:.3f}, {run['wall_s']:.0f} s"
    )


def main() -> int:
    """Run what is missing, write the results, draw and fill the page."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", nargs="+", choices=list(ARMS), default=USUAL, help="arms; default: all but the last"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--prompts", type=int, default=EVAL_PROMPTS, help="held-out prompts, before and after")
    parser.add_argument("--rate", type=float, help="learning rate of every arm; default: the config's")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--output", type=Path, default=reporting.ROOT / "outputs" / "relatives")
    parser.add_argument("--results", type=Path, default=RESULT)
    parser.add_argument("--report-only", "--picture", action="store_true", help="only draw and fill the page")
    options = parser.parse_args()
    import relatives_report as report

    if not options.report_only:
        head = reporting.header("benchmarks/relatives.py")
        settings = {"steps": options.steps, "completions_a_step": COMPLETIONS, "rate": options.rate}
        tasks = [(arm, seed) for seed in options.seeds for arm in options.methods]  # paired even if cut off
        with ThreadPoolExecutor(options.jobs) as pool:
            models = dict(zip(options.seeds, pool.map(build_model, options.seeds), strict=True))
            runs = list(pool.map(lambda task: run_arm(*task, models[task[1]], options), tasks))
        result = head | settings | {"jobs": options.jobs} | {"runs": runs}
    else:
        result = json.loads(options.results.read_text(encoding="utf-8"))
    result |= report.compare(result["runs"])
    reporting.write(result, options.results)
    print("\n".join([*report.arms_table(result), "", *report.differences_table(result)]), flush=True)
    if options.results == RESULT:
        report.draw(result)
        import doc_tables

        doc_tables.write_tables((reporting.ROOT / "docs" / "relatives.md",))
    return 0


def build_model(seed: int) -> str:
    """The name of a seed's embedded model, with its recipe's number; built here, before two runs do it at once."""
    text = f"from rloo_kit.embedded.model import build; print(build('thinking', 'compact', {seed}))"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=reporting.ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(done.stdout.split()[-1]).name


if __name__ == "__main__":
    sys.exit(main())
