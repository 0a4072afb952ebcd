"""What a run prints in a notebook: read in the saved notebook and in the log of a real papermill.

The flow is a user's: set-up, a model that is built, a dataset that is mapped, evaluation, training with tables of
samples, a report, and TRL's trainer used directly. The model is a cold start of a few steps, which learns nothing.
"""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks.runners import COMMANDS, LIMIT_S, call, write_cells

pytestmark = [pytest.mark.slow, pytest.mark.long]

CELLS = """
import time
import rloo_kit as kit
print(kit.setup_environment())
# %%
from rloo_kit.system import console; from rloo_kit.demo.embedded import build
folder = build(steps=30)
# %%
quick = ["rloo.max_steps=3", "rloo.per_device_train_batch_size=8", "run.sample_every_steps=2", "eval.greedy=false"]
quick += ["data.num_prompts=48", "data.test_size=8", "eval.num_prompts=8", "run.output_dir=outputs"]
run = kit.load_config(CONFIG, f"model.name={folder}", *quick)
policy = kit.load_policy(run)
data = kit.load_data(run, policy.tokenizer)
reward_funcs = kit.build_rewards(run, policy.tokenizer)
# %%
before = kit.evaluate(run, policy, data.test, label="before")
print(before)
# %%
result = kit.train(run, policy, data, reward_funcs)
# %%
after = kit.evaluate(run, policy, data.test, label="after")
print(kit.compare(before, after))
kit.write_report(run, result, before, after)
# %%
console.INTERVAL_S = 1.0  # of bars; the test is in a hurry
mapped = data.train.map(lambda row: time.sleep(0.1) or {"x": 1})
# %%
arguments = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False, "max_completion_length": 48}
arguments |= {"per_device_train_batch_size": 8, "max_steps": 2, "logging_steps": 1, "output_dir": "outputs/plain"}
trainer = kit.RLOOTrainer(
    policy.model, reward_funcs, kit.RLOOConfig(**arguments), data.train, processing_class=policy.tokenizer
)
trainer.train()
"""
ENVIRONMENT, BUILD, LOAD, BEFORE, TRAIN, AFTER, MAP, TRAINER = range(8)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> tuple[Any, str]:
    """The saved notebook, and papermill's log."""
    folder = tmp_path_factory.mktemp("progress")
    source = CELLS.replace("CONFIG", repr(str(repository / "configs/arithmetic_thinking.yaml")))
    write_cells(source.split("# %%\n"), folder)
    command = [str(word).replace("IN.", "in.") for word in (*COMMANDS["papermill"], "--log-output")]
    ended = call(command, folder, 2 * LIMIT_S, RLOO_KIT_CACHE=folder / "cache")
    assert ended.exit_code == "0", ended.log[-3000:]
    return nbformat.read(folder / "out.ipynb", as_version=4), ended.log


def printed(notebook: Any, cell: int) -> list[str]:
    """The lines of a cell's streams."""
    texts = [output.text for output in notebook.cells[cell].outputs if output.output_type == "stream"]
    return "".join(texts).splitlines()


def test_only_text_is_in_the_saved_notebook(ran: tuple[Any, str]) -> None:
    """Evaluations and sample tables were HTML, which no text tool reads; transformers' training table was an
    `<IPython.core.display.HTML object>` in the log; stderr is shown as an error."""
    notebook, log = ran
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result"}
    assert {name for output in outputs for name in output.get("data", {})} <= {"text/plain"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    assert "HTML object" not in log and "IPython.core.display" not in log and "widget" not in log.lower()


def test_lines_are_whole_and_nothing_is_redrawn(ran: tuple[Any, str]) -> None:
    """A redrawn bar is a carriage return each tenth of a second in the log, and frozen at 0 % in the notebook.

    The outputs of a cell are read joined: `print` writes text and line break separately, and the kernel may flush in
    between.
    """
    notebook, log = ran
    for cell in notebook.cells:
        text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        assert not text or text.endswith("\n"), text
    text = log + "".join(line for number in range(len(notebook.cells)) for line in printed(notebook, number))
    assert "\r" not in text and "\x1b" not in text and "█" not in text
    assert not re.search(r"(?<![\d.])0%\|", text) and "Loading weights" not in text
    assert max(len(line) for number in (ENVIRONMENT, BEFORE, TRAIN) for line in printed(notebook, number)) <= 100


def test_training_says_where_it_is(ran: tuple[Any, str]) -> None:
    """The one thing that people look for, in the notebook and in the log: steps, then samples as a table."""
    notebook, log = ran
    shown = printed(notebook, TRAIN)
    steps = [line for line in shown if re.fullmatch(r"step \d/3 \| reward .* \| \d+ tok/s \| eta 0:\d\d", line)]
    assert steps[0].startswith("step 1/3") and steps[-1].startswith("step 3/3") and set(steps) <= set(log.splitlines())
    assert [line for line in shown if "Completions" in line] == ["Completions of step 1", "Completions of step 2"]
    assert "Completions of step 2" in log
    assert any(line.startswith("building embedded/thinking, once; cached in ") for line in printed(notebook, BUILD))
    assert any(line.startswith("│ accuracy, temperature 1") for line in printed(notebook, BEFORE))
    assert printed(notebook, AFTER)[-1].startswith("accuracy ")
    assert any(line.startswith("{'loss'") and "'reward'" in line for line in printed(notebook, TRAINER)), "TRL's own"
