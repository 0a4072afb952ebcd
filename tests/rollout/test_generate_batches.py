"""Which rows `generate` samples together: prompts of one length, in no more batches than any other order takes."""

import math
import random
from typing import Any

import pytest
import torch

from rloo_kit.rollout.generate import next_batch
from rloo_kit.rollout.types import Limits
from tests.models.zoo import make_model
from tests.rollout.models import adapted, check_logps, engine_for


def cut(lengths: list[int], rows: int) -> list[list[int]]:
    """All batches, as the engine takes them."""
    order, batches = sorted(range(len(lengths)), key=lambda row: -lengths[row]), []
    while order:
        batches.append(next_batch(order, lengths, rows))
        order = [row for row in order if row not in batches[-1]]
    return batches


def padded(batches: list[list[int]], lengths: list[int]) -> int:
    return sum(len({lengths[row] for row in batch}) > 1 for batch in batches)


def test_no_batch_more_and_no_row_twice():
    """A batch more costs as much as what it was to spare; a row that is forgotten would be an empty completion."""
    chance = random.Random(0)
    for _ in range(500):
        lengths = [chance.choice((5, 7, 9, 11)) for _ in range(chance.randrange(1, 40))]
        rows = chance.randrange(1, 20)
        batches = cut(lengths, rows)
        assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
        assert len(batches) == math.ceil(len(lengths) / rows) and max(map(len, batches)) <= rows
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        before = [order[start : start + rows] for start in range(0, len(order), rows)]
        assert padded(batches, lengths) <= padded(before, lengths)


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
