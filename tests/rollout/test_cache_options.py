"""Caches in 8 bits and in the machine's memory: how near they are, what they hold, and who may have one."""

import math
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from transformers.cache_utils import HQQQuantizedLayer, QuantizedCache

from rloo_kit.config.schema import CACHES, ENGINES
from rloo_kit.errors import BackendError, ConfigError
from rloo_kit.plan import parts
from rloo_kit.plan.shapes import ModelShape
from rloo_kit.rollout.engine import check_cache
from rloo_kit.rollout.generate import generate_options
from rloo_kit.rollout.kv_cache import LEVELS, SlotCache, make_cache, pack_8_bit, unpack_8_bit
from rloo_kit.rollout.types import Limits
from tests.rollout.models import (
    END_OF_TEXT,
    PROMPTS,
    TURN_END,
    adapted,
    engine_for,
    lean,
    run_out_above,
    teacher_forced,
)

FAR = 0.15  # nats: more than 8 bits explain in the models here, less than another token's probability is away


@pytest.fixture
def make_model(make_tiny_model: Callable[..., Any]) -> Callable[..., Any]:
    """`make_model(**config)`: random weights with an adapter that is not the identity, an end now and then."""

    def build(**config: Any) -> Any:
        model = make_tiny_model(0, **({"tie_word_embeddings": False, "initializer_range": 0.15} | config))
        return adapted(lean(model, {END_OF_TEXT: 3.0, TURN_END: 3.0}), scale=0.1).eval()

    return build


def with_cache(model: Any, cache: str = "int8", temperature: float = 1.0, engine: str = "native", **more: Any) -> Any:
    return engine_for(model, engine, temperature, cache=cache, **more)


