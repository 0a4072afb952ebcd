"""Does the demo learn? Runs the real command for several seeds; figures go to `results/demo_learning.json`.

    python benchmarks/demo_learning.py                          # seeds 0 to 4 of arithmetic_thinking
    python benchmarks/demo_learning.py --families all --seeds 0 1 2 --jobs 2    # task families, same config
    python benchmarks/demo_learning.py --config arithmetic_instruct --seeds 0 1 2

A seed sets everything random: the embedded model (weights and demonstrations), the problems and their
split, the adapter and the sampling. The bar for arithmetic_thinking, checked here for every seed, on at least 1,000
held-out prompts: accuracy at temperature 1 at least 0.50 higher after than before, greedy accuracy at least 0.45, the
95 % intervals apart for both, and more tokens of thinking. For another family the bar is that both accuracies rise,
with the sampled one's intervals apart. Exit code 1 if a seed misses it.

Times are wall-clock on a possibly busy machine; the command's share of the processor is recorded with them. Left out:
the installation at the start of `make demo`.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import reporting
from reporting import RESULTS, ROOT

FIGURES = (
    "num_prompts", "temperature", "accuracy", "low", "high", "greedy_accuracy", "greedy_low", "greedy_high",
    "closed_share", "truncated_share", "mean_thinking_tokens", "mean_tokens",
)  # fmt: skip
DEMO, MIN_PROMPTS, MIN_RISE, MIN_GREEDY_RISE = "arithmetic_thinking", 1000, 0.50, 0.45


def run_seed(config: str, family: str, seed: int, output: Path, keep: bool, overrides: list[str]) -> dict[str, Any]:
    """Train `config` with one seed through the command line, and read its output files."""
    name = f"{config}-{family}-{seed}" if family else f"{config}-{seed}"
    command = [str(Path(sys.executable).with_name("rloo-kit")), "train", str(ROOT / "configs" / f"{config}.yaml")]
    words = [f"run.seed={seed}", f"data.seed={seed}", f"model.build_seed={seed}"]
    words += [f"run.output_dir={output}", f"run.name={name}"]
    words += [f"model.name=embedded/thinking@{family}", f"data.source=embedded/{family}"] if family else []
    folder = output / name
    if not (keep and (folder / "after.json").is_file()):
        output.mkdir(parents=True, exist_ok=True)
        with (output / f"{name}.log").open("w") as file:
            command += [*words, *overrides, "--overwrite"]
            subprocess.run(command, check=True, cwd=ROOT, stdout=file, stderr=file)
    before, after = (json.loads((folder / f"{part}.json").read_text()) for part in ("before", "after"))
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    held = holds_the_bar(before, after) if not family or family == "addition" else rises(before, after)
    run = {
        "seed": seed, "before": _figures(before), "after": _figures(after),
        "rise": after["accuracy"] - before["accuracy"],
        "greedy_rise": after["greedy_accuracy"] - before["greedy_accuracy"], "bar_held": held,
        "steps": last["step"], "training_s": last["seconds"],
    }  # fmt: skip
    _print(name, run)
    return {"family": family} | run if family else run


def holds_the_bar(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether two evaluations of one seed show the learning that the demo promises."""
    return (
        min(before["num_prompts"], after["num_prompts"]) >= MIN_PROMPTS
        and before["temperature"] == after["temperature"] == 1.0
        and after["accuracy"] - before["accuracy"] >= MIN_RISE
        and after["low"] > before["high"]
        and after["greedy_accuracy"] - before["greedy_accuracy"] >= MIN_GREEDY_RISE
        and after["greedy_low"] > before["greedy_high"]
        and after["mean_thinking_tokens"] > before["mean_thinking_tokens"]
    )


def rises(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether accuracy rose, sampled with intervals apart and greedy."""
    return after["low"] > before["high"] and after["greedy_accuracy"] > before["greedy_accuracy"]


def _print(name: str, run: dict[str, Any]) -> None:
    before, after = run["before"], run["after"]
    lengths = f"{before['mean_thinking_tokens'] or 0:.0f} -> {after['mean_thinking_tokens'] or 0:.0f}"
    print(
        f"{name}: accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}, greedy "
        f"{before['greedy_accuracy']:.3f} -> {after['greedy_accuracy']:.3f}, thinking {lengths} tokens, "
        f"{run['training_s']:.0f} s of training, bar {'held' if run['bar_held'] else 'MISSED'}",
        flush=True,
    )


def _figures(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The figures of an evaluation without its samples."""
    return {name: evaluation[name] for name in FIGURES}


def main() -> int:
    """Run the seeds and write the results."""
    reporting.settle()
    from rloo_kit.config.embedded import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=DEMO)
    parser.add_argument("--families", nargs="+", default=[""], help="task families in place of the config's; or: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--keep", action="store_true", help="do not repeat runs that are in the output folder")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "demo_learning")
    parser.add_argument(
        "--results", type=Path, help="default: benchmarks/results/demo_learning[_CONFIG|_families].json"
    )
    parser.add_argument("overrides", nargs="*", help="more overrides, for example rloo.max_steps=40")
    options = parser.parse_args()
    families = list(FAMILIES) if options.families == ["all"] else options.families
    suffix = "_families" if families != [""] else "" if options.config == DEMO else f"_{options.config}"
    head = reporting.header("benchmarks/demo_learning.py") | {"config": options.config, "jobs": options.jobs}
    work = [(family, seed) for family in families for seed in options.seeds]
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(run_seed, options.config, *one, options.output, options.keep, options.overrides) for one in work
        ]
        runs = [job.result() for job in jobs]
    reporting.write(head | {"runs": runs}, options.results or RESULTS / f"demo_learning{suffix}.json")
    return 0 if all(run["bar_held"] for run in runs) or options.config != DEMO else 1


if __name__ == "__main__":
    sys.exit(main())
