"""The trainer's log: metrics of a rollout and of a step, TRL's table of completions, rows for the listeners.

A mixin of `RLOOTrainer`: gathers the numbers of `metrics` across processes, in one order on all of them, and puts them
where TRL's `log` looks. Shapes: B completions of this process, A of all processes.
"""

import time
from typing import Any

import torch
from accelerate.utils import gather, gather_object

from rloo_kit.gradient.passes import RATIO_STATISTICS, RowStatistics
from rloo_kit.loop.metrics import (
    COLUMNS,
    GenerationBatch,
    find_answer_column,
    kl_share,
    kl_spread_ratio,
    loss_metrics,
    rollout_metrics,
    rollout_rows,
    sample_statistics,
    thinking_metrics,
)
from rloo_kit.loop.step import Sampled
from rloo_kit.loop.trainer_setup import TrainerParts


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
