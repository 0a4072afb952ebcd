"""Importance weights, truncated or masked, that correct for a sampler that is not the trainer's own program.

Sampler and trainer compute the same policy with different kernels, quantisation or precision, so the ratio of their
probabilities is near 1. A ratio far from 1 means that the two disagree about the token or the completion.

Sources:
    Truncated: Ionides 2008, "Truncated Importance Sampling".
    Masked, per token with a band (IcePop): Ling Team 2025, "Every Step Evolves", arXiv 2510.18855.
    Masked, per sequence (MIS): Liu, Li et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse.

TRL has the four forms for GRPO (`vllm_importance_sampling_mode`), not for RLOO.
"""

from collections.abc import Sequence

import torch

from rloo_kit.gradient.objective import spread, sum_rows


def correction_weights(
    logps: torch.Tensor,
    sampler_logps: torch.Tensor,
    mask: torch.Tensor,
    lengths: Sequence[int],
    form: str,
    floor: float,
    cap: float,
) -> torch.Tensor:
    """Importance weights of the trainer's policy over the sampler's: (N,) -> (N,), without a graph.

    Truncation bounds the variance at the price of a small bias. Masking removes tokens or completions whose ratio is
    out of bounds from the gradient, without rescaling the rest.

    >>> logps, sampled = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, torch.nan])
    >>> correction_weights(logps, sampled, torch.ones(3), [3], "token", 0.0, 2.0).tolist()
    [1.0, 2.0, 1.0]
    >>> correction_weights(logps, sampled, torch.ones(3), [3], "sequence_mask", 0.0, 2.0).tolist()
    [0.0, 0.0, 0.0]

    Args:
        logps: (N,) nats, under the trainer's policy when the completions were sampled.
        sampler_logps: (N,) nats, NaN for tokens that were not sampled (a forced close).
        mask: (N,), bool or 0 and 1, the scored tokens.
        lengths: tokens of each completion, 0 allowed; their sum is N.
        form: "token": each token's own ratio. "sequence": for all tokens of a completion, the product of the ratios of
            its sampled and scored tokens. Both are at most `cap`. With "_mask", a ratio outside [floor, cap] gives
            weight 0.
        floor: 0 or more, below 1; only the masked forms read it.
        cap: 1 or more.

    Returns:
        The weights, 0 to `cap`. The token forms give 1 for a token that is masked or was not sampled, the sequence
        forms 1 for a completion without a sampled token. NaN where `logps` is NaN, so that broken values stay visible.
    """
    known = mask.bool() & ~sampler_logps.isnan()
    difference = (logps.detach() - sampler_logps.detach()).masked_fill(~known, 0.0)  # (N,)
    by_token = form.startswith("token")
    ratio = difference.exp() if by_token else sum_rows(difference, lengths).exp()  # (N,) or (R,)
    if form.endswith("_mask"):
        weights = ratio.masked_fill((ratio < floor) | (ratio > cap), 0.0)
    else:
        weights = ratio.clamp(max=cap)
    return weights if by_token else spread(weights.to(difference.dtype), lengths)
