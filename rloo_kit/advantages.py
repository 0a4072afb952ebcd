"""From rewards to advantages: small pure functions on tensors, in the order in which the trainer applies them.

NaN marks a completion that is not scored, all along: it leaves its siblings' baseline and has advantage 0.
`leave_one_out.py` is the oracle for the baseline. Source of the estimator: arXiv 2402.14740; of the penalty as k1 in
the reward: the same, and arXiv 2510.01555 for why it is unbiased there.

Shapes: B = prompts x K completions, K generations a prompt, F reward functions, C completion tokens.
"""

import torch

from rloo_kit.config_checks import KL_FORMS


def combine_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the rewards that apply: (B, F), (F,) -> (B,). NaN where none applies.

    A NaN entry drops that function's term for the sample, as in TRL.
    """
    combined = (rewards_per_func * weights.unsqueeze(0)).nansum(dim=1)
    return combined.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def unscore_non_finite(rewards: torch.Tensor) -> torch.Tensor:
    """NaN in place of an infinity, so that one broken log-probability cannot reach the siblings' baseline."""
    return rewards.masked_fill(~rewards.isfinite(), torch.nan)


def zero_unscored(advantages: torch.Tensor) -> torch.Tensor:
    """0 in place of NaN, whatever the shape: a completion that is not scored does not move the policy."""
    return advantages.masked_fill(advantages.isnan(), 0.0)


def standardize(values: torch.Tensor, eps: float) -> torch.Tensor:
    """Mean 0 and standard deviation 1 over the entries that are not NaN, whatever the shape."""
    present = values[~values.isnan()]
    if present.numel() < 2:
        return values
    return (values - present.mean()) / (present.std() + eps)


def kl_penalty(per_token_kl: torch.Tensor, mask: torch.Tensor, form: str) -> torch.Tensor:
    """What beta is multiplied with: (B, C), (B, C) -> (B,) for the sequence forms, (B, C) for `per_token`.

    `sum`: the whole completion's log-ratio (the paper, TRL). `length_normalized`: its mean over the tokens, so that a
    long thought costs no more than a short one. `per_token`: the reward-to-go, what is still to be paid from each
    token on (arXiv 2501.03262).
    """
    kl = per_token_kl * mask
    if form == "sum":
        return kl.sum(dim=1)
    if form == "length_normalized":
        return kl.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    if form == "per_token":
        return kl.flip(dims=(1,)).cumsum(dim=1).flip(dims=(1,)) * mask
    raise ValueError(f"kl_form must be one of {', '.join(KL_FORMS)}, got {form!r}")


def leave_one_out(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Reward minus the mean of the scored siblings: (B,) -> (B,). NaN where there is no reward or no scored sibling."""
    grouped = rewards.view(-1, num_generations)  # (prompts, K)
    scored = (~grouped.isnan()).sum(dim=1, keepdim=True)  # (prompts, 1)
    siblings = (scored - 1).clamp(min=1)
    baseline = (grouped.nansum(dim=1, keepdim=True) - grouped) / siblings  # (prompts, K)
    return (grouped - baseline).masked_fill(scored < 2, torch.nan).view(-1)


def tied_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Which groups carry no signal, all scored rewards being equal: (B,) -> (prompts,) bool.

    Wholly unscored groups count as tied. The tolerance is that of `torch.isclose`, as in TRL's metric.
    """
    grouped = rewards.view(-1, num_generations)
    high = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    low = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    return torch.isclose(high, low) | (grouped.isnan().all(dim=1))
