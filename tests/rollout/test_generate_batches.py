"""Which rows `generate` samples together, a `generate` that is not transformers' own, how `ModuleDecoder` attends."""

from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers.generation.utils import DeferredStopCheck

from rloo_kit.errors import BackendError
from rloo_kit.rollout.types import Limits
from tests.episodes import Echo
from tests.models.zoo import make_model
from tests.rollout.models import PROMPTS, TURN_END, adapted, check_logps, engine_for, lean


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


@pytest.mark.parametrize("replies", [False, True], ids=["one turn", "tools"])
def test_batches_of_as_many_rows_share_a_mode(replies, make_tiny_model, monkeypatch):
    """Unsloth captured its CUDA graphs again for every batch; it keeps the buffers of two numbers of rows."""
    model = adapted(lean(make_tiny_model(initializer_range=0.3), {TURN_END: 3.0}))
    engine = engine_for(model, "generate", rows=4)
    engine.check_padding()
    plain, mode, seen = model.generate, engine._mode, []

    @contextmanager
    def counted() -> Any:
        with mode():
            yield
        seen.append("out")

    def generate(**named: Any) -> Any:
        seen.append(rows := len(named["input_ids"]))
        if seen.count(4) == 3 and rows == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(**named)

    monkeypatch.setattr(engine, "_mode", counted)
    monkeypatch.setattr(model, "generate", generate)
    dialogue = Echo(lambda number: 0.01 * (number % 3)) if replies else None
    engine.sample([[3, 4, 5]] * 17, Limits(20), dialogue=dialogue)
    if not replies:
        assert seen == [4, 4, 4, "out", 2, 2, 2, 2, "out", 1, "out"]
    sizes = [list(rows) for is_out, rows in groupby(seen, lambda what: what == "out") if not is_out]
    assert all(len(set(rows)) == 1 for rows in sizes) and sizes[0] == [4, 4, 4] and max(map(len, sizes[1:])) > 2
    assert all(one[0] != other[0] for one, other in pairwise(sizes)) and seen.count("out") == len(sizes)


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
    assert not engine_for(make_model("MiniMax").to(dtype), "generate").check_padding()
    assert engine_for(make_tiny_model(initializer_range=0.3).to(dtype), "generate").check_padding()


def drop_the_processor(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.cat([input_ids, input_ids[:, :1]], dim=1)


def test_a_generate_without_log_probabilities_is_refused(make_tiny_model):
    """The fault was an AssertionError in the middle of the kit."""
    model = make_tiny_model()
    model.generate = drop_the_processor
    with pytest.raises(BackendError, match=r"logits_processor.*rollout\.engine=native"):
        engine_for(model, "generate").sample([[3, 4, 5]] * 2, Limits(3))


@pytest.mark.parametrize("limits", [Limits(30), Limits(30, 4, 3, (3,), 9)], ids=["plain", "budget"])
def test_a_stop_check_that_comes_late_is_refused(limits, make_tiny_model, monkeypatch):
    """transformers' stop check one step late (on MPS today) gives one log-probability too many."""
    monkeypatch.setattr(DeferredStopCheck, "is_supported", lambda *_, **__: True)
    monkeypatch.setattr(torch, "Event", Mock())  # the CPU has no events to wait for
    engine = engine_for(lean(make_tiny_model(), {TURN_END: 4.0}), "generate")
    with pytest.raises(BackendError, match=r"rollout\.engine=native.*transformers.*constraints\.txt"):
        engine.sample(PROMPTS[:2], limits)
