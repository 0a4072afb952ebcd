"""What the generation loop asks of a model: fill a cache with prompts, and the logits of the next token of each row.

`ModuleDecoder` goes through the modules of transformers, whatever they are and whatever PEFT has put into them;
`fused_decoder.FusedDecoder` does the same sums in fewer kernels for the models that it knows.

Left out: models with sliding windows or without plain keys and values, which `generate` is for.

Shapes: B prompts, P prompt tokens, R live rows, L tokens in the cache, V vocabulary, G key-value heads, D head size.
"""

from typing import Any, Protocol

import torch

from rloo_kit.rollout.kv_cache import SlotCache


class Decoder(Protocol):
    """One model, for the duration of one rollout."""

    device: torch.device

    def prefill(self, prompts: list[list[int]], cache: SlotCache, slots: list[tuple[int, int]]) -> None:
        """Put each prompt's keys and values into its slots, given as (first, count)."""
        ...

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Feed `tokens` (R,) at `positions` (R,), for which the cache has opened a step; logits (R, V)."""
        ...


CHECK_PROMPT = (3, 1, 2, 0)
TOLERANCE = 1e-4  # of a logit, relative to the largest


def make_decoder(model: Any, choice: "type[ModuleDecoder] | None" = None) -> "ModuleDecoder":
    """The decoder for a causal language model, plain or with an adapter, in evaluation mode.

    Args:
        choice: the class that an earlier call for the same model chose; None chooses, and compares the fused decoder
            with the modules on a few tokens before it is trusted.
    """
    from rloo_kit.rollout.fused_decoder import FusedDecoder, NotPlainError

    if choice is ModuleDecoder or torch.is_autocast_enabled(model.device.type):
        return ModuleDecoder(model)
    try:
        fused = FusedDecoder(model)
    except (NotPlainError, AttributeError):
        return ModuleDecoder(model)
    return fused if choice is FusedDecoder or _agree(fused, ModuleDecoder(model)) else ModuleDecoder(model)


def _agree(fused: "ModuleDecoder", plain: "ModuleDecoder") -> bool:
    """Whether two decoders say the same of two rows of unequal length."""
    found = []
    for decoder in (fused, plain):
        cache = SlotCache(slots=2, block_tokens=8)
        decoder.prefill([list(CHECK_PROMPT), list(CHECK_PROMPT[:2])], cache, [(0, 1), (1, 1)])
        tokens = torch.tensor(CHECK_PROMPT[:2], device=decoder.device)
        found.append(decoder.decode(tokens, cache.begin([4, 2], decoder.device), cache).float())
    return bool((found[0] - found[1]).abs().max() <= TOLERANCE * found[1].abs().max().clamp(min=1))


class ModuleDecoder:
    """Runs the model's own modules; its cache is handed to them in the place of theirs."""

    def __init__(self, model: Any) -> None:
        self.model = model.get_base_model() if hasattr(model, "peft_config") else model
        self.device = self.model.get_input_embeddings().weight.device
        self._float_mask = self.model.config._attn_implementation == "eager"

    def prefill(self, prompts: list[list[int]], cache: SlotCache, slots: list[tuple[int, int]]) -> None:
        """Prompts are padded on the right: no token looks to its right, so no mask is needed."""
        width = max(map(len, prompts))
        ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)  # (B, P)
        filled = self.model.get_decoder()(input_ids=ids, use_cache=True).past_key_values
        for layer, states in enumerate(filled.layers):
            for number, (first, count) in enumerate(slots):
                length = len(prompts[number])
                keys, values = states.keys[number, :, :length], states.values[number, :, :length]  # (G, P, D)
                cache.insert(layer, first, count, self.arrange(keys), values)

    def arrange(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys as the decoder keeps them, (G, P, D)."""
        return keys

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """The 4-D mask is taken as it is by every attention of transformers."""
        mask = cache.mask
        if self._float_mask:
            kind = self.model.dtype
            mask = torch.zeros(mask.shape, dtype=kind, device=self.device).masked_fill_(~mask, torch.finfo(kind).min)
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

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_more: Any, **_named: Any) -> Any:
        """(R, G, 1, D) each in, (R, G, L, D) each out."""
        return self._cache.write(layer, keys[:, :, 0], values[:, :, 0])

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens before the step; positions are given, so it decides nothing."""
        return self._cache.length - 1
