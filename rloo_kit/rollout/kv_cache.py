"""Keys and values of the rows that are being generated: one slot and one write position per row.

Live rows occupy the first slots: a row that ends is overwritten by the last live one, a new row goes after them.

Shapes: S slots, R live rows, L tokens up to the longest live row, G key-value heads, P prompt tokens, D head size.
"""

from collections.abc import Iterator

import torch

BLOCK_TOKENS = 64  # allocating costs as much as a step: short rollouts take little, long ones copy often but cheaply
LEVELS = 127  # of an int8 code, on each side of 0

Stored = dict[int, torch.Tensor]  # by layer: (S, G, capacity, width)


class SlotCache:
    """The cache of all layers in the precision of what is written; a layer is allocated on its first write.

    Attributes:
        mask: (R, 1, 1, L) bool of the current step, True where the row may attend, its own new token included.
        is_even: all rows of the current step are equally long, so the mask is True throughout.
        length: L of the current step.
    """

    def __init__(self, slots: int, block_tokens: int | None = None) -> None:
        self.slots = slots
        self.block_tokens = block_tokens or BLOCK_TOKENS
        self.capacity = 0  # tokens of a slot
        self.keys: Stored = {}
        self.values: Stored = {}
        self.mask: torch.Tensor
        self.is_even = False
        self.length = 0
        self._positions: torch.Tensor  # (R,), on the cache's device
        self._places: dict[int, torch.Tensor] = {}  # by G: (R * G,), where a row's heads write in the flat cache

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(rows.nbytes for store in self._stores() for rows in store.values())

    def insert(self, layer: int, first: int, count: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the beginning of the slots `first` to `first + count` with one prompt's (G, P, D)."""
        self._reserve(keys.size(1))
        for store, new in self._pack(keys, values):
            self._layer(store, layer, new.size(0), new)[first : first + count, :, : new.size(1)] = new

    def begin(self, positions: list[int], device: torch.device) -> torch.Tensor:
        """Begin a step in which row r writes at `positions[r]`; returns the positions as (R,)."""
        self.length = max(positions) + 1
        self.is_even = min(positions) + 1 == self.length
        self._reserve(self.length)
        self._places = {}
        found = torch.tensor(positions, device=device)
        self._positions = found.to(self._place(device))
        self.mask = (torch.arange(self.length, device=device) <= found[:, None])[:, None, None, :]
        return found

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's (R, G, D) and return the rows' keys and values, (R, G, L, D) each; here views."""
        for store, new in self._pack(keys, values):
            rows = self._layer(store, layer, new.size(1), new)
            flat = rows.view(-1, rows.size(-1))  # (S * G * capacity, width)
            flat.index_copy_(0, self._flat_places(new.size(1)), new.reshape(-1, new.size(-1)).to(rows.dtype))
        return self._read(layer, keys)

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of the slots `sources` into the slots `targets`."""
        if not sources:
            return
        for store in self._stores():
            for rows in store.values():
                rows[targets, :, :length] = rows[sources, :, :length]

    def shrink(self, slots: int) -> None:
        """Keep only the first `slots`; the others are freed when the cache grows next."""
        self.slots = min(self.slots, slots)

    # What a kind of cache may override.

    def _stores(self) -> tuple[Stored, ...]:
        return self.keys, self.values

    def _pack(self, keys: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[Stored, torch.Tensor]]:
        """What is stored for keys and values (R, G, D) or (G, P, D), with the store it goes into."""
        yield self.keys, keys
        yield self.values, values

    def _read(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the live rows, (R, G, L, D) each, in the type and on the device of `like` (R, G, D)."""
        live = like.size(0)
        return self.keys[layer][:live, :, : self.length], self.values[layer][:live, :, : self.length]

    def _place(self, device: torch.device) -> torch.device:
        """The device of the cache of a model on `device`."""
        return device

    def _allocate(self, slots: int, heads: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory, (slots, heads, capacity, width)."""
        return like.new_empty(slots, heads, self.capacity, width)

    # The same for all kinds.

    def _flat_places(self, heads: int) -> torch.Tensor:
        if heads not in self._places:
            row_heads = torch.arange(self._positions.size(0) * heads, device=self._positions.device)
            places = row_heads.view(-1, heads) * self.capacity + self._positions[:, None]
            self._places[heads] = places.flatten()
        return self._places[heads]

    def _layer(self, store: Stored, layer: int, heads: int, like: torch.Tensor) -> torch.Tensor:
        if layer not in store:  # zeros, not garbage: NaN times a weight of 0 is NaN
            store[layer] = self._allocate(self.slots, heads, like.size(-1), like).zero_()
        return store[layer]

    def _reserve(self, length: int) -> None:
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, -(-length // self.block_tokens) * self.block_tokens
        for store in self._stores():
            for layer, rows in store.items():
                grown = self._allocate(self.slots, rows.size(1), rows.size(3), rows)
                grown[:, :, :old] = rows[: self.slots]
                grown[:, :, old:] = 0
                store[layer] = grown


class EightBitCache(SlotCache):
    """`SlotCache` in 8 bits with one scale per token and head. `write` returns copies."""

    def __init__(self, slots: int, block_tokens: int | None = None) -> None:
        super().__init__(slots, block_tokens)
        self.key_scales: Stored = {}  # by layer: (S, G, capacity, 1)
        self.value_scales: Stored = {}

    def _stores(self) -> tuple[Stored, ...]:
        return self.keys, self.values, self.key_scales, self.value_scales

    def _pack(self, keys: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[Stored, torch.Tensor]]:
        stores = ((self.keys, self.key_scales, keys), (self.values, self.value_scales, values))
        for codes_store, scales_store, states in stores:
            codes, scales = pack_8_bit(states)
            yield codes_store, codes
            yield scales_store, scales

    def _read(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        live = like.size(0)
        keys, values = (
            unpack_8_bit(codes[layer][:live, :, : self.length], scales[layer][:live, :, : self.length].to(like.dtype))
            for codes, scales in ((self.keys, self.key_scales), (self.values, self.value_scales))
        )
        return keys, values


class OffloadedCache(SlotCache):
    """`SlotCache` in main memory. If the model is on a GPU, `write` returns copies, each of a layer's whole capacity.
    The next step can safely overwrite the host memory: copying that step's new keys waits for all earlier work."""

    def _pack(self, keys: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[Stored, torch.Tensor]]:
        host = self._place(keys.device)
        yield self.keys, keys.to(host)
        yield self.values, values.to(host)

    def _read(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        live = like.size(0)
        keys, values = (
            store[layer][:live].to(like.device, non_blocking=True)[:, :, : self.length]
            for store in (self.keys, self.values)
        )
        return keys, values

    def _place(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def _allocate(self, slots: int, heads: int, width: int, like: torch.Tensor) -> torch.Tensor:
        size = (slots, heads, self.capacity, width)
        return torch.empty(size, dtype=like.dtype, pin_memory=torch.cuda.is_available())


def make_cache(kind: str, slots: int) -> SlotCache:
    """The cache that `rollout.cache` = `kind` names: plain, int8 or offloaded."""
    return {"plain": SlotCache, "int8": EightBitCache, "offloaded": OffloadedCache}[kind](slots)


def pack_8_bit(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., D) in int8 and scales (..., 1) in the states' type; codes * scales approximates the states.

    The largest value of a token and head maps to +-127, so the error is at most half a scale plus the type's rounding.
    A NaN or an infinity is kept in the scale, so that broken weights show.
    """
    largest = states.abs().amax(dim=-1, keepdim=True)
    scales = (largest / LEVELS).clamp(min=torch.finfo(states.dtype).tiny)
    codes = (states.float() / scales.float()).round().clamp(-LEVELS, LEVELS)
    return codes.nan_to_num(0.0).to(torch.int8), scales


def unpack_8_bit(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The states that `pack_8_bit` approximated."""
    if codes.is_cuda:
        return codes * scales  # one kernel; a CPU would first convert the codes into a separate tensor
    return codes.to(scales.dtype).mul_(scales)
