"""The clipped policy-gradient objective of completions laid end to end, and the weights that correct for the sampler.

Log-probabilities are subtracted token by token and summed in float64. The clip is applied to the log-ratio, so a ratio
that overflows has a bounded loss and a gradient of 0, not NaN. Non-finite inputs stay non-finite.

Shapes: R completions, N their tokens end to end, completion after completion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Of a weight: one token must not drown the rest, and two samplers of one policy seldom differ more.
CORRECTION_CAP = 2.0
RATIO_STATISTICS = ("ratio", "clipped_low", "clipped_high")


@dataclass(frozen=True)
class Objective:
    """How the importance ratio is computed and bounded.

    Attributes:
        epsilon_low, epsilon_high: the ratio is clipped to 1 - epsilon_low and 1 + epsilon_high, as in PPO.
        ratio_form: of the log-ratio, its "sum" over the completion, its mean ("length_normalized") or "per_token".
        token_mean: with "completion" a row's loss is the mean over its tokens, else the sum. "batch" divides later, in
            `loop/step.py`, which knows all rows. All but "none" require "per_token".
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    ratio_form: str = "sum"
    token_mean: str = "none"


@dataclass(frozen=True)
class LossParts:
    """The loss of some completions, and its statistics for the log.

    Attributes:
        per_row: (R,) float32 with its graph, minus each completion's objective; 0 for one without a trained token. With
            a ratio per token, the sum over the completion's tokens, or their mean (`token_mean`).
        ratio: (R,), without a graph; with a ratio per token, its mean over the completion. 1 without a trained token.
        clipped_low, clipped_high: (R,), 1.0 where that bound clipped the ratio, else 0.0; with a ratio per token, the
            share of clipped tokens.
    """

    per_row: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def choose_ratio_form(ratio_form: str | None, kl_form: str, token_mean: str = "none") -> str:
    """Resolve `ratio_form` None: "per_token" if each token has its own advantage, or if the loss is a mean over tokens;
    else "sum".

    >>> choose_ratio_form(None, "per_token"), choose_ratio_form(None, "sum"), choose_ratio_form("per_token", "sum")
    ('per_token', 'sum', 'per_token')
    >>> choose_ratio_form(None, "sum", "batch")
    'per_token'
    """
    return ratio_form or ("per_token" if kl_form == "per_token" or token_mean != "none" else "sum")


def policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    lengths: Sequence[int],
    mask: torch.Tensor,
    advantages: torch.Tensor,
    settings: Objective,
    weights: torch.Tensor | None = None,
) -> LossParts:
    """Minus the objective of each completion: min(ratio * A, clip(ratio) * A).

    With `old_logps = logps.detach()` the ratio is exactly 1 and the gradient is REINFORCE's, minus A times the sum of
    the log-probabilities' gradients (their mean with `length_normalized`).

    Args:
        logps: (N,) under the policy, with a graph. old_logps: (N,) under the policy that sampled, without one.
        lengths: tokens of each of the R completions, 0 allowed.
        mask: (N,), bool or 0 and 1; tokens with 0 are left out of the ratio, the loss and the gradient.
        advantages: (R,), or (N,) with `per_token`, where (R,) is spread over the tokens. Finite.
        weights: (N,), constants that multiply the gradient of each token (`sampler_correction`); the clipped ratio does
            not include them.

    Returns:
        `LossParts`. Non-finite log-probabilities give a non-finite loss, which `all_finite` detects.
    """
    kept = mask.bool()
    difference = (logps - old_logps.detach()).masked_fill(~kept, 0.0)  # (N,)
    advantages = advantages.detach()
    tokens = sum_rows(kept.to(difference.dtype), lengths)  # (R,)
    if settings.ratio_form == "per_token":
        per_token = spread(advantages, lengths) if advantages.numel() != logps.numel() else advantages
        gain, parts = _bounded_gain(difference, per_token, settings)
        gain = gain if weights is None else gain * weights
        per_row = sum_rows(gain.masked_fill(~kept, 0.0), lengths)
        if settings.token_mean == "completion":
            per_row = per_row / tokens.clamp(min=1)
        parts = {n: sum_rows(part * kept, lengths) / tokens.clamp(min=1) for n, part in parts.items()}
        parts["ratio"] = parts["ratio"].masked_fill(tokens == 0, 1.0)
    else:
        if weights is not None:  # the same value, its gradient times the weight
            fixed = difference.detach()
            difference = fixed + weights.detach().masked_fill(~kept, 0.0) * (difference - fixed)
        log_ratio = sum_rows(difference, lengths)
        if settings.ratio_form == "length_normalized":
            log_ratio = log_ratio / tokens.clamp(min=1)
        gain, parts = _bounded_gain(log_ratio, advantages.to(log_ratio.dtype), settings)
        per_row = gain.masked_fill(tokens == 0, 0.0)
    return LossParts(-per_row.float(), **{n: part.float() for n, part in parts.items()})


