"""The Python and YAML of the skill: it compiles, names what is installed, and the example reward works.

What needs Unsloth is checked by tests/with_unsloth/test_fingerprints.py, where it is installed (`make test-unsloth`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rloo_kit import build_rewards, load_config
from tests.skill.calls import LIBRARIES, check_names
from tests.skill.pages import ROOT, Block, find_blocks, read_pages

PAGES = [(name, find_blocks(name, text, "python")) for name, text in read_pages()]
YAML_BLOCKS = [block for name, text in read_pages() for block in find_blocks(name, text, "yaml")]
CONFIG = ROOT / "configs" / "arithmetic_thinking.yaml"


@pytest.mark.parametrize(("page", "blocks"), PAGES, ids=[name for name, _ in PAGES])
def test_blocks_compile_and_call_what_is_there(page: str, blocks: list[Block]) -> None:
    """Recipes with `kl_coef`, `max_seq_length` or `tokenizer=` are everywhere, and each release drops another one."""
    for block in blocks:
        compile(block.code, block.place, "exec")
    assert check_names(blocks, LIBRARIES)[0] == []


def merge(base: Any, changes: Any) -> Any:
    if isinstance(base, dict) and isinstance(changes, dict):
        return base | {key: merge(base.get(key), value) for key, value in changes.items()}
    return changes


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=lambda block: block.place)
def test_yaml_blocks_are_parts_of_a_config(block: Block, tmp_path: Path) -> None:
    """A key that was renamed is copied from here into every new config."""
    values = merge(yaml.safe_load(CONFIG.read_text(encoding="utf-8")), yaml.safe_load(block.code))
    values["model"]["max_seq_length"] = 8192  # the blocks are for models with room
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values))
    load_config(file)


def test_the_example_reward_works_as_the_config_names_it(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """A faulty example would be copied; the YAML next to it finds the module and gives it the tag's id."""
    page = "docs/rewarding.md"
    blocks = find_blocks(page, (ROOT / page).read_text(encoding="utf-8"), "python")
    (tmp_path / "my_rewards.py").write_text(next(block.code for block in blocks if "my_rewards.py" in block.code))
    block = next(block for block in YAML_BLOCKS if "my_rewards:near_miss" in block.code)
    values = yaml.safe_load(CONFIG.read_text(encoding="utf-8")) | yaml.safe_load(block.code)
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    reward, second = build_rewards(load_config(tmp_path / "run.yaml"), tiny_tokenizer)
    close = [7, 260, 8]  # 260 is </think> in the embedded model
    cases = [
        ("a</think>100", close, "100", 1.0),
        ("a</think> 95.0 ", close, "100", 0.5),
        ("a</think>80", close, "100", 0.0),
        ("a</think>none", close, "100", 0.0),
        ("a</think>100", [7, 8], "100", 0.0),  # the tag spelt in ordinary tokens
        ("", [], "100", 0.0),
        ("a</think>100", close, None, None),
        ("a</think>100", close, "see above", None),
    ]
    texts, ids, gold, expected = (list(column) for column in zip(*cases, strict=True))
    assert reward(prompts=["p"] * 8, completions=texts, completion_ids=ids, answer=gold) == expected
    assert second.weight == 0.2
