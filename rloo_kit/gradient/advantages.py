"""From rewards to advantages: functions on tensors, and the running moments of `normalize_rewards`.

NaN marks a completion that is not scored: it leaves its siblings' baseline and has advantage 0.

Shapes: B = prompts x K completions, K generations a prompt, F reward functions, C padded completion tokens; R rows, N
their tokens end to end. Sources: RLOO, arXiv 2402.14740; the penalty as k1 in the reward, 2510.01555; REINFORCE++,
2501.03262.
"""

from collections.abc import Sequence

import torch

from rloo_kit.config.schema import BASELINES, KL_FORMS
from rloo_kit.gradient.objective import spread, sum_rows


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


def kl_charge(per_token_kl: torch.Tensor, mask: torch.Tensor, form: str) -> torch.Tensor:
    """What a whole completion is charged, before beta: (B, C), (B, C) -> (B,). As `kl_penalty`; with `per_token` the
    sum."""
    return kl_penalty(per_token_kl, mask, "sum" if form == "per_token" else form)


def kl_penalty_rows(per_token_kl: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int], form: str) -> torch.Tensor:
    """What beta is multiplied with, for rows laid end to end: (N,), (N,) -> (R,), or (N,) for `per_token`.

    As `kl_penalty`; sums are float64, the result is of the KL's dtype. A KL that is not finite stays so.
    """
    kept = mask.bool()
    kl = per_token_kl.masked_fill(~kept, 0.0)
    if form == "per_token":
        rows = kl.double().split(list(lengths)) if kl.device.type != "mps" else kl.split(list(lengths))
        to_go = [row.flip(0).cumsum(0).flip(0) for row in rows]
        return torch.cat(to_go).to(kl.dtype).masked_fill(~kept, 0.0) if to_go else kl
    if form not in KL_FORMS:
        raise ValueError(f"kl_form must be one of {', '.join(KL_FORMS)}, got {form!r}")
    total = sum_rows(kl, lengths)
    if form == "length_normalized":
        total = total / sum_rows(kept.to(kl.dtype), lengths).clamp(min=1)
    return total.to(kl.dtype)


def baseline_advantages(rewards: torch.Tensor, num_generations: int, baseline: str) -> torch.Tensor:
    """Reward minus its baseline: (B,) -> (B,); NaN where there is no reward or nothing to compare it with.

    `leave_one_out`: the mean of the scored siblings. `group_mean`: that of all scored completions of the prompt, its
    own among them, which shrinks every advantage by (K - 1) / K. `none`: 0.
    """
    if baseline == "leave_one_out":
        return leave_one_out(rewards, num_generations)
    if baseline == "group_mean":
        grouped = rewards.view(-1, num_generations)  # (prompts, K)
        return (grouped - grouped.nanmean(dim=1, keepdim=True)).view(-1)
    if baseline == "none":
        return rewards
    raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {baseline!r}")


def affine_kl(baseline: str, scored: torch.Tensor, num_generations: int) -> tuple[float, float]:
    """How an advantage depends on its group's KL: A_i = A^R_i - beta * (own * kl_i - others * sum of scored kl_j).

    `A^R` are the advantages of the task rewards alone. Exact where `kl_i` is one number a completion (`sum`,
    `length_normalized`) and nothing is normalised or clipped after the penalty.

    >>> affine_kl("leave_one_out", torch.tensor([True, True, False, True]), 4)
    (1.5, 0.5)

    Args:
        scored: (K,) bool, the rows of one group that have a reward. num_generations: K.

    Returns:
        (own, others); (0.0, 0.0) where no row of the group has an advantage.
    """
    if len(scored) != num_generations:
        raise ValueError(f"{len(scored)} rows are not one group of {num_generations}")
    count = int(scored.sum())
    if baseline == "leave_one_out":
        return (count / (count - 1), 1 / (count - 1)) if count > 1 else (0.0, 0.0)
    if count == 0:
        return 0.0, 0.0
    if baseline == "group_mean":
        return 1.0, 1 / count
    if baseline == "none":
        return 1.0, 0.0
    raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {baseline!r}")


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


