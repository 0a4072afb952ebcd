"""Do the health rules name the fault of a failing run, and nothing else? Runs of the embedded model that are made to
fail, and healthy ones, and one of each of SmolLM2, a real model; figures go to `results/health_runs.json`.

    python benchmarks/health_runs.py                        # all of them, one after the other
    python benchmarks/health_runs.py --only limit coin      # some; the others stay in the file
    python benchmarks/health_runs.py --series tests/health/series     # and their rows, for tests/health/test_health.py

Each run goes through `rloo-kit train`. A failing one is found if the rule of its fault is among the findings within 20
steps of the fault's onset (the first step that has it); a healthy one must be silent to its end. The rules' windows and
limits were fixed before these runs, with other seeds. Exit code 1 if one misses.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reporting
from reporting import RESULTS, ROOT

RESULT = RESULTS / "health_runs.json"
WITHIN = 20  # steps after the onset
STEPS = 22


@dataclass(frozen=True)
class HealthRun:
    """One run.

    Attributes:
        fault: in words. rule: that has to find it; empty for a healthy run. onset: the first step with the fault.
        overrides: of the config. rewards: (name, weight), in place of the config's.
    """

    name: str
    fault: str
    rule: str
    overrides: tuple[str, ...] = ()
    rewards: tuple[tuple[str, float], ...] = ()
    onset: int = 1
    config: str = "arithmetic_thinking"

    @property
    def words(self) -> list[str]:
        """The overrides, with the rewards as one of them."""
        listed = ", ".join(f"{{name: {name}, weight: {weight}}}" for name, weight in self.rewards)
        steps = [f"rloo.max_steps={STEPS}"] * bool(self.rule)  # an override of its own comes later and holds
        return [*steps, *self.overrides, *([f"rewards=[{listed}]"] if listed else [])]


RUNS = (
    # On a model that is right half of the time, because the demo's reward cannot fall far.
    HealthRun(
        "rate", "learning rate 0.3", "broken_policy",
        ("rloo.learning_rate=0.3", "model.name=embedded/thinking@subtraction", "data.source=embedded/subtraction"),
    ),
    HealthRun("limit", "6 tokens to think and answer", "truncation", ("rloo.max_completion_length=6",)),
    HealthRun("wrong", "every answer of the data is wrong", "cold_start", ("data.source=wrong.jsonl",)),
    HealthRun("still", "learning rate 1e-9", "no_movement", ("rloo.learning_rate=1e-9",)),
    HealthRun("none", "the reward returns None from step 9 on", "all_none", (), (("health_rewards:none_later", 1),), 9),
    HealthRun("raises", "the reward raises on 60 %", "reward_failures", (), (("health_rewards:raises_often", 1),)),
    HealthRun(
        "longer", "a reward for length, learning rate 1e-2", "length_explosion",
        ("rloo.learning_rate=1e-2", "rloo.temperature=1.3"), (("health_rewards:longer", 1),),
    ),
    HealthRun("shorter", "a reward for brevity", "length_collapse", (), (("health_rewards:shorter", 1),)),
    HealthRun(
        "seven", "a reward for an answer that ends in 7, five times the right one's", "reward_hacking",
        ("rloo.learning_rate=5e-3",), (("health_rewards:ends_in_seven", 1), ("answer_reward", 0.2)),
    ),
    HealthRun(
        "one_answer", "a reward for one fixed answer, learning rate 1.2e-2", "entropy_collapse",
        ("rloo.learning_rate=1.2e-2",), (("health_rewards:one_answer", 1),), 1, "arithmetic_instruct",
    ),
    HealthRun(
        "kl", "a reward for a digit, learning rate 5e-3, beta 0.001", "kl_explosion",
        ("rloo.learning_rate=5e-3", "rloo.beta=0.001"), (("health_rewards:sevens", 1),),
    ),
    HealthRun(
        "circles", "a reward for repeating, learning rate 1e-2", "repetition",
        ("rloo.learning_rate=1e-2", "rloo.temperature=1.3"), (("health_rewards:circles", 1),),
    ),
    HealthRun("open", "a reward that is never earned", "no_signal", (), (("health_rewards:left_open", 1),)),
    HealthRun("coin", "the reward is a coin", "nothing_learnt", ("rloo.max_steps=30",), (("health_rewards:coin", 1),)),
    HealthRun(
        "real_rate", "SmolLM2: learning rate 3e-3", "broken_policy",
        ("rloo.learning_rate=3e-3", "rloo.lr_scheduler_type=constant", "rloo.max_steps=16"), (), 1, "smollm2_sums",
    ),
    HealthRun("healthy", "none", "", ("run.seed=1",)),
    HealthRun(
        "healthy_beta", "none: beta 0.05", "", ("run.seed=2", "rloo.beta=0.05", "rloo.kl_form=length_normalized"),
    ),
    HealthRun("healthy_k4", "none: K 4", "", ("run.seed=3", "rloo.num_generations=4")),
    HealthRun(
        "healthy_instruct", "none: without thinking", "", ("run.seed=4", "rloo.max_steps=60"), (), 1,
        "arithmetic_instruct",
    ),
    HealthRun(
        "healthy_reused", "none: temperature 0.8, each rollout used twice", "",
        ("run.seed=5", "rloo.temperature=0.8", "rloo.num_iterations=2"),
    ),
    HealthRun(
        "healthy_format", "none: two rewards", "", ("run.seed=6",),
        (("answer_reward", 1), ("think_format_reward", 0.2)),
    ),
    HealthRun(  # with room to end: at the config's 24 tokens most completions are cut off at first
        "real_healthy", "SmolLM2: none", "",
        ("rloo.max_completion_length=40", "model.max_seq_length=112", "rloo.per_device_train_batch_size=32",
         "rloo.learning_rate=9e-4"),
        (), 1, "smollm2_sums",
    ),
)  # fmt: skip


def make_folder(folder: Path) -> None:
    """The configs, the rewards next to them, and additions with wrong answers."""
    shutil.copytree(ROOT / "configs", folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "benchmarks" / "health_rewards.py", folder)
    draw = random.Random(0)
    pairs = [(draw.randrange(10, 1000), draw.randrange(10, 1000)) for _ in range(2000)]
    rows = [{"prompt": f"{one}+{two}=", "answer": str(one + two + 5000)} for one, two in pairs]
    (folder / "wrong.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_one(one: HealthRun, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train; returns the findings in `health.jsonl` and the rows of metrics."""
    words = ["train", str(folder / f"{one.config}.yaml"), f"run.output_dir={folder}", f"run.name={one.name}"]
    words += ["run.evaluate=false", "run.report=false", "run.sample_every_steps=0", "--overwrite", *one.words]
    words = [word.replace("source=wrong", f"source={folder}/wrong") for word in words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rloo_kit.cli", *words], capture_output=True, text=True, check=False, env=environment
    )
    rows, findings = (read_rows(folder / one.name / name) for name in ("metrics.jsonl", "health.jsonl"))
    if not rows:
        raise RuntimeError(f"{one.name} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    print(f"{one.name}: {len(rows)} steps, exit code {done.returncode}", flush=True)
    return judge(one, findings) | {
        "revision": reporting.git("rev-parse", "HEAD"), "steps": rows[-1]["step"], "exit_code": done.returncode,
        "wall_s": round(time.monotonic() - begun, 1),
    }, rows  # fmt: skip


def judge(one: HealthRun, findings: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the findings are the expected ones."""
    own = next((found for found in findings if found["rule"] == one.rule), None)
    found_after = None if own is None else own["step"] - one.onset
    others = [found["rule"] for found in findings if found is not own]
    holds = not findings if not one.rule else found_after is not None and found_after <= WITHIN
    return {
        "name": one.name, "fault": one.fault, "rule": one.rule, "onset": one.onset, "overrides": one.words,
        "found": own and own["step"], "since": own and own["since"], "evidence": own and own["evidence"],
        "explains": own["explains"] if own else [], "others": others, "holds": holds,
    }  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def write_series(one: HealthRun, rows: list[dict[str, Any]], folder: Path) -> None:
    """Write the metrics that the rules read, rounded, after a line about the run."""
    from rloo_kit.health.rules import RULES

    read = {"step", *(name for rule in RULES.values() for name in rule.metrics)}
    kept = [
        {
            name: value if isinstance(value, int) or value is None else float(f"{value:.4g}")
            for name, value in row.items()
            if name in read or name.startswith("rewards/")
        }
        for row in rows
    ]
    config = [word for word in one.words if word.startswith(("rloo.", "model.max_seq_length"))]
    head = {"fault": one.fault, "rule": one.rule, "onset": one.onset, "config": one.config, "overrides": config}
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in [head, *kept])
    (folder / f"{one.name}.jsonl").write_text(lines, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the selected runs and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[one.name for one in RUNS])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--series", type=Path, help="a folder for the rows that the rules read")
    options = parser.parse_args(arguments)
    result = reporting.header("benchmarks/health_runs.py") | {"within_steps": WITHIN, "runs": []}
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        for one in (one for one in RUNS if not options.only or one.name in options.only):
            found, rows = run_one(one, Path(name))
            result["runs"].append(found)
            if options.series is not None:
                write_series(one, rows, options.series)
    if options.only and options.out.is_file():  # the others keep theirs
        kept = {found["name"]: found for found in json.loads(options.out.read_text(encoding="utf-8"))["runs"]}
        kept |= {found["name"]: found for found in result["runs"]}
        result["runs"] = [kept[one.name] for one in RUNS if one.name in kept]
    reporting.write(result, options.out)
    for found in result["runs"]:
        print(f"{found['name']}: {'held' if found['holds'] else 'MISSED'}, found {found['found']}, {found['others']}")
    return 0 if all(found["holds"] for found in result["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
