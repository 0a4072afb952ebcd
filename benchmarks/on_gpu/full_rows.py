"""Rows at their full length without hours of decoding: an engine whose prefill is a full cache, and its memory."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache

from on_gpu.decoding import make_engine
from rloo_kit.preflight.trial_steps import load_of, take_steps
from rloo_kit.rollout.types import Limits
from rloo_kit.training.memory_watch import MemoryPeak


def measure_steps(policy: Any, run: Any, rows: int, decoded: int) -> tuple[MemoryPeak, MemoryPeak]:
    """Peaks of the rollouts and of the rest of two optimizer steps at full length, each after the last `decoded` tokens
    of a rollout of `rows` full rows; their seconds are those of the second step."""
    engine, tokens = full_engine(policy, run, rows), load_of(run, policy).row_tokens
    rollouts: list[MemoryPeak] = []
    trainings: list[MemoryPeak] = []

    def decode(_engine: Any) -> None:
        if trainings:
            trainings[-1].finish()
        with MemoryPeak() as peak:
            decode_ends(engine, rows, tokens, decoded)
        rollouts.append(peak)
        trainings.append(MemoryPeak().start())

    take_steps(policy, run, decode)
    trainings[-1].finish()
    for peaks in (rollouts, trainings):
        peaks[-1].gib = max(peak.gib for peak in peaks)
        peaks[-1].reserved_gib = max(peak.reserved_gib for peak in peaks)
    return rollouts[-1], trainings[-1]


def full_engine(policy: Any, run: Any, rows: int) -> Any:
    """The run's local engine with its prefill replaced by a full cache, and without halving rows."""
    engine = make_engine(policy, run.rollout.engine, rows, run.rloo.temperature)
    if engine.name == "native":
        engine._fill = _fill_slots
    elif engine.name == "generate":
        engine._cache_options = lambda rows, width: {"past_key_values": _fill_cache(engine._model, rows, width)}
    return engine


def decode_ends(engine: Any, rows: int, tokens: int, decoded: int) -> None:
    """Decode the last `decoded` of the `tokens` tokens of each of `rows` rows, after full caches."""
    prompts = [[row % 200 + 1] * (tokens - decoded) for row in range(rows)]  # different, unlike those of a group
    engine.sample(prompts, Limits(decoded))


def _fill_slots(decoder: Any, cache: Any, rows: list[Any], first: int) -> None:
    """Fill slots of the native engine with one token's keys and values at every position."""
    states: dict[int, tuple[Any, Any]] = {}  # (G, 1, D) by layer

    def insert(layer: int, _first: int, _count: int, keys: Any, values: Any) -> None:
        states[layer] = keys, values

    decoder.prefill([[0]], SimpleNamespace(insert=insert), [(0, 1)])
    for layer, (keys, values) in states.items():
        for slot, row in enumerate(rows, first):
            length = row.position
            cache.insert(layer, slot, 1, keys.expand(-1, length, -1), values.expand(-1, length, -1))


def _fill_cache(model: Any, rows: int, width: int) -> Any:
    """transformers' cache for (B, P) prefixes without their last token: views of one token's keys and values, which the
    first step materialises layer by layer."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    one = model(input_ids=ids, use_cache=True).past_key_values
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer, found in zip(cache.layers, one.layers if hasattr(one, "layers") else one, strict=True):
        pair = (found.keys, found.values) if hasattr(found, "keys") else found  # Unsloth has pairs
        wide = [states.expand(rows, -1, width - 1, -1) for states in pair]
        layer.lazy_initialization(*wide)
        layer.keys, layer.values = wide
    return cache
