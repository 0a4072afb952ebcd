"""The notebooks for a GPU, cell by cell on Unsloth, with their own configs cut to two small steps."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.runs.rollouts import read_rollouts
from tests.with_unsloth import interpreter

ROOT = Path(__file__).resolve().parents[2]
THINK_END, TURN_END = 260, 258
QUESTIONS = [{"question": f"{n} and {n + 1}", "answer": f"So it is so.\n#### {2 * n + 1}"} for n in range(8)]
# What a GPU needs and the interpreter cannot: size. All else is the file's.
CUT: dict[str, dict[str, Any]] = {
    "model": {"load_in_4bit": False, "dtype": "float32", "max_seq_length": 160},
    "data": {"subset": None, "system_prompt": "Add.", "test_size": 2, "max_prompt_length": 64},
    "rloo": {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "optim": "adamw_torch_fused",
             "save_steps": 1},
    "eval": {"batch_size": 4},
}  # fmt: skip
PARAMETERS = {"run_name": "small", "max_steps": 2, "num_generations": 4, "learning_rate": 1e-2, "eval_prompts": 2}
WHOLE = {"config.yaml", "versions.json", "status.json", "metrics.jsonl", "rollouts", "checkpoints", "adapter"}
WHOLE |= {"before.json", "after.json", "report.html"}


def read_cells(name: str) -> list[tuple[str, bool]]:
    """The code cells of a notebook's source, and whether each is the one with the parameters."""
    parts = re.split(r"^# %%(.*)\n", (ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8"), flags=re.M)
    cells = zip(parts[1::2], parts[2::2], strict=True)
    return [(source, '"parameters"' in head) for head, source in cells if "[markdown]" not in head]


@pytest.fixture
def cut(tmp_path: Path) -> Callable[..., Path]:
    """`cut(name, model, **sections)`: a config of `configs/` on that model, with the cuts and further keys."""
    import yaml

    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in QUESTIONS))

    def write(name: str, model: Path, **sections: Any) -> Path:
        values = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
        for section, keys in CUT.items():
            values[section] |= keys
        values["model"]["name"], values["data"]["source"] = str(model), str(questions)
        for section, keys in sections.items():
            values[section] = keys if isinstance(keys, list) else values[section] | keys
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    return write


@pytest.fixture
def play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, Path, Any]]:
    """`play(name, config, **parameters)` runs the cells; gives what was printed, the run's folder and the policy."""

    def run(name: str, config: Path, **parameters: Any) -> tuple[str, Path, Any]:
        interpreter.keep_on_cpu()
        values = PARAMETERS | {"config": str(config), "output_dir": str(tmp_path / "outputs")} | parameters
        namespace: dict[str, Any] = {"__name__": "notebook"}
        policy = None
        for number, (source, holds_parameters) in enumerate(read_cells(name)):
            policy = namespace.get("policy", policy)
            exec(compile(source, f"{name}, code cell {number}", "exec"), namespace)
            if holds_parameters:
                assert values.keys() <= namespace.keys()
                namespace.update(values)  # as papermill's cell behind it does
        return capsys.readouterr().out, tmp_path / "outputs" / "small", policy

    return run


def check_folder(folder: Path) -> list[dict[str, Any]]:
    """Everything that a whole run leaves; its rollouts."""
    assert {path.name for path in folder.iterdir()} >= WHOLE
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["step"]) == ("finished", 2)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in steps] == [1, 2] and any(row["grad_norm"] > 0 for row in steps)
    assert all(row["val/ratio"] == 1.0 for row in steps)
    assert (folder / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    assert (folder.parent / "adapters" / folder.name / "adapter_config.json").is_file()
    return list(read_rollouts(folder))


def check_print(printed: str, leading: str = "accuracy") -> None:
    """What the reader sees: the backend, how rows are sampled and scored, what Unsloth's settings were, once."""
    assert "backend unsloth" in printed
    assert re.search(r"^rollout: generate, .*Unsloth", printed, flags=re.M)
    assert re.search(r"^scoring: repeated rows agree with single sequences", printed, flags=re.M)
    assert len(re.findall(r"^kept settings that Unsloth would change: .*padding_side left", printed, flags=re.M)) == 1
    assert re.search(r"^\(\d+ tokens.* tokens/s\)$", printed, flags=re.M)  # below the notebook's own question
    assert re.search(rf"^{leading} [+-]\d", printed, flags=re.M)
    assert re.search(r"^2 steps, \d+ s", printed, flags=re.M)


def test_the_thinking_notebook(play: Any, cut: Any, model_folder: Path) -> None:
    """The way of a user with a GPU, start to end: nothing but the notebook's cells, the shipped config and Unsloth.

    A thought ends by itself, or is closed by `</think>` at the budget and leaves an answer.
    """
    budgets = {"thinking_budget": 6, "answer_budget": 4, "thinking_close": "tag"}
    printed, folder, policy = play(
        "qwen3_thinking_rloo", cut("qwen3_4b_thinking", model_folder, rloo=budgets), max_completion_length=16
    )
    check_print(printed)
    assert policy.backend == "unsloth" and policy.family == "thinking"
    rows = check_folder(folder)
    assert len(rows) == 8
    for row in rows:
        ids = row["completion_ids"]
        assert len(ids) - ids.index(THINK_END) - 1 <= 4 if THINK_END in ids[:7] else ids[-1] == TURN_END
        assert set(row["rewards"]) == {"answer_reward", "think_format_reward"}
    forced = [row["forced"] for row in rows]
    assert any(forced) and all(row["completion_ids"][6] == THINK_END for row in rows if row["forced"])
