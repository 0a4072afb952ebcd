"""What the notebooks teach is true: their worked example, and the keys, metrics and files that their prose names."""

import re
import statistics
from types import SimpleNamespace

import pytest

from tests.notebooks.notebook_cells import NAMES, ROOT, cells_of, code_of
from tests.oracles import leave_one_out_advantages

each_notebook = pytest.mark.parametrize("name", NAMES)


def test_the_worked_example_is_the_oracles(capsys: pytest.CaptureFixture) -> None:
    """A baseline with the completion's own reward looks as plausible; the first line says what the numbers are."""
    (source,) = [cell.source for cell in code_of(NAMES[0]) if "rewards = [1.0, 0.0, 0.0" in cell.source]
    exec(source, {"statistics": statistics})
    title, *lines = capsys.readouterr().out.splitlines()
    expected = [round(advantage, 2) for advantage in leave_one_out_advantages([1.0, 0.0, 0.0, 1.0], 4)]
    assert title.startswith("Worked example: ")
    assert [float(re.findall(r"[+-]?\d+(?:\.\d+)?", line)[-1]) for line in lines] == expected


def prose_of(name: str) -> str:
    return "\n".join(cell.source for cell in cells_of(name) if cell.kind == "markdown")


def in_backticks(name: str) -> list[str]:
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose_of(name))]


@each_notebook
def test_keys_and_parameters_of_the_prose_exist(name: str) -> None:
    """Advice that names a key of an older version ends in an error about the key."""
    from rloo_kit.config.run import RunConfig
    from rloo_kit.notebook.parameters import KNOWN

    sections = {key: field.annotation for key, field in RunConfig.model_fields.items() if key != "rewards"}
    loop = sections["rloo"].model_fields
    for text in in_backticks(name):
        for section, key in re.findall(r"\b(run|model|data|rloo|eval)\.([a-z_]+)(?!\.py)", text):
            assert key in sections[section].model_fields, text
        assigned = re.fullmatch(r"([a-z_]+) ?= ?[^ =].*", text)
        if assigned:
            assert assigned[1] in KNOWN or assigned[1] in loop, text


@each_notebook
def test_metrics_of_the_prose_are_logged(name: str) -> None:
    """A table of alarms with a name that no run logs is never looked at twice."""
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    (table,) = [cell.source for cell in cells_of(name) if cell.source.startswith("## 12.")]
    named = set(re.findall(r"`([a-z_]+/[a-z_]+)`", prose_of(name)))
    named |= {row.split("`")[1] for row in table.splitlines() if row.startswith("| `")}
    assert {"kl", "entropy", "grad_norm", "completions/clipped_ratio"} <= named
    assert [metric for metric in named if f"`{metric}`" not in metrics] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "printed"),
    [
        ("qwen3_1_7b_reasoning_gym", ""),
        ("arithmetic_thinking", "data.source is reasoning_gym/chain_sum"),
        ("qwen3_4b_thinking", "make reasoning-gym"),
    ],
)
def test_the_tasks_of_the_library_are_shown(
    file: str, printed: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook ended in an error with the embedded model, and with a file that has data.sources."""
    import rloo_kit as kit
    from rloo_kit.demo.cold_start import build_tokenizer
    from rloo_kit.system.isolation import WORKERS
    from rloo_kit.tasks import gym

    if not printed and not gym.is_importable("reasoning_gym"):
        pytest.skip("make reasoning-gym has not been run")
    if "make" in printed:
        monkeypatch.setattr(gym, "is_importable", lambda name: False)
    (cell,) = [
        cell for cell in cells_of("qwen3_thinking_rloo") if "reasoning_gym_score" in cell.source and cell.kind == "code"
    ]
    overrides = ["data.test_size=4", "model.family=auto", "model.enable_thinking=null"]  # the tokenizer has no switch
    parameters = SimpleNamespace(config=ROOT / "configs" / f"{file}.yaml", overrides=overrides)
    policy = SimpleNamespace(tokenizer=build_tokenizer("thinking"))
    exec(cell.source, {"kit": kit, "parameters": parameters, "policy": policy})
    shown = capsys.readouterr().out
    assert printed in shown
    assert (shown.count(": 1.00"), shown.count("[1, 2, 3]: 0.00")) == ((0, 0) if printed else (2, 2))
    assert not any(worker.name == "reasoning_gym_score" and worker.running for worker in WORKERS)
