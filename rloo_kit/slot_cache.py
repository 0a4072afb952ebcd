"""Keys and values of the rows that are being generated: one slot a row, one write position a row.

A cache of `generate` is as wide as its longest row and keeps rows that have ended. Here the live rows are always the
first slots: a row that ends is overwritten by the last live one, and a new row takes the slot behind them. Slots grow
by blocks of tokens, copied once a block; every row writes at its own position, so nothing is padded on the left and
rows of any age stand side by side.

Left out: sliding windows, paging, quantised caches.

Shapes: S slots, R live rows, L tokens up to the longest live row, G key-value heads, D head size.
"""

import torch

BLOCK_TOKENS = 64  # fresh memory costs as much as a step: short rollouts take little, long ones copy often but cheaply


class SlotCache:
    """The cache of all layers; a layer is allocated when it is first written to.

    Attributes:
        mask: (R, 1, 1, L) bool, True where the row may look, its own new token included; of the current step.
        is_even: all rows of the current step are equally long, so the mask is True throughout.
        length: L of the current step.
    """

    def __init__(self, slots: int, block_tokens: int | None = None) -> None:
        self.slots = slots
        self.block_tokens = block_tokens or BLOCK_TOKENS
        self.capacity = 0  # tokens of a slot
        self.keys: dict[int, torch.Tensor] = {}  # by layer: (S, G, capacity, D)
        self.values: dict[int, torch.Tensor] = {}
        self.mask: torch.Tensor
        self.is_even = False
        self.length = 0
        self._positions: torch.Tensor  # (R,)
        self._places: dict[int, torch.Tensor] = {}  # by G: (R * G,), where a row's heads write in the flat cache

    def insert(self, layer: int, first: int, count: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the beginning of the slots `first` to `first + count` with one prompt's (G, P, D)."""
        self._reserve(keys.size(1))
        for store, new in ((self.keys, keys), (self.values, values)):
            self._layer(store, layer, new.size(0), new)[first : first + count, :, : new.size(1)] = new

    def begin(self, positions: list[int], device: torch.device) -> torch.Tensor:
        """Open a step in which row r writes at `positions[r]`; returns the positions as (R,)."""
        self.length = max(positions) + 1
        self.is_even = min(positions) + 1 == self.length
        self._reserve(self.length)
        self._places = {}
        self._positions = torch.tensor(positions, device=device)
        self.mask = (torch.arange(self.length, device=device) <= self._positions[:, None])[:, None, None, :]
        return self._positions

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's (R, G, D) and return all that the rows have, (R, G, L, D) each; views, not copies."""
        found = []
        for store, new in ((self.keys, keys), (self.values, values)):
            rows = self._layer(store, layer, new.size(1), new)
            flat = rows.view(-1, rows.size(-1))  # (S * G * capacity, D)
            flat.index_copy_(0, self._flat_places(new.size(1)), new.reshape(-1, new.size(-1)).to(rows.dtype))
            found.append(rows[: new.size(0), :, : self.length])
        return found[0], found[1]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Put the rows of `sources` into the slots `targets`; `length` tokens are enough for all of them."""
        if not sources:
            return
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[targets, :, :length] = rows[sources, :, :length]

    def shrink(self, slots: int) -> None:
        """No more than the first `slots` are needed from now on; the others go when the cache grows next."""
        self.slots = min(self.slots, slots)

    def _flat_places(self, heads: int) -> torch.Tensor:
        if heads not in self._places:
            row_heads = torch.arange(self._positions.size(0) * heads, device=self._positions.device)
            places = row_heads.view(-1, heads) * self.capacity + self._positions[:, None]
            self._places[heads] = places.flatten()
        return self._places[heads]

    def _layer(self, store: dict[int, torch.Tensor], layer: int, heads: int, like: torch.Tensor) -> torch.Tensor:
        if layer not in store:  # zeros, not empty: a masked NaN is still NaN after the softmax has given it weight 0
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
