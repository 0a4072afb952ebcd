"""The native engine's KV cache: what it holds, and that nothing of it is garbage."""

import pytest
import torch

from rloo_kit.plan import parts
from rloo_kit.plan.shapes import ModelShape
from rloo_kit.rollout.kv_cache import SlotCache


@pytest.mark.parametrize("width", [4, 2])
def test_what_a_cache_holds_is_what_the_plan_counts(width):
    """Bytes are counted in real tensors."""
    shape = ModelShape(32, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=320, tied=True)
    load = parts.Load(
        shape, False, width, width, 16, ("q_proj",), "sgd", "off", False, 1, False, "none", prompt_tokens=10,
        completion_tokens=90, num_generations=3, completions=3, on_cuda=False,
    )  # fmt: skip
    cache = SlotCache(3)
    states = torch.randn(2, 100, 16, dtype=torch.float32 if width == 4 else torch.bfloat16)  # (G, P, D)
    for layer in range(2):
        cache.insert(layer, 0, 3, states, states)
    assert cache.nbytes == parts.cache_bytes(load, rows=3)


def tokens(*values: float):
    """(R, 1 head, 2 dimensions), a row for each value."""
    return torch.tensor(values)[:, None, None].expand(-1, 1, 2)


def test_masked_memory_is_finite():
    """Fresh memory may hold NaNs, and weight 0 times NaN is NaN: whole rows were lost to masked tokens."""
    cache = SlotCache(slots=3, block_tokens=4)
    cache.begin([6, 0], torch.device("cpu"))
    keys, values = cache.write(0, tokens(1.0, 1.0), tokens(1.0, 1.0))
    cache.begin([9, 1], torch.device("cpu"))  # grows
    keys, values = cache.write(0, tokens(1.0, 1.0), tokens(1.0, 1.0))
    assert torch.isfinite(keys).all() and torch.isfinite(values).all()


def test_a_growing_cache_drops_the_slots_of_ended_rows():
    """The last long rows of a batch kept the memory of all rows that had ended."""
    cache = SlotCache(slots=3, block_tokens=4)
    cache.begin([0, 0, 0], torch.device("cpu"))
    cache.write(0, tokens(1.0, 2.0, 3.0), tokens(0.0, 0.0, 0.0))
    cache.shrink(1)
    cache.begin([4], torch.device("cpu"))
    cache.write(0, tokens(5.0), tokens(0.0))
    assert cache.keys[0].shape == (1, 1, 8, 2) and cache.keys[0][0, 0, [0, 4], 0].tolist() == [1.0, 5.0]
