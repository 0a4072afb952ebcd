"""A step of the kit vs. a step of TRL 1.16 as it is, on SmolLM2-135M; figures go to `results/real_model_speed.json`.

    python -m venv .venv-trl
    .venv-trl/bin/python -m pip install trl==1.16.0 peft==0.21.2 transformers==5.17.0 accelerate==1.15.0 datasets==4.8.5
    python benchmarks/real_model_speed.py --trl-python .venv-trl/bin/python
    python benchmarks/real_model_speed.py --trl-python .venv-trl/bin/python --equal-work --tokens 24
    python benchmarks/real_model_speed.py                # only the kit: where its step goes

TRL's loop runs on a CPU since 1.16, which the kit does not install with: each side is a process of its own environment.
Both run `build_trainer` and differ only in where `RLOOConfig` and `RLOOTrainer` come from. A process is asked for one
step at a time, in turn, so both see the same machine; a step lasts from one `on_step_begin` to the next, logging
included. A first, short step is discarded; each later pair of steps gives a ratio. On a busy machine, compare CPU time.

Equal on both sides: float32 weights, template, prompts and reward (of `configs/smollm2_sums.yaml`), LoRA, batch,
micro-batch, temperature, no KL penalty, one thread. Each side samples its own completions, which end where they end;
TRL's default learning rate leaves the model what it is, so their lengths have one distribution. What differs is what a
user of TRL and of `rloo-kit train` gets: TRL checkpoints gradients by default (so does the kit's drop-in `RLOOConfig`,
for which it is switched off here), and computes the loss of groups with equal rewards, which the kit skips.
`--equal-work` leaves checkpointing out, with a graded reward, so that no group ties.
"""

