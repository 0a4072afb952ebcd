"""Which recipe makes a model think shorter and as well: four of them, on two models whose thinking can be shortened.

    python benchmarks/shorter_thinking.py train --model embedded --recipes forced cut relative both --seeds 0
    python benchmarks/shorter_thinking.py measure     # all trained ones, into benchmarks/results/shorter_thinking.json

Recipes: "forced": at the thinking budget the thinking is closed by force, and the completion is scored. "cut":
completions end at the budget and an answer's length, and earn 0 then. "relative": `relative_length_penalty` without a
budget. "both": forced and relative. All policies are measured alike: at several budgets, and without one. The verdict
is that of the run with the shipped config, whose evaluations have the budget.

SmolLM2 needs `rloo-kit sft configs/smollm2_shorter.yaml` first.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from reporting import RESULTS, ROOT, header, settle, write

BUDGET, ANSWER = 32, 8  # tokens of thinking, and of the answer
LONGEST = {"embedded": 72, "smollm2": 80}  # of a completion without a budget, tokens
CONFIGS = {"embedded": "evening_cpu", "smollm2": "smollm2_shorter"}
BUDGETS = {"embedded": [16, 24, 32, 48], "smollm2": [16, 32]}
NO_BUDGET = ["rloo.thinking_budget=null", "rloo.answer_budget=null"]
RECIPES: dict[str, list[str]] = {
    "forced": ["rewards.1.weight=0"],
    "cut": [*NO_BUDGET, f"rloo.max_completion_length={BUDGET + 1 + ANSWER}", "rewards.1.weight=0"],
    "relative": NO_BUDGET,
    "both": [],
}


def load(model: str, name: str, *overrides: str) -> Any:
    """The run of a recipe; SmolLM2's starts from the adapter of `sft`."""
    import rloo_kit as kit

    start = [f"model.adapter={ROOT / 'outputs' / f'{CONFIGS[model]}-sft' / 'adapter'}"] if model == "smollm2" else []
    given = [*start, f"run.name={name}", "run.evaluate=false", "run.report=false", *overrides]
    return kit.load_config(ROOT / "configs" / f"{CONFIGS[model]}.yaml", *given)


def train(model: str, recipe: str, seed: int) -> None:
    import rloo_kit as kit

    run = load(model, f"shorter_{model}_{recipe}_{seed}", f"run.seed={seed}", *RECIPES[recipe])
    policy = kit.load_policy(run)
    data = kit.load_data(run, policy.tokenizer)
    started = time.monotonic()
    kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer), overwrite=True)
    (run.folder / "minutes").write_text(f"{(time.monotonic() - started) / 60:.1f}")


def measure(model: str, recipe: str, seed: int | None) -> dict[str, Any] | None:
    """A trained policy, or for the recipe "before" the one that all start from; None if it was not trained."""
    import rloo_kit as kit
    from rloo_kit.results.evaluation import Evaluation
    from rloo_kit.results.verdict import load_result

    folder = ROOT / "outputs" / f"shorter_{model}_{recipe}_{seed}"
    trained = [] if recipe == "before" else [f"model.adapter={folder / 'adapter'}"]
    if trained and not (folder / "minutes").is_file():
        return None
    alike = [*NO_BUDGET, f"rloo.max_completion_length={LONGEST[model]}", f"eval.thinking_budgets={BUDGETS[model]}"]
    run = load(model, "shorter_measured", *alike, *trained)
    policy = kit.load_policy(run)
    found = kit.evaluate(run, policy, kit.load_data(run, policy.tokenizer).test)
    row: dict[str, Any] = {"model": model, "recipe": recipe, "seed": seed, "prompts": found.num_prompts}
    row |= {name: one.ends for name, one in found.measures.items() if name in ("accuracy", "thinking_tokens")}
    row["budgets"] = {
        one.tokens: {"accuracy": one.accuracy and one.accuracy.ends, "forced": one.forced_share}
        for one in found.budgets
    }
    own = load(model, folder.name, f"run.seed={seed or 0}", *RECIPES.get(recipe, []))
    its = kit.evaluate(own, policy, kit.load_data(own, policy.tokenizer).test)
    start = ROOT / "outputs" / f"shorter_{model}_before.json"
    if not trained:
        start.write_text(json.dumps(its.to_dict()))
    else:
        row["minutes"] = float((folder / "minutes").read_text())
        if own.rloo.thinking_budget is not None:
            verdict = kit.judge_run(own, load_result(own), Evaluation.read(start), its)
            row["verdict"] = [verdict.kind, verdict.sentence]
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("--model", choices=tuple(CONFIGS), action="append")
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / "shorter_thinking.json")
    given = parser.parse_args()
    settle()
    import rloo_kit as kit

    kit.setup_environment()
    wanted = [(m, r, s) for m in given.model or CONFIGS for s in given.seeds for r in given.recipes]
    if given.what == "train":
        for one in wanted:
            train(*one)
        return
    starts = [(model, "before", None) for model in given.model or CONFIGS]
    rows = json.loads(given.out.read_text())["runs"] if given.out.is_file() else []
    known = [(row["model"], row["recipe"], row["seed"]) for row in rows]
    for one in [*starts, *wanted]:
        if one not in known and (row := measure(*one)) is not None:
            rows.append(row)
            write(header("benchmarks/shorter_thinking.py") | {"runs": rows}, given.out, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
