"""From rewards to advantages: `make_advantages` and its parts.

NaN marks a completion that is not scored: it is left out of its siblings' baseline and has advantage 0.

Shapes: B completions of this process, A of all processes, K per prompt, F reward functions; R completions of one call,
N their tokens end to end. Sources: RLOO, arXiv 2402.14740; the penalty as k1 in the reward, 2510.01555;
REINFORCE++, 2501.03262.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rloo_kit.gradient.objective import spread, sum_rows

SCALE_EPSILON = 1e-4  # added to a standard deviation before dividing by it, as in TRL


@dataclass(frozen=True)
class AdvantageSettings:
    """The keys of `rloo` that turn rewards into advantages; `beta` 0 for no KL penalty."""

    beta: float = 0.0
    kl_form: str = "sum"
    baseline: str = "leave_one_out"
    normalize_advantages: bool = False
    scale_rewards: str = "none"


@dataclass(frozen=True)
class Advantages:
    """Advantages of a rollout.

    Attributes:
        rewards: (A,), scores minus the KL charge of the whole completion; NaN where it is not scored.
        per_row: (A,), one per completion, for the log; with `per_token` the mean over its tokens. 0 for a completion
            that is not scored.
        trained: the advantages in the loss, for this process's rows: (B,), or (N,) with `per_token`. Finite.
        lengths: tokens of this process's rows. per_token: each token has its own advantage.
    """

    rewards: torch.Tensor
    per_row: torch.Tensor
    trained: torch.Tensor
    lengths: Sequence[int]
    per_token: bool

    def of(self, rows: Sequence[int], by_token: bool = False) -> torch.Tensor:
        """The advantages in the loss, for some rows: (R,), or (N,) with `per_token` or `by_token`."""
        if not self.per_token:
            trained = self.trained[list(rows)]
            return spread(trained, [self.lengths[row] for row in rows]) if by_token else trained
        parts = self.trained.split(list(self.lengths))
        return torch.cat([parts[row] for row in rows])


def make_advantages(
    scores: torch.Tensor,
    kl: torch.Tensor,
    mask: torch.Tensor,
    lengths: Sequence[int],
    group_size: int,
    settings: AdvantageSettings,
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    mine: slice = slice(None),
) -> Advantages:
    """Advantages from scores and KL: the only place where penalty, baseline and normalisation are combined.

    >>> scores, tokens = torch.tensor([1.0, 0.0]), torch.ones(3)
    >>> make_advantages(scores, torch.tensor([0.1, 0.1, 0.4]), tokens, [2, 1], 2, AdvantageSettings(beta=0.5)).trained
    tensor([ 1.1000, -1.1000])

    Args:
        scores: (A,), whole groups; NaN where a completion is not scored. group_size: K; with 1 there is no baseline.
        kl: (N,), log-ratio of the policy to the reference, of this process's rows; unused without a penalty.
        mask: (N,), 0 for tokens that are left out of the loss. lengths: tokens of this process's completions.
        gather: turns a tensor of this process's rows into one of all rows. mine: this process's rows among all.
    """
    # Standardized per-token advantages take their moments over tokens, with a penalty or without (beta 0).
    by_token = settings.kl_form == "per_token" and (settings.beta != 0 or settings.normalize_advantages)
    rewards = scores
    if settings.beta != 0:
        charged = scores - settings.beta * gather(kl_charge(kl, mask, lengths, settings.kl_form))
        rewards = charged.masked_fill(~charged.isfinite(), torch.nan)  # one infinity must not reach the siblings
    task = scores.masked_fill(rewards.isnan(), torch.nan)
    if group_size > 1:
        is_scaled = settings.scale_rewards == "group"
        per_row = subtract_baseline(task if by_token or is_scaled else rewards, group_size, settings.baseline)  # (A,)
        if is_scaled:  # only the task's part: in a solved group only the KL varies
            per_row = scale_by_group(per_row, task, group_size)
            if settings.beta != 0 and not by_token:
                per_row = per_row + subtract_baseline(rewards - task, group_size, settings.baseline)
    else:
        per_row = torch.full_like(task, torch.nan)
    if not by_token:
        per_row = zero_unscored(standardize(per_row, eps=SCALE_EPSILON) if settings.normalize_advantages else per_row)
        return Advantages(rewards, per_row, per_row[mine], lengths, per_token=False)
    tokens = spread(per_row[mine], lengths) - settings.beta * kl_to_go(kl, mask, lengths)  # (N,)
    tokens = tokens.masked_fill(~mask.bool(), torch.nan)
    if settings.normalize_advantages:  # on the sum: normalising only the task's part would not scale the penalty
        moments = merge_moments(gather(find_moments(tokens)[None].to(tokens.device)).cpu())
        tokens = normalize_by(tokens, moments, eps=SCALE_EPSILON)
    trained = zero_unscored(tokens)
    means = sum_rows(trained, lengths) / sum_rows(mask.float(), lengths).clamp(min=1)  # (B,)
    return Advantages(rewards, gather(means.to(scores.dtype)), trained, lengths, per_token=True)


def combine_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the rewards that apply: (B, F), (F,) -> (B,). A NaN entry drops that function's term for the
    sample, as in TRL; NaN where none with a weight applies."""
    combined = (rewards_per_func * weights.unsqueeze(0)).nansum(dim=1)
    return combined.masked_fill(rewards_per_func[:, weights != 0].isnan().all(dim=1), torch.nan)


