"""A step of `ModuleDecoder` reads the KV cache without a copy for every query head, where attention is only a mask;
`test_native` has its completions."""

from typing import Any

import pytest
import torch

from rloo_kit.gradient.scorer import Scorer
from rloo_kit.rollout import decoders
from rloo_kit.rollout.decoders import SlotCache
from tests.rollout.models import adapted


@pytest.mark.parametrize("name", ["sliding_window", "s_aux", "softcap", "position_bias"])
def test_attention_that_is_more_than_a_mask_stays_transformers_own(name, monkeypatch):
    """A window, a sink or a cap belongs to the layer that asks for it, and grouping would silently drop it."""
    query, key, mask = torch.randn(2, 8, 1, 4), torch.randn(2, 2, 5, 4), torch.ones(2, 1, 1, 5, dtype=torch.bool)
    module, calls, plain = torch.nn.Module(), [], decoders.sdpa_attention_forward
    module.num_key_value_groups = 4

    def stock(*args: Any, **named: Any) -> Any:
        calls.append(named)
        return plain(*args, **named)

    monkeypatch.setattr(decoders, "sdpa_attention_forward", stock)
    expected = plain(module, query, key, key, mask)[0]
    torch.testing.assert_close(decoders.attend_grouped(module, query, key, key, mask, sliding_window=None)[0], expected)
    assert not calls
    value = torch.zeros(2, 8, 1, 5) if name == "position_bias" else 3
    found = decoders.attend_grouped(module, query, key, key, mask[..., :0], **{name: value})[0]
    torch.testing.assert_close(found, expected)
    assert len(calls) == 1 and calls[0][name] is value


def test_the_model_attends_as_before_between_steps(make_tiny_model):
    """A pass that trains must not meet the rollout's attention, behind an error neither."""
    model = adapted(make_tiny_model())
    Scorer(model, 1.0, pad_id=256)  # its packed rows take "rloo_packed"
    decoder, cache = decoders.ModuleDecoder(model), SlotCache(2)
    assert decoder.groups_heads and model.config._attn_implementation == "rloo_packed"
    with torch.no_grad():
        decoder.prefill([[5, 6, 7], [9]], cache, [(0, 1), (1, 1)])
        decoder.decode(torch.tensor([1, 2]), cache.begin([3, 1], decoder.device), cache)
        assert model.config._attn_implementation == "rloo_packed"
        with pytest.raises(IndexError):
            decoder.decode(torch.tensor([10**6] * 2), cache.begin([4, 2], decoder.device), cache)
    assert model.config._attn_implementation == "rloo_packed"
