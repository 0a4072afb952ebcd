"""Templates, tags, budgets and answers with Qwen3's real tokenizer: 151,669 tokens, merges, the hybrid template.

`make tokenizers` fetches it. The tiny tokenizer of the other tests has one token a byte, and a template of our own.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.checks.faults import find_faults
from rloo_kit.config.checks import CLOSE_TOKENS
from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import render_prompt, resolve_family
from rloo_kit.data.load import prepare_data
from rloo_kit.errors import DataError, TokenizerError
from rloo_kit.rewarding.registry import build_rewards
from rloo_kit.rewards import answer_reward, thinking_reward
from rloo_kit.rollout.thinking_budget import CLOSING_SENTENCE, close_ids_for, make_limits
from rloo_kit.rollout.types import CompletionState
from rloo_kit.tasks.worked import load_worked
from rloo_kit.think_tags import QWEN3_IDS, answer_offset, bind_think_tags, opens_thinking, span_offsets, split_thinking

START, END, TURN_END, END_OF_TEXT = 151667, 151668, 151645, 151643
TALK = [
    {"role": "system", "content": "Sei kurz. 🙂"},
    {"role": "user", "content": "Was ist 1+1?"},
    {"role": "assistant", "content": "<think>\neins und eins\n</think>\n\n2"},
    {"role": "user", "content": "Und 2+2? /no_think"},
]
THOUGHT = "Hm, 2+2? Zwei und zwei: das gibt 4. 🧮"
SPELLED = "Der Tag </think> beendet sie."  # as a model quotes it


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_spelled(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text whose tag is spelled in ordinary tokens."""
    before, after = text.split("</think>")
    ids = [token for part in (before, "</", "think", ">", after) for token in encode(tokenizer, part)]
    assert END not in ids and tokenizer.decode(ids) == text
    return ids


@pytest.fixture
def make_run(tmp_path: Path, qwen3_folder: Path) -> Any:
    """`make_run(rows, rewards, thinking_budget=100, ...)`: a run on the real tokenizer's folder."""

    def make(
        rows: Any = None, rewards: Any = ("answer_reward",), model: Any = (), sft: Any = (), **rloo: Any
    ) -> RunConfig:
        file = tmp_path / "rows.jsonl"
        rows = rows or [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return RunConfig.model_validate(
            {
                "model": {"name": str(qwen3_folder), "max_seq_length": 2048, **dict(model)},
                "data": {"source": str(file), "test_size": 0, "max_prompt_length": 24},
                "rewards": [{"name": name} for name in rewards],
                "rloo": {"max_steps": 1, "max_completion_length": 1024, **rloo},
                "sft": {"completion_column": "completion", **dict(sft)},
                "run": {"name": "real", "output_dir": str(tmp_path / "outputs"), "evaluate": False},
            }
        )

    return make


@pytest.mark.slow
def test_the_ids_are_those_that_rewards_decide_by(qwen3_tokenizer: Any) -> None:
    """Every default of the kit rests on these numbers, and no test had read them from Qwen3's own files."""
    tags = bind_think_tags(qwen3_tokenizer)
    assert (tags.start_id, tags.end_id) == (START, END) == (QWEN3_IDS["<think>"], QWEN3_IDS["</think>"])
    assert all(encode(qwen3_tokenizer, text) == [token] for text, token in QWEN3_IDS.items())
    assert qwen3_tokenizer.decode([START, 19, END], skip_special_tokens=True) == "<think>4</think>", "not special"
    moved = dict(qwen3_tokenizer.get_vocab()) | {"</think>": 151669}
    edited = type("Edited", (), {"get_vocab": lambda self: moved})()
    with pytest.raises(TokenizerError, match=r"</think> at id 151669; Qwen3 has it at 151668"):
        bind_think_tags(edited)


@pytest.mark.parametrize("switch", [None, False])
def test_a_prompt_is_the_templates_own(qwen3_tokenizer: Any, switch: bool | None) -> None:
    """Text and ids are what the template of Qwen3 writes."""
    assert resolve_family(qwen3_tokenizer, "Qwen/Qwen3-0.6B", "auto", switch) == "hybrid"
    assert qwen3_tokenizer.eos_token_id == TURN_END
    options = {} if switch is None else {"enable_thinking": switch}
    for prompt in ("1+1=?", TALK[1:2], TALK):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = qwen3_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        ids = qwen3_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **options)
        rendered = render_prompt(qwen3_tokenizer, prompt, "hybrid", switch)
        assert rendered == text and list(qwen3_tokenizer(rendered)["input_ids"]) == list(ids["input_ids"])
        assert not opens_thinking(text) and text.endswith("</think>\n\n") is (switch is False)
        assert list(ids["input_ids"]).count(END) == (1 if switch is False else 0), "earlier thinking is removed"


