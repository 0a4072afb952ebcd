"""Metrics of a rollout and of a step by name, the rows of `rollouts.jsonl`, and the mixin that records them.

Names are TRL's where TRL has one (`kl`, `entropy`, `clip_ratio/*`), those of its older trainer for `objective/*`,
`val/*` and `eps`, and the kit's own for `thinking/*`; docs/metrics.md explains each.

Shapes: B completions of this process, A of all processes, C completion tokens, F reward functions.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather, gather_object

from rloo_kit.data.load import REWARDS_WITH_ANSWERS
from rloo_kit.gradient.advantages import kl_charge, tied_groups
from rloo_kit.gradient.passes import RATIO_STATISTICS, RowStatistics
from rloo_kit.loop.step import Sampled
from rloo_kit.loop.trainer_setup import TrainerParts
from rloo_kit.think_tags import ThinkTags

COLUMNS = ("tokens", "eos_tokens", "thinks", "closed", "thinking_tokens", "kl", "kl_tokens", "penalty", "forced")


@dataclass
class GenerationBatch:
    """One rollout of this process and what became of it; what the metrics and the listeners read.

    Attributes:
        sampled: the completions and their rewards. tensors: made of them, see `TrainerRollout._tensors`.
        scores: (A,), after the penalty for a missing end, normalisation and clipping; NaN where not scored.
        rewards: (A,), scores less the KL penalty. advantages: (A,), 0 where there is no baseline.
    """

    sampled: Sampled
    tensors: dict[str, Any]
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
    batch: dict[str, Any],
    tags: ThinkTags,
    eos_token_ids: list[int],
    per_token_kl: torch.Tensor | None,
    kl_form: str = "sum",
) -> torch.Tensor:
    """One row of numbers per completion, (B, len(COLUMNS)) float32, ready to be gathered across processes.

    `thinking_tokens` are those before the first `</think>`; a completion that never closes has spent all of its tokens
    on thinking, so that truncation does not make thoughts look short. `thinks` is 0 for a model that was not asked to.
    `penalty` is what the whole completion is charged, before beta.
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
        columns += [torch.zeros_like(tokens)] * 3
    else:
        mask = batch["loss_mask"]
        charged = kl_charge(per_token_kl, mask, kl_form)
        columns += [(per_token_kl * mask).sum(dim=1), mask.sum(dim=1), charged]
    columns.append(batch["thinking_forced"])
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
        metrics[f"rewards/{name}/mean"] = mean(rollout.sampled.rewards_per_func[:, index])
        metrics[f"rewards/{name}/std"] = std(rollout.sampled.rewards_per_func[:, index])
    metrics |= {
        "reward": mean(rollout.sampled.raw_scores),
        "reward_std": std(rollout.sampled.raw_scores),
        "frac_reward_zero_std": tied_groups(rollout.rewards, group).float().mean().item(),
        # before the KL penalty, which alone keeps the rewards of a group from being equal
        "frac_score_zero_std": tied_groups(rollout.scores, group).float().mean().item(),
        "rewards/unscored_ratio": rollout.sampled.raw_scores.isnan().float().mean().item(),
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
        metrics["thinking/closed_ratio"] = (column["closed"] * (1 - column["forced"]))[thinks].mean().item()
    return metrics


def loss_metrics(
    rows: torch.Tensor, sums: torch.Tensor, largest_gap: torch.Tensor, on_policy: bool
) -> dict[str, float]:
    """Entropy, ratio, clip shares and the gap to the sampler of the passes of one step, over all processes.

    Args:
        rows: (A, 4), ratio, clipped below, clipped above and bounded by `delta` of each completion; NaN for one that
            was not computed (its advantage is 0).
        sums: (6,), of the entropies and their tokens, of the gaps to the sampler and their tokens, of the importance
            weights and theirs. largest_gap: of one token.
        on_policy: a ratio that was not computed is 1 then, by definition.

    Returns:
        metrics by name; what nothing was computed for is left out.
    """
    computed = rows[~rows[:, 0].isnan()]
    metrics = {"rollout/skipped_rows_ratio": 1 - len(computed) / max(len(rows), 1)}
    if on_policy and not len(computed):
        computed = rows.new_tensor([[1.0, 0.0, 0.0, 0.0]])
    if len(computed):
        ratios, lows, highs, bounded = computed.unbind(dim=1)
        metrics |= {
            "clip_ratio/low_mean": lows.mean().item(),
            "clip_ratio/low_min": lows.min().item(),
            "clip_ratio/high_mean": highs.mean().item(),
            "clip_ratio/high_max": highs.max().item(),
            "clip_ratio/region_mean": (lows + highs).mean().item(),
            "clip_ratio/delta_mean": bounded.mean().item(),
            "val/ratio": ratios.mean().item(),
            "val/ratio_var": ratios.var(unbiased=False).item(),
        }
    entropy, tokens, gap, gap_tokens, weight, weight_tokens = sums.tolist()
    if tokens:
        metrics["entropy"] = entropy / tokens
    if gap_tokens:
        metrics["sampling/logp_difference_mean"] = gap / gap_tokens
        metrics["sampling/logp_difference_max"] = largest_gap.item()
    if weight_tokens:
        metrics["sampling/importance_weight_mean"] = weight / weight_tokens
    return metrics


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
        rewards = rollout.sampled.rewards_per_func[first + index].tolist()
        rows.append(
            {
                "step": step,
                "prompt": rollout.sampled.prompts[index],
                "completion": rollout.sampled.completions[index],
                "completion_ids": rollout.sampled.completion_ids[index],
                "prompt_tokens": int(rollout.tensors["prompt_mask"][index].sum()),
                "completion_tokens": int(column["tokens"]),
                "thinking_tokens": int(column["thinking_tokens"]) if closed else None,
                "closed": closed,
                "truncated": bool(rollout.tensors["truncated"][index]),
                "forced": bool(rollout.tensors["thinking_forced"][index]),
                "kl": column["kl"],
                "rewards": {name: _or_none(value) for name, value in zip(names, rewards, strict=True)},
                "reward": _or_none(rollout.sampled.raw_scores[first + index].item()),
                "advantage": rollout.advantages[first + index].item(),
                "columns": {name: value for name, value in rollout.sampled.inputs[index].items() if name != "prompt"},
            }
        )
    return rows


def _or_none(value: float) -> float | None:
    return None if value != value else value


def kl_share(penalty: torch.Tensor, scores: torch.Tensor, beta: float) -> float:
    """`kl/share_of_reward`: mean |beta * penalty| over itself plus mean |score|, 0 to 1.

    >>> kl_share(torch.tensor([2.0, -2.0]), torch.tensor([1.0, 0.0]), beta=0.25)
    0.5

    Args:
        penalty: (A,), `advantages.kl_charge`.
        scores: (A,), what is subtracted from; NaN where a sample is not scored, which leaves it out.

    Returns:
        the share; 0 where both are 0, NaN where nothing is scored.
    """
    scored = ~scores.isnan()
    if not scored.any():
        return float("nan")
    charged, earned = (beta * penalty[scored]).abs().mean().item(), scores[scored].abs().mean().item()
    return charged / (charged + earned) if charged + earned != 0 else 0.0


def kl_spread_ratio(penalty: torch.Tensor, scores: torch.Tensor, beta: float, num_generations: int) -> float | None:
    """`kl/spread_ratio`: how much beta * penalty differs within a group, over how much the scores do.

    >>> penalty, scores = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    >>> kl_spread_ratio(penalty, scores, beta=1.0, num_generations=2)
    2.0

    Args:
        penalty, scores: as for `kl_share`. num_generations: K.

    Returns:
        mean standard deviation of a group's penalties over that of its scores, groups with fewer than two scored
        samples left out; infinity where no group's scores differ but penalties do (the penalty alone makes the
        gradient); None where neither differs or no group has two scored samples.
    """
    grouped, charges = scores.view(-1, num_generations), (beta * penalty).view(-1, num_generations)
    spreads = [
        (charge[kept].std().item(), score[kept].std().item())
        for score, charge in zip(grouped, charges, strict=True)
        if (kept := ~score.isnan()).sum() >= 2
    ]
    of_penalty, of_scores = (sum(spread[part] for spread in spreads) for part in (0, 1))
    if of_scores == 0:
        return float("inf") if of_penalty > 0 else None
    return of_penalty / of_scores


def find_answer_column(rewards_per_func: torch.Tensor, names: list[str]) -> torch.Tensor | None:
    """The answer reward's values, (A,), or None where the run has no such reward.

    Args:
        rewards_per_func: (A, F), unweighted, NaN where a reward does not apply. names: of the F reward functions.
    """
    index = next((index for index, name in enumerate(names) if name in REWARDS_WITH_ANSWERS), None)
    return None if index is None else rewards_per_func[:, index]


def thinking_metrics(forced: torch.Tensor, answers: torch.Tensor | None) -> dict[str, float]:
    """`thinking/forced_ratio`, and `thinking/forced_accuracy` and `thinking/unforced_accuracy` where there are answers.

    Args:
        forced: (A,) bool, whether the budget closed the completion's thinking.
        answers: (A,), the answer reward's values (`find_answer_column`); one that is NaN counts as wrong.

    Returns:
        The metrics; an accuracy over no completions at all is NaN, which TRL's log leaves out.

    >>> thinking_metrics(torch.tensor([True, False, False, False]), torch.tensor([0.0, 1.0, 1.0, float("nan")]))
    {'thinking/forced_ratio': 0.25, 'thinking/forced_accuracy': 0.0, 'thinking/unforced_accuracy': 0.6666666865348816}
    """
    forced = forced.bool()
    metrics = {"thinking/forced_ratio": forced.float().mean().item()}
    if answers is not None:
        right = (answers == 1.0).float()
        metrics["thinking/forced_accuracy"] = right[forced].mean().item()
        metrics["thinking/unforced_accuracy"] = right[~forced].mean().item()
    return metrics


class TrainerLog(TrainerParts):
    """What `RLOOTrainer` records about its steps."""

    def _record_rollout(
        self,
        sampled: Sampled,
        batch: dict[str, Any],
        scores: torch.Tensor,
        rewards: torch.Tensor,
        advantages: torch.Tensor,
    ) -> None:
        """Metrics, TRL's table of completions, and the rows for the listeners.

        Args:
            scores: (A,), after normalising and clipping. rewards: (A,), less the KL penalty. advantages: (A,), 0 where
                there is none.
        """
        mode = "train" if self.model.training else "eval"
        names = self.reward_func_names
        rollout = GenerationBatch(sampled, batch, scores, rewards, advantages)
        kl = batch.get("per_token_kl")
        statistics = sample_statistics(batch, self.think_tags, self.eos_token_ids, kl, self._option("kl_form"))
        gathered = gather(statistics)  # (A, columns)
        metrics = rollout_metrics(rollout, gathered, names, self._group_size, self.beta)
        if kl is not None:
            penalty = gathered[:, COLUMNS.index("penalty")]
            metrics["kl/share_of_reward"] = kl_share(penalty, scores, self.beta)
            ratio = kl_spread_ratio(penalty, scores, self.beta, self._group_size)
            metrics |= {} if ratio is None else {"kl/spread_ratio": ratio}
        if self._limits.thinking_budget is not None:
            answers = find_answer_column(sampled.rewards_per_func, names)
            metrics |= thinking_metrics(gather(batch["thinking_forced"]), answers)
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)
        self._log_completions(rollout, mode)
        if mode == "train":
            self._episodes += len(gathered)
            if self.rollout_listeners:
                first = self._local_rows(len(sampled.prompts)).start
                rows = rollout_rows(rollout, statistics, names, first, self.state.global_step)
                for listener in self.rollout_listeners:
                    listener(rows)

    def _log_completions(self, rollout: GenerationBatch, mode: str) -> None:
        """Fill TRL's table of completions and flush what rewards logged themselves, in one order on all processes."""
        sampled = rollout.sampled
        self._logs["prompt"].extend(gather_object(sampled.prompts))
        self._logs["completion"].extend(gather_object(sampled.completions))
        for index, name in enumerate(self.reward_func_names):
            self._logs["rewards"][name].extend(sampled.rewards_per_func[:, index].tolist())
        self._logs["advantages"].extend(rollout.advantages.tolist())
        for column in sorted(set(gather_object(list(self._pending_extra_logs)))):
            self._logs["extra"][column].extend(
                gather_object(self._pending_extra_logs.get(column, [None] * len(sampled.prompts)))
            )
        self._pending_extra_logs.clear()
        for name in sorted(set(gather_object(list(self._pending_metrics)))):
            values = gather_object(self._pending_metrics.get(name, []))
            self._metrics[mode][name].append(sum(values) / len(values))
        self._pending_metrics.clear()

    def _record_loss(self, found: RowStatistics) -> None:
        """Entropy, ratios, clip shares and the gap to the sampler of one step's passes, over all processes."""
        mode = "train" if self.model.training else "eval"
        columns = torch.stack([getattr(found, name) for name in RATIO_STATISTICS], dim=1)  # (B, 4)
        rows = self.accelerator.pad_across_processes(columns, dim=0, pad_index=torch.nan)
        sums = torch.cat([found.entropy, found.gap[:2], found.weight])
        sums = self.accelerator.reduce(sums, reduction="sum")
        largest = gather(found.gap[2:]).max()
        on_policy = self._on_policy or not self.model.training
        for name, value in loss_metrics(gather(rows), sums, largest, on_policy).items():
            self._metrics[mode][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, with completions a second; a gradient norm that is not finite is left out (the step was skipped)."""
        if self.model.training and self._started_at is not None and self._metrics["train"]:
            elapsed = max(time.monotonic() - self._started_at, 1e-9)
            self._metrics["train"]["eps"] = [self._episodes / elapsed]
        norm = logs.get("grad_norm")
        if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
            logs = {name: value for name, value in logs.items() if name != "grad_norm"}
        super().log(logs, start_time)
