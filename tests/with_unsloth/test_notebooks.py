"""The notebooks for a GPU, cell by cell on Unsloth, with their own configs cut to two small steps."""

import json
import re
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
             "save_steps": 1, "thinking_budget": 6, "answer_budget": 4, "thinking_close": "tag"},
    "eval": {"batch_size": 4},
}  # fmt: skip
PARAMETERS = {
    "run_name": "small",
    "max_steps": 2,
    "num_generations": 4,
    "learning_rate": 1e-2,
    "eval_prompts": 2,
    "max_completion_length": 16,
}
WHOLE = {"config.yaml", "versions.json", "status.json", "metrics.jsonl", "rollouts", "checkpoints", "adapter"}
WHOLE |= {"before.json", "after.json", "report.html"}


@pytest.fixture
def config(tmp_path: Path, model_folder: Path) -> Path:
    """The notebook's config on that model, with the cuts and small budgets."""
    import yaml

    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in QUESTIONS))
    values = yaml.safe_load((ROOT / "configs" / "qwen3_4b_thinking.yaml").read_text(encoding="utf-8"))
    for section, keys in CUT.items():
        values[section] |= keys
    values["model"]["name"], values["data"]["source"] = str(model_folder), str(questions)
    file = tmp_path / "qwen3_4b_thinking.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def play(parameters: dict[str, Any]) -> Any:
    """Run the code cells of the notebook's source, the parameters behind their cell; gives the policy."""
    interpreter.keep_on_cpu()
    text = (ROOT / "notebooks" / "qwen3_thinking_rloo.py").read_text(encoding="utf-8")
    parts = re.split(r"^# %%(.*)\n", text, flags=re.M)
    namespace: dict[str, Any] = {"__name__": "notebook"}
    policy = None
    for number, (head, source) in enumerate(zip(parts[1::2], parts[2::2], strict=True)):
        if "[markdown]" in head:
            continue
        policy = namespace.get("policy", policy)
        exec(compile(source, f"cell {number}", "exec"), namespace)
        if '"parameters"' in head:
            assert parameters.keys() <= namespace.keys()
            namespace.update(parameters)  # as papermill's cell behind it does
    return policy


def test_the_thinking_notebook(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The way of a user with a GPU: nothing but the notebook's cells, the shipped config and Unsloth."""
    policy = play(PARAMETERS | {"config": str(config), "output_dir": str(tmp_path / "outputs")})
    printed, folder = capsys.readouterr().out, tmp_path / "outputs" / "small"
    assert policy.backend == "unsloth" and policy.family == "thinking" and "backend unsloth" in printed
    assert re.search(r"^rollout: native, ", printed, flags=re.M)
    assert re.search(r"^scoring: repeated rows agree with single sequences", printed, flags=re.M)
    assert len(re.findall(r"^kept settings that Unsloth would change: .*padding_side left", printed, flags=re.M)) == 1
    assert re.search(r"^\(\d+ tokens.* tokens/s\)$", printed, flags=re.M)  # below the notebook's own question
    assert re.search(r"^accuracy [+-]\d", printed, flags=re.M) and re.search(r"^2 steps, \d+ s", printed, flags=re.M)

    assert {path.name for path in folder.iterdir()} >= WHOLE
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["step"]) == ("finished", 2)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in steps] == [1, 2] and any(row["grad_norm"] > 0 for row in steps)
    assert all(row["val/ratio"] == 1.0 for row in steps)
    assert (folder / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    assert (folder.parent / "adapters" / folder.name / "adapter_config.json").is_file()
    rows = list(read_rollouts(folder))
    assert len(rows) == 8 and any(row["forced"] for row in rows)
    for row in rows:
        ids = row["completion_ids"]
        assert len(ids) - ids.index(THINK_END) - 1 <= 4 if THINK_END in ids[:7] else ids[-1] == TURN_END
        assert set(row["rewards"]) == {"answer_reward", "think_format_reward"}
        assert not row["forced"] or ids[6] == THINK_END