def zero_unscored(advantages: torch.Tensor) -> torch.Tensor:
    """Replace NaN by 0, in any shape: a completion that is not scored does not move the policy."""
    return advantages.masked_fill(advantages.isnan(), 0.0)


def kl_charge(kl: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int], form: str) -> torch.Tensor:
    """The KL charge of each completion, before beta: (N,), (N,) -> (R,). A non-finite KL stays non-finite.

    Args:
        kl: log-ratio of the policy to the reference at each token, in nats. mask: 0 where a token is not charged.
        lengths: tokens of each completion, R of them.
        form: "sum" (the paper, TRL) and "per_token": the sum over the completion. "length_normalized": the mean over
            its tokens, so that long thinking costs no more than short thinking.
    """
    kept = mask.bool()
    total = sum_rows(kl.masked_fill(~kept, 0.0), lengths)
    if form == "length_normalized":
        total = total / sum_rows(kept.to(kl.dtype), lengths).clamp(min=1)
    return total.to(kl.dtype)


def kl_to_go(kl: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The KL from each token to the end of its completion, for `per_token`: (N,), (N,) -> (N,), 0 where masked."""
    kept = mask.bool()
    wide = kl.masked_fill(~kept, 0.0)
    rows = (wide if kl.device.type == "mps" else wide.double()).split(list(lengths))
    to_go = [row.flip(0).cumsum(0).flip(0) for row in rows]
    return torch.cat(to_go).to(kl.dtype).masked_fill(~kept, 0.0) if to_go else wide


def subtract_baseline(rewards: torch.Tensor, num_generations: int, baseline: str) -> torch.Tensor:
    """Reward minus its baseline: (B,) -> (B,); NaN where there is no reward or nothing to compare it with.

    `leave_one_out`: the mean of the scored siblings. `group_mean`: the mean of all scored completions of the prompt,
    its own included, which scales every advantage by (K - 1) / K. `none`: 0.
    """
    if baseline == "none":
        return rewards
    grouped = rewards.view(-1, num_generations)  # (prompts, K)
    if baseline == "group_mean":
        return (grouped - grouped.nanmean(dim=1, keepdim=True)).view(-1)
    assert baseline == "leave_one_out", baseline
    scored = (~grouped.isnan()).sum(dim=1, keepdim=True)  # (prompts, 1)
    siblings = (scored - 1).clamp(min=1)
    means = (grouped.nansum(dim=1, keepdim=True) - grouped) / siblings  # (prompts, K)
    return (grouped - means).masked_fill(scored < 2, torch.nan).view(-1)


def scale_by_group(values: torch.Tensor, rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Values over the standard deviation of their group's scored rewards plus SCALE_EPSILON: (B,), (B,) -> (B,).

    NaN stays NaN. The estimator is the unbiased one, as in TRL's GRPO. Where all rewards of a group are equal, or only
    one completion is scored, the values are 0, whatever the baseline.

    >>> scale_by_group(torch.tensor([0.5, -0.5, 1.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000])
    """
    grouped, grouped_values = rewards.view(-1, num_generations), values.view(-1, num_generations)  # (prompts, K)
    scored = (~grouped.isnan()).sum(dim=1, keepdim=True)  # (prompts, 1)
    squares = (grouped - grouped.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    deviation = (squares / (scored - 1).clamp(min=1)).sqrt()
    high = grouped.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    low = grouped.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    is_tied = (high <= low) & ~grouped_values.isnan()  # by comparison: the mean of equal numbers may be off by rounding
    return (grouped_values / (deviation + SCALE_EPSILON)).masked_fill(is_tied, 0.0).view(-1)


def find_moments(values: torch.Tensor) -> torch.Tensor:
    """Number, mean and sum of squared deviations of the entries that are not NaN: (3,) float64 on the CPU."""
    present = values.detach()[~values.isnan()].cpu().double()
    if present.numel() == 0:
        return torch.zeros(3, dtype=torch.float64)
    mean = present.mean()
    return torch.stack([torch.tensor(float(present.numel()), dtype=torch.float64), mean, ((present - mean) ** 2).sum()])


def merge_moments(rows: torch.Tensor) -> torch.Tensor:
    """The moments of several sets combined: (sets, 3) -> (3,). Source: Chan, Golub, LeVeque 1979."""
    counts, means, squares = rows.double().unbind(dim=-1)
    total = counts.sum()
    mean = (counts * means).sum() / total.clamp(min=1)
    return torch.stack([total, mean, (squares + counts * (means - mean) ** 2).sum()])


def normalize_by(values: torch.Tensor, moments: torch.Tensor, eps: float) -> torch.Tensor:
    """Standardize by the moments of a set to mean 0 and standard deviation 1; unchanged if it has fewer than 2 entries.

    Args:
        values: of any shape; NaN stays. moments: (3,), from `find_moments` or `merge_moments`.
    """
    count, mean, squares = moments.tolist()
    if count < 2:
        return values
    return (values - mean) / ((squares / (count - 1)) ** 0.5 + eps)


def standardize(values: torch.Tensor, eps: float) -> torch.Tensor:
    """Standardize to mean 0 and standard deviation 1 over the entries that are not NaN, in any shape."""
    return normalize_by(values, find_moments(values), eps)


def tied_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Which groups have no learning signal because all scored rewards are equal: (B,) -> (prompts,) bool.

    A group without a scored completion counts as tied. The tolerance is that of `torch.isclose`, as in TRL's metric.
    """
    grouped = rewards.view(-1, num_generations)
    high = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    low = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    return torch.isclose(high, low) | grouped.isnan().all(dim=1)
