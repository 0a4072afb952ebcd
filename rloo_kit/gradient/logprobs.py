"""Log-probabilities of tokens through the language-model head, in tiles: no tokens x vocabulary tensor is built.

Shapes: B rows, H hidden size, V vocabulary, N scored tokens of a pass.
"""

import functools
import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput

from rloo_kit.errors import BackendError
from rloo_kit.sizes import TILE_TOKENS, TILE_VOCABULARY


@dataclass
class TokenScores(ModelOutput):
    """What a scoring call returns: log-probabilities and entropies of the N scored tokens, in nats, float32, and the
    auxiliary loss of a mixture of experts, if requested."""

    logps: torch.Tensor | None = None  # (N,)
    entropies: torch.Tensor | None = None  # (N,)
    aux_loss: torch.Tensor | None = None


class _ScoreTokens(torch.autograd.Function):
    """log softmax((h W^T + b) / temperature)[target], tile by tile.

    With a frozen head, the forward pass also computes the derivative of each log-probability with respect to its state,
    (W[target] - sum of p W) / temperature, and keeps only that (N, H) tensor. With a trained one, the backward pass
    recomputes the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        need_entropy: bool,
        prepare: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = [
            _score_tile(hidden[rows], weight, bias, targets[rows], temperature, need_entropy, prepare)
            for rows in _row_tiles(hidden)
        ]
        logps, log_norms, entropies, slopes = (torch.cat(parts) for parts in zip(*tiles, strict=True))
        ctx.is_prepared, ctx.temperature = prepare, temperature
        if prepare:
            ctx.save_for_backward(slopes)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, log_norms)
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, grad_logps: torch.Tensor, _grad_entropies: torch.Tensor) -> tuple[Any, ...]:
        if ctx.is_prepared:
            (slopes,) = ctx.saved_tensors
            return (slopes * grad_logps[:, None]).to(slopes.dtype), *[None] * 6
        hidden, weight, bias, targets, log_norms = ctx.saved_tensors
        likes = (hidden, weight, bias)  # a gradient is None if it is not needed
        wanted = zip(likes, ctx.needs_input_grad, strict=False)
        sums = [torch.zeros_like(tensor, dtype=torch.float32) if needed else None for tensor, needed in wanted]
        for rows in _row_tiles(hidden):
            for columns in _column_tiles(weight):
                logits = _tile_logits(hidden[rows], weight, bias, columns, ctx.temperature)
                grad_logits = logits.sub_(log_norms[rows, None]).exp_().mul_(-grad_logps[rows, None])  # (n, v)
                place = (targets[rows] - columns.start).clamp(0, logits.size(1) - 1)[:, None]
                is_here = (targets[rows] >= columns.start) & (targets[rows] < columns.stop)
                grad_logits.scatter_add_(1, place, torch.where(is_here, grad_logps[rows], 0.0)[:, None])
                grad_logits.div_(ctx.temperature)
                if sums[0] is not None:
                    sums[0][rows] += (grad_logits.to(weight.dtype) @ weight[columns]).float()
                if sums[1] is not None:
                    sums[1][columns] += grad_logits.T @ hidden[rows].float()
                if sums[2] is not None:
                    sums[2][columns] += grad_logits.sum(dim=0)
        gradients = [None if total is None else total.to(like.dtype) for total, like in zip(sums, likes, strict=True)]
        return *gradients, *[None] * 4


def _score_tile(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    need_entropy: bool,
    prepare: bool,
) -> tuple[torch.Tensor, ...]:
    """logps, log norms and entropies (n,) and slopes (n, H) of a tile's tokens; the last two empty if not requested.

    Sums of exponentials are kept relative to the largest logit so far, and the target's exponential separate from the
    rest, so that 1 - p is exact in 16 bits where p is close to 1.
    """
    target_exp = rest = spread = slopes = top = chosen = torch.zeros(len(hidden), device=hidden.device)
    for columns in _column_tiles(weight):
        logits = _tile_logits(hidden, weight, bias, columns, temperature)  # (n, v), float32
        place = (targets - columns.start).clamp(0, logits.size(1) - 1)[:, None]
        is_here = (targets >= columns.start) & (targets < columns.stop)
        chosen = torch.where(is_here, logits.gather(1, place).squeeze(1), chosen)
        largest = logits.amax(dim=1)
        if columns.start > 0:
            largest = torch.maximum(largest, top)
            drop = top - largest
            shrink = drop.exp()
            spread = shrink * (spread + drop * (target_exp + rest))
            target_exp, rest = target_exp * shrink, rest * shrink
            slopes = slopes * shrink[:, None] if prepare else slopes
        top = largest
        logits.sub_(top[:, None])
        exponentials = logits.exp() if need_entropy else logits.exp_()
        if need_entropy:
            spread = spread + torch.bmm(exponentials[:, None], logits[:, :, None]).flatten()
        at_target = exponentials.gather(1, place).squeeze(1)
        target_exp = target_exp + torch.where(is_here, at_target, 0.0)
        exponentials.scatter_(1, place, torch.where(is_here, 0.0, at_target)[:, None])
        rest = rest + exponentials.sum(dim=1)
        if prepare:
            product = (exponentials.to(weight.dtype) @ weight[columns]).float()
            slopes = product if columns.start == 0 else slopes + product
    total = target_exp + rest
    log_norm = top + total.log()
    entropy = total.log() - spread / total if need_entropy else total[:0]
    if prepare:
        away = (weight[targets].float() * rest[:, None] - slopes).div_(total[:, None] * temperature)
        slopes = away.to(hidden.dtype)
    return chosen - log_norm, log_norm, entropy, slopes


def _row_tiles(hidden: torch.Tensor) -> list[slice]:
    tokens, size = hidden.size(0), TILE_TOKENS[hidden.device.type == "cpu"]
    return [slice(start, start + size) for start in range(0, max(tokens, 1), size)]


def _column_tiles(weight: torch.Tensor) -> list[slice]:
    rows, size = weight.size(0), TILE_VOCABULARY[weight.device.type == "cpu"]
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _tile_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: slice, temperature: float
) -> torch.Tensor:
    part = None if bias is None else bias[columns]
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight[columns], part).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def score_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    need_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target and entropy of its distribution, through the language-model head.

    Args:
        hidden: (N, H), the states that predict the targets. weight: (V, H). bias: (V,) or None.
        targets: (N,) token ids. temperature: above 0; the logits are divided by it, as in sampling.
        need_entropy: if False, the second result is None.

    Returns:
        logps and entropies (N,), float32, in nats. Only the logps carry a gradient.
    """
    is_trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    prepare = torch.is_grad_enabled() and hidden.requires_grad and not is_trained
    with torch.autocast(hidden.device.type, enabled=False):
        logps, entropies = _ScoreTokens.apply(hidden, weight, bias, targets, temperature, need_entropy, prepare)
    return logps, entropies if need_entropy else None


