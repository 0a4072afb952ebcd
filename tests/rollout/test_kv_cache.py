"""The cache of the rollout: who writes where, who sees what, and what stays when rows move and slots grow."""

import pytest
import torch

from rloo_kit.rollout.kv_cache import SlotCache


@pytest.fixture
def cache():
    """Three slots in blocks of four tokens."""
    return SlotCache(slots=3, block_tokens=4)


def tokens(*values: float):
    """(R, 1 head, 2 dimensions), a row for each value."""
    return torch.tensor(values)[:, None, None].expand(-1, 1, 2)


def prompt(*values: float):
    """(1 head, P, 2 dimensions)."""
    return torch.tensor(values)[None, :, None].expand(1, -1, 2)


def seen(cache, layer: int = 0) -> list[list[float]]:
    """What each row may look at in the current step, read off the keys."""
    rows, mask = cache.keys[layer], cache.mask[:, 0, 0]
    return [rows[row, 0, : cache.length, 0][mask[row]].tolist() for row in range(mask.size(0))]


def test_rows_write_at_their_own_positions_across_blocks(cache) -> None:
    """Rows of unequal length share a tensor: one that wrote where its neighbour is would read the neighbour's words."""
    cache.insert(0, 0, 2, prompt(1.0, 2.0, 3.0), prompt(1.0, 2.0, 3.0))
    cache.insert(0, 2, 1, prompt(9.0), prompt(9.0))
    for step in range(4):  # the first rows cross from the first block into the second
        cache.begin([3 + step, 3 + step, 1 + step], torch.device("cpu"))
        keys, values = cache.write(0, tokens(10.0 + step, 20.0 + step, 30.0 + step), tokens(0.5, 0.5, 0.5))
        assert keys.shape == values.shape == (3, 1, 4 + step, 2) and not cache.is_even
    assert seen(cache) == [[1, 2, 3, 10, 11, 12, 13], [1, 2, 3, 20, 21, 22, 23], [9, 30, 31, 32, 33]]
    assert cache.capacity == 8


def test_moved_rows_keep_what_they_have(cache) -> None:
    """A row that ends gives its slot to the last live one; half a move is another prompt's continuation."""
    cpu = torch.device("cpu")
    for slot in range(3):
        cache.insert(0, slot, 1, prompt(slot + 0.1, slot + 0.2), prompt(0.0, 0.0))
    cache.move([2], [0], 2)
    cache.begin([2, 2], cpu)
    cache.write(0, tokens(7.0, 8.0), tokens(0.0, 0.0))
    assert [[round(value, 1) for value in row] for row in seen(cache)] == [[2.1, 2.2, 7.0], [1.1, 1.2, 8.0]]
    assert cache.is_even


def test_masked_memory_is_finite(cache) -> None:
    """Fresh memory may hold NaNs, and weight 0 times NaN is NaN: whole rows were lost to words that nobody saw."""
    cache.begin([6, 0], torch.device("cpu"))
    keys, values = cache.write(0, tokens(1.0, 1.0), tokens(1.0, 1.0))
    cache.begin([9, 1], torch.device("cpu"))  # grows
    keys, values = cache.write(0, tokens(1.0, 1.0), tokens(1.0, 1.0))
    assert torch.isfinite(keys).all() and torch.isfinite(values).all()


def test_slots_that_nobody_needs_go_when_the_cache_grows(cache) -> None:
    """The last long rows of a batch paid for the memory of all that had ended."""
    cache.begin([0, 0, 0], torch.device("cpu"))
    cache.write(0, tokens(1.0, 2.0, 3.0), tokens(0.0, 0.0, 0.0))
    cache.shrink(1)
    cache.begin([4], torch.device("cpu"))
    cache.write(0, tokens(5.0), tokens(0.0))
    assert cache.keys[0].shape == (1, 1, 8, 2) and cache.keys[0][0, 0, [0, 4], 0].tolist() == [1.0, 5.0]
