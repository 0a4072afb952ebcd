"""Whether a change keeps every result: runs a list of commands on this checkout and writes what came of them, bit by bit.

`python tests/frozen_baseline.py OUT.json [NAME ...]` runs them; `... --compare A.json B.json` lists what differs.
"""

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = f"{ROOT}/configs/arithmetic_thinking.yaml"
TOOLS = f"{ROOT}/configs/tools_calculator.yaml"
SMALL = ["data.num_prompts=400", "data.test_size=40", "rloo.per_device_train_batch_size=32", "eval.num_prompts=24"]
SMALL += ["run.progress_every_s=0", "rloo.report_to=none"]
REWARDS = """
import asyncio
CALLS = []
def even(completions, completion_ids, log_extra=None, log_metric=None, trainer_state=None, **columns):
    log_metric("evens", sum(len(ids) % 2 == 0 for ids in completion_ids))
    log_extra("size", [len(ids) for ids in completion_ids])
    return [float(len(ids) % 2 == 0) for ids in completion_ids]
async def slow(completions, thinking_forced=None, **columns):
    await asyncio.sleep(0.001)
    return [None if len(text) % 3 == 0 else 0.1 * len(text) for text in completions]
def bad(completions, answer, **columns):
    return [1 / (not text.startswith("</think>")) for text in completions]
def awful(completions, **columns):
    if any(text and "think." not in text for text in completions):
        raise ValueError("always")
    return [0.0] * len(completions)
def columns(completions, **more):
    return [float(len(more) % 5)] * len(completions)
"""
OFF = ["rloo.beta=0.02", "rloo.thinking_budget=12", "rloo.answer_budget=8", "rloo.num_iterations=2",
       "rloo.gradient_accumulation_steps=1", "rloo.steps_per_generation=2", "rloo.per_device_train_batch_size=16",
       "rollout.resample_rounds=1", "rloo.sampler_correction=token", "eval.every_steps=2", "eval.every_prompts=16",
       "eval.thinking_budgets=[8]", "eval.num_samples=2", "rloo.missing_eos_penalty=0.5"]  # fmt: skip
RUNS: dict[str, list[list[str]]] = {
    "demo": [["train", DEMO, *SMALL, "rloo.max_steps=6"]],
    "off": [["train", DEMO, *SMALL, *OFF, "rloo.max_steps=6",
             "rewards=[{name: answer_reward}, {name: my.py:even, weight: 0.3}, {name: my.py:slow, weight: 0}, "
             "{name: length_reward, weight: 0.1}, {name: my.py:columns, weight: 0}]"]],
    "fails": [["train", DEMO, *SMALL, "rloo.max_steps=4", "run.max_reward_failure_share=0.9",
               "rewards=[{name: answer_reward}, {name: my.py:bad}]"],
              ["train", DEMO, *SMALL, "rloo.max_steps=4", "run.name=awful", "run.reward_failure_steps=2",
               "rewards=[{name: answer_reward}, {name: my.py:awful}]", "run.evaluate=false"]],
    "difficulty": [["train", DEMO, *SMALL, "rloo.max_steps=2", "rollout.difficulty_samples=3",
                    "rloo.thinking_budget=16", "eval.greedy=false"]],
    "tools": [["sft", TOOLS, "sft.max_steps=150", "data.num_prompts=3000", "data.test_size=20", "eval.num_prompts=8"],
              ["train", TOOLS, *SMALL, "rloo.max_steps=3", "rloo.num_generations=4",
               "model.name=outputs/tools_calculator-sft/adapter"],
              ["ask", "outputs/tools_calculator", "1234+4321="]],
    "gym": [["train", f"{ROOT}/configs/reasoning_gym_chain_sum.yaml", *SMALL, "rloo.max_steps=2"]],
    "preflight": [["preflight", DEMO, *SMALL, "rloo.thinking_budget=16"],
                  ["preflight", DEMO, *SMALL, "rewards=[{name: my.py:awful}]"],
                  ["preflight", DEMO, *SMALL, "data.answer_column=nothing", "rloo.beta=0.1", "rewards=[{name: answer}]"]],
    "ask": [["train", DEMO, *SMALL, "rloo.max_steps=2", "run.evaluate=false"],
            ["ask", "outputs/arithmetic_thinking", "12+34=", "--base"],
            ["ask", "outputs/arithmetic_thinking", "12+34=", "--budget", "8"],
            ["eval", DEMO, *SMALL, "eval.num_prompts=16"]],
    "sft": [["sft", f"{ROOT}/configs/sft_arithmetic.yaml", "sft.max_steps=4", "eval.num_prompts=16", "rloo.max_steps=2"]],
    "smollm2": [["train", f"{ROOT}/configs/smollm2_sums.yaml", "rloo.max_steps=2", "data.test_size=12",
                 "rloo.per_device_train_batch_size=16", "rloo.num_generations=8", "rloo.max_completion_length=16",
                 "eval.num_prompts=8", "run.progress_every_s=0"]],
}  # fmt: skip
TIME = re.compile(r"seconds|_s$|per_second|energy|time|^run$|runtime|hours|flos|gib|^peak|memory|^id$|began|digest|inputs|eps|pid|updated|command")


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not TIME.search(key)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def words_of(text: str, folder: str) -> list[str]:
    text = text.replace(folder, "FOLDER").replace(str(ROOT), "ROOT")
    text = re.sub(r"\b\d+(\.\d+)? ?(s|ms|min|h|GiB|GB|Wh|tokens/s|tok/s|it/s|%)\b", "TIME", text)
    text = re.sub(r"\d+:\d+(:\d+)?|\b[0-9a-f]{8,}\b", "CLOCK", text)
    text = re.sub(r"(eta|took|about) [\d.,]+ ?\w*", "TIME", text)
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip() and "it/s" not in line and "s/it" not in line]


