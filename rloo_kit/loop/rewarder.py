"""Scores of completions: rewards, their weighted sum, penalties, normalisation, and failing rewards.

Shapes: B completions of this process, A of all processes, F reward functions.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import trl

from rloo_kit.errors import RewardError
from rloo_kit.gradient.advantages import RunningMoments, combine_rewards, standardize
from rloo_kit.loop.records import Completions, Judged
from rloo_kit.models.parallel import Parallel
from rloo_kit.rewarding.guard import GuardedReward
from rloo_kit.rewarding.values import overflowing
from rloo_kit.runs.watch import FailureWatch


class Rewarder:
    """Scores completions.

    Args:
        trainer: TRL's, with guarded reward functions, their names and weights. Its `_calculate_rewards` calls them,
            including models and async ones.
        failures: counts rollouts with failed rewards.
        missing_eos_penalty: subtracted from the score of a truncated completion; None for no penalty.
        normalize: True: by the rollout's standard deviation; "running": by that of all rewards so far.
        clip: (lowest, highest) or None.
        tells_forced: whether rewards get the column `thinking_forced`.
    """

    def __init__(
        self,
        trainer: Any,
        parallel: Parallel,
        failures: FailureWatch,
        *,
        missing_eos_penalty: float | None = None,
        normalize: Any = False,
        clip: Sequence[float] | None = None,
        tells_forced: bool = False,
    ):
        self.trainer, self.parallel, self.failures = trainer, parallel, failures
        self.missing_eos_penalty, self.form, self.clip = missing_eos_penalty, normalize, clip
        self.tells_forced = tells_forced
        self.moments = RunningMoments()  # of `normalize_rewards: running`; part of a checkpoint

    def judge(self, found: Completions) -> Judged:
        """Rewards and scores; a sample with any failed reward is not scored."""
        rows = found.rows
        if self.tells_forced:
            rows = [row | {"thinking_forced": span is not None} for row, span in zip(rows, found.forced, strict=True)]
        failures: list[str] = []
        for guarded in self.trainer.reward_funcs:
            if isinstance(guarded, GuardedReward):
                guarded.report = failures.append
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices), _mute("All reward functions returned None"):  # a reward may seed
            rewards = self.trainer._calculate_rewards(rows, found.prompts, found.texts, found.completion_ids)  # (A, F)
        failed = rewards.isinf()
        rewards = rewards.masked_fill(failed.any(dim=1, keepdim=True), torch.nan)
        weights = self.trainer.reward_weights.to(rewards.device)
        raw_scores = combine_rewards(rewards, weights)  # (A,)
        over = ~raw_scores.isfinite() & ~rewards[:, weights != 0].isnan().all(dim=1)
        if over.any():
            failures += overflowing(rewards.tolist(), weights.tolist(), self.trainer.reward_func_names)[:1]
            failed, rewards = failed | over[:, None], rewards.masked_fill(over[:, None], torch.nan)
        raw_scores = scores = raw_scores.masked_fill(failed.any(dim=1), torch.nan)
        if self.missing_eos_penalty is not None:
            cut = torch.tensor(found.truncated, device=scores.device)
            scores = raw_scores - self.missing_eos_penalty * self.parallel.gather(cut).float()
        return Judged(found, rewards, failed, raw_scores, scores, failures)

    def normalize(self, scores: torch.Tensor, training: bool) -> torch.Tensor:
        """Scores (A,) after `normalize_rewards` and `reward_clip_range`."""
        if self.form == "running":
            if training:
                self.moments.update(scores)
            scores = self.moments.normalize(scores, eps=1e-8)
        elif self.form:
            scores = standardize(scores, eps=1e-8)
        return scores.clamp(*self.clip) if self.clip else scores

    def watch(self, share: float, failures: list[str]) -> None:
        """Report rewards that failed in a training rollout.

        Args:
            share: of all processes' samples with a failed reward, 0 to 1. failures: as in `Judged`.

        Raises:
            RewardError: too many failed in too many rollouts in a row; a checkpoint is saved first.
        """
        if share and not failures:
            failures = ["a reward model returned infinity, or a reward failed in another process"]
        self.failures.observe(share, failures)
        if self.failures.exceeded:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            raise RewardError(
                f"rewards failed for {share:.0%} of the samples, more than max_reward_failure_share = "
                f"{self.failures.limit:.0%} in {self.failures.patience} generation batches in a row, so training "
                f"stopped. The state is saved in {self.trainer.args.output_dir}; fix the reward and resume. A failure: "
                f"{' | '.join(failures)}"
            )


@contextmanager
def _mute(beginning: str) -> Iterator[None]:
    """Drop TRL's warning about unscored samples, which prints a whole completion each rollout; `rewards/unscored_ratio`
    counts them, and failures have their own line."""
    logger = logging.getLogger(trl.RLOOTrainer._calculate_rewards.__module__)

    def keep(record: logging.LogRecord) -> bool:
        return beginning not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
