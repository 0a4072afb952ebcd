"""Figures on the skill's pages that the code or the configs hold too: token ids and memory."""

import re
from pathlib import Path

import pytest

from rloo_kit.think_tags import QWEN3_IDS
from tests.skill.pages import ROOT

CONFIGS = sorted(path for path in (ROOT / "configs").glob("qwen3_*.yaml"))


def read(page: str) -> str:
    return (ROOT / "references" / page).read_text(encoding="utf-8")


def test_the_ids_are_the_codes() -> None:
    """A reward that was written with a wrong id gives every completion the same."""
    from rloo_kit.embedded import tokenizer

    text = read("thinking-tokens.md").replace("\\|", "|")
    rows = re.findall(r"^\| `(<[^`]+>)`[^\n]* \| (\d+) \| (\d+) \|$", text, flags=re.M)
    assert {name: int(large) for name, large, _ in rows} == QWEN3_IDS
    vocabulary = tokenizer.build_tokenizer("thinking", "compact").get_vocab()
    assert {name: int(small) for name, _, small in rows} == {name: vocabulary[name] for name in QWEN3_IDS}
    skill = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    assert f"**{QWEN3_IDS['</think>']}**" in skill and f"think_end_id={QWEN3_IDS['</think>']}" in skill


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_memory_table_is_the_configs(config: Path) -> None:
    """A config that was made smaller leaves a table that sends people to a larger GPU."""
    text = config.read_text(encoding="utf-8")
    values = {key: re.search(rf"{key}: (\d+)", text) for key in ("num_generations", "max_completion_length")}
    memory = re.search(r"([\d.]+) GiB in a rollout, ([\d.]+) GiB in training", text)
    gpu = re.search(r"GPU with (\d+) GB", text)
    assert memory is not None and gpu is not None and None not in values.values()
    cells = [gpu[1] + " GB", f"`{config.name}`", *(found[1] for found in values.values() if found), *memory.groups()]
    assert f"| {' | '.join(cells)} |" in read("memory.md")


def test_the_parts_are_those_of_the_plan() -> None:
    """The page and the command say the same of Qwen3-4B in 4-bit."""
    from rloo_kit import load_config, plan_vram

    plan = plan_vram(load_config(ROOT / "configs" / "qwen3_4b_thinking_12gb.yaml"), 12)
    parts, text = {part.name: part for part in plan.parts}, read("memory.md")
    layers, tables = parts["weights: layers"].rollout_gib, parts["weights: tables"].rollout_gib
    assert f"| weights: 4-bit body {layers:.2f}, bf16 embedding {tables:.2f} | {layers + tables:.2f} |" in text
    adapter = sum(parts[name].rollout_gib for name in ("adapter", "gradients", "optimizer"))
    assert f"8-bit Adam | {adapter:.2f} |" in text
    assert f"| CUDA context | {parts['context'].rollout_gib:.1f} |" in text
    assert "144 KiB" in text and "144 KiB" in parts["cache"].detail
