"""The generate engine through Unsloth's fast inference: budgets, and log-probabilities that scoring confirms."""

import math
from typing import Any

import pytest

THINK_END, TURN_END = 260, 258


def test_fast_inference_with_a_budget(load: Any) -> None:
    """Under Unsloth every rollout goes through `generate`: a budget that it ignored would leave a batch of truncated
    thoughts, and log-probabilities of other tokens would make its importance correction noise."""
    import torch

    from rloo_kit.rollout.completions import find_end_ids
    from rloo_kit.rollout.engine import build_engine
    from rloo_kit.rollout.thinking_budget import make_limits

    policy = load(moved=True)
    policy.model.train()
    limits = make_limits(policy.tokenizer, policy.tags, 10, 3, 4)
    engine = build_engine(
        policy.model, "auto", backend=policy.backend, temperature=0.8, end_ids=find_end_ids(policy), pad_id=256
    )
    assert engine.name == "generate" and "Unsloth" in engine.reason
    prompts = [policy.tokenizer(text)["input_ids"] for text in ("ab", "abc cab", "h", "ga fe") for _ in range(3)]
    torch.manual_seed(0)
    found = engine.sample(prompts, limits)
    assert policy.model.training
    assert {span is None for span in found.forced} == {True, False}
    policy.model.eval()
    for prompt, ids, span, logps in zip(prompts, found.completion_ids, found.forced, found.sampler_logps, strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        exact = (logits.float() / 0.8).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        for place, (logp, expected) in enumerate(zip(logps, exact, strict=True)):
            if span is not None and span[0] <= place < span[1]:
                assert math.isnan(logp) and ids[place] == THINK_END and place == 3
            else:
                assert logp == pytest.approx(expected, abs=1e-4)
        if THINK_END in ids:
            assert len(ids) - ids.index(THINK_END) - 1 <= 4
        else:
            assert ids[-1] == TURN_END


def test_rows_of_one_length_are_decoded_without_a_copy_of_the_cache(load: Any, monkeypatch: Any) -> None:
    """With a mask its decoding copies keys and values for each query head: half of the batches were padded for nothing.
    Two query heads share one here; what a call of SDPA is given has the heads that the cache has, or that of a copy."""
    import torch
    from torch.overrides import TorchFunctionMode

    from rloo_kit.rollout.completions import find_end_ids
    from rloo_kit.rollout.engine import build_engine
    from rloo_kit.rollout.types import Limits

    class Calls(TorchFunctionMode):
        """Of SDPA for one token: whether it has a mask, and the heads of its keys."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[bool, int]] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention and args[0].size(2) == 1:
                mask = (kwargs or {}).get("attn_mask", args[3] if len(args) > 3 else None)
                self.seen.append((mask is not None, args[1].size(1)))
            return func(*args, **(kwargs or {}))

    policy = load(moved=True)
    engine = build_engine(
        policy.model, "auto", backend=policy.backend, temperature=1.0, end_ids=find_end_ids(policy), pad_id=256, rows=4
    )
    prompts = [policy.tokenizer(text)["input_ids"] for text in ("abc ", "h", *["ab"] * 4, "abc ", "h")]
    assert engine.check_padding() is None  # before the first padded batch; it decodes too
    torch.manual_seed(0)
    with Calls() as calls:
        found = engine.sample(prompts, Limits(4))
    steps = [max(len(ids) for ids in found.completion_ids[2:6]) - 1]
    steps.append(max(len(ids) for ids in found.completion_ids[:2] + found.completion_ids[6:]) - 1)
    assert calls.seen == [(False, 1)] * steps[0] + [(True, 2)] * steps[1] and all(steps)


def test_a_prompt_that_is_too_long_is_refused(load: Any) -> None:
    """Unsloth has tables for `model.max_seq_length` tokens; beyond it an error about the shapes of tensors came from
    inside its attention, after the rollout had begun."""
    from rloo_kit import generate_completions
    from rloo_kit.errors import ConfigError

    with pytest.raises(ConfigError, match="120 tokens and 9 more .* loaded for 128: raise model.max_seq_length"):
        generate_completions(load(), ["a" * 120], max_completion_length=9)
