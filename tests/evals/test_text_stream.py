"""Completions while they grow: what the engines tell of them, and the text that is made of it."""

import random

import pytest
import torch

from rloo_kit.data.chat import byte_symbols
from rloo_kit.evals.ask import TextStream
from rloo_kit.rollout.thinking_budget import make_limits
from rloo_kit.rollout.types import Limits
from rloo_kit.think_tags import bind_think_tags, split_thinking
from tests.rollout.models import END_OF_TEXT, PROMPTS, THINK_END, TURN_END, adapted, engine_for, lean

THINK_START = 259


@pytest.fixture
def model(make_tiny_model):
    """Random weights large enough that every prompt gets its own answer, and some end and close early."""
    model = make_tiny_model(tie_word_embeddings=False, initializer_range=0.3)
    return adapted(lean(model, {END_OF_TEXT: 2.0, TURN_END: 2.0, THINK_END: 2.0}))


@pytest.mark.parametrize("budget", [None, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("name", ["native", "generate"])
def test_what_is_sampled_is_the_same_with_a_listener(model, tiny_tokenizer, name, temperature, budget):
    """An answer on the screen that training would not have sampled shows a different model from the trained one."""
    limits = Limits(24)
    if budget is not None:
        limits = make_limits(tiny_tokenizer, bind_think_tags(tiny_tokenizer), 24, budget, 8)
    seen: dict[int, list[list[int]]] = {number: [] for number in range(len(PROMPTS))}

    def sample(**named):
        torch.manual_seed(3)
        return engine_for(model, name, temperature, rows=4).sample(PROMPTS, limits, **named)

    plain = sample()
    heard = sample(on_tokens=lambda number, ids: seen[number].append(list(ids)))
    assert heard.completion_ids == plain.completion_ids and heard.forced == plain.forced
    assert str(heard.sampler_logps) == str(plain.sampler_logps)  # NaN where forced
    assert any(plain.forced) == (budget is not None)
    for number, shown in seen.items():
        whole = plain.completion_ids[number]
        assert [len(ids) for ids in shown] == list(range(1, len(whole) + 1)), "once a token"
        assert all(whole[: len(ids)] == ids for ids in shown)


def stream(tokenizer, ids, opened, step=1):
    """The pieces of a completion that grows by `step` tokens at once."""
    pieces: list[tuple[str, str]] = []
    text = TextStream(tokenizer, bind_think_tags(tokenizer), opened, lambda *piece: pieces.append(piece))
    for end in range(step, len(ids) + step, step):
        text.feed(ids[:end])
    text.close()
    return pieces


def joined(pieces):
    return tuple("".join(text for part, text in pieces if part == wanted) for wanted in ("thinking", "answer"))


def test_characters_of_several_tokens_come_whole(tiny_tokenizer):
    """Each byte is a token here, and half a character is a replacement character on the screen."""
    thought, answer = "日本, naïve 😀 ∑", "Größe: 3 ½ 👩‍🚀"
    ids = [*tiny_tokenizer(f"{thought}\n</think>\n\n{answer}")["input_ids"], TURN_END]
    pieces = stream(tiny_tokenizer, ids, opened=True)
    assert joined(pieces) == (thought, answer)
    assert not any("\ufffd" in text for _, text in pieces) and len(pieces) > 20
    assert ("thinking", "日") in pieces and ("answer", " 👩") in pieces


@pytest.mark.parametrize("opened", [True, False])
def test_the_parts_are_those_of_split_thinking(tiny_tokenizer, opened):
    """The screen and `Answer` must not differ in what was thought: random tokens, tags and ends among them, read one
    by one or in lumps. Bytes that are no character stay replacement characters."""
    draw = random.Random(0)
    words = ["1", " ", "\n", "é", "😀", "<think>"]
    symbols = byte_symbols()
    for _ in range(400):
        ids = [token for _ in range(draw.randint(0, 12)) for token in tiny_tokenizer(draw.choice(words))["input_ids"]]
        for _ in range(draw.choice([0, 0, 1, 3])):  # bytes that are no character, also right before one
            byte = tiny_tokenizer.convert_tokens_to_ids(symbols[draw.randrange(128, 256)])
            ids.insert(draw.randint(0, len(ids)), byte)
        ids = ids if opened else [token for token in ids if token != THINK_START]
        if not opened and draw.random() < 0.5:
            ids.insert(0, THINK_START)
        if draw.random() < 0.7 and (opened or THINK_START in ids):
            ids.append(THINK_END)
            ids += tiny_tokenizer(" 7 é\n")["input_ids"] + [TURN_END] * draw.randint(0, 1)
        whole = split_thinking(ids, tiny_tokenizer, bind_think_tags(tiny_tokenizer), opened)
        for step in (1, 3, 100):
            found = joined(stream(tiny_tokenizer, ids, opened, step))
            assert found == whole, (ids, step)


def test_bytes_that_become_no_character_are_shown_in_the_end(tiny_tokenizer):
    """Held back for ever they would leave an empty screen while a random model writes on."""
    lead = tiny_tokenizer("😀")["input_ids"][0]
    assert joined(stream(tiny_tokenizer, [15, lead], opened=False))[1].startswith("0\ufffd")
    assert len(joined(stream(tiny_tokenizer, [lead] * 40, opened=False))[1]) >= 10
