"""The full rows of `benchmarks/on_gpu`: their ends are decoded after full caches, which no prefill has filled."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config, load_policy
from rloo_kit.rollout.kv_cache import SlotCache

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_rows_are_decoded_at_their_end(engine: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that prefills whole rows measures the prefill; one that decodes from the start takes hours."""
    monkeypatch.setenv("RLOO_KIT_BACKEND", "transformers")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    words = [f"model.name={tiny_folder}", "model.family=auto", f"rollout.engine={engine}", "model.max_seq_length=128"]
    words += ["data.max_prompt_length=16", "rloo.max_completion_length=112"]
    words += ["rloo.num_generations=4", "rloo.per_device_train_batch_size=8"]
    run = load_config(ROOT / "configs" / "arithmetic_thinking.yaml", *words)
    policy = load_policy(run, check=False)
    full_rows = importlib.import_module("on_gpu.full_rows")
    backbone = policy.model.get_base_model().model
    plain, seen, held = backbone.forward, [], []
    begin = SlotCache.begin

    def counted(*args: Any, **named: Any) -> Any:
        seen.append(tuple((args[0] if args else named["input_ids"]).shape))
        return plain(*args, **named)

    def noted(self: Any, positions: list[int], device: Any) -> Any:
        held.append(max(positions))
        return begin(self, positions, device)

    monkeypatch.setattr(backbone, "forward", counted)
    monkeypatch.setattr(SlotCache, "begin", noted)
    assert full_rows.measure_rollout(policy, run, rows=3, tokens=100, decoded=64).gib > 0
    assert all(width <= 4 for _, width in seen), "whole rows were prefilled"
    assert held[-64:] == list(range(35, 99)) if engine == "native" else seen[-64:] == [(3, 1)] * 64
    seen.clear()
    rollout, training = full_rows.measure_steps(policy, run, rows=5, decoded=7)
    assert min(rollout.gib, rollout.seconds, training.gib, training.seconds) > 0
    kinds = ["decoded" if width == 1 else "scored" for _, width in seen if width == 1 or width > 100]
    order = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    assert engine == "native" or order == ["decoded", "scored", "decoded", "scored"]  # native decodes past the backbone
