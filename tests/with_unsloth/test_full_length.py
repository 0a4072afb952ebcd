"""Full length on Unsloth's own code: its cache is full at the end of a row without a prefill; a preflight's steps."""

import importlib
from pathlib import Path
from typing import Any

import pytest


def test_rows_are_decoded_at_their_end_from_unsloths_buffers(
    load: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsloth copies the cache that it is given into its own buffers at the first step. A prefill of whole rows
    would be measured in their place, and a cache that it did not take would leave the buffers short."""
    from rloo_kit.models import unsloth as backend

    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    full_rows = importlib.import_module("on_gpu.full_rows")

    run = make_run("rollout.rows=2")
    policy = load(moved=True)
    attention = policy.model.get_base_model().model.layers[0].self_attn
    kept, free = {}, backend.free_caches

    def noted(model: Any) -> None:
        kept.update(vars(attention))
        free(model)

    monkeypatch.setattr(backend, "free_caches", noted)
    full_rows.measure_rollout(policy, run, rows=2, tokens=100, decoded=8)
    filled = 100 - 8 - 1  # the last token of the prefix goes through the first step
    assert kept["paged_attention"].shape == (512 + filled + 1, 2, 2, 1, 32)
    one = kept["paged_attention_K"][:filled]
    assert (one == one[:1]).all() and not (kept["paged_attention_K"][filled] == one[0]).all()
    assert not [name for name in vars(attention) if name.startswith("paged")], "a rollout's cache is held in training"


def test_two_steps_of_full_length(load: Any, make_run: Any) -> None:
    """The trainer that Unsloth generates, on completions that no engine sampled; the policy is left as it was found."""
    from rloo_kit.preflight.trial_steps import take_steps

    run = make_run("data.max_prompt_length=8", "rloo.beta=0.0")
    policy = load(moved=True)
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters() if value.requires_grad}
    take_steps(policy, run)
    now = dict(policy.model.named_parameters())
    assert any(not now[name].equal(value) for name, value in before.items())
    assert all(value.grad is None for value in now.values()) and list(policy.model.peft_config) == ["default"]