def test_a_typed_token_is_refused(qwen3_tokenizer: Any) -> None:
    """A question with `</think>` in it becomes the id that ends a thought."""
    for typed in ("</think> 4", "<|im_end|>"):
        assert len(encode(qwen3_tokenizer, typed)) < 4, "one token of the vocabulary"
        with pytest.raises(DataError, match="the user message contains"):
            render_prompt(qwen3_tokenizer, f"What is {typed}?", "hybrid")


def test_the_counts_of_a_closed_thought(qwen3_tokenizer: Any) -> None:
    """Budgets are checked, and planned, before there is a tokenizer, by numbers in the code: the sentence was counted
    as 24 tokens and has 23, so every budget derived from it was a token short."""
    tags = bind_think_tags(qwen3_tokenizer)
    for close, count in CLOSE_TOKENS.items():
        ids = close_ids_for(qwen3_tokenizer, tags, close)
        assert len(ids) == count and ids.count(END) == 1, close
    assert qwen3_tokenizer.decode(close_ids_for(qwen3_tokenizer, tags, "sentence")) == CLOSING_SENTENCE


@pytest.mark.parametrize("close", ["tag", "sentence"])
def test_a_budget_closes_the_thought(qwen3_tokenizer: Any, close: str) -> None:
    """The forced tokens, their place in the text, the rest for the answer, where a token has several letters."""
    tags = bind_think_tags(qwen3_tokenizer)
    limits = make_limits(qwen3_tokenizer, tags, 60, thinking_budget=9, answer_budget=3, close=close)
    state = CompletionState(limits, [TURN_END, END_OF_TEXT])
    sampled = iter([START, *encode(qwen3_tokenizer, "\n" + THOUGHT)[:8], *encode(qwen3_tokenizer, "4 ist es, ja")])
    while not state.finished:
        state.take(next(sampled) if state.next_forced is None else -1, -1.0)
    assert state.forced == [(9, 9 + CLOSE_TOKENS[close])] and len(state.ids) == 9 + CLOSE_TOKENS[close] + 3
    text = qwen3_tokenizer.decode(state.ids, skip_special_tokens=True)
    first, last = span_offsets(state.forced[0], state.ids, qwen3_tokenizer)
    assert text[first:last] == (CLOSING_SENTENCE if close == "sentence" else "</think>")
    start = answer_offset(text, state.ids, qwen3_tokenizer, tags)
    assert text[:start].endswith("</think>") and text[start:].strip() == "4 ist es"
    closed_itself = CompletionState(limits, [TURN_END])
    for token in (START, 19, END, 19, 13, 13):
        closed_itself.take(token, -1.0)
    assert not closed_itself.forced and closed_itself.finished and closed_itself.ids.count(END) == 1


@pytest.mark.parametrize(
    ("thinking", "answer", "opened"),
    [(THOUGHT, "4", True), (SPELLED, "4", False), (SPELLED, None, True), ("", "Vier 🙂", True)],
)
def test_split_and_rewards_agree(qwen3_tokenizer: Any, thinking: str, answer: str | None, opened: bool) -> None:
    """A tag in ordinary tokens has the text of the real one. A character may take several tokens."""
    tags = bind_think_tags(qwen3_tokenizer)
    inside = encode_spelled(qwen3_tokenizer, thinking) if "</think>" in thinking else encode(qwen3_tokenizer, thinking)
    ids = [*([] if opened else [START]), *encode(qwen3_tokenizer, "\n"), *inside]
    length = len(ids)
    if answer is not None:
        ids += [END, *encode(qwen3_tokenizer, f"\n\n{answer}"), TURN_END]
    assert split_thinking(ids, qwen3_tokenizer, tags, opened) == (thinking, answer or "")
    batch = {"completions": [qwen3_tokenizer.decode(ids, skip_special_tokens=True)], "completion_ids": [ids]}
    bound = {"decode": lambda part: qwen3_tokenizer.decode(part, skip_special_tokens=True)}
    right = answer_reward.with_(**bound)(**batch, answer=[answer or "4"])
    assert right == [0.0 if answer is None else 1.0]
    exact = thinking_reward.with_(min_tokens=length, full_tokens=length + 1)(**batch)
    assert exact[0] in ((0.7, 0.8) if answer is not None else (-1.0,)), "the length is counted in tokens"


