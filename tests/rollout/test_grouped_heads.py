"""A step of `ModuleDecoder` reads the KV cache as it lies, without a copy for every query head: the same logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rloo_kit.gradient.scorer import Scorer
from rloo_kit.rollout.decoders import ModuleDecoder
from rloo_kit.rollout.kv_cache import SlotCache
from tests.rollout.models import adapted

LENGTHS = (200, 200, 150, 90)  # of the rows, the new token included
HEADS = 8


@pytest.fixture
def make_model(make_tiny_model: Callable[..., Any]) -> Callable[..., Any]:
    """`make_model(kv_heads, **config)`: 8 query heads, an adapter that is not the identity."""

    def build(kv_heads: int = 2, **config: Any) -> Any:
        values = {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "initializer_range": 0.2}
        return adapted(make_tiny_model(**(values | config)))

    return build


def filled(decoder: ModuleDecoder, lengths: tuple[int, ...] = LENGTHS) -> Any:
    """A cache behind one prompt a row, one token short of `lengths`."""
    cache, generator = SlotCache(len(lengths)), torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (length - 1,), generator=generator).tolist() for length in lengths]
    decoder.prefill(prompts, cache, [(row, 1) for row in range(len(lengths))])
    return cache


def step(decoder: ModuleDecoder, cache: Any, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Logits (R, V) behind the rows' last tokens."""
    positions = cache.begin([length - 1 for length in lengths], decoder.device)
    return decoder.decode(torch.arange(len(lengths)), positions, cache)


def both_ways(model: Any, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits with grouped heads, and as transformers' own attention gives them."""
    decoder = ModuleDecoder(model)
    with torch.no_grad():
        cache = filled(decoder, lengths)
        assert decoder.groups_heads
        grouped = step(decoder, cache, lengths)
        decoder.groups_heads = False
        return grouped, step(decoder, cache, lengths)


@pytest.mark.parametrize("kv_heads", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_those_of_transformers_attention(make_model, dtype, kv_heads):
    """1, 2 and 4 query heads a group; a head that read its neighbour's keys would be off by the size of the logits."""
    for lengths in (LENGTHS, (200,) * 4):
        grouped, plain = both_ways(make_model(kv_heads).to(dtype), lengths=lengths)
        bound = 1e-5 if dtype == torch.float32 else 0.02
        assert (grouped - plain).abs().max() <= bound * plain.abs().max()
        assert plain.float().std() > 0.1  # they say something


def test_attention_that_is_more_than_a_mask_stays_transformers_own(make_model):
    """A window, a sink or a cap belongs to the layer that asks for it, and grouping would silently drop it."""
    import rloo_kit.rollout.decoders as decoders

    calls: list[Any] = []
    query, key = torch.randn(2, 8, 1, 4), torch.randn(2, 2, 5, 4)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    module = torch.nn.Module()
    module.num_key_value_groups = 4

    def stock(*args: Any, **named: Any) -> Any:
        calls.append(named)
        return plain(*args, **named)

    plain = decoders.sdpa_attention_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders, "sdpa_attention_forward", stock)
        expected = plain(module, query, key, key, mask)[0]
        found = decoders.attend_grouped(module, query, key, key, mask, sliding_window=None)[0]
        assert not calls
        torch.testing.assert_close(found, expected)
        for name in ("sliding_window", "s_aux", "softcap", "position_bias"):
            value = torch.zeros(2, 8, 1, 5) if name == "position_bias" else 3
            found = decoders.attend_grouped(module, query, key, key, mask[..., :0], **{name: value})[0]
            torch.testing.assert_close(found, expected)
            assert len(calls) == 1 and calls.pop()[name] is value


def test_the_model_attends_as_before_between_steps(make_model):
    """A pass that trains must not meet the rollout's attention, behind an error neither."""
    model = make_model()
    Scorer(model, 1.0, pad_id=256)  # its packed rows take "rloo_packed"
    config = model.config
    before = config._attn_implementation
    assert before == "rloo_packed"
    decoder = ModuleDecoder(model)
    with torch.no_grad():
        cache = filled(decoder)
        step(decoder, cache)
        assert config._attn_implementation == before
        with pytest.raises(IndexError):
            decoder.decode(torch.tensor([10**6] * 4), cache.begin([200] * 4, decoder.device), cache)
    assert config._attn_implementation == before
