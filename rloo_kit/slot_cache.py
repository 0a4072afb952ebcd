"""Keys and values of the rows that are being generated: one slot a row, one write position a row.

A cache of `generate` is as wide as its longest row and keeps rows that have ended. Here the live rows are always the
first slots: a row that ends is overwritten by the last live one, and a new row takes the slot behind them. Slots grow
by blocks of tokens, copied once a block; every row writes at its own position, so nothing is padded on the left and
rows of any age stand side by side.

Left out: sliding windows, paging, quantised caches.

Shapes: S slots, R live rows, L tokens up to the longest live row, G key-value heads, D head size.
"""

import torch

BLOCK_TOKENS = 256


class SlotCache:
    """The cache of all layers; a layer is allocated when it is first written to.

    Attributes:
        mask: (R, 1, 1, L) bool, True where the row may look, its own new token included; of the current step.
    """

    def __init__(self, slots: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.slots = slots
        self.block_tokens = block_tokens
        self.capacity = 0  # tokens of a slot
        self.keys: dict[int, torch.Tensor] = {}  # by layer: (S, capacity, G, D)
        self.values: dict[int, torch.Tensor] = {}
        self.mask: torch.Tensor
        self._live = 0
        self._length = 0
        self._places: torch.Tensor  # (R,), row * capacity + position

    def insert(self, layer: int, first: int, count: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the beginning of the slots `first` to `first + count` with one prompt's (G, P, D)."""
        length = keys.size(1)
        self._reserve(length)
        for store, new in ((self.keys, keys), (self.values, values)):
            rows = new.transpose(0, 1)  # (P, G, D)
            self._layer(store, layer, rows)[first : first + count, :length] = rows

    def begin(self, positions: list[int], device: torch.device) -> torch.Tensor:
        """Open a step in which row r writes at `positions[r]`; returns the positions as (R,)."""
        self._live, self._length = len(positions), max(positions) + 1
        self._reserve(self._length)
        here = torch.tensor(positions, device=device)
        self._places = torch.arange(0, self._live * self.capacity, self.capacity, device=device) + here
        self.mask = (torch.arange(self._length, device=device) <= here[:, None])[:, None, None, :]
        return here

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's (R, G, D) and return all that the rows have, (R, L, G, D) each; views, not copies."""
        found = []
        for store, new in ((self.keys, keys), (self.values, values)):
            rows = self._layer(store, layer, new)
            rows.view(-1, *rows.shape[2:]).index_copy_(0, self._places, new.to(rows.dtype))
            found.append(rows[: self._live, : self._length])
        return found[0], found[1]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Put the rows of `sources` into the slots `targets`; `length` tokens are enough for all of them."""
        if not sources:
            return
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[targets, :length] = rows[sources, :length]

    def _layer(self, store: dict[int, torch.Tensor], layer: int, like: torch.Tensor) -> torch.Tensor:
        if layer not in store:  # zeros, not empty: a masked NaN is still NaN after the softmax has given it weight 0
            store[layer] = like.new_zeros(self.slots, self.capacity, *like.shape[-2:])
        return store[layer]

    def _reserve(self, length: int) -> None:
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, -(-length // self.block_tokens) * self.block_tokens
        for store in (self.keys, self.values):
            for layer, rows in store.items():
                grown = rows.new_zeros(self.slots, self.capacity, *rows.shape[2:])
                grown[:, :old] = rows
                store[layer] = grown