def find_moments(values: torch.Tensor) -> torch.Tensor:
    """Number, mean and sum of squared deviations of the entries that are not NaN: (3,) float64 on the CPU."""
    present = values.detach()[~values.isnan()].cpu().double()
    if present.numel() == 0:
        return torch.zeros(3, dtype=torch.float64)
    mean = present.mean()
    return torch.stack([torch.tensor(float(present.numel()), dtype=torch.float64), mean, ((present - mean) ** 2).sum()])


def merge_moments(rows: torch.Tensor) -> torch.Tensor:
    """The moments of several sets together: (sets, 3) -> (3,). Source: Chan, Golub, LeVeque 1979."""
    counts, means, squares = rows.double().unbind(dim=-1)
    total = counts.sum()
    mean = (counts * means).sum() / total.clamp(min=1)
    return torch.stack([total, mean, (squares + counts * (means - mean) ** 2).sum()])


def normalize_by(values: torch.Tensor, moments: torch.Tensor, eps: float) -> torch.Tensor:
    """To mean 0 and standard deviation 1 of the set with these moments; unchanged where it has less than two entries.

    Args:
        values: of any shape; NaN stays. moments: (3,), of `find_moments` or `merge_moments`.
    """
    count, mean, squares = moments.tolist()
    if count < 2:
        return values
    return (values - mean) / ((squares / (count - 1)) ** 0.5 + eps)


class RunningMoments:
    """Mean and deviation of all rewards so far (`normalize_rewards: running`); its state belongs into a checkpoint.

    A rollout's own deviation is a poor estimate where the rollout is small, and changes what a reward is worth from
    step to step. Nothing is forgotten, so the scale settles.

    >>> running = RunningMoments()
    >>> running.update(torch.tensor([0.0, 1.0, torch.nan]))
    >>> running.update(torch.tensor([2.0]))
    >>> running.normalize(torch.tensor([1.0, 2.0]), eps=0.0).tolist()
    [0.0, 1.0]
    >>> RunningMoments.from_dict(running.to_dict()).to_dict() == running.to_dict()
    True
    """

    def __init__(self) -> None:
        self._moments = torch.zeros(3, dtype=torch.float64)

    def update(self, values: torch.Tensor) -> None:
        """Take the rewards of one rollout, of all processes; NaN (not scored) and infinities are left out."""
        finite = values.masked_fill(~values.isfinite(), torch.nan)
        self._moments = merge_moments(torch.stack([self._moments, find_moments(finite)]))

    def normalize(self, values: torch.Tensor, eps: float) -> torch.Tensor:
        """To mean 0 and deviation 1 of all that was taken; unchanged while that is less than two rewards."""
        return normalize_by(values, self._moments, eps)

    def to_dict(self) -> dict[str, float]:
        """The state, as JSON takes it."""
        return dict(zip(("count", "mean", "squares"), self._moments.tolist(), strict=True))

    @classmethod
    def from_dict(cls, state: dict[str, float]) -> "RunningMoments":
        """The one that `to_dict` described."""
        found = cls()
        found._moments = torch.tensor([state[name] for name in ("count", "mean", "squares")], dtype=torch.float64)
        return found


def leave_one_out(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Reward minus the mean of the scored siblings: (B,) -> (B,). NaN where there is no reward or no scored sibling."""
    grouped = rewards.view(-1, num_generations)  # (prompts, K)
    scored = (~grouped.isnan()).sum(dim=1, keepdim=True)  # (prompts, 1)
    siblings = (scored - 1).clamp(min=1)
    baseline = (grouped.nansum(dim=1, keepdim=True) - grouped) / siblings  # (prompts, K)
    return (grouped - baseline).masked_fill(scored < 2, torch.nan).view(-1)


def tied_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Which groups carry no learning signal, all scored rewards being equal: (B,) -> (prompts,) bool.

    Wholly unscored groups count as tied. The tolerance is that of `torch.isclose`, as in TRL's metric.
    """
    grouped = rewards.view(-1, num_generations)
    high = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    low = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    return torch.isclose(high, low) | (grouped.isnan().all(dim=1))
