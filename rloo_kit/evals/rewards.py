"""Held-out rewards: calls a run's rewards as training does, without a trainer."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from transformers import TrainerState

from rloo_kit.collective import gather_objects, share_of
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import RlooKitError
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.intervals import Scores
from rloo_kit.rewarding.guard import GuardedReward, guard, log_names, reward_name
from rloo_kit.rewarding.registry import make_rewards
from rloo_kit.rewarding.signature import weighted_sum
from rloo_kit.rewarding.worker import digest_texts, read_sources
from rloo_kit.rollout.completions import Completion
from rloo_kit.system.processes import count_processes, say

_Value = TypeVar("_Value")
NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # not passed as columns, as in TRL


class HeldOutRewards:
    """The rewards of a run behind separate guards, with the names that training logs.

    A reward is called as in a rollout: prompts, texts and ids, every column, `thinking_forced` if the run has a
    thinking budget, as many completions per call as one process has of a rollout. Two things differ: its log calls are
    dropped, and `trainer_state` is always that of the run's last step, so that all evaluations measure the same.

    Args:
        run: reads `rloo`.
        rewards: in the form that `train` takes; with a model that only TRL's trainer can call (a name, an `nn.Module`)
            no rewards are measured.
    """

    def __init__(self, run: RunConfig, rewards: Sequence[Any]) -> None:
        guarded = [guard(reward) for reward in rewards]
        self.names = log_names([reward_name(reward) for reward in guarded], guarded)
        self.is_callable = all(isinstance(reward, GuardedReward) for reward in guarded)
        self._rewards = guarded
        self._weights = [getattr(reward, "weight", 1.0) for reward in guarded]
        self._has_budget = run.rloo.thinking_budget is not None
        self._size = max(1, run.rloo.generation_batch_size // count_processes())
        steps = run.rloo.max_steps or 1
        self._constant = {"trainer_state": TrainerState(global_step=steps, max_steps=steps)}
        self._constant |= dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)

    def measure(self, dataset: Any, completions: list[Completion], measured: Evaluation) -> None:
        """Write the mean rewards of `completions` into `measured`; each process scores a part.

        Args:
            dataset: the prompts with their columns. completions: of all prompts, in order, equally many for each.
        """
        if not self.is_callable:
            return
        measured.take_rewards(*self.score(dataset, completions, measured.num_samples))
        sources = sorted(read_sources(self._rewards).items())
        measured.sources = digest_texts(map(str, sources)) if sources else ""

    def score(self, dataset: Any, completions: list[Completion], size: int) -> tuple[Scores, dict[str, Scores]]:
        """The weighted sum of each completion of each prompt (`size` of them), and each reward by name; None where
        nothing was scored. Each process scores a part."""
        own = share_of(range(len(dataset)))  # whole prompts: a reward may compare siblings
        found = gather_objects(self._score_own(dataset, completions[own.start * size : own.stop * size], size))
        rows = [row for part, _ in found for row in part]
        failures = [message for _, part in found for message in part]
        total = [weighted_sum(row, self._weights) for row in rows]
        if failures:
            share = total.count(None) / len(rows)
            say(f"WARNING: {failures[0]} ({share:.0%} of the held-out completions have no reward)")
        single: dict[str, Scores] = {}
        for name, column in zip(self.names, zip(*rows, strict=True), strict=True):
            known = [value if value is not None and math.isfinite(value) else None for value in column]
            single[name] = by_prompt(known, size)
        return by_prompt(total, size), single

    def _score_own(
        self, dataset: Any, completions: list[Completion], num_samples: int
    ) -> tuple[list[list[float | None]], list[str]]:
        """Every reward of each completion (None: does not apply, NaN: failed), and messages."""
        rows: list[list[float | None]] = []
        messages: list[str] = []
        size = max(1, self._size // num_samples) * num_samples
        for start in range(0, len(completions), size):
            chunk = completions[start : start + size]
            samples = [dataset[done.prompt_index] for done in chunk]
            batch = {
                "prompts": [sample["prompt"] for sample in samples],
                "completions": [done.text for done in chunk],
                "completion_ids": [done.ids for done in chunk],
            }
            batch |= {name: [sample[name] for sample in samples] for name in samples[0] if name not in NOT_COLUMNS}
            batch |= {"thinking_forced": [done.forced for done in chunk]} if self._has_budget else {}
            batch |= self._constant
            columns = []
            for reward in self._rewards:
                found = reward.score(**batch)
                pairs = zip(found.values, found.failed, strict=True)
                columns.append([math.nan if failed else value for value, failed in pairs])
                messages += found.failures[:1]
            rows += [list(row) for row in zip(*columns, strict=True)]
        return rows, messages


def make_held_out_rewards(run: RunConfig, tokenizer: Any) -> tuple[HeldOutRewards | None, list[Any]]:
    """The configured rewards, and those to close afterwards. None, with a warning, if they cannot be built: a run whose
    reward file is gone can still be evaluated for accuracy."""
    try:
        made = make_rewards(run, tokenizer)
    except RlooKitError as error:
        say(f"WARNING: the held-out reward is not measured: {error}")
        return None, []
    return HeldOutRewards(run, made), [reward.reward for reward in made]


def by_prompt(values: Sequence[_Value], size: int) -> list[Sequence[_Value]]:
    """The values of each prompt's completions, `size` of them."""
    return [values[start : start + size] for start in range(0, len(values), size)]
