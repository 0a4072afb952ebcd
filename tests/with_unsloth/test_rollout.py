"""Sampling from a policy that Unsloth loaded, by the kit's decoder and through Unsloth's fast inference: budgets, and
log-probabilities that scoring confirms."""

import math
from typing import Any

import pytest

THINK_END, TURN_END = 260, 258


@pytest.mark.parametrize("name", ["auto", "generate", "graphs"])
def test_a_budget_and_its_log_probabilities(load: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Sampled tokens are as likely as Unsloth's forward says, and thoughts end at their budget, in graphs too."""
    import torch

    from rloo_kit.rollout import graphs
    from rloo_kit.rollout.choice import build_engine
    from rloo_kit.rollout.completions import find_end_ids
    from rloo_kit.rollout.thinking_budget import make_limits
    from tests.rollout.replay import record

    policy = load(moved=True)
    policy.model.train()
    limits = make_limits(policy.tokenizer, policy.tags, 10, 3, 4)
    engine = build_engine(
        policy.model,
        {"graphs": "native"}.get(name, name),
        backend=policy.backend,
        temperature=0.8,
        end_ids=find_end_ids(policy),
        pad_id=256,
    )
    assert engine.name == ("generate" if name == "generate" else "native")
    if name == "graphs":
        monkeypatch.setattr(graphs, "capture", record)
        engine.uses_graphs = True
    prompts = [policy.tokenizer(text)["input_ids"] for text in ("ab", "abc cab", "h", "ga fe") for _ in range(3)]
    torch.manual_seed(0)
    found = engine.sample(prompts, limits)
    assert policy.model.training
    assert name == "generate" or engine.decoder.__name__ == "DirectDecoder"
    assert name != "graphs" or engine.counts["replays"] > 2
    assert set(map(bool, found.forced)) == {True, False}
    policy.model.eval()
    for prompt, ids, spans, logps in zip(prompts, found.completion_ids, found.forced, found.sampler_logps, strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        exact = (logits.float() / 0.8).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        for place, (logp, expected) in enumerate(zip(logps, exact, strict=True)):
            if any(start <= place < end for start, end in spans):
                assert math.isnan(logp) and ids[place] == THINK_END and place == 3
            else:
                assert logp == pytest.approx(expected, abs=1e-4)
        if THINK_END in ids:
            assert len(ids) - ids.index(THINK_END) - 1 <= 4
        else:
            assert ids[-1] == TURN_END


def test_float32_weights_in_mixed_precision_and_broken_ones(load: Any, monkeypatch: Any) -> None:
    """A rollout under autocast fell back to a step inside Unsloth's attention and died; so did one with a NaN."""
    import torch

    from rloo_kit import generate_completions
    from rloo_kit.errors import BackendError

    monkeypatch.setattr("rloo_kit.system.environment.mixed_precision", lambda dtype: "bf16")  # a GPU's
    policy = load(moved=True)
    assert policy.precision == "bf16" and policy.model.get_input_embeddings().weight.dtype == torch.float32
    greedy = {"limits": 5, "temperature": 0.0}
    both = [generate_completions(policy, ["ab", "abc"], engine=engine, **greedy) for engine in ("native", "generate")]
    assert [one.ids for one in both[0]] == [one.ids for one in both[1]]
    with torch.no_grad():
        policy.model.get_base_model().model.norm.weight.fill_(torch.nan)
    with pytest.raises(BackendError, match="logits contain a NaN"):
        generate_completions(policy, ["ab"], engine="native", limits=5)


def test_a_prompt_that_is_too_long_is_refused(load: Any) -> None:
    """Beyond Unsloth's tables came an error about shapes from inside its attention, after the rollout had begun."""
    from rloo_kit import generate_completions
    from rloo_kit.errors import ConfigError

    with pytest.raises(ConfigError, match="120 tokens and 9 more .* loaded for 128: raise model.max_seq_length"):
        generate_completions(load(), ["a" * 120], limits=9)
