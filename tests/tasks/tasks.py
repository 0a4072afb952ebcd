"""Nine kinds of tasks: rows of data, rewards, and what the verdict on a short run has to be."""

import json
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROWS = 320
STEPS = 6
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
        kinds: the verdicts that are true. advice: one of these has to be in the advice; none: there must be none.
        greedy: whether the evaluations are also greedy.
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
    steps: int = STEPS
    greedy: bool = False


def literal(a: int, b: int) -> str:
    """The sum as text."""
    return str(a + b)


RIGHT = ({"name": "rewards.py:right"},)
TASKS = (
    Task("literal", literal, "", ({"name": "answer_reward"},), 0, 1, leads="accuracy", greedy=True),
    Task("sentence", lambda a, b: f"The sum is {a + b}.", right("number(answer)"), RIGHT, 0, 1),
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
        greedy=True,
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
        steps=8,
        greedy=True,
    ),
    Task(  # a newcomer's: no answer is ever right, the form is paid for, and the completions are cut off
        "newcomer",
        lambda a, b: str(a + b + 1000),
        """
def long(completions, **_):
    return [min(size(text), 60) / 60 for text in completions]
""",
        ({"name": "answer_reward"}, {"name": "rewards.py:long", "weight": 0.5}),
        0,
        1.5,
        leads="accuracy",
        kinds=("no evidence",),
        advice=("rloo.max_completion_length", "easier prompts"),
        steps=14,
        greedy=True,
    ),
    Task(
        "thinking",
        None,
        "",
        ({"name": "thinking_reward"},),
        -1,
        1.1,
        steps=22,  # long enough for the moving means of the curves
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
    ),
)  # fmt: skip
BY_NAME = {task.name: task for task in TASKS}


def write_task(task: Task, folder: Path) -> Path:
    """Write the task's data, rewards and config into `folder`; returns the config."""
    rng = random.Random(f"{task.name}-toy")
    pairs = rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], ROWS)
    rows = [{"prompt": f"{a}+{b}="} | ({} if task.answer is None else {"answer": task.answer(a, b)}) for a, b in pairs]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    (folder / "rewards.py").write_text(HELPER + textwrap.dedent(task.source), encoding="utf-8")
    rloo = {"max_steps": task.steps, "learning_rate": 5e-3, "max_completion_length": 28}
    evaluation = {"batch_size": 120, "every_steps": 3, "every_prompts": 40}
    values = {
        "model": {"name": "embedded/thinking", "max_seq_length": 128},
        "data": {"test_size": 120, "max_prompt_length": 64, "source": str(folder / "rows.jsonl")},
        "rewards": [dict(entry) for entry in task.rewards],
        "rloo": rloo | {"num_generations": 4, "per_device_train_batch_size": 32},
        "eval": evaluation | {"greedy": task.greedy},
        "run": {"name": task.name, "output_dir": str(folder / "outputs"), "progress_every_s": 0.001}
        | {"sample_every_steps": 0},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path
