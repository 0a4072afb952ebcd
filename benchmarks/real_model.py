"""Does a real language model learn? Figures go to `results/real_model.json`.

    python benchmarks/real_model.py                          # both configs, seeds 0, 1 and 2: an hour and a half
    python benchmarks/real_model.py --configs smollm2_sums --seeds 0

For each seed: `rloo-kit train configs/smollm2_sums.yaml`; `rloo-kit sft configs/smollm2_words.yaml` and the command
that it prints. A seed sets the split, the adapter and the sampling. Each command's verdict, minutes and peak memory
(of the process, by the operating system) are recorded with the held-out means before and after. Runs of other seeds
stay in the file.

Exit code 1 if a verdict of `train` is not "learnt".
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "real_model.json"
CONFIGS = {"smollm2_sums": ("train",), "smollm2_words": ("sft", "train")}
FIGURES = (
    "num_prompts", "reward", "reward_low", "reward_high", "accuracy", "low", "high", "greedy_accuracy",
    "truncated_share", "mean_tokens", "mean_thinking_tokens",
)  # fmt: skip


def call(words: list[str], log: Path, threads: int) -> tuple[str, dict[str, float]]:
    """What `rloo-kit words` prints, its minutes, imports included, and its peak memory in GiB."""
    started = time.monotonic()
    with log.open("w+") as file:
        command = [sys.executable, "-m", "rloo_kit.cli", *words]
        variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(command, cwd=reporting.ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        file.seek(0)
        printed = file.read()
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"{shlex.join(words)} failed; its output is in {log}")
    minutes = round((time.monotonic() - started) / 60, 2)
    return printed, {"minutes": minutes, "peak_gib": round(usage.ru_maxrss / 2**20, 2)}


def run_seed(config: str, seed: int, output: Path, threads: int) -> dict[str, Any]:
    """The parts of one seed: each with before, after, verdict, minutes and peak memory."""
    found: dict[str, Any] = {"config": config, "seed": seed, "threads": threads}
    found["revision"] = reporting.git("rev-parse", "HEAD")[:7]
    place = output / str(seed)
    place.mkdir(parents=True, exist_ok=True)
    words = [f"configs/{config}.yaml", f"run.seed={seed}", f"data.seed={seed}", f"run.output_dir={place}"]
    for part in CONFIGS[config]:
        printed, cost = call([part, *words, "--overwrite"], place / f"{config}-{part}.log", threads)
        folder = place / (f"{config}-sft" if part == "sft" else config)
        status = json.loads((folder / "status.json").read_text("utf-8"))
        evaluations = (json.loads((folder / f"{when}.json").read_text("utf-8")) for when in ("before", "after"))
        before, after = ({key: one.get(key) for key in FIGURES} for one in evaluations)
        judged = status.get("verdict") or {"kind": "", "sentence": ""}  # sft has none
        verdict = {"verdict": judged["kind"], "sentence": judged["sentence"]}
        found[part] = verdict | {"before": before, "after": after, "steps": status["step"]} | cost
        if part == "sft":
            words = shlex.split(printed.rpartition("next: ")[2].partition("\n")[0])[2:]
    return found


def show(part: dict[str, Any]) -> list[str]:
    """The cells of a table: mean reward before and after with intervals, verdict, minutes, memory."""
    means = [
        "{reward:.3f} ({reward_low:.3f} to {reward_high:.3f})".format(**part[when]) for when in ("before", "after")
    ]
    return [*means, part["verdict"], f"{part['minutes']:.0f}", f"{part['peak_gib']:.1f}"]


def main() -> int:
    """Measure the selected configs and seeds, and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: as a user's command, all cores")
    parser.add_argument("--output", type=Path, default=reporting.ROOT / "outputs" / "real_model")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = json.loads(options.results.read_text("utf-8"))["runs"] if options.results.is_file() else []
    for config in options.configs:
        for seed in options.seeds:
            done = run_seed(config, seed, options.output, options.threads)
            runs = [run for run in runs if (run["config"], run["seed"]) != (config, seed)] + [done]
            runs.sort(key=itemgetter("config", "seed"))
            reporting.write(reporting.header("benchmarks/real_model.py") | {"runs": runs}, options.results)
    titles = ["config", "seed", "command", "reward before", "after", "verdict", "minutes", "GiB"]
    rows = [
        [run["config"], str(run["seed"]), part, *show(run[part])] for run in runs for part in CONFIGS[run["config"]]
    ]
    print("\n".join(reporting.table(titles, rows)), flush=True)
    return 0 if all(run["train"]["verdict"] == "learnt" for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
