"""docs/recipes.md: its data, its reward and its config, as a reader would copy them."""

import json
import shlex
from pathlib import Path

import pytest

from rloo_kit import load_config
from rloo_kit.data.load import load_data
from rloo_kit.rewarding.registry import build_rewards
from tests.skill.pages import ROOT, find_blocks

PAGE = ROOT / "docs" / "recipes.md"
PROBLEM, PERSON, RECEIPT = (
    json.loads(block.code) for block in find_blocks("docs/recipes.md", PAGE.read_text(encoding="utf-8"), "json")
)


def read_block(language: str, word: str) -> str:
    blocks = find_blocks("docs/recipes.md", PAGE.read_text(encoding="utf-8"), language)
    return next(block.code for block in blocks if word in block.code)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [PROBLEM | {"question": f"{PROBLEM['question']} ({n})"} for n in range(300)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "json_rewards.py").write_text(read_block("python", "json_fields"))
    (tmp_path / "people.yaml").write_text(read_block("yaml", "json_fields"))
    return tmp_path


@pytest.mark.parametrize("config", ["evening_12gb", "qwen3_4b_thinking_12gb"])
def test_a_file_takes_the_place_of_gsm8k(config, folder, tiny_tokenizer):
    """The evening's commands refused a plain file of questions and answers: they kept GSM8K's `####`."""
    check, line = map(shlex.split, read_block("bash", f"train configs/{config}.yaml").splitlines())
    assert (check[1], line[1]) == ("preflight", "train") and check[2:] == line[2:]
    run, gold = load_config(ROOT / line[2], *line[3:]), PROBLEM["answer"].partition("#### ")[2]
    if config == "evening_12gb":
        rows = [PROBLEM | {"question": f"{n} + 0?", "answer": gold} for n in range(300)]
        (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_data(run, tiny_tokenizer)
    assert data.test[0]["answer"] == gold


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('easy</think>{"name": "Ada", "age": 36}', 1.0),
        ('easy</think>\n```json\n{"name": "Ada", "age": 36}\n```', 1.0),
        ('easy</think>Here it is: {"name": "Ada", "age": 36}. Anything else?', 1.0),
        ('easy</think>{"name": "Ada", "age": "36"}', 0.5),
        ('easy</think>{"city": "London"}', 0.1),
        ("easy</think>[36]", 0.0),
        ("easy</think>Ada is 36.", 0.0),
        ('{"name": "Ada", "age": 36}', 0.0),
    ],
)
def test_the_json_reward_of_the_page(text, score, folder, tiny_tokenizer):
    (reward,) = build_rewards(load_config("people.yaml"), tiny_tokenizer)
    assert reward(prompts=[""], completions=[text], completion_ids=[[1]], fields=[PERSON["fields"]]) == [score]
