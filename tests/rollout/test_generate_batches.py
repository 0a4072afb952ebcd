"""Which rows `generate` samples together: prompts of one length, in no more batches than any other order takes."""

from typing import Any

import pytest
import torch

from rloo_kit.rollout.types import Limits
from tests.models.zoo import make_model
from tests.rollout.models import adapted, check_logps, engine_for


def test_what_reaches_generate(make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch):
    """Rows that wait in another order than they came in; each completion is still its own prompt's."""
    model = adapted(make_tiny_model(initializer_range=0.3))
    prompts = [[9] * 4, *[[3, 4, 5]] * 4, *[[8, 7]] * 2, *[[2, 6, 1]] * 2, [1, 2, 3, 4], [7, 7], [5, 6]]
    masks: list[torch.Tensor] = []
    plain = model.generate

    def counted(**named: Any) -> Any:
        masks.append(named["attention_mask"])
        return plain(**named)

    monkeypatch.setattr(model, "generate", counted)
    done: list[tuple[int, int]] = []
    torch.manual_seed(0)
    found = engine_for(model, "generate", rows=6).sample(
        prompts, Limits(8), on_progress=lambda *some: done.append(some)
    )
    shapes = [tuple(mask.shape) for mask in masks]
    assert shapes == [(6, 3), (2, 6), (1, 2), (6, 4)] and bool(masks[0].all()), "between them, the check of padding"
    assert done == [(6, 12), (12, 12)]
    check_logps(model, prompts, found)


def test_a_model_that_cannot_be_padded_samples_one_length_after_another():
    """MiniMax sampled from another policy than was trained, 4 nats a token apart, where `generate` padded prompts."""
    model, lines = make_model("MiniMax"), list[str]()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 4, 5], [9, 8, 7], [6, 5, 4, 3, 2, 1]]
    engine = engine_for(model, "generate", say=lines.append)
    torch.manual_seed(0)
    check_logps(model, prompts, engine.sample(prompts, Limits(12)))
    engine.sample(prompts, Limits(2))
    (line,) = lines
    assert line.startswith("rollout: minimax") and "one length after another" in line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_is_refused_in_16_bits_too_and_only_where_it_is_wrong(dtype: torch.dtype, make_tiny_model: Any):
    """A tolerance that let MiniMax pass in bfloat16, or refused Qwen3 for its rounding, would be no check."""
    assert engine_for(make_model("MiniMax").to(dtype), "generate").check_padding() is not None
    assert engine_for(make_tiny_model(initializer_range=0.3).to(dtype), "generate").check_padding() is None
