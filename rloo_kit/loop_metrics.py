"""What a step says about itself: per-completion statistics, metrics by name, and rows for `rollouts.jsonl`.

Names are TRL's where TRL has one (`kl`, `entropy`, `clip_ratio/*`), those of its older trainer for `objective/*`,
`val/*` and `eps`, and the kit's own for `thinking/*`. docs/10-metrics.md says what each means.

Shapes: B completions of this process, A of all processes, C completion tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch

from rloo_kit.advantages import tied_groups
from rloo_kit.tokens import ThinkTags

COLUMNS = ("tokens", "eos_tokens", "thinks", "closed", "thinking_tokens", "kl", "kl_tokens")


@dataclass
class GenerationBatch:
    """One rollout of this process and what became of it; what the metrics and the listeners read.

    Attributes:
        inputs: the data set's rows, B dicts. prompts, completions, completion_ids: B entries each.
        tensors: padded ids and masks, see `RLOOTrainer._tensors`.
        rewards_per_func: (A, F), NaN where a reward does not apply.
        per_token_kl: (B, C), or None when beta is 0.
        raw_scores: (A,), weighted rewards as the functions gave them; NaN where a sample is not scored.
        scores: (A,), after the penalty for a missing end, normalisation and clipping.
        rewards: (A,), scores less the KL penalty. advantages: (A,), 0 where there is no baseline.
    """

    inputs: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    tensors: dict[str, torch.Tensor]
    rewards_per_func: torch.Tensor
    per_token_kl: torch.Tensor | None
    raw_scores: torch.Tensor
    scores: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor


def mean(values: torch.Tensor) -> float:
    """Mean over the entries that are not NaN; NaN if there is none (TRL's `log` leaves NaN out)."""
    return values.nanmean().item()


def std(values: torch.Tensor) -> float:
    """Sample standard deviation over the entries that are not NaN; 0 for a single one, NaN for none."""
    present = values[~values.isnan()]
    if present.numel() == 0:
        return float("nan")
    return present.std().item() if present.numel() > 1 else 0.0


def sample_statistics(
    batch: dict[str, torch.Tensor], tags: ThinkTags, eos_token_ids: list[int], per_token_kl: torch.Tensor | None
) -> torch.Tensor:
    """One row of numbers per completion, (B, len(COLUMNS)) float32, ready to be gathered across processes.

    `thinking_tokens` are those before the first `</think>`; a completion that never closes has spent all of its tokens
    on thinking, so that truncation does not make thoughts look short. `thinks` is 0 for a model that was not asked to.
    """
    ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
    tokens = mask.sum(dim=1)
    eos = torch.isin(ids, torch.tensor(eos_token_ids, device=ids.device)) & mask
    thinks = closed = torch.zeros_like(tokens)
    thinking_tokens = tokens
    if tags.end_id is not None:
        is_end = (ids == tags.end_id) & mask
        closed = is_end.any(dim=1)
        thinking_tokens = torch.where(closed, is_end.int().argmax(dim=1), tokens)
        thinks = closed
        if tags.start_id is not None:
            opened = (ids == tags.start_id) & mask
            asked = batch["prompt_ids"][:, -3:] == tags.start_id  # the template may end the prompt with "<think>\n"
            thinks = closed | opened.any(dim=1) | asked.any(dim=1)
    columns = [tokens, eos.sum(dim=1), thinks, closed, thinking_tokens]
    if per_token_kl is None:
        columns += [torch.zeros_like(tokens)] * 2
    else:
        columns += [(per_token_kl * batch["loss_mask"]).sum(dim=1), batch["loss_mask"].sum(dim=1)]
    return torch.stack([column.float() for column in columns], dim=1)


def rollout_metrics(
    rollout: GenerationBatch, statistics: torch.Tensor, names: list[str], group: int, beta: float
) -> dict[str, float]:
    """Metrics by name of one generation batch, over all processes.

    Args:
        statistics: gathered, (A, len(COLUMNS)). names: of the F reward functions. group: K. beta: the KL coefficient.
    """
    column = dict(zip(COLUMNS, statistics.T, strict=True))
    metrics = {}
    for index, name in enumerate(names):
        metrics[f"rewards/{name}/mean"] = mean(rollout.rewards_per_func[:, index])
        metrics[f"rewards/{name}/std"] = std(rollout.rewards_per_func[:, index])
    metrics |= {
        "reward": mean(rollout.raw_scores),
        "reward_std": std(rollout.raw_scores),
        "frac_reward_zero_std": tied_groups(rollout.rewards, group).float().mean().item(),
        # before the KL penalty, which alone keeps the rewards of a group from being equal
        "frac_score_zero_std": tied_groups(rollout.scores, group).float().mean().item(),
        "rewards/unscored_ratio": rollout.raw_scores.isnan().float().mean().item(),
        "objective/scores": mean(rollout.scores),
        "objective/rlhf_reward": mean(rollout.rewards),
        "objective/non_score_reward": mean(rollout.rewards - rollout.scores),
        "val/num_eos_tokens": column["eos_tokens"].sum().item(),
    }
    if beta != 0.0:
        metrics["kl"] = (column["kl"].sum() / column["kl_tokens"].sum().clamp(min=1)).item()
        metrics["objective/kl"] = column["kl"].mean().item()
    thinks = column["thinks"].bool()
    if thinks.any():
        metrics["thinking/mean_length"] = column["thinking_tokens"][thinks].mean().item()
        metrics["thinking/closed_ratio"] = column["closed"][thinks].mean().item()
    return metrics


def loss_metrics(
    accelerator: Any,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    entropies: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    limits: tuple[float, float],
) -> dict[str, float]:
    """Entropy, ratio and clip shares of one micro-batch, over all processes.

    Args:
        ratio: (B,) for the sequence, (B, C) for each token. advantages: of the same shape.
        entropies: (B, C), nats. limits: the clip range of the ratio.
    """
    mask = inputs["loss_mask"]
    entropy = accelerator.reduce(torch.stack([(entropies * mask).sum(), mask.sum().float()]), reduction="sum")
    low = (ratio < limits[0]) & (advantages < 0)
    high = (ratio > limits[1]) & (advantages > 0)
    rows = torch.stack([ratio, low.float(), high.float()], dim=-1)
    if ratio.dim() == 2:  # shares per completion, over its own tokens
        weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
        rows = (rows * weights[..., None]).sum(dim=1)
    ratios, lows, highs = accelerator.gather(rows).unbind(dim=-1)
    return {
        "entropy": (entropy[0] / entropy[1].clamp(min=1)).item(),
        "clip_ratio/low_mean": lows.mean().item(),
        "clip_ratio/low_min": lows.min().item(),
        "clip_ratio/high_mean": highs.mean().item(),
        "clip_ratio/high_max": highs.max().item(),
        "clip_ratio/region_mean": (lows + highs).mean().item(),
        "val/ratio": ratios.mean().item(),
        "val/ratio_var": ratios.var(unbiased=False).item(),
    }


def rollout_rows(
    rollout: GenerationBatch, statistics: torch.Tensor, names: list[str], first: int, step: int
) -> list[dict[str, Any]]:
    """One plain dict per completion of this process, in the order of the rollout; unscored values are None.

    Args:
        statistics: of this process, (B, len(COLUMNS)). names: of the F reward functions.
        first: where this process's rows begin among all (A). step: optimizer steps done when they were sampled.
    """
    rows = []
    for index, numbers in enumerate(statistics.tolist()):
        column = dict(zip(COLUMNS, numbers, strict=True))
        closed = bool(column["closed"])
        rewards = rollout.rewards_per_func[first + index].tolist()
        rows.append(
            {
                "step": step,
                "prompt": rollout.prompts[index],
                "completion": rollout.completions[index],
                "completion_ids": rollout.completion_ids[index],
                "prompt_tokens": int(rollout.tensors["prompt_mask"][index].sum()),
                "completion_tokens": int(column["tokens"]),
                "thinking_tokens": int(column["thinking_tokens"]) if closed else None,
                "closed": closed,
                "truncated": bool(rollout.tensors["truncated"][index]),
                "kl": column["kl"],
                "rewards": {name: _or_none(value) for name, value in zip(names, rewards, strict=True)},
                "reward": _or_none(rollout.raw_scores[first + index].item()),
                "advantage": rollout.advantages[first + index].item(),
                "columns": {name: value for name, value in rollout.inputs[index].items() if name != "prompt"},
            }
        )
    return rows


def _or_none(value: float) -> float | None:
    return None if value != value else value
