"""The notebooks run whole: by papermill from another folder, and as plain scripts, cut to a few small steps."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rloo_kit.runs.rollouts import read_rollouts
from rloo_kit.system.environment import cache_folder
from tests.clocks import CLOCKS
from tests.notebooks.notebook_cells import FOLDER
from tests.notebooks.runners import Ended, call

pytestmark = pytest.mark.slow

PAPERMILL = Path(sys.executable).with_name("papermill")
LIMIT_S = 300  # of one run: fifteen seconds where nothing else runs; this is for one that hangs
SMALL: dict[str, Any] = {"max_steps": 3, "num_generations": 4, "eval_prompts": 12}
OVERRIDES = "data.num_prompts=200 data.test_size=40 rloo.per_device_train_batch_size=16"
# The Qwen3 notebooks with the embedded model: every cell of theirs runs, with the file of their small twin.
EMBEDDED = {
    "qwen3_thinking_rloo": {"config": "configs/evening_cpu.yaml"},
    "qwen3_instruct_rloo": {"config": "configs/arithmetic_instruct.yaml", "max_completion_length": 8},
}
WHOLE = {"config.yaml", "versions.json", "status.json", "metrics.jsonl", "rollouts", "checkpoints", "adapter"}
WHOLE |= {"before.json", "after.json", "report.html"}

Start = Callable[..., Ended]


@pytest.fixture(scope="session")
def cache() -> Path:
    """The kit's cache with both models in it: building them is not part of any run's time limit."""
    from rloo_kit.demo.embedded import build

    for kind in ("thinking", "instruct"):
        build(kind)
    return cache_folder()


@pytest.fixture
def start(tmp_path: Path, cache: Path) -> Start:
    """`start(*command)` runs a command in an empty folder; nothing of it is left running."""
    work = tmp_path / "elsewhere"
    work.mkdir()

    def run(*command: str | Path) -> Ended:
        ended = call(command, work, LIMIT_S, RLOO_KIT_CACHE=cache)
        assert ended.all_gone, "processes were left running"
        return ended

    return run


def papermill(start: Start, name: str, output: Path, **parameters: Any) -> Ended:
    values = [word for key, value in parameters.items() for word in ("-p", key, str(value))]
    return start(PAPERMILL, FOLDER / f"{name}.ipynb", output, *values, "--no-progress-bar")


def cell_outputs(path: Path, call: str) -> list[dict[str, Any]]:
    """What the first code cell with `call` in it has shown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return next(cell["outputs"] for cell in cells if cell["cell_type"] == "code" and call in "".join(cell["source"]))


def shown(path: Path, call: str) -> set[str]:
    """The MIME types in which it did."""
    return {kind for output in cell_outputs(path, call) for kind in output.get("data", ())}


