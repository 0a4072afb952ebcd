"""The Python and YAML of the skill: it compiles, names what is installed, and the example reward works.

What needs Unsloth is checked by tests/with_unsloth/test_fingerprints.py, where it is installed (`make test-unsloth`).
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rloo_kit import load_config
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


@pytest.fixture(scope="module")
def own_reward(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module that the reader writes from the reward contract of references/rewards.md."""
    page = "references/rewards.md"
    blocks = find_blocks(page, (ROOT / page).read_text(encoding="utf-8"), "python")
    code = next(block.code for block in blocks if "my_rewards.py" in block.code)
    file = tmp_path_factory.mktemp("own") / "my_rewards.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("my_rewards", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_reward_is_right(own_reward: ModuleType) -> None:
    """An example that gives 1.0 for a spelt-out tag, or 0 where it does not apply, would be copied with its fault."""
    close = [7, 151668, 8]
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
    given = {"completions": texts, "completion_ids": ids, "answer": gold, "think_end_id": 151668}
    assert own_reward.near_miss(prompts=["p"] * len(texts), trainer_state=None, **given) == expected


def test_the_example_reward_works_as_the_config_names_it(own_reward: ModuleType, tiny_tokenizer: Any) -> None:
    """The YAML next to it has to find the module in the config's folder and give it the tag's id."""
    from rloo_kit import build_rewards

    assert own_reward.__file__ is not None
    folder = Path(own_reward.__file__).parent
    block = next(block for block in YAML_BLOCKS if "my_rewards:near_miss" in block.code)
    values = yaml.safe_load(CONFIG.read_text(encoding="utf-8")) | yaml.safe_load(block.code)
    (folder / "run.yaml").write_text(json.dumps(values))
    first, second = build_rewards(load_config(folder / "run.yaml"), tiny_tokenizer)
    found = first(prompts=["p"], completions=["a</think>7"], completion_ids=[[64, 260, 22, 258]], answer=["7"])
    assert found == [1.0] and second.weight == 0.2
