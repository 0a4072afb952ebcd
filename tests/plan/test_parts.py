"""The arithmetic of memory against real models: what is called exact is counted, what is an estimate is bounded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config
from rloo_kit.config.resume import OLD_TARGETS as PROJECTIONS
from rloo_kit.plan import parts
from rloo_kit.plan.load import find_machine, read_load
from rloo_kit.plan.parts import GIB, Load
from rloo_kit.plan.peaks import rollout_bytes, rollout_gib, training_bytes, training_gib
from rloo_kit.plan.shapes import EMBEDDED, EMBEDDED_ROWS, PUBLISHED, ModelShape, shape_of_config

SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2}
SMALL |= {"head_dim": 64, "vocab_size": 320}


def load_of(shape: ModelShape, **changes: Any) -> Load:
    """A run on a GPU: LoRA r = 16 in 4-bit with 8-bit Adam, Unsloth's checkpointing, one sequence a pass."""
    given = Load(
        shape=shape, four_bit=True, weight_bytes=2, compute_bytes=2, lora_rank=16, lora_targets=tuple(PROJECTIONS),
        optim="adamw_8bit", checkpointing="offloaded", fused=True, tokens_per_pass=1, whole_groups=False,
        reference="none", prompt_tokens=0, completion_tokens=4096, num_generations=8, completions=8,
        on_cuda=True,
    )  # fmt: skip
    return replace(given, **changes)


def make_model(**changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SMALL | {"num_hidden_layers": 2, "tie_word_embeddings": True} | changes))


def test_the_published_sizes_are_those_of_the_reports() -> None:
    """A wrong width in the table makes a plan that is wrong everywhere. Source: the Qwen3 report."""
    reported = {"0.6b": 0.6, "1.7b": 1.7, "4b": 4.0, "8b": 8.2, "14b": 14.8, "32b": 32.8}
    bodies = {"0.6b": 0.44, "1.7b": 1.4, "4b": 3.6, "8b": 6.95, "14b": 13.2, "32b": 31.2}
    for size, shape in PUBLISHED.items():
        assert shape.num_weights / 1e9 == pytest.approx(reported[size], rel=0.02), size
        assert shape.body_weights / 1e9 == pytest.approx(bodies[size], rel=0.02), size
        assert shape.tied == (size in ("0.6b", "1.7b", "4b"))


def test_qwen3_4b_in_4_bit() -> None:
    """The figures that the configs were chosen by, computed by hand: weights, adapter with its optimizer, peaks of
    rollouts of K = 8 at full length, and of training one sequence at a time (Unsloth's kernels below, transformers'
    around it)."""
    load = load_of(PUBLISHED["4b"])
    assert parts.body_bytes(load) / GIB == pytest.approx(1.75, abs=0.005)
    assert parts.table_bytes(load) / GIB == pytest.approx(0.72, abs=0.005)
    assert parts.cache_bytes_per_token(load) == 144 * 1024
    trained = parts.trained_weights(load)
    assert trained == 33_030_144
    whole = 4 * trained + parts.gradient_bytes(load) + parts.optimizer_bytes(load)
    assert whole / GIB == pytest.approx(0.31, abs=0.005), "float32 masters and gradients, 8-bit moments"
    for tokens, rollout in ((4096, 8.2), (8192, 12.7), (16384, 21.7)):
        long = replace(load, completion_tokens=tokens)
        copied = parts.decoding_bytes(long, 8) / GIB  # the copy that attention makes: not in the figures by hand
        assert rollout_gib(long, 8) - copied == pytest.approx(rollout, rel=0.025)
    for tokens, training in ((4096, 4.9), (16384, 7.3)):
        long = replace(load, completion_tokens=tokens)
        fused, plain = training_gib(long), training_gib(replace(long, fused=False))
        assert 0.88 * training < fused < training < 1.06 * plain and plain < 1.1 * training


def test_the_copy_that_decodes_is_counted(tiny_model: Any) -> None:
    """Up to a gibibyte of joined matrices was in no part of the plan; a larger model has none, nor one in 16 bit."""
    from rloo_kit.rollout.decoders import FusedDecoder

    load = load_of(shape_of_config(tiny_model.config.to_dict()), four_bit=False, fused=False, engine="native")
    in_float32 = replace(load, weight_bytes=4, compute_bytes=4)
    layers = FusedDecoder(tiny_model)._layers
    matrices = [part for layer in layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert parts.joined_bytes(in_float32) == sum(part.numel() * part.element_size() for part in matrices)
    assert parts.joined_bytes(load) == 0
    assert parts.joined_bytes(replace(in_float32, shape=PUBLISHED["0.6b"])) == 0


def test_numbers_that_are_held_twice_agree() -> None:
    """The arithmetic may not import torch, so it holds some numbers of modules that do."""
    from rloo_kit.data import byte_tokens as tokenizer
    from rloo_kit.embedded import cold_start

    assert EMBEDDED_ROWS == tokenizer.ROWS
    for plan in cold_start.PLANS.values():
        config = cold_start.model_config(plan, tokenizer.ROWS["compact"]).to_dict()
        assert replace(shape_of_config(config), source=EMBEDDED.source) == EMBEDDED


def test_a_rollout_finds_gradients_only_in_a_step_of_several() -> None:
    """The optimizer's step drops them before the next rollout. Counted there they were a sixth of a peak where all
    weights are trained (measured 1.96 GiB of 2.36 computed)."""
    config = Path(__file__).resolve().parents[2] / "configs" / "arithmetic_thinking.yaml"
    words = ["model.lora=null", "rloo.gradient_accumulation_steps=4", "rloo.per_device_train_batch_size=32"]
    one, several = (
        read_load(load_config(config, *words, *more), find_machine()) for more in ([], ["rloo.steps_per_generation=1"])
    )
    several = replace(several, completions=one.completions)
    assert rollout_bytes(several, 8) - rollout_bytes(one, 8) == parts.gradient_bytes(one) > 0
    assert training_bytes(several) == training_bytes(one)