def text_of(path: Path, call: str) -> str:
    return "".join("".join(output.get("text", "")) for output in cell_outputs(path, call))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_folder(folder: Path, steps: int) -> None:
    """Everything that `rloo-kit train` leaves is there, and says that the run is finished."""
    assert {path.name for path in folder.iterdir()} >= WHOLE
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["step"]) == ("finished", steps)
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(1, steps + 1))
    assert (folder / "adapter" / "adapter_config.json").is_file()
    assert (folder.parent / "adapters" / folder.name / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    "name",
    ["arithmetic_thinking"]
    + [pytest.param(f"qwen3_{kind}_rloo", marks=pytest.mark.long) for kind in ("thinking", "instruct")],
)
def test_papermill_runs_it_from_another_folder(name: str, start: Start, tmp_path: Path) -> None:
    """Started elsewhere, paths led nowhere; a kernel that was shut down ended papermill with code 138; and `resume`
    was refused where `overwrite` is True."""
    output, folder = tmp_path / "executed.ipynb", tmp_path / "runs"
    parameters = SMALL | {"output_dir": folder, "run_name": "small", "overrides": OVERRIDES} | EMBEDDED.get(name, {})
    done = papermill(start, name, output, **parameters)
    assert done.exit_code == "0", done.log[-4000:]
    assert not re.search(r"unknown parameter|Unable to parse|Traceback", done.log), done.log
    check_folder(folder / "small", steps=3)

    assert {"text/html", "text/plain"} <= shown(output, "kit.plot_training(")
    assert {"text/html", "text/plain"} <= shown(output, "kit.show_completions(before, after")
    before = json.loads((folder / "small" / "before.json").read_text(encoding="utf-8"))
    assert before["num_prompts"] == SMALL["eval_prompts"]
    assert f"{before['measures']['accuracy']['value']:.3f}" in text_of(output, "before = kit.evaluate")
    assert re.search(r"^accuracy [+-]\d", text_of(output, "kit.compare("))
    check_group(text_of(output, "scored = "))
    asked = text_of(output, "kit.ask(")
    thinking = r"(thinking:\n((\d[\d+]*=\d+|\?)\n)+\nanswer:\n)?" if "thinking" in name else ""
    # A number, with nothing of the thinking left in it, and then the question, one of the held-out prompts.
    end = r"\n\(\d+ tokens.*(ended|truncated); .* tokens/s\)\n\nThe question was: (.+)\n$"
    found = re.fullmatch(rf"{thinking}\d+{end}", asked)
    assert found, asked
    assert any(f"\n{found.groups()[-1]}<" in sample["prompt"] for sample in before["samples"])
    assert re.match("(learnt|no evidence|no signal|broken|gamed): ", text_of(output, "kit.judge_run("))
    check_text(output, done.log)
    if name == "arithmetic_thinking":
        earlier = rows(folder / "small" / "metrics.jsonl")
        done = papermill(start, name, output, **parameters | {"resume": True, "max_steps": 5})
        assert done.exit_code == "0", done.log[-4000:]
        check_folder(folder / "small", steps=5)
        assert rows(folder / "small" / "metrics.jsonl")[:3] == earlier
        assert "from step 3" in text_of(output, "kit.train(")


def check_text(output: Path, log: str) -> None:
    """Whole lines on stdout alone: a redrawn bar fills the log with carriage returns, stderr reads as an error."""
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    streams = [one for cell in cells for one in cell.get("outputs", ()) if one["output_type"] == "stream"]
    text = log + "".join("".join(one["text"]) for one in streams)
    assert {one["name"] for one in streams} == {"stdout"} and "\r" not in text and "\x1b" not in text
    assert "HTML object" not in log and not re.search(r"(?<![\d.])0%\|", text)
    steps = [line for line in text_of(output, "kit.train(").splitlines() if line.startswith("step 3/3 | reward ")]
    assert steps and re.search(r"\| \d+ tok/s \| eta 0:\d\d", steps[0])


def check_group(table: str) -> None:
    """The siblings' means that the notebook works out give the advantages that the trainer used."""
    for line in table.splitlines()[2:]:  # behind a title and the columns' names
        reward, siblings, advantage = map(float, line.split()[:3])
        assert advantage == pytest.approx(reward - siblings, abs=0.011)


OWN = {
    "model": {"name": "embedded/thinking", "max_seq_length": 64},
    "data": {"source": "rows.csv", "test_size": 12, "max_prompt_length": 40},
    "rewards": [{"name": "own_reward:even", "weight": 2.0}],
    "rloo": {
        "max_steps": 2, "learning_rate": 5e-4, "num_generations": 4, "per_device_train_batch_size": 16,
        "max_completion_length": 20,
    },
    "run": {"seed": 3},
}  # fmt: skip
REWARD = """def even(completions, **columns):
    return [float(text.strip()[-1:] in tuple("02468")) for text in completions]
"""


