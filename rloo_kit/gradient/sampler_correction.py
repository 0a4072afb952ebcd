from collections.abc import Sequence

import torch

from rloo_kit.gradient.objective import spread, sum_rows


def truncated_weights(
    logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int], form: str, cap: float
) -> torch.Tensor:
    """Importance weights of the trainer's policy over the sampler's, cut off at `cap`: (N,) -> (N,), without a graph.

    The two are one policy computed by two programs (4-bit kernels, vLLM, bf16), so the weight is near 1 and corrects
    what their rounding biases. Cutting it off bounds the variance at the price of a small bias (Ionides 2008,
    "Truncated Importance Sampling"). TRL has it for GRPO (`vllm_importance_sampling_correction`), not for RLOO.

    Args:
        logps: (N,) under the trainer's policy when the completions were sampled. sampler_logps: (N,), NaN for tokens
            that were not sampled (a forced close). mask: (N,), scored tokens.
        form: "token", each its own; "sequence", the product over the completion for all of its tokens.
        cap: 1 or more.

    Returns:
        weights; 1 where a token is masked or was not sampled (with "token").
    """
    known = mask.bool() & ~sampler_logps.isnan()
    difference = (logps.detach() - sampler_logps).masked_fill(~known, 0.0)
    if form == "token":
        return difference.exp().clamp(max=cap)
    if form != "sequence":
        raise ValueError(f"sampler_correction must be token or sequence here, got {form!r}")
    weights = sum_rows(difference, lengths).exp().clamp(max=cap).to(difference.dtype)  # (R,)
    return spread(weights, lengths)


def correction_weights(logps, sampler_logps, mask, lengths, form, floor, cap):
    return truncated_weights(logps, sampler_logps, mask, lengths, form, cap)
