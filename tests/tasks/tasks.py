"""Ten kinds of tasks: rows of data, rewards, and what the verdict on a short run has to be."""

import json
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROWS = 320
STEPS = {"toy": 8, "real": 3}
# The shared part of the reward files: the last whole number after the thinking.
HELPER = '''
import re


def size(text):
    """Characters that are no white space."""
    return len("".join(text.split()))


def number(text):
    """The last whole number of a text, without the thinking; None if there is none."""
    found = re.findall(r"-?[0-9]+", str(text).rpartition("</think>")[2])
    return int(found[-1]) if found else None
'''


def right(expected: str) -> str:
    """The source of a reward `right`: 1.0 if the completion's last number equals the expression `expected`."""
    return f"""
def right(completions, answer, **_):
    return [1.0 if number(text) == {expected} else 0.0 for text, answer in zip(completions, answer)]
"""


@dataclass(frozen=True)
class Task:
    """One kind of task.

    Attributes:
        name: of the task and its folder.
        answer: the answer column's value for two summands; None: there is no such column.
        source: of `rewards.py`, after HELPER. rewards: the entries of the run's `rewards:`; NAME is a function of it.
        low, high: range of the weighted sum.
        leads: the measure that leads the verdict: "accuracy" or "reward".
        kinds: the verdicts that are true on the toy. advice: one of these has to be in the advice; none: there must
            be none.
        real_kinds: the verdicts that three steps on the real model may have.
        steps: on the toy. overrides: keys of the config by model.
    """

    name: str
    answer: Callable[[int, int], Any] | None
    source: str
    rewards: tuple[dict[str, Any], ...]
    low: float
    high: float
    leads: str = "reward"
    kinds: tuple[str, ...] = ("learnt",)
    advice: tuple[str, ...] = ()
    real_kinds: tuple[str, ...] = ("learnt", "no evidence", "no signal", "broken")
    steps: int = STEPS["toy"]
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)


def literal(a: int, b: int) -> str:
    """The sum as text."""
    return str(a + b)


RIGHT = ({"name": "rewards.py:right"},)
TASKS = (
    Task("literal", literal, "", ({"name": "answer_reward"},), 0, 1, leads="accuracy",
         overrides={"toy": {"eval.greedy": True}}),
    Task("sentence", lambda a, b: f"The sum is {a + b}.", right("number(answer)"), RIGHT, 0, 1),
    Task("marker", lambda a, b: f"{a} + {b} = {a + b} #### {a + b}", right('number(answer.split("####")[1])'), RIGHT,
         0, 1),
    Task("json", lambda a, b: {"sum": a + b, "terms": [a, b]}, right('answer["sum"]'), RIGHT, 0, 1),
    Task(
        "penalty",
        literal,
        """
def penalty(completions, answer, **_):
    \"\"\"0 for the right number, -0.5 for one within ten, -1 for any other.\"\"\"
    values = []
    for text, gold in zip(completions, answer):
        off = 99 if number(text) is None else abs(number(text) - int(gold))
        values.append(0.0 if off == 0 else -0.5 if off <= 10 else -1.0)
    return values
""",
        ({"name": "rewards.py:penalty"},),
        -1,
        0,
        overrides={"toy": {"eval.greedy": True}},
    ),
    Task(
        "several",
        literal,
        """
def has_work(completions, **_):
    \"\"\"1.0 if a line with a sum comes before the last one.\"\"\"
    return [1.0 if "=" in text else 0.0 for text in completions]


def length(completions, **_):
    return [-min(size(text), 100) / 100 for text in completions]
""",
        (
            {"name": "answer_reward"},
            {"name": "rewards.py:has_work", "weight": 0.3},
            {"name": "rewards.py:length", "weight": 0.1},
        ),
        -0.1,
        1.3,
        leads="accuracy",
    ),
    Task(
        "no_answers",
        None,
        """
def long(completions, **_):
    return [min(size(text), 40) / 40 for text in completions]
""",
        ({"name": "rewards.py:long"},),
        0,
        1,
        overrides={"toy": {"eval.greedy": True}},
    ),
    Task(
        "thinking",
        None,
        "",
        ({"name": "thinking_reward"},),
        -1,
        1.1,
        steps=22,  # long enough for the moving means of the curves
        overrides={"real": {"model.name": "smollm2/thinking"}},
    ),
    Task(
        "solved",
        literal,
        """
def not_empty(completions, **_):
    return [1.0 if re.search("[0-9A-Za-z]", text) else 0.0 for text in completions]
""",
        ({"name": "rewards.py:not_empty"},),
        0,
        1,
        kinds=("no evidence", "no signal"),
        advice=("harder prompts",),
        real_kinds=("no evidence", "no signal"),
    ),
    Task(
        "never",
        literal,
        """
def zebra(completions, **_):
    return [1.0 if "zebra" in text else 0.0 for text in completions]
""",
        ({"name": "rewards.py:zebra"},),
        0,
        1,
        kinds=("no signal",),
        advice=("solved sometimes", "graded reward"),
        real_kinds=("no signal",),
    ),
)  # fmt: skip
BY_NAME = {task.name: task for task in TASKS}

QUESTIONS = {"toy": "{a}+{b}=", "real": "What is {a} + {b}? Answer in one short sentence."}
MODELS = {
    "toy": {
        "model": {"name": "embedded/thinking", "max_seq_length": 128},
        "data": {"test_size": 120, "max_prompt_length": 64},
        "rloo": {"learning_rate": 5e-3, "max_completion_length": 28},
        "eval": {"batch_size": 120, "every_steps": 4, "every_prompts": 40},
    },
    "real": {
        "model": {"name": "smollm2/instruct", "max_seq_length": 128},
        "data": {"test_size": 24, "max_prompt_length": 80},
        "rloo": {"learning_rate": 1e-3, "max_completion_length": 24},
        "eval": {"batch_size": 24, "every_steps": 2, "every_prompts": 12},
    },
}


def write_task(task: Task, model: str, folder: Path) -> Path:
    """Write the task's data, rewards and config into `folder`, for the toy or the real `model`; returns the config."""
    rng = random.Random(f"{task.name}-{model}")
    pairs = rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], ROWS)
    rows = []
    for a, b in pairs:
        row = {"prompt": QUESTIONS[model].format(a=a, b=b)}
        rows.append(row if task.answer is None else row | {"answer": task.answer(a, b)})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    (folder / "rewards.py").write_text(HELPER + textwrap.dedent(task.source), encoding="utf-8")
    values: dict[str, Any] = json.loads(json.dumps(MODELS[model]))
    values["data"]["source"] = str(folder / "rows.jsonl")
    values["rewards"] = [dict(entry) for entry in task.rewards]
    steps = task.steps if model == "toy" else STEPS["real"]
    values["rloo"] |= {"max_steps": steps, "num_generations": 4, "per_device_train_batch_size": 32}
    values["eval"] |= {"greedy": False, "num_completions": 4, "save_best": False}
    values["run"] = {"name": task.name, "output_dir": str(folder / "outputs"), "progress_every_s": 0.001}
    values["run"] |= {"sample_every_steps": 0}
    for key, value in task.overrides.get(model, {}).items():
        section, option = key.split(".")
        values[section][option] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path
