"""One decoding step of all live rows through the model's modules, and the cache of their keys and values.

Live rows occupy the first slots: a row that ends is overwritten by the last live one, a new row goes after them.

Shapes: S slots, R live rows, L tokens up to the longest live row, G key-value heads, P prompt tokens, D head size.
"""

from typing import Any

import torch

from rloo_kit.sizes import CACHE_BLOCK

Stored = dict[int, torch.Tensor]  # by layer: (S, G, capacity, D)


class SlotCache:
    """The cache of all layers in the dtype of what is written; a layer is allocated on its first write.

    Attributes:
        mask: (R, 1, 1, L) bool of the current step, True where the row may attend, its own new token included.
        is_even: all rows of the current step are equally long, so the mask is True throughout.
        length: L of the current step, at least the longest row's.
        position_offsets: (S, 1), what each row adds to its positions, because its images take fewer positions than
            tokens; None without images.
    """

    def __init__(self, slots: int, block_tokens: int | None = None) -> None:
        self.slots, self.block_tokens = slots, block_tokens or CACHE_BLOCK
        self.capacity = 0  # tokens of a slot
        self.keys: Stored = {}
        self.values: Stored = {}
        self.mask: torch.Tensor
        self.is_even = False
        self.length = 0
        self.position_offsets: torch.Tensor | None = None
        self._positions: torch.Tensor  # (R,), on the cache's device
        self._places: dict[int, torch.Tensor] = {}  # by G: (R * G,), where a row's heads write in the flat cache

    def insert(self, layer: int, first: int, count: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the beginning of the slots `first` to `first + count` with one prompt's (G, P, D)."""
        self.reserve(keys.size(1))
        for store, new in ((self.keys, keys), (self.values, values)):
            self._layer(store, layer, new.size(0), new)[first : first + count, :, : new.size(1)] = new

    def begin(self, positions: torch.Tensor, length: int, is_even: bool = False) -> None:
        """Begin a step in which row r writes at `positions[r]` (R,), below `length`."""
        self.length, self.is_even = length, is_even
        self.reserve(length)
        self._places = {}
        self._positions = positions
        self.mask = (torch.arange(length, device=positions.device) <= positions[:, None])[:, None, None, :]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's (R, G, D) and return views of the rows' keys and values, (R, G, L, D) each."""
        live, heads = keys.size(0), keys.size(1)
        if heads not in self._places:
            first = torch.arange(live * heads, device=keys.device).view(-1, heads) * self.capacity
            self._places[heads] = (first + self._positions[:, None]).flatten()
        for store, new in ((self.keys, keys), (self.values, values)):
            rows = self._layer(store, layer, heads, new)
            flat = rows.view(-1, rows.size(-1))  # (S * G * capacity, D)
            flat.index_copy_(0, self._places[heads], new.reshape(-1, new.size(-1)).to(rows.dtype))
        return self.keys[layer][:live, :, : self.length], self.values[layer][:live, :, : self.length]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of the slots `sources` into the slots `targets`."""
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[targets, :, :length] = rows[sources, :, :length]
        if self.position_offsets is not None:
            self.position_offsets[targets] = self.position_offsets[sources]

    def shrink(self, slots: int) -> None:
        """Keep only the first `slots`; the others are freed when the cache grows next."""
        self.slots = min(self.slots, slots)

    def _layer(self, store: Stored, layer: int, heads: int, like: torch.Tensor) -> torch.Tensor:
        if layer not in store:  # zeros, not garbage: NaN times a weight of 0 is NaN
            store[layer] = like.new_zeros(self.slots, heads, self.capacity, like.size(-1))
        return store[layer]

    def reserve(self, length: int) -> None:
        """Grow to slots of so many tokens, if they are shorter."""
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, -(-length // self.block_tokens) * self.block_tokens
        for store in (self.keys, self.values):
            for layer, rows in store.items():
                grown = rows.new_empty(self.slots, rows.size(1), self.capacity, rows.size(3))
                grown[:, :, :old] = rows[: self.slots]
                grown[:, :, old:] = 0
                store[layer] = grown


class ModuleDecoder:
    """Runs the model's own modules, with `SlotCache` in place of their cache; made for one rollout.

    Attributes:
        replayable: whether `decode` is a fixed sequence of operations once `prepare` was called.
        reads_images: ids of prompts may stand for images, which only the model's own forward reads.
    """

    replayable = False

    def __init__(self, model: Any) -> None:
        self.model = model.get_base_model() if hasattr(model, "peft_config") else model
        self.device = self.model.get_input_embeddings().weight.device
        self.reads_images = hasattr(self.model.base_model, "check_prompt")
        self._float_mask = self.model.config.get_text_config()._attn_implementation == "eager"

    def prepare(self, length: int) -> None:
        """Be ready for rows of so many tokens."""

    def prefill(self, prompts: list[list[int]], cache: SlotCache, slots: list[tuple[int, int]]) -> None:
        """Put each prompt's keys and values into its slots, (first, count). Padding on the right needs no mask."""
        width = max(map(len, prompts))
        ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)  # (B, P)
        filled = self.model.base_model(input_ids=ids, use_cache=True).past_key_values
        if self.reads_images:
            if cache.position_offsets is None:
                cache.position_offsets = torch.zeros(cache.slots, 1, dtype=torch.long, device=self.device)
            offsets = getattr(filled, "position_offsets", [0] * len(prompts))
            for number, (first, count) in enumerate(slots):
                cache.position_offsets[first : first + count] = offsets[number]
        for layer, states in enumerate(filled.layers):
            for number, (first, count) in enumerate(slots):
                length = len(prompts[number])
                keys, values = states.keys[number, :, :length], states.values[number, :, :length]  # (G, P, D)
                cache.insert(layer, first, count, keys, values)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Feed `tokens` (R,) at `positions` (R,) after the cache's `begin`; returns logits (R, V)."""
        mask = cache.mask  # 4-D: every attention of transformers uses it unchanged
        if self._float_mask:
            dtype = self.model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=self.device).masked_fill_(~mask, torch.finfo(dtype).min)
        return self.model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask,
            past_key_values=_StepCache(cache),
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


class _StepCache:
    """The part of transformers' `Cache` that a model's forward calls when its mask and positions are given."""

    is_compileable = False

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        offsets = cache.position_offsets
        self.position_offsets = None if offsets is None else offsets[: len(cache.mask)]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_more: Any, **_named: Any) -> Any:
        """(R, G, 1, D) each in, (R, G, L, D) each out."""
        return self._cache.write(layer, keys[:, :, 0], values[:, :, 0])

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens before the step; unused, since positions are given."""
        return self._cache.length - 1
