"""What the native loop needs from a model: fill a cache with prompts, and the logits of each row's next token.

`ModuleDecoder` runs the modules of transformers, with whatever PEFT put into them; `fused_decoder.FusedDecoder`
computes the same in fewer kernels for the models that it knows.

Shapes: B prompts, P prompt tokens, R live rows, L tokens in the cache, V vocabulary, G key-value heads, D head size.
"""

from typing import Any

import torch

from rloo_kit.rollout.kv_cache import SlotCache


class ModuleDecoder:
    """Runs the model's own modules, with `SlotCache` in place of their cache; made for one rollout."""

    def __init__(self, model: Any) -> None:
        self.model = model.get_base_model() if hasattr(model, "peft_config") else model
        self.device = self.model.get_input_embeddings().weight.device
        self._float_mask = self.model.config._attn_implementation == "eager"

    def prefill(self, prompts: list[list[int]], cache: SlotCache, slots: list[tuple[int, int]]) -> None:
        """Put each prompt's keys and values into its slots, (first, count).

        Prompts are padded on the right: attention is causal, so no mask is needed.
        """
        width = max(map(len, prompts))
        ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)  # (B, P)
        filled = self.model.get_decoder()(input_ids=ids, use_cache=True).past_key_values
        for layer, states in enumerate(filled.layers):
            for number, (first, count) in enumerate(slots):
                length = len(prompts[number])
                keys, values = states.keys[number, :, :length], states.values[number, :, :length]  # (G, P, D)
                cache.insert(layer, first, count, self.arrange(keys), values)

    def arrange(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys in the decoder's order of dimensions, (G, P, D)."""
        return keys

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Feed `tokens` (R,) at `positions` (R,) after the cache's `begin`; returns logits (R, V)."""
        mask = cache.mask  # 4-D: every attention of transformers takes it unchanged
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
        """Tokens before the step; unused, since positions are given."""
        return self._cache.length - 1