def _bounded_gain(
    log_ratio: torch.Tensor, advantages: torch.Tensor, settings: Objective
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Ratio times advantage within the bounds that apply to its sign, and which bounds were hit; all of one shape."""
    low = math.log(1 - settings.epsilon_low) if settings.epsilon_low < 1 else -math.inf
    high = math.log(1 + settings.epsilon_high)
    negative = advantages < 0
    lower = torch.full_like(advantages, -math.inf).masked_fill(negative, low)
    upper = torch.full_like(advantages, high).masked_fill(negative, math.inf)
    gain = log_ratio.clamp(min=lower, max=upper).exp() * advantages
    detached = log_ratio.detach()
    parts = {
        "ratio": detached.exp(),
        "clipped_low": (detached < low) & negative,
        "clipped_high": (detached > high) & (advantages > 0),
    }
    return gain, {name: part.to(detached.dtype) for name, part in parts.items()}


def correction_weights(
    logps: torch.Tensor,
    sampler_logps: torch.Tensor,
    mask: torch.Tensor,
    lengths: Sequence[int],
    form: str,
) -> torch.Tensor:
    """Importance weights of the trainer's policy over the sampler's: (N,) -> (N,), without a graph.

    They correct for a sampler that computes the same policy with other kernels, quantisation or precision. Truncation
    (Ionides 2008) bounds the variance at the price of a small bias. Masking removes tokens (IcePop, arXiv 2510.18855)
    or completions (MIS, https://richardli.xyz/rl-collapse) whose ratio is above the cap from the gradient. TRL has the
    four forms for GRPO (`vllm_importance_sampling_mode`), not for RLOO.

    >>> logps, sampled = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, torch.nan])
    >>> correction_weights(logps, sampled, torch.ones(3), [3], "token").tolist()
    [1.0, 2.0, 1.0]
    >>> correction_weights(logps, sampled, torch.ones(3), [3], "sequence_mask").tolist()
    [0.0, 0.0, 0.0]

    Args:
        logps: (N,) nats, under the trainer's policy when the completions were sampled.
        sampler_logps: (N,) nats, NaN for tokens that were not sampled (a forced close).
        mask: (N,), bool or 0 and 1, the scored tokens. lengths: of each completion, 0 allowed; their sum is N.
        form: "token": each token's own ratio. "sequence": for all tokens of a completion, the product of the ratios of
            its sampled and scored tokens. Both are at most 2 (CORRECTION_CAP); with "_mask", a ratio above it gives 0.

    Returns:
        The weights, 0 to 2. The token forms give 1 for a token that is masked or was not sampled, the sequence
        forms 1 for a completion without a sampled token. NaN where `logps` is NaN, so that broken values stay visible.
    """
    known = mask.bool() & ~sampler_logps.isnan()
    difference = (logps.detach() - sampler_logps.detach()).masked_fill(~known, 0.0)  # (N,)
    by_token = form.startswith("token")
    ratio = difference.exp() if by_token else sum_rows(difference, lengths).exp()  # (N,) or (R,)
    if form.endswith("_mask"):
        weights = ratio.masked_fill(ratio > CORRECTION_CAP, 0.0)
    else:
        weights = ratio.clamp(max=CORRECTION_CAP)
    return weights if by_token else spread(weights.to(difference.dtype), lengths)


def sum_rows(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Sums over each row's tokens in float64 (float32 where the device has none): (N,) -> (R,). Empty rows give 0."""
    wide = values.float() if values.device.type == "mps" else values.double()
    return torch.stack([part.sum() for part in wide.split(list(lengths))]) if len(lengths) else wide.new_zeros(0)


def spread(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Each row's value for each of its tokens: (R,) -> (N,)."""
    return values.repeat_interleave(
        torch.tensor(list(lengths), dtype=torch.long, device=values.device), output_size=sum(lengths)
    )


def all_finite(*tensors: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
    """Whether every entry is a finite number; with a mask, every entry that it keeps.

    >>> values = torch.tensor([1.0, torch.nan])
    >>> all_finite(values), all_finite(values, mask=torch.tensor([1, 0]))
    (False, True)

    Args:
        tensors: of any shape; with a mask, of the mask's shape. mask: bool or 0 and 1.
    """
    finite = [tensor.detach().isfinite() for tensor in tensors]
    if mask is not None:
        finite = [entries | ~mask.bool() for entries in finite]
    return bool(torch.stack([entries.all().cpu() for entries in finite]).all())