def test_a_users_file_with_a_reward_of_their_own(start: Start, tmp_path: Path) -> None:
    """The cell's own values took the place of the file's, cells needed an answer column, the run lay in the clone."""
    task = tmp_path / "elsewhere" / "task"
    task.mkdir()
    (task / "mine.yaml").write_text(yaml.safe_dump(OWN))
    (task / "own_reward.py").write_text(REWARD)
    (task / "rows.csv").write_text("\n".join(["prompt", *(f"{n}+{2 * n}=" for n in range(100, 180))]) + "\n")
    output = tmp_path / "executed.ipynb"
    done = papermill(start, "arithmetic_thinking", output, config="task/mine.yaml")
    assert done.exit_code == "0", done.log[-4000:]
    folder = tmp_path / "elsewhere" / "outputs" / "mine"
    check_folder(folder, steps=2)
    resolved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    found_next_to_it = {"source": str(task / "rows.csv")}  # absolute: `ask` and `export` are called from anywhere
    for section, values in (OWN | {"data": OWN["data"] | found_next_to_it}).items():
        if section != "rewards":
            assert {key: resolved[section][key] for key in values} == values
    assert resolved["rewards"][0]["name"] == f"{task / 'own_reward.py'}:even" and resolved["rewards"][0]["weight"] == 2
    rewards = [row["reward"] for row in read_rollouts(folder)]
    assert len(rewards) == 2 * 16 and set(rewards) <= {0.0, 2.0}
    assert "rloo." not in text_of(output, "read_parameters("), "a parameter overrides the file"
    assert re.search(r"The question was: \d+\+\d+=\n$", text_of(output, "kit.ask("))
    assert f"the run's folder: {folder}" in text_of(output, "read_parameters(")


def test_a_run_that_stopped_early_fails_the_notebook(start: Start, tmp_path: Path) -> None:
    """A notebook that goes on after a run without signal exits 0, and a batch counts it as done."""
    stop = f"{OVERRIDES} health.stop=[no_signal]"
    parameters = SMALL | {"max_steps": 6, "max_completion_length": 4, "overrides": stop}
    parameters["output_dir"] = tmp_path / "runs"
    done = papermill(start, "arithmetic_thinking", tmp_path / "x.ipynb", **parameters)
    assert done.exit_code == "1"
    assert "stopped (no signal) at step 5; resume = True goes on from there" in done.log
    said = text_of(tmp_path / "x.ipynb", "kit.train(")
    assert "raise rloo.max_completion_length (currently 4)" in said


@pytest.mark.long
def test_the_source_runs_as_a_plain_script(start: Start, tmp_path: Path) -> None:
    """Without IPython there is no display, no `In` and no kernel to end: the .py is for a terminal too."""
    text = (FOLDER / "arithmetic_instruct.py").read_text(encoding="utf-8")
    values = SMALL | {"output_dir": str(tmp_path / "runs"), "overrides": OVERRIDES}
    for name, value in values.items():
        text, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value!r}  ", text, flags=re.M)
        assert count == 1, name
    script = tmp_path / "arithmetic_instruct.py"
    script.write_text(text, encoding="utf-8")
    done = start(sys.executable, script)
    assert done.exit_code == "0", done.log[-4000:]
    check_folder(tmp_path / "runs" / "arithmetic_instruct", steps=3)
    assert "reward" in done.log and "answer:" in done.log
    assert "HTML object" not in done.log and "Figure" not in done.log
    check_command_line(start, tmp_path)


def check_command_line(start: Start, folder: Path) -> None:
    """`rloo-kit train` with the same values gives the same figures to the last digit: one program, two surfaces."""
    overrides = [f"run.output_dir={folder / 'cli'}", "rloo.max_steps=3", "rloo.num_generations=4", *OVERRIDES.split()]
    config = FOLDER.parent / "configs" / "arithmetic_instruct.yaml"
    done = start(PAPERMILL.with_name("rloo-kit"), "train", config, *overrides, "eval.num_prompts=12")
    assert done.exit_code == "0", done.log[-4000:]
    notebook, command = (folder / name / "arithmetic_instruct" for name in ("runs", "cli"))
    for ours, theirs in zip(rows(notebook / "metrics.jsonl"), rows(command / "metrics.jsonl"), strict=True):
        assert {key for key in ours | theirs if ours.get(key) != theirs.get(key)} <= CLOCKS
    for name in ("before.json", "after.json"):
        ours, theirs = (json.loads((path / name).read_text(encoding="utf-8")) for path in (notebook, command))
        assert ours | {"seconds": 0} == theirs | {"seconds": 0}
    assert {path.name for path in notebook.iterdir()} == {path.name for path in command.iterdir()}