def digest(path: Path) -> str:
    from safetensors.torch import load_file

    found = hashlib.sha256()
    for name, value in sorted(load_file(str(path)).items()):
        found.update(name.encode() + value.float().numpy().tobytes())
    return found.hexdigest()


def run(name: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "my.py").write_text(REWARDS)
        if name == "tools":
            subprocess.run([sys.executable, ROOT / "configs/tools/sums.py"], cwd=folder, check=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
        for number, words in enumerate(RUNS[name]):
            command = [sys.executable, "-m", "rloo_kit.cli", *words]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
            results[f"{number} code"] = done.returncode
            results[f"{number} out"] = words_of(done.stdout, folder)
            results[f"{number} err"] = words_of(done.stderr, folder)
        for path in sorted(Path(folder, "outputs").rglob("*")):
            place = str(path.relative_to(folder))
            if path.suffix == ".safetensors" and "optimizer" not in place:
                results[place] = digest(path)
            elif path.suffix == ".jsonl":
                results[place] = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
            elif path.name.endswith(".jsonl.gz"):
                import gzip

                results[place] = [without_times(json.loads(line)) for line in gzip.open(path, "rt")]
            elif path.name in ("before.json", "after.json", "status.json", "sft.json", "prompts.json"):
                results[place] = without_times(json.loads(path.read_text()))
            elif path.is_file():
                results.setdefault("files", []).append(place)
    return results


def compare(first: Any, second: Any, place: str = "") -> list[str]:
    if place.endswith((" out", " err")):
        progress = re.compile(r"^step |^evaluation|^loading|measured|\d+ of \d+ completions$|│ memory|TIME of")
        sides = [[line for line in side or [] if not progress.search(line)] for side in (first, second)]
        return [f"{place}: {line}" for line in difflib.unified_diff(*sides, lineterm="", n=0)]
    if isinstance(first, dict) and isinstance(second, dict):
        return [line for key in sorted({*first, *second}) for line in compare(first.get(key), second.get(key), f"{place}/{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [line for number, pair in enumerate(zip(first, second)) for line in compare(*pair, f"{place}/{number}")]
    same = first == second or (first != first and second != second)
    return [] if same else [f"{place}: {str(first)[:300]} -> {str(second)[:300]}"]


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        sides = [json.loads(Path(path).read_text()) for path in sys.argv[2:4]]
        lines = [line for name in sides[1] for line in compare(sides[0].get(name), sides[1][name], name)]
        print("\n".join(lines) or "equal")
        sys.exit(bool(lines))
    out = Path(sys.argv[1])
    found = {name: run(name) for name in sys.argv[2:] or RUNS}
    out.write_text(json.dumps(found))