@pytest.mark.slow
def test_rewards_of_a_run_are_bound(qwen3_tokenizer: Any, make_run: Any) -> None:
    """Ids, end tokens and texts of the real tokenizer meet the rewards as a run builds them."""
    run = make_run(rewards=("thinking_reward", "answer_reward", "think_format_reward", "missing_eos_penalty"))
    built = {one.__name__: one.reward for one in build_rewards(run, qwen3_tokenizer)}
    assert built["answer_reward"].think_end_id == END and built["answer_reward"].thinking is True
    assert built["think_format_reward"].eos_token_ids == (TURN_END, END_OF_TEXT)
    whole = encode(qwen3_tokenizer, f"<think>\n{THOUGHT}\n</think>\n\n1.024") + [TURN_END]
    cases = [whole, whole[:-1], whole[:12], encode_spelled(qwen3_tokenizer, SPELLED) + [END_OF_TEXT]]
    texts = [qwen3_tokenizer.decode(ids, skip_special_tokens=True) for ids in cases]
    found = {
        name: reward(prompts=["p"] * 4, completions=texts, completion_ids=cases, answer=["1.0240"] * 4)
        for name, reward in built.items()
    }
    assert found["answer_reward"] == [1.0, 1.0, 0.0, 0.0] and found["think_format_reward"] == [1.0, 0.0, 0.0, 0.0]
    assert found["missing_eos_penalty"] == [0.0, -1.0, -1.0, 0.0]
    assert found["thinking_reward"][:2] == [0.8, 0.8] and found["thinking_reward"][2:] == [-1.0, -1.0]
    without = build_rewards(make_run(model={"enable_thinking": False}), qwen3_tokenizer)[0]
    assert without(prompts=["p"], completions=["1024"], completion_ids=[[16, TURN_END]], answer=["1024"]) == [1.0]


def test_prompts_are_counted_in_real_tokens(qwen3_tokenizer: Any, make_run: Any) -> None:
    """`data.max_prompt_length` is exact, template included, and the empty thought costs four more tokens."""
    words = "eins zwei drei vier " * 3
    rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": words, "answer": "4"}]
    lengths = {}
    for switch in (None, False):
        run = make_run(rows, model={} if switch is None else {"enable_thinking": switch})
        text = render_prompt(qwen3_tokenizer, "2+2=", "hybrid", switch)
        lengths[switch] = len(encode(qwen3_tokenizer, text))
        run.data.max_prompt_length = lengths[switch]
        found = prepare_data(run, qwen3_tokenizer)
        assert (found.train.rows, found.train.texts[0]) == ([0], text), "the longer one is dropped"
        run.data.max_prompt_length -= 1
        with pytest.raises(DataError, match="max_prompt_length"):
            prepare_data(run, qwen3_tokenizer)
    assert lengths[False] == lengths[None] + 4


@pytest.mark.parametrize("switch", [None, False])
def test_a_demonstration_ends_where_the_model_stops(qwen3_tokenizer: Any, make_run: Any, switch: bool | None) -> None:
    """One `<think>`, one `</think>`, one end token, each by its id; without thinking the template's empty thought."""
    work = f"{THOUGHT}\n</think>\n\n4"
    rows = [{"prompt": "2+2=", "answer": "4", "completion": work if switch is None else "4"}]
    run = make_run(rows, model={} if switch is None else {"enable_thinking": switch})
    (example,) = load_worked(run, qwen3_tokenizer, ()).examples
    assert example.completion_ids[-1] == TURN_END and example.completion_ids.count(TURN_END) == 1
    counts = [ids.count(tag) for ids in (example.prompt_ids, example.completion_ids) for tag in (START, END)]
    assert counts == ([0, 0, 1, 1] if switch is None else [1, 1, 0, 0])
    if switch is None:
        assert example.completion_ids[:2] == encode(qwen3_tokenizer, "<think>\n")


@pytest.mark.slow
def test_the_checks_refuse_a_budget_for_a_model_that_was_asked_not_to_think(
    make_run: Any, qwen3_folder: Path, tmp_path: Path
) -> None:
    """`</think>` would be forced into its answers."""
    model = {"name": str(shutil.copytree(qwen3_folder, tmp_path / "model"))}
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    asked = make_run(model=model | {"enable_thinking": False}, thinking_budget=100)
    messages = [str(fault) for fault in find_faults(asked)]
    assert any("set rloo.thinking_budget=null" in message for message in messages), messages
    assert not any("thinking" in str(fault) for fault in find_faults(make_run(model=model, thinking_budget=100)))