import argparse
import csv
import json
import os
import re
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "real_model_speed.json"
PACKAGES = ("trl", "transformers", "torch", "peft", "accelerate")
RATIOS = ("cpu_s", "wall_s", "generation_cpu_s", "rest_cpu_s", "cpu_ms_per_token")
LORA = {
    "r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
ARGUMENTS = {
    "learning_rate": 1e-6, "beta": 0.0, "temperature": 1.0, "use_cpu": True, "bf16": False, "seed": 0,
    "shuffle_dataset": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


# --------------------------------------------------------------------------------- a side, in its own environment


def prompt_rows(count: int) -> list[dict[str, Any]]:
    """The first rows of the config's data, as conversations."""
    with (reporting.ROOT / "configs" / "smollm2" / "sums.csv").open(encoding="utf-8") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    return [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": int(row["answer"])} for row in rows]


def last_number(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """The config's reward, of conversations."""
    reward = runpy.run_path(str(reporting.ROOT / "configs" / "smollm2" / "sums_reward.py"))["last_number"]
    return reward([message["content"] for [message] in completions], answer)


def nearness(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """1 if the last number of the text is the answer, less the farther it is off, 0 without one; minus a thousandth
    for each character.

    >>> nearness([[{"content": "2 + 3 = 5."}], [{"content": "6"}], [{"content": "five"}]], [5, 5, 5])
    [0.99, 0.499, -0.004]
    """
    found = []
    for [message], gold in zip(completions, answer, strict=True):
        numbers = re.findall(r"[0-9]+", message["content"])
        near = 1 / (1 + abs(int(numbers[-1][:9]) - gold)) if numbers else 0.0
        found.append(near - len(message["content"]) / 1000)
    return found


def build_trainer(task: dict[str, Any], output: str) -> Any:
    """The trainer of `task["side"]`; see `Side` for the other keys."""
    if task["side"] == "ours":
        from rloo_kit.loop.options import RLOOConfig
        from rloo_kit.loop.trainer import RLOOTrainer
    else:
        from trl import RLOOConfig, RLOOTrainer
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    size, groups = task["generations"], task["prompts"]
    without_checkpointing = {"gradient_checkpointing": False} if task["equal_work"] or task["side"] == "ours" else {}
    arguments = RLOOConfig(
        output_dir=output,
        max_steps=task["steps"],
        max_completion_length=max(task["tokens"]),
        num_generations=size,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=groups,
        **ARGUMENTS,
        **without_checkpointing,
    )
    return RLOOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype="float32"),
        reward_funcs=nearness if task["equal_work"] else last_number,
        args=arguments,
        train_dataset=Dataset.from_list(prompt_rows(groups * task["steps"])),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        peft_config=LoraConfig(**LORA),
    )


def limit(trainer: Any, tokens: int) -> None:
    """Completions of the next step have at most so many tokens."""
    trainer.generation_config.max_new_tokens = tokens
    if hasattr(trainer, "rloo"):
        trainer.rloo.sampler.limits = replace(trainer.rloo.sampler.limits, max_completion_length=tokens)


class Meter:
    """Seconds of sections, each without the sections inside it."""

    def __init__(self) -> None:
        self._spent: Counter[tuple[str, str]] = Counter()
        self._open = ["rest"]
        self._last = self._now()

    @staticmethod
    def _now() -> dict[str, float]:
        return {"wall_s": time.perf_counter(), "cpu_s": time.process_time()}

    def _settle(self) -> None:
        now = self._now()
        for kind, value in now.items():
            self._spent[kind, self._open[-1]] += value - self._last[kind]
        self._last = now

    def wrap(self, owner: Any, method: str, section: str, keep: Any = None) -> None:
        """Time the calls of `owner.method`; `keep` gets their arguments and result."""
        original = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            self._settle()
            self._open.append(section)
            try:
                found = original(*arguments, **keywords)
            finally:
                self._settle()
                self._open.pop()
            if keep is not None:
                keep(arguments, found)
            return found

        setattr(owner, method, timed)

    def take(self) -> dict[str, dict[str, float]]:
        """Seconds since the last call: {"cpu_s": {section: seconds}, "wall_s": ...}."""
        self._settle()
        found: dict[str, dict[str, float]] = {"cpu_s": {}, "wall_s": {}}
        for (kind, section), value in self._spent.items():
            found[kind][section] = round(value, 3)
        self._spent.clear()
        return found


def wrap_sections(meter: Meter, trainer: Any, step: dict[str, Any]) -> None:
    """Sections of a step, and `step` with its prompt_ids, completion_ids and rewards; more sections in the kit's."""

    def keep(given: Any, ids: list[list[int]]) -> None:
        step.update(prompt_ids=given[0], completion_ids=ids)

    meter.wrap(trainer, "_generate_single_turn", "generation", keep)
    meter.wrap(trainer, "_calculate_rewards", "rewards", lambda _, found: step.update(rewards=found.flatten().tolist()))
    if not hasattr(trainer, "rloo"):
        return
    import torch

    from rloo_kit.gradient import logprobs
    from rloo_kit.rollout import decoders, native

    meter.wrap(decoders.FusedDecoder, "__init__", "generation: merge the adapter")
    meter.wrap(decoders.FusedDecoder, "prefill", "generation: prompts")
    meter.wrap(decoders.FusedDecoder, "decode", "generation: layers and head")
    meter.wrap(native, "draw", "generation: draw")
    meter.wrap(trainer.rloo.scorer, "score", "training: forward")
    meter.wrap(logprobs, "score_tokens", "training: head and its gradient")
    meter.wrap(torch.Tensor, "backward", "training: backward")
    meter.wrap(torch.optim.AdamW, "step", "training: optimizer")


def describe(step: dict[str, Any], seconds: dict[str, dict[str, float]], size: int) -> dict[str, Any]:
    """A step's figures, and the prompt_ids to compare; `size`: completions of a group."""
    cpu, lengths, rewards = seconds["cpu_s"], [len(ids) for ids in step["completion_ids"]], step["rewards"]
    groups = [rewards[first : first + size] for first in range(0, len(rewards), size)]
    generation = sum(value for name, value in cpu.items() if name.startswith("generation"))
    figures = {
        "cpu_s": sum(cpu.values()), "wall_s": sum(seconds["wall_s"].values()), "generation_cpu_s": generation,
        "rest_cpu_s": sum(cpu.values()) - generation, "cpu_ms_per_token": 1000 * sum(cpu.values()) / sum(lengths),
        "mean_tokens": statistics.mean(lengths), "mean_reward": statistics.mean(rewards),
        "tied_share": statistics.mean(min(group) == max(group) for group in groups),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }  # fmt: skip
    found: dict[str, Any] = {name: round(value, 3) for name, value in figures.items()}
    return found | {
        "sections_cpu_s": cpu, "prompt_ids": step["prompt_ids"], "versions": {name: version(name) for name in PACKAGES}
    }  # fmt: skip


def work(task: dict[str, Any]) -> None:
    """A side's process: a step for each number of tokens on stdin; its figures, a line of JSON, on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the trainers print goes to stderr
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as output:
        trainer = build_trainer(task, output)
        meter, step = Meter(), dict[str, Any]()
        wrap_sections(meter, trainer, step)

        class Turns(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                if step:
                    print(json.dumps(describe(step, meter.take(), task["generations"])), file=answers, flush=True)
                wanted = sys.stdin.readline()
                if not wanted:
                    os._exit(0)
                limit(trainer, int(wanted))
                meter.take()

        trainer.add_callback(Turns())
        trainer.train()


# --------------------------------------------------------------------------------------------------- both, in turn


def start(side: str, python: str, task: dict[str, Any]) -> subprocess.Popen[str]:
    """A side's process. `task`: model (a folder), tokens (the limits), steps, prompts, generations, equal_work."""
    command = [python, __file__, "--work", json.dumps(task | {"side": side})]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def take_turns(sides: dict[str, subprocess.Popen[str]], tokens: int) -> dict[str, dict[str, Any]]:
    """The figures of a step of each side, on the same prompts."""
    steps = {}
    for name, process in sides.items():
        print(tokens, file=process.stdin, flush=True)
        steps[name] = json.loads(process.stdout.readline())  # type: ignore[union-attr]
        print(f"up to {tokens} tokens, {name}: {steps[name]['cpu_s']:.1f} CPU seconds", flush=True)
    if len({json.dumps(step.pop("prompt_ids")) for step in steps.values()}) > 1:
        raise AssertionError("the sides sampled completions of different prompts")
    return steps


def main() -> int:
    """Measure and write; a row is written after each pair, and those of other lengths stay in the file."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="the interpreter of an environment with TRL 1.16; default: only the kit")
    parser.add_argument("--tokens", type=int, nargs="+", default=[24, 96, 256], help="limits of a completion")
    parser.add_argument("--pairs", type=int, default=3, help="steps of each side at each length, after a discarded one")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--generations", type=int, default=8, help="completions of each")
    parser.add_argument("--equal-work", action="store_true", help="a graded reward, no gradient checkpointing")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results, if both sides are measured")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    from rloo_kit.embedded.smollm2 import build

    task = {name: getattr(options, name) for name in ("tokens", "prompts", "generations", "equal_work")}
    task |= {"model": str(build("smollm2/instruct")), "steps": options.pairs * len(options.tokens) + 2}
    pythons = {"ours": sys.executable} | ({"trl": options.trl_python} if options.trl_python else {})
    sides = {name: start(name, python, task) for name, python in pythons.items()}
    target = options.results or (RESULT if options.trl_python else Path(os.devnull))
    result = json.loads(target.read_text("utf-8")) if target.is_file() else {"rows": []}
    header = reporting.header("benchmarks/real_model_speed.py")
    result |= header | {"lora": LORA, "arguments": ARGUMENTS, "threads": os.environ["OMP_NUM_THREADS"]}
    take_turns(sides, min(24, *options.tokens))
    for tokens in options.tokens:
        row: dict[str, Any] = {"limit": tokens, "equal_work": options.equal_work, "prompts": options.prompts}
        row |= {"generations": options.generations, "revision": header["revision"][:7], "steps": []}
        for _ in range(options.pairs):
            row["steps"].append(take_turns(sides, tokens))
            if "trl" in sides:
                pairs = [(step["trl"], step["ours"]) for step in row["steps"]]
                row["ratios"] = {name: [round(trl[name] / ours[name], 3) for trl, ours in pairs] for name in RATIOS}
            of_row = itemgetter("equal_work", "limit")
            rows = [old for old in result["rows"] if of_row(old) != of_row(row)] + [row]
            result["rows"] = sorted(rows, key=of_row)
            reporting.write(result, target, quiet=True)
    for process in sides.values():
        process.communicate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
