"""The auxiliary load-balancing loss of mixtures of experts, as TRL adds it to its loss.

Shapes: T tokens of a layout, E experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rloo_kit.errors import BackendError
from rloo_kit.gradient.packing import Group


def token_weights(groups: Sequence[Group], mask: torch.Tensor, layout: str) -> torch.Tensor:
    """How often each token of a layout counts: a prompt once per completion, padding not at all.

    Args:
        mask: (N,), the completion tokens that count, group by group. layout: as `packing.lay_out` takes it.

    Returns:
        (T,) float32; padded rows end to end.
    """
    pieces: list[torch.Tensor] = []
    for group in groups:
        for number, completion in enumerate(group.completions):
            kept, mask = mask[: len(completion)].float(), mask[len(completion) :]
            copies = 1 if layout != "shared" else len(group.completions) if number == 0 else 0
            prompt = kept.new_full((len(group.prompt),), copies)
            pieces += [kept] if copies == 0 else [torch.cat([prompt, kept])]
    if layout == "padded":
        return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).flatten()
    return torch.cat(pieces)


def balance_loss(found: Any, config: Any, weights: torch.Tensor) -> torch.Tensor:
    """E times the sum over experts of (share of tokens routed to the expert) x (its mean router probability).

    Args:
        found: what the backbone returned. config: of its text model. weights: (T,), see `token_weights`.

    Raises:
        BackendError: the backbone returns no router logits.
    """
    router_logits = getattr(found, "router_logits", None)
    if not router_logits:
        raise BackendError(
            "the model returns no router logits, so its auxiliary loss cannot be computed: set router_aux_loss_coef=0.0"
        )
    return load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok, weights)
