"""A hybrid model whose template opens `<think>` in the prompt (Qwen3.5-4B and larger), through a whole run."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rloo_kit as kit
from rloo_kit.results.samples import split_row
from rloo_kit.think_tags import opens_thinking

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{{ '' }}"
)
CLOSES = 260


@pytest.fixture
def load(
    write_config: Callable[..., Path], make_tiny_model: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path
) -> Callable[..., Any]:
    """`load(*overrides)`: a run on the tiny model with that template, its policy and its data. The random model hardly
    ever closes its thinking."""

    def build(*overrides: str) -> Any:
        folder = tmp_path / "model"
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = TEMPLATE
        make_tiny_model().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        run = kit.load_config(write_config(), f"model.name={folder}", "eval.num_completions=2", *overrides)
        policy = kit.load_policy(run)
        return run, policy, kit.load_data(run, policy.tokenizer)

    return build


def test_a_thought_that_never_ends_is_no_answer_anywhere(load: Any) -> None:
    """By its family it was split as if the model had not begun to think: before.json, the table of samples and
    `split_thinking` as documented took the unfinished thought for the answer."""
    run, policy, data = load()
    assert policy.family == "hybrid" and all(map(opens_thinking, data.train["prompt"]))
    samples = [sample for sample in kit.evaluate(run, policy, data.test).samples if not sample["closed"]]
    assert samples and all(sample["thinking"] and not sample["answer"] for sample in samples)
    result = kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer))
    assert all("thinking/closed_ratio" in row for row in result.metrics), "every completion is a thought"
    rows = [row for row in kit.read_rollouts(result.folder) if not row["closed"]]
    assert rows and not any(split_row(row, CLOSES)[1] for row in rows), "the report's split"
    pieces: list[str] = []
    given = kit.ask(run, policy, "add 3", max_tokens=4, stream=lambda part, text: pieces.append(part))
    assert given.thinking and not given.answer and set(pieces) == {"thinking"} and given.thinking_tokens == given.tokens


@pytest.mark.parametrize("switch", ["null", "true", "false"])
def test_a_budget_closes_what_the_prompt_opened(load: Any, switch: str) -> None:
    """One close by force, after the budget, and rewards that see it; without thinking the budget is refused."""
    overrides = [
        f"model.enable_thinking={switch}",
        "rloo.thinking_budget=3",
        "rloo.answer_budget=2",
        "rloo.max_steps=1",
    ]
    if switch == "false":
        with pytest.raises(kit.RlooKitError, match="rloo.thinking_budget=null"):
            load(*overrides)
        return
    run, policy, data = load(*overrides, 'rewards=[{"name": "thinking_budget_reward"}]')
    result = kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer))
    for row in kit.read_rollouts(result.folder):
        ids = row["completion_ids"]
        assert not row["forced"] or (ids.index(CLOSES) == 3 and ids.count(CLOSES) == 1)
        assert row["forced"] or CLOSES in ids[:3] or ids[-1] == 258
        assert row["rewards"]["thinking_budget_reward"] == 0.0
