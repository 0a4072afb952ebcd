"""Keys and values of the rows that are being generated: one slot and one write position per row.

Live rows occupy the first slots: a row that ends is overwritten by the last live one, a new row goes after them.

Shapes: S slots, R live rows, L tokens up to the longest live row, G key-value heads, P prompt tokens, D head size.
"""

import torch

from rloo_kit.plan.parts import CACHE_BLOCK

Stored = dict[int, torch.Tensor]  # by layer: (S, G, capacity, D)


class SlotCache:
    """The cache of all layers in the dtype of what is written; a layer is allocated on its first write.

    Attributes:
        mask: (R, 1, 1, L) bool of the current step, True where the row may attend, its own new token included.
        is_even: all rows of the current step are equally long, so the mask is True throughout.
        length: L of the current step.
    """

    def __init__(self, slots: int, block_tokens: int | None = None) -> None:
        self.slots, self.block_tokens = slots, block_tokens or CACHE_BLOCK
        self.capacity = 0  # tokens of a slot
        self.keys: Stored = {}
        self.values: Stored = {}
        self.mask: torch.Tensor
        self.is_even = False
        self.length = 0
        self._positions: torch.Tensor  # (R,), on the cache's device
        self._places: dict[int, torch.Tensor] = {}  # by G: (R * G,), where a row's heads write in the flat cache

    def insert(self, layer: int, first: int, count: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the beginning of the slots `first` to `first + count` with one prompt's (G, P, D)."""
        self._reserve(keys.size(1))
        for store, new in ((self.keys, keys), (self.values, values)):
            self._layer(store, layer, new.size(0), new)[first : first + count, :, : new.size(1)] = new

    def begin(self, positions: list[int], device: torch.device) -> torch.Tensor:
        """Begin a step in which row r writes at `positions[r]`; returns the positions as (R,)."""
        self.length = max(positions) + 1
        self.is_even = min(positions) + 1 == self.length
        self._reserve(self.length)
        self._places = {}
        self._positions = torch.tensor(positions, device=device)
        self.mask = (torch.arange(self.length, device=device) <= self._positions[:, None])[:, None, None, :]
        return self._positions

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
        if not sources:
            return
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[targets, :, :length] = rows[sources, :, :length]

    def shrink(self, slots: int) -> None:
        """Keep only the first `slots`; the others are freed when the cache grows next."""
        self.slots = min(self.slots, slots)

    def _layer(self, store: Stored, layer: int, heads: int, like: torch.Tensor) -> torch.Tensor:
        if layer not in store:  # zeros, not garbage: NaN times a weight of 0 is NaN
            store[layer] = like.new_zeros(self.slots, heads, self.capacity, like.size(-1))
        return store[layer]

    def _reserve(self, length: int) -> None:
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, -(-length // self.block_tokens) * self.block_tokens
        for store in (self.keys, self.values):
            for layer, rows in store.items():
                grown = rows.new_empty(self.slots, rows.size(1), self.capacity, rows.size(3))
                grown[:, :, :old] = rows[: self.slots]
                grown[:, :, old:] = 0
                store[layer] = grown
