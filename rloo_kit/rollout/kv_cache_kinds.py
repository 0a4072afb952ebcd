"""Two smaller homes for a rollout's keys and values: in 8 bits, and in the machine's memory beside the card.

`EightBitCache` holds whole numbers from -127 to 127 and one scale for each token and head. A layer's keys and values
are turned back into the model's precision when that layer attends, so what is held at once is the cache in 8 bits and
one layer in full. Sampling then follows a distribution a little beside the one that is scored; the log-probabilities
that a rollout reports are those that it sampled from, and `rloo.sampler_correction` weighs by the difference.

`OffloadedCache` holds all in (pinned) host memory and brings one layer at a time to the card: exact, and as slow as the
bus, for every token reads the whole cache through it.

Left out: fewer bits, a scale for each channel, keeping the newest tokens in full precision, fetching a layer ahead.

Shapes: as in `slot_cache`.
"""

from collections.abc import Iterator

import torch

from rloo_kit.rollout.kv_cache import SlotCache, Stored

LEVELS = 127


def pack_8_bit(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., D) in int8 and scales (..., 1) in the states' own type: codes * scales is near the states.

    The largest of a token and head gets +-127, so nothing is off by more than half a scale and the rounding of the
    type. A NaN or an infinity stays one, in the scale: broken weights are to show.
    """
    largest = states.abs().amax(dim=-1, keepdim=True)
    scales = (largest / LEVELS).clamp(min=torch.finfo(states.dtype).tiny)
    codes = (states.float() / scales.float()).round().clamp(-LEVELS, LEVELS)
    return codes.nan_to_num(0.0).to(torch.int8), scales


def unpack_8_bit(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The states near which `pack_8_bit` found codes and scales."""
    if codes.is_cuda:
        return codes * scales  # one kernel; on a CPU it would convert the codes into a tensor of their own first
    return codes.to(scales.dtype).mul_(scales)


class EightBitCache(SlotCache):
    """`SlotCache` in 8 bits and a scale, see above. `write` returns copies."""

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
    """`SlotCache` in the machine's memory, see above. `write` returns copies where the model is on a card.

    A layer is fetched with its whole capacity, because a part of it would be gathered on the host first. Its memory may
    be written again at the next step: reading that step's new keys back waits for everything before it.
    """

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
