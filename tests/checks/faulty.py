"""Faults that cost a user an hour: files, columns, rewards, folders. Each is found before a model is loaded."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CONFIG = """\
model: {name: embedded/thinking, max_seq_length: 128}
data: {source: mine.csv, test_size: 8, max_prompt_length: 64}
rewards: [{name: answer_reward}]
rloo: {max_steps: 2, num_generations: 4, per_device_train_batch_size: 8, max_completion_length: 48}
"""
GOOD = "def longest(completions, **columns):\n    return [float(len(text)) for text in completions]\n"


@dataclass(frozen=True)
class Faulty:
    """A run that cannot work.

    Attributes:
        name: for people. overrides: of the run in `CONFIG`. words: that the message has, the key among them.
        make: writes what the fault needs into the run's folder, which holds mine.csv, my_rewards.py and run.yaml.
        level: "error", or "warning" where the run may start.
    """

    name: str
    overrides: tuple[str, ...]
    words: tuple[str, ...]
    make: Callable[[Path], object] = lambda folder: None
    level: str = "error"


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def reward(body: str, name: str = "own") -> Callable[[Path], object]:
    return write("my_rewards.py", f"def {name}(completions, **columns):\n{body}")


def two_outputs(folder: Path) -> None:
    (folder / "rm").mkdir()
    (folder / "rm" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForSequenceClassification"]}))


def tools(text: str) -> Callable[[Path], object]:
    return write("my_tools.py", text)


DOC = '    """Add.\n\n    Args:\n        a: a number.\n    """\n'
ADD = f"def add(a: int) -> int:\n{DOC}    return a + 1\n"
# An environment that needs the answer, and a reward that reads what only a run with tools has.
WORLD = (
    "class World:\n    def reset(self, answer, **row):\n        self.left = int(answer)\n\n"
    f"    def take(self, a: int) -> int:\n    {DOC.replace(chr(10) + '    ', chr(10) + '        ')}"
    "        self.left -= a\n        return self.left\n\n"
    "def left(completions, completion_mask, turns, environments, **columns):\n"
    "    assert turns[0][-1]['role'] == 'assistant' and set(completion_mask[0]) <= {1}\n"
    "    return [float(one.left) for one in environments]\n"
)
UNTAUGHT = ("model.name=embedded/untaught", "rloo.tool_result_tokens=20")
TOOL = (*UNTAUGHT, "rloo.tools=['my_tools.py:add']")
IN_WORLD = (*UNTAUGHT, "rloo.environment='my_tools.py:World'", "rewards=[{name: 'my_tools.py:left'}]")
NO_GPU = ("No GPU", "4.02B parameters", "rloo-kit plan", "configs/arithmetic_thinking.yaml")
RM = ("rewards=[{name: reward_model, params: {model: rm}}]",)
OWN = ("rewards=[{name: 'my_rewards:own'}]",)
FAULTS = (
    Faulty("a misspelt file", ("data.source=mine.cvs",), ("data.source", "mine.cvs")),
    Faulty("a misspelt prompt column", ("data.prompt_column=promt",), ("data.prompt_column", "prompt, answer")),
    Faulty("a row without its answer", (), ("mine.csv, line 3", "data.answer_column"),
           write("mine.csv", "prompt,answer\n1+1=,2\n1+2=,\n" + "".join(f"1+{n}=,{n + 1}\n" for n in range(3, 30)))),
    Faulty("fewer prompts than a rollout needs", ("data.num_prompts=9",), ("1 prompt", "per_device_train_batch_size")),
    Faulty("a reward that does not exist", ("rewards.0.name=answer_rewrd",),
           ("rewards.0.name", "'answer_reward'? Known")),
    Faulty("a parameter that a reward has not", ("rewards.0.params={fnd: boxed}",),
           ("rewards.0.params.fnd", "'find'?")),
    Faulty("a module that is not there", ("rewards.0.name='my_reward:own'",),
           ("rewards.0.name", "no module 'my_reward'")),
    Faulty("a syntax error in a reward", OWN, ("SyntaxError", "my_rewards.py, line 1", "def own(completions:"),
           write("my_rewards.py", "def own(completions:\n    return []\n")),
    Faulty("a reward that fails on an empty completion", OWN,
           ("rewards.0.name", "that is empty", "IndexError", "my_rewards.py, line 2"),
           reward("    return [float(text[0] == '4') for text in completions]\n")),
    Faulty("a reward that needs a column that is not there", OWN, ("rewards.0.name", "'level'", "answer"),
           write("my_rewards.py", "def own(completions, level):\n    return [1.0] * len(completions)\n")),
    Faulty("a reward that returns None always", OWN, ("rewards", "None", "data.answer_column"),
           reward("    return [None] * len(completions)\n"), "warning"),
    Faulty("a reward that is the same for everything", OWN, ("rewards", "nonsense", "teaches nothing"),
           reward("    return [1.0] * len(completions)\n"), "warning"),
    Faulty("a reward model that is not trained yet",
           ("rewards=[{name: reward_model, params: {model: outputs/run-reward-model/reward_model}}]",),
           ("rewards.0.params.model", "no such folder", "rloo-kit reward-model")),
    Faulty("a reward model with two outputs", RM, ("rewards.0.params.model", "2 outputs", "rloo-kit reward-model"),
           two_outputs),
    Faulty("a judge that does not answer",
           ("rewards=[{name: judge_reward, params: {url: 'http://127.0.0.1:9/v1', model: any}}]",),
           ("rewards.0.params", "http://127.0.0.1:9/v1")),
    Faulty("a template without tools", (*TOOL, "model.name=embedded/thinking"),
           ("rloo.tools", "chat template", "leaves the tools out"), tools(ADD)),
    Faulty("a result as long as a completion", (*TOOL, "rloo.tool_result_tokens=48"),
           ("rloo.tool_result_tokens=12", "rloo.max_completion_length"), tools(ADD), "warning"),
    Faulty("an environment that cannot start", IN_WORLD,
           ("rloo.environment: World", "prompt, answer", "ValueError", "my_tools.py, line 3"),
           tools(WORLD.replace("int(answer)", "int('x' + answer)"))),
    Faulty("an observation that is too long", IN_WORLD, ("data.max_prompt_length=64", "'board board", "a prompt has"),
           tools(WORLD.replace("int(answer)", "int(answer)\n        return 'board ' * 30"))),
    Faulty("an environment of verifiers without the package",
           (*UNTAUGHT, "rloo.environment=verifiers/wordle"), ("rloo.environment", "pip install 'verifiers")),
    Faulty("a measure that no reward has", ("eval.every_steps=1", "eval.measure=acuracy"),
           ("eval.measure", "accuracy")),
    Faulty("a tracker that is not installed", ("rloo.report_to=swanlab_",), ("rloo.report_to",)),
    Faulty("a model's folder that is not there", ("model.name=./models/mine",), ("model.name", "no such folder")),
    Faulty("a run's folder for its adapter", ("model.adapter=old",),
           ("model.adapter=old/adapter", "adapter_config.json"),
           lambda folder: ((folder / "old/adapter").mkdir(parents=True),
                           (folder / "old/adapter/adapter_config.json").write_text("{}"))),
    Faulty("a 4B model and no GPU", ("model.name=Qwen/Qwen3-4B-Thinking-2507", "rloo.max_steps=9999"), NO_GPU),
    Faulty("a thinking budget for a model that does not think",
           ("model.name=embedded/instruct", "rloo.thinking_budget=16"),
           ("rloo.thinking_budget=null", "does not think")),
    Faulty("a folder that holds something else", (), ("outputs/run", "run.name", "run.output_dir"),
           lambda folder: ((folder / "outputs/run").mkdir(parents=True), (folder / "outputs/run/thesis.txt").touch())),
    Faulty("more checkpoints than the disk holds",
           ("model.name=Qwen/Qwen3-32B", "model.lora=null", "model.max_seq_length=512", "rloo.save_total_limit=1000"),
           ("rloo.save_total_limit", "run.output_dir")),
)  # fmt: skip


def prepare(folder: Path, fault: Faulty) -> Path:
    """The run's file, in a folder that has the fault."""
    rows = [f"{first}+{second}=,{first + second}\n" for first in range(10, 18) for second in range(20, 28)]
    (folder / "mine.csv").write_text("prompt,answer\n" + "".join(rows), encoding="utf-8")
    (folder / "my_rewards.py").write_text(GOOD, encoding="utf-8")
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    fault.make(folder)
    return folder / "run.yaml"
