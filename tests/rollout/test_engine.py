"""Generation outside the loop: the model's own ids, its whole distribution, and thinking that is closed at a budget."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rloo_kit.errors import ConfigError, DataError
from rloo_kit.rollout.completions import find_end_ids, generate_completions
from rloo_kit.rollout.thinking_budget import make_budget_limits
from tests.rollout import models

THINK_END, TURN_END, END_OF_TEXT = 260, 258, 256
PROMPTS = ["12+13=", "a much longer prompt than the others", "7", "1+1=2?"]


@pytest.fixture
def make_policy(make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Callable[..., Any]:
    """`make_policy(bias={id: b})`: a random Qwen3 whose head leans towards some ids."""

    def build(seed: int = 0, bias: dict[int, float] | None = None, **config: Any) -> Any:
        model = make_tiny_model(seed, tie_word_embeddings=False, **config)
        model.generation_config.eos_token_id = [TURN_END, END_OF_TEXT]
        return models.make_policy(model, tiny_tokenizer, bias or {})

    return build


def test_whole_distribution_whatever_the_checkpoint_says(make_policy):
    """`generate` fills what is not given from the checkpoint's top-k 20 and top-p 0.95: another distribution."""
    plain, narrowed = make_policy(), make_policy()
    settings = {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "temperature": 0.01, "repetition_penalty": 9.0}
    for name, value in (settings | {"typical_p": 0.1}).items():
        setattr(narrowed.model.generation_config, name, value)
    options = {"limits": 8, "num_samples": 4, "seed": 3}
    sampled = generate_completions(narrowed, PROMPTS, **options)
    assert sampled == generate_completions(plain, PROMPTS, **options)
    assert len({tuple(completion.ids) for completion in sampled}) == 16
    greedy = {"limits": 8, "temperature": 0}
    assert generate_completions(narrowed, PROMPTS, **greedy) == generate_completions(plain, PROMPTS, **greedy)


def test_seed_fixes_the_samples_and_leaves_the_global_state(make_policy):
    """An evaluation between two steps changed the samples of the training after it."""
    policy = make_policy()
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = generate_completions(policy, PROMPTS, limits=6, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert generate_completions(policy, PROMPTS, limits=6, seed=1) == first
    assert generate_completions(policy, PROMPTS, limits=6, seed=2) != first


def test_flags_are_told_by_ids(make_policy):
    """Ids distinguish a completion that writes the letters of `</think>`, or whose text hides the end token."""
    ended = generate_completions(make_policy(bias={TURN_END: 100}), ["a"], limits=5)[0]
    assert (ended.ids, ended.text, ended.ended, ended.closed) == ([TURN_END], "", True, False)
    other_end = generate_completions(make_policy(bias={END_OF_TEXT: 100}), ["a"], limits=5)[0]
    assert other_end.ids == [END_OF_TEXT] and other_end.ended
    closing = generate_completions(make_policy(bias={THINK_END: 100}), ["a"], limits=3)[0]
    assert closing.ids == [THINK_END] * 3 and closing.text == "</think>" * 3
    assert (closing.ended, closing.closed, closing.thinking_tokens, closing.forced) == (False, True, 0, [])
    letter = make_policy().tokenizer("x")["input_ids"][0]
    endless = generate_completions(make_policy(bias={letter: 100}), ["a"], limits=3)[0]
    assert (endless.text, endless.ended, endless.closed, endless.thinking_tokens) == ("xxx", False, False, 3)


def test_every_declared_end_token_ends(make_policy):
    """An evaluation that knew only the tokenizer's end token read on into whatever came after."""
    policy = make_policy()
    assert find_end_ids(policy) == [TURN_END, END_OF_TEXT]
    policy.model.generation_config.eos_token_id = END_OF_TEXT
    assert find_end_ids(policy) == [TURN_END, END_OF_TEXT]
    policy.model.generation_config.eos_token_id = None
    assert find_end_ids(policy) == [TURN_END]


def test_open_thinking_is_closed_at_the_budget(make_policy):
    """`</think>` comes right after the budget's last token, once, and the answer gets its budget or what is left."""
    policy = make_policy(bias={THINK_END: -100, TURN_END: -100, END_OF_TEXT: -100})
    for limit, budget, answer, length in ((99, 4, 3, 8), (6, 0, None, 6), (6, 9, None, 11)):
        limits = make_budget_limits(policy.tokenizer, policy.tags, limit, budget, answer)
        for done in generate_completions(policy, PROMPTS, limits, num_samples=2):
            assert done.forced and done.closed and not done.ended and len(done.ids) == length
            assert done.thinking_tokens == done.ids.index(THINK_END) == budget and done.ids.count(THINK_END) == 1
    limits = make_budget_limits(policy.tokenizer, policy.tags, 400, 4, 3, close="sentence")
    (done,) = generate_completions(policy, PROMPTS[:1], limits)
    assert done.ids.index(THINK_END) > 40 and done.thinking_tokens == 4, "the sentence is not the model's"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"limits": 0}, "max_completion_length is 0; it has to be at least 1"),
        ({"temperature": -1}, "temperature is -1; it has to be 0 (greedy) or more"),
        ({"budget": (-1,)}, "thinking_budget is -1; it has to be 0 or more tokens"),
        ({"limits": 600}, "600 more are to be generated, but the model has 512 positions"),
        ({"budget": (500, 50)}, "551 more are to be generated"),
    ],
)
def test_values_out_of_range(make_policy, options, text):
    """Beyond its positions a model silently writes noise."""
    policy = make_policy()
    with pytest.raises(ConfigError) as caught:
        if budget := options.pop("budget", None):
            options["limits"] = make_budget_limits(policy.tokenizer, policy.tags, 8, *budget)
        generate_completions(policy, ["a"], **({"limits": 8} | options))
    assert text in str(caught.value)


def test_no_prompts_and_empty_prompts(make_policy):
    """Nothing in, nothing out; a prompt without tokens made `generate` fail inside attention."""
    assert generate_completions(make_policy(), [], limits=8) == []
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        generate_completions(make_policy(), ["a", ""], limits=8)
