"""Steps at full length: that what is measured is a run's own code at its longest."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rloo_kit import load_config, load_policy
from rloo_kit._stack import load_stack
from rloo_kit.preflight.steps import decode_ends, full_engine, load_of, measure_steps, rows_of_a_pass
from rloo_kit.rollout.kv_cache import SlotCache
from tests.models.zoo import make_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WORDS = [
    "data.max_prompt_length=16", "rloo.max_completion_length=112", "model.max_seq_length=128", "rollout.rows=4",
    "rloo.num_generations=4", "rloo.per_device_train_batch_size=8", "rloo.gradient_accumulation_steps=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def libraries() -> None:
    load_stack()


@pytest.fixture
def run(tiny_folder: Path) -> Any:
    return load_config(CONFIGS / "arithmetic_thinking.yaml", *WORDS, f"model.name={tiny_folder}", "model.family=auto")


@pytest.fixture
def policy(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RLOO_KIT_BACKEND", "transformers")
    return load_policy(run, check=False)


@pytest.fixture
def calls(policy: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of the ids that the model's backbone was called with."""
    backbone = policy.model.get_base_model().model
    plain, seen = backbone.forward, []

    def counted(*args: Any, **named: Any) -> Any:
        ids = args[0] if args else named["input_ids"]
        seen.append(tuple(ids.shape))
        return plain(*args, **named)

    monkeypatch.setattr(backbone, "forward", counted)
    return seen


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_rows_are_decoded_at_their_end(run, policy, calls, monkeypatch, engine):
    """A measurement that prefills whole rows measures the prefill; one that decodes from the start takes hours."""
    held: list[int] = []
    if engine == "native":
        begin = SlotCache.begin

        def noted(self: Any, positions: list[int], device: Any) -> Any:
            held.append(max(positions))
            return begin(self, positions, device)

        monkeypatch.setattr(SlotCache, "begin", noted)
    run.rollout.engine = engine
    decode_ends(full_engine(policy, run, 3), rows=3, tokens=100, decoded=64)
    assert all(width <= 4 for _, width in calls), "whole rows were prefilled"
    if engine == "native":
        assert held[-64:] == list(range(35, 99))
    else:
        assert calls[-64:] == [(3, 1)] * 64


def test_a_cache_is_filled_where_layers_have_none():
    """Qwen3.5: most layers have a state of fixed size, and a rollout's cache had no place for it."""
    model = make_model("Qwen3_5")
    policy = SimpleNamespace(model=model, backend="transformers", tokenizer=SimpleNamespace(pad_token_id=0))
    run = SimpleNamespace(rollout=SimpleNamespace(engine="generate"), rloo=SimpleNamespace(temperature=1.0))
    with torch.no_grad():
        filled = full_engine(policy, run, 2)._cache_options(2, 31)["past_key_values"]
        assert filled.get_seq_length() == 30
        states = [one.recurrent_states[0] for one in filled.layers if hasattr(one, "recurrent_states")]
        assert states and {one.shape[0] for one in states} == {2}
        logits = model(torch.tensor([[7], [8]]), past_key_values=filled, position_ids=torch.full((2, 1), 30)).logits
    assert filled.get_seq_length() == 31 and logits.isfinite().all()


@pytest.mark.parametrize(("engine", "beta"), [("native", 0.0), ("generate", 0.0), ("", 0.0), ("", 0.05)])
def test_steps_are_measured_as_a_run_takes_them(run, policy, calls, engine, beta):
    """Rollout and gradient fit one by one, and not with the optimizer's state in place: found out after three hours.
    With a KL penalty a pass is a whole group; a measurement of single sequences says that it fits. Two steps, for the
    optimizer's state; the adapter "ref" and the gradients are gone afterwards."""
    run.rollout.engine = engine or "auto"
    run.rloo.beta, run.rloo.tokens_per_pass = beta, 300
    generations, completions = rows_of_a_pass(load_of(run, policy))
    assert (generations, completions) == ((4, 4) if beta else (3, 3))
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters() if value.requires_grad}
    calls.clear()
    rollout, training = measure_steps(policy, run, rows=5 if engine else 0, decoded=7)
    assert training.gib > 0 and training.seconds > 0
    kinds = ["decoded" if width == 1 else "scored" for _, width in calls if width == 1 or width > 100]
    order = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    if engine:
        assert rollout.gib > 0 and rollout.seconds > 0 and order == ["decoded", "scored", "decoded", "scored"]
        assert engine == "native" or calls.count((5, 1)) == 2 * 7  # native decodes past the backbone
    else:
        assert rollout is None and order == ["scored"]
    group = 16 + generations * 112  # the prompt once for all
    assert max(height * width for height, width in calls) == (group if beta else 16 + 2 * 112)
    now = dict(policy.model.named_parameters())
    assert any(not now[name].equal(value) for name, value in before.items())
    assert all(value.grad is None for value in now.values())
    assert list(policy.model.peft_config) == ["default"] and not policy.model.training