def attach_token_scoring(model: torch.nn.Module) -> None:
    """Make `model(input_ids=(B, L), score_positions=(N,), score_targets=(N,), temperature=1.0)` return `TokenScores`.

    `score_positions` are flat positions b * L + t whose hidden state predicts the target. With `token_weights=(B * L,)`
    the auxiliary loss of a mixture of experts is computed too. Any other call is unchanged.

    Raises:
        BackendError: the head transforms its logits non-linearly (soft-capping), which the kit does not score.
    """
    text_config = model.config.get_text_config()
    for key in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "output_multiplier"):
        if getattr(text_config, key, None) not in (None, 1.0):
            raise BackendError(f"the model's config sets {key}; the kit scores plain or scaled heads only (Qwen3's)")
    # the factor that the model's forward applies to its logits, as in Cohere, Falcon-H1, Granite and HyperCLOVA X
    divisor = getattr(text_config, "logits_scaling", None) or 1.0
    scales = [getattr(text_config, key, None) or 1.0 for key in ("logit_scale", "lm_head_multiplier")]
    logit_scale = math.prod([*scales, divisor if text_config.model_type == "hyperclovax" else 1 / divisor])
    plain_forward = getattr(model.forward, "without_scoring", model.forward)

    @functools.wraps(type(model).forward)  # generate() checks its arguments against the original signature
    def forward(
        self: Any,
        *args: Any,
        score_positions: Any = None,
        score_targets: Any = None,
        temperature: float = 1.0,
        need_entropy: bool = True,
        token_weights: Any = None,
        **kwargs: Any,
    ) -> Any:
        if score_positions is None:
            return plain_forward(*args, **kwargs)
        if token_weights is not None:
            kwargs["output_router_logits"] = True
        output = self.base_model(*args, **kwargs, use_cache=False)
        aux_loss = None
        if token_weights is not None:  # E times the sum over experts of (share of tokens) x (mean router probability)
            if not (routed := getattr(output, "router_logits", None)):
                raise BackendError(
                    "the model returns no router logits, so its auxiliary loss cannot be computed: set "
                    "router_aux_loss_coef=0.0"
                )
            experts, chosen = text_config.num_experts, text_config.num_experts_per_tok
            aux_loss = load_balancing_loss_func(routed, experts, chosen, token_weights)
        states = output.last_hidden_state  # (B, L, H)
        head = self.get_output_embeddings()
        scored = states.flatten(0, 1)[score_positions.to(states.device)].to(head.weight.device)  # (N, H)
        with _scoring_head(head, temperature / logit_scale, need_entropy):
            logps, entropies = head(scored, score_targets.to(scored.device))
        return TokenScores(logps=logps, entropies=entropies, aux_loss=aux_loss)

    forward.without_scoring = plain_forward  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


@contextmanager
def _scoring_head(head: torch.nn.Module, temperature: float, need_entropy: bool) -> Iterator[None]:
    """Make the head score states instead of computing logits. It is called as a module, so that shards are gathered."""

    def forward(self: Any, states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return score_tokens(states, self.weight, getattr(self, "bias", None), targets, temperature, need_entropy)

    before = vars(head).get("forward")
    head.forward = types.MethodType(forward, head)
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before