def find_gaps(model: Any, prompts: list[list[int]], found: Any) -> list[float]:
    """|log-probability as sampled - as scored| of every token of a rollout."""
    gaps = []
    for prompt, ids, logps in zip(prompts, found.completion_ids, found.sampler_logps, strict=True):
        exact = teacher_forced(model, prompt, ids)
        gaps += [abs(mine - other) for mine, other in zip(logps, exact, strict=True)]
    return gaps


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_eight_bits_are_off_by_half_a_scale(kind):
    """A scale that is stored in 16 bits is not the one that codes were made with, if one divides by the other."""
    dtype = getattr(torch, kind)
    states = torch.randn(50, 4, 32, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    states[0], states[1, 0, 0] = 0.0, 300.0
    codes, scales = pack_8_bit(states)
    back = unpack_8_bit(codes, scales)
    assert codes.dtype == torch.int8 and back.dtype == scales.dtype == dtype and scales.shape == (50, 4, 1)
    largest = states.float().abs().amax(-1, keepdim=True)
    rounding = 0.0 if kind == "float32" else 2.0 ** -(8 if kind == "bfloat16" else 11)
    off = (back.float() - states.float()).abs()
    assert (off <= largest * (0.5 / LEVELS + 2 * rounding) * 1.001).all()
    assert off.max() > 1e-3 and (back[0] == 0).all()
    assert codes.abs().amax(-1)[2:].min() >= LEVELS - 1, "the levels are all used"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_states_stay_broken(broken):
    """int8 has no NaN: broken weights would come back as plain numbers, and a run went on on noise."""
    states = torch.ones(2, 1, 4)
    states[1, 0, 2] = broken
    back = unpack_8_bit(*pack_8_bit(states))
    assert torch.isfinite(back[0]).all() and not torch.isfinite(back[1]).all()


def fill(kind: str, tokens: int, dtype: str = "float32") -> Any:
    cache = make_cache(kind, 3)
    states = torch.randn(2, tokens, 16, dtype=getattr(torch, dtype))  # (G, P, D)
    for layer in range(2):
        cache.insert(layer, 0, 3, states, states)
    return cache


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_what_a_cache_holds_is_what_the_plan_counts(kind, dtype, width):
    """A cache that is called 8-bit and keeps a full copy saves nothing; bytes are counted in real tensors."""
    shape = ModelShape(32, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=320, tied=True)
    load = parts.Load(
        shape, False, width, width, 16, ("q_proj",), "sgd", "off", False, 1, False, "none", prompt_tokens=10,
        completion_tokens=90, num_generations=3, completions=3, on_cuda=False, cache=kind,
    )  # fmt: skip
    assert fill(kind, 100, dtype).nbytes == parts.cache_bytes(load, rows=3)
    plain = replace(load, cache="plain")
    ratio = parts.cache_bytes(load, 3) / parts.cache_bytes(plain, 3)
    assert ratio == (pytest.approx((16 + width) / (16 * width)) if kind == "int8" else 1)


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


VARIANTS = {"FusedDecoder": {}, "ModuleDecoder": {"hidden_act": "gelu"}, "eager": {"attn_implementation": "eager"}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_sampling_from_8_bits_is_near_scoring(make_model, monkeypatch, variant):
    """Either decoder, rows that end and give their slots to others, slots that grow: each token's log-probability is
    that of the distribution it was drawn from, which is near the one that is scored and not it."""
    monkeypatch.setattr("rloo_kit.rollout.kv_cache.BLOCK_TOKENS", 4)
    model, prompts = make_model(**VARIANTS[variant]), [prompt for prompt in PROMPTS for _ in range(3)]
    gaps = {}
    for cache in CACHES:
        torch.manual_seed(0)
        found = with_cache(model, cache, rows=5).sample(prompts, Limits(24))
        assert len({len(ids) for ids in found.completion_ids}) > 3
        gaps[cache] = find_gaps(model, prompts, found)
    assert max(gaps["plain"]) < 1e-4 > max(gaps["offloaded"])
    assert 1e-3 < max(gaps["int8"]) < FAR and sum(gaps["int8"]) / len(gaps["int8"]) < FAR / 10


def test_rows_do_not_depend_on_their_slots(make_model, monkeypatch):
    """A row's completion does not depend on its neighbours, on rows dropped before it or on rows admitted after it."""
    monkeypatch.setattr("rloo_kit.rollout.kv_cache.BLOCK_TOKENS", 4)
    model = make_model()
    wanted = with_cache(model, "int8", 0.0, rows=1).sample(PROMPTS, Limits(24)).completion_ids
    assert len({len(ids) for ids in wanted}) > 1
    for rows in (2, 3, None):
        assert with_cache(model, "int8", 0.0, rows=rows).sample(PROMPTS, Limits(24)).completion_ids == wanted
    plain = with_cache(model, "plain", 0.0).sample(PROMPTS, Limits(24)).completion_ids
    assert with_cache(model, "offloaded", 0.0, rows=2).sample(PROMPTS, Limits(24)).completion_ids == plain


def test_sixteen_bit_models_keep_8_bits_too(make_model):
    """The GPUs that need it hold bf16: scales in float32 would turn the attention's inputs into float32."""
    model = make_model().to(torch.bfloat16)
    torch.manual_seed(0)
    found = with_cache(model).sample(PROMPTS, Limits(24))
    assert max(find_gaps(model, PROMPTS, found)) < 2 * FAR


def test_rows_are_halved_with_8_bits(make_model, monkeypatch):
    """What has been sampled stays, and is prefilled again from its tokens, not from codes that are gone."""
    model = make_model(hidden_act="gelu")
    run_out_above(model, 3, [], monkeypatch, after=5)
    said: list[str] = []
    torch.manual_seed(0)
    found = with_cache(model, say=said.append).sample(PROMPTS, Limits(24))
    assert len(said) == 1 and "out of memory" in said[0]
    monkeypatch.undo()
    assert max(find_gaps(model, PROMPTS, found)) < FAR


def test_a_budget_costs_one_call_of_generate(make_model, monkeypatch):
    """The answers were a second call, whose prefill is whole rows at once: on a small GPU more than decoding takes."""
    model = make_model()
    limits = Limits(20, thinking_budget=6, answer_budget=4, close_ids=(7, 260, 8), think_end_id=260)
    widths: list[int] = []
    plain = model.generate

    def counted(**named: Any) -> Any:
        widths.append(named["input_ids"].size(1))
        return plain(**named)

    monkeypatch.setattr(model, "generate", counted)
    torch.manual_seed(0)
    found = with_cache(model, "plain", engine="generate").sample(PROMPTS, limits)
    assert widths == [max(map(len, PROMPTS))] and any(found.thinking_forced)
    for ids, span in zip(found.completion_ids, found.forced, strict=True):
        if span is not None:
            assert span == (6, 9) and ids[6:9] == [7, 260, 8] and len(ids) <= 13


REFUSED = {
    "unsloth, 8 bits": ("int8", "generate", "unsloth", True, "Unsloth decodes.*rollout.cache=plain.*transformers"),
    "unsloth, offloaded": ("offloaded", "generate", "unsloth", True, "Unsloth decodes.*rollout.cache=plain"),
    "vllm": ("int8", "vllm", "transformers", True, "float8_kv_cache=true.*rollout.cache=plain"),
    "server": ("offloaded", "server", "transformers", True, "the server holds.*--kv-cache-dtype"),
    "no GPU": ("offloaded", "generate", "transformers", False, "not on a GPU.*rollout.cache=plain"),
    "no hqq": ("int8", "generate", "transformers", True, "pip install hqq.*rollout.engine=native"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_cache_that_cannot_be_kept_is_refused(monkeypatch, case):
    """A key that is silently ignored is found out by an out-of-memory error after an hour."""
    cache, engine, backend, on_cuda, message = REFUSED[case]
    monkeypatch.setattr("rloo_kit.rollout.engine.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=f"rollout.cache is {cache}, but.*{message}"):
        check_cache(cache, engine, backend, on_cuda)


def test_what_is_let_through(monkeypatch, make_model):
    """`generate` gets the library's own names; for a plain cache it gets nothing."""
    monkeypatch.setattr("rloo_kit.rollout.engine.find_spec", lambda name: object())
    check_cache("int8", "generate", "transformers", on_cuda=True)
    check_cache("offloaded", "generate", "transformers", on_cuda=True)
    assert generate_options("offloaded") == {"cache_implementation": "offloaded"}
    assert generate_options("int8")["cache_config"]["nbits"] == 8 and not generate_options("plain")
    for engine in ENGINES[1:]:
        check_cache("plain", engine, "unsloth", on_cuda=False)
    with pytest.raises(ConfigError, match="rollout.cache is '4bit'; it is one of plain, int8, offloaded"):
        check_cache("4bit", "native", "transformers", on_cuda=False)
    model = make_model()
    assert "its cache is int8 (rollout.cache)" in with_cache(model, engine="auto").reason
    assert with_cache(model, "plain", engine="generate")._cache_options(2, 5) == {}


def test_the_library_takes_the_config_that_it_is_given():
    """hqq is not installed here, so nothing of it runs; what transformers would be asked for it has to know."""
    config = generate_options("int8")["cache_config"]
    assert config["backend"] == "hqq"
    assert set(config) - {"backend"} <= set(signature(QuantizedCache).parameters)
    assert set(config) - {"backend"} <= set(signature(HQQQuantizedLayer).parameters)


def test_training_corrects_for_8_bits(make_tiny_model, make_trainer):
    """What 8 bits sample is scored without them: the log says by how much they differ, the correction weighs by it,
    and the ratio on-policy stays exactly 1."""
    logs = {}
    for cache in ("plain", "int8"):
        trainer = make_trainer(
            lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            model=make_tiny_model(initializer_range=0.15), max_steps=2, max_completion_length=24,
            per_device_train_batch_size=8, sampler_correction="token", rollout_cache=cache,
        )  # fmt: skip
        assert trainer.rloo.sampler.engine.cache == cache
        trainer.train()
        logs[cache] = trainer.state.log_history[1]
    plain, small = logs.values()
    assert plain["sampling/logp_difference_max"] < 1e-4 < small["sampling/logp_difference_max"] < FAR
    assert small["sampling/importance_weight_mean"] == pytest.approx(1.0, abs=0.02)
    assert small["val/ratio"] == plain["val/ratio"] == 1.0 and small["grad_norm"] > 0
