"""Caches of a rollout as they are late in it, without the prefill that no run makes.

What fills them is one token's keys and values, repeated: memory and time of the steps that follow are those of a real
row of that length, what is decoded from them is noise. For measurements only. Left out: vLLM's pool, and the pages of
continuous batching.
"""

from typing import Any

from rloo_kit._stack import load_stack
from rloo_kit.rollout.cache_options import HQQ_CONFIG


def fill_slots(decoder: Any, cache: Any, rows: list[Any], first: int) -> None:
    """Slots of the native engine, with one token's keys and values in every place."""
    one = _Inserted()
    decoder.prefill([[0]], one, [(0, 1)])
    for layer, (keys, values) in one.states.items():
        for slot, row in enumerate(rows, first):
            length = len(row.prefix)
            cache.insert(layer, slot, 1, keys.expand(-1, length, -1), values.expand(-1, length, -1))


class _Inserted:
    """In the place of a cache: keeps what a prefill puts into it, (G, 1, D) by layer."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[Any, Any]] = {}

    def insert(self, layer: int, _first: int, _count: int, keys: Any, values: Any) -> None:
        self.states[layer] = keys, values


def fill_cache(engine: Any, rows: int, width: int) -> Any:
    """The library's cache for (B, P) prefixes, all but the last token of each in it.

    Keys and values are views of one token's; the first step makes the real ones of them, layer by layer.
    """
    stack = load_stack()
    model = engine._model
    ids = stack.torch.zeros(1, 1, dtype=stack.torch.long, device=model.get_input_embeddings().weight.device)
    one = model(input_ids=ids, use_cache=True).past_key_values
    pairs = [(layer.keys, layer.values) for layer in one.layers] if hasattr(one, "layers") else list(one)
    cache = _make_cache(engine.cache, model.config.get_text_config(decoder=True))
    for layer, pair in zip(cache.layers, pairs, strict=True):
        wide = [states.expand(rows, -1, width - 1, -1) for states in pair]
        if engine.cache == "int8":
            layer.update(*wide)
        else:
            layer.lazy_initialization(*wide)
            layer.keys, layer.values = wide
    return cache


def _make_cache(kind: str, config: Any) -> Any:
    caches = load_stack().transformers.cache_utils
    if kind == "int8":
        options = dict(HQQ_CONFIG)
        return caches.QuantizedCache(options.pop("backend"), config, **options)
    return caches.DynamicCache(config=config, offloading=kind == "offloaded")
