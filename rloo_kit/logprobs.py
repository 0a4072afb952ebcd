"""Log-probabilities of completions without Triton, without padding on the left, without [tokens, vocabulary].

TRL 1.15 scores through a Triton kernel that needs an accelerator, and pads prompts on the left, which Unsloth's
training forward silently ignores (its mask is dropped: gradients off by half). Here each row is laid out as prompt +
completion, padded on the right: no token ever sees padding, so no mask is needed and every backend gives the same
numbers.

`attach_token_scoring` gives one model instance a second way to be called, through whatever wraps it (PEFT, DDP,
autocast), as TRL does for its fused head. Left out: packing and shared prompts.

Shapes: B rows, P prompt tokens, C completion tokens, H hidden size, V vocabulary, N scored tokens of a micro-batch.
"""

import functools
import types
from dataclasses import dataclass

from rloo_kit._stack import load_stack
from rloo_kit.errors import BackendError

load_stack()

import torch
from transformers.utils import ModelOutput

TILE_ELEMENTS = 2**22  # logits of one tile: 16 MiB in float32
MAX_TILE_TOKENS = 1024


@dataclass
class TokenScores(ModelOutput):
    """What a scoring call returns: log-probabilities and entropies of the N scored tokens, in nats, float32."""

    logps: torch.Tensor | None = None  # (N,)
    entropies: torch.Tensor | None = None  # (N,)


class _ScoreTokens(torch.autograd.Function):
    """log softmax(h W^T + b)[target] by tiles of tokens; the backward pass makes each tile's logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        with torch.autocast(hidden.device.type, enabled=False):
            logps, entropies, log_norms = [], [], []
            for rows in _tiles(hidden.size(0), weight.size(0)):
                logits = _tile_logits(hidden[rows], weight, bias, temperature)  # (tile, V)
                log_norm = logits.logsumexp(dim=1)
                logps.append(logits.gather(1, targets[rows, None]).squeeze(1) - log_norm)
                entropies.append(log_norm - (torch.softmax(logits, dim=1) * logits).sum(dim=1))
                log_norms.append(log_norm)
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(log_norms))
        ctx.temperature = temperature
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logps), entropy

    @staticmethod
    def backward(ctx, grad_logps, _grad_entropies):
        hidden, weight, bias, targets, log_norms = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows in _tiles(hidden.size(0), weight.size(0)):
            logits = _tile_logits(hidden[rows], weight, bias, ctx.temperature)
            grad_logits = torch.exp(logits - log_norms[rows, None]).mul_(-grad_logps[rows, None])  # (tile, V)
            grad_logits.scatter_add_(1, targets[rows, None], grad_logps[rows, None])
            grad_logits.div_(ctx.temperature)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_logits.to(weight.dtype) @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows].float()
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _tiles(tokens: int, vocabulary: int) -> list[slice]:
    size = max(16, min(MAX_TILE_TOKENS, TILE_ELEMENTS // vocabulary))
    return [slice(start, start + size) for start in range(0, max(tokens, 1), size)]


def _tile_logits(hidden, weight, bias, temperature):
    return torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).float() / temperature


def score_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution, through the language-model head.

    Args:
        hidden: (N, H), the states that predict the targets. weight: (V, H). bias: (V,) or None.
        targets: (N,) token ids. temperature: above 0; the logits are divided by it, as in sampling.

    Returns:
        logps (N,) and entropies (N,), float32, in nats. Only the logps carry a gradient.
    """
    return _ScoreTokens.apply(hidden, weight, bias, targets, temperature)


def attach_token_scoring(model: torch.nn.Module, temperature: float) -> None:
    """Let `model(input_ids=(B, L), score_positions=(N,), score_targets=(N,))` return `TokenScores`.

    `score_positions` are flat positions b * L + t whose hidden state predicts the target. Any other call is unchanged.

    Raises:
        BackendError: the head changes its logits in a way that is not scored here (soft-capping, scaling).
    """
    text_config = model.config.get_text_config()
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"):
        if getattr(text_config, key, None) not in (None, 1.0):
            raise BackendError(f"the model's config sets {key}; the kit scores plain heads only (Qwen3 has one)")
    plain_forward = getattr(model.forward, "without_scoring", model.forward)

    @functools.wraps(type(model).forward)  # generate() checks its arguments against the original signature
    def forward(self, *args, score_positions=None, score_targets=None, need_entropy=True, **kwargs):
        if score_positions is None:
            return plain_forward(*args, **kwargs)
        states = self.base_model(*args, **kwargs, use_cache=False).last_hidden_state  # (B, L, H)
        head = self.get_output_embeddings()
        scored = states.flatten(0, 1)[score_positions.to(states.device)].to(head.weight.device)  # (N, H)
        logps, entropies = score_tokens(
            scored, head.weight, getattr(head, "bias", None), score_targets.to(scored.device), temperature
        )
        return TokenScores(logps=logps, entropies=entropies)

    forward.without_scoring = plain_forward
    model.forward = types.MethodType(forward, model)


def completion_scores(
    model: torch.nn.Module,
    prompt_ids: list[torch.Tensor],
    completion_ids: list[torch.Tensor],
    width: int,
    pad_id: int,
    batch_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token log-probabilities and entropies of completions given their prompts.

    Args:
        model: a model that went through `attach_token_scoring`, or what wraps it.
        prompt_ids: B tensors (P_i,), P_i at least 1. completion_ids: B tensors (C_i,), unpadded.
        width: columns of the result, at least the longest completion. pad_id: any valid token id.
        batch_size: rows scored at once; None for all of them.

    Returns:
        logps and entropies, (B, width), float32, 0 behind each completion's end.
    """
    rows = len(prompt_ids)
    device = completion_ids[0].device
    order = sorted(range(rows), key=lambda row: len(prompt_ids[row]) + len(completion_ids[row]))
    step = batch_size or rows
    logps: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    targets_at: list[torch.Tensor] = []
    for start in range(0, rows, step):
        chosen = order[start : start + step]
        input_ids, positions, targets = _lay_out([(prompt_ids[row], completion_ids[row]) for row in chosen], pad_id)
        scores = model(input_ids=input_ids, score_positions=positions, score_targets=targets)
        logps.append(scores.logps.to(device))
        entropies.append(scores.entropies.to(device))
        targets_at += [row * width + torch.arange(len(completion_ids[row]), device=device) for row in chosen]
    flat = torch.cat(targets_at)
    empty = torch.zeros(rows * width, device=device)
    return (
        empty.index_put((flat,), torch.cat(logps)).view(rows, width),
        empty.index_put((flat,), torch.cat(entropies)).view(rows, width),
    )


def _lay_out(pairs: list[tuple[torch.Tensor, torch.Tensor]], pad_id: int) -> tuple[torch.Tensor, ...]:
    """Rows prompt + completion padded on the right (B, L), and for each completion token where it is predicted."""
    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    device = pairs[0][1].device
    input_ids = torch.full((len(pairs), length), pad_id, dtype=torch.long, device=device)
    positions = []
    for row, (prompt, completion) in enumerate(pairs):
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : len(prompt) + len(completion)] = completion
        first = row * length + len(prompt) - 1
        positions.append(torch.arange(first, first + len(completion), device=device))
    return input_ids, torch.cat(positions), torch.cat([completion for _, completion in pairs])
