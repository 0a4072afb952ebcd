"""Measures whether RLOO has a signal: the share of prompts with both right and wrong completions, or, if no reward
compares answers, with completions that earn unequal rewards."""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.data.answers import answer_reward_of, gold_answers
from rloo_kit.data.load import Data
from rloo_kit.evals.difficulty import measure_pass_rates, sampling_of
from rloo_kit.evals.rewards import make_held_out_rewards
from rloo_kit.health.signs import EQUAL_REWARDS, at_ceiling
from rloo_kit.models.policy import Policy
from rloo_kit.results.intervals import Measured, wilson
from rloo_kit.rewarding.worker import close_worker
from rloo_kit.rewards.answer import has_no_answer
from rloo_kit.rollout.completions import generate_completions

ENOUGH = 0.2  # share of prompts with a signal; below it most of a rollout is wasted


@dataclass(frozen=True)
class Signal:
    """Pass rates of training prompts.

    Attributes:
        rates: for each prompt, the share of its `num_generations` completions that are right, or their mean reward.
        unequal: prompts with unequal rewards; None if answers were judged. is_easy: whether its rewards are mostly
            at their ceiling.
    """

    rates: list[float]
    num_generations: int
    unequal: int | None = None
    is_easy: bool = False

    @property
    def num_mixed(self) -> int:
        """Number of prompts with right and wrong completions; for all others every advantage is 0."""
        return sum(0.0 < rate < 1.0 for rate in self.rates) if self.unequal is None else self.unequal

    @property
    def share(self) -> Measured:
        """Their share, with its 95 % interval."""
        return wilson(self.num_mixed / len(self.rates), len(self.rates))

    @property
    def mean_rate(self) -> float:
        """The mean pass rate."""
        return sum(self.rates) / len(self.rates)

    @property
    def verdict(self) -> str:
        """ "enough", "too low" (too little is solved) or "too easy" (too little is left to learn)."""
        if self.share.value >= ENOUGH:
            return "enough"
        return "too easy" if (self.mean_rate > 0.5 if self.unequal is None else self.is_easy) else "too low"

    def __str__(self) -> str:
        found = f"{self.num_mixed} ({self.share:.0%})"
        meaning = {
            "enough": "enough signal for RLOO",
            "too low": f"still too low for RLOO, which needs {ENOUGH:.0%}: use more or better demonstrations "
            "(sft.source), more steps (sft.max_steps, sft.num_train_epochs), a higher sft.learning_rate, or easier "
            "prompts (data.source)",
            "too easy": "nearly everything is solved, so little is left for RLOO: use harder prompts (data.source) or "
            "fewer steps (sft.max_steps)",
        }[self.verdict]
        what, mean = "right and wrong among", f"pass rate {self.mean_rate:.0%}"
        if self.unequal is not None:
            what, mean = "unequal rewards among", f"reward {self.mean_rate:.3g}"
        return (
            f"signal: of {len(self.rates)} training prompts {found} have {what} {self.num_generations} completions, "
            f"mean {mean}: {meaning}"
        )


def measure_signal(run: RunConfig, policy: Policy, data: Data, num_prompts: int = 64) -> Signal | None:
    """The pass rates of the first `num_prompts` training prompts with an answer, from `rloo.num_generations`
    completions each, sampled as RLOO samples; None if no prompt has an answer. Of the first prompts and the rewards if
    no reward compares answers; None if they cannot be called."""
    if answer_reward_of(one.name for one in run.rewards) is None:
        return _measure_rewards(run, policy, data.train.select(range(min(num_prompts, len(data.train)))))
    answers = gold_answers(data.train) or []
    rows = [row for row, answer in enumerate(answers) if not has_no_answer(answer)][:num_prompts]
    if not rows:
        return None
    measured = run.model_copy(deep=True)
    samples = run.rloo.num_generations
    measured.rollout = run.rollout.model_copy(update={"difficulty_samples": samples})
    prompts = data.train.select(rows)["prompt"]
    rates, _ = measure_pass_rates(measured, policy, list(prompts), [answers[row] for row in rows])
    return Signal(rates, samples)


def _measure_rewards(run: RunConfig, policy: Policy, prompts: Any) -> Signal | None:
    samples, rows = run.rloo.num_generations, run.rollout.rows or run.eval.batch_size
    rewards, built = make_held_out_rewards(run, policy.tokenizer)
    if rewards is None:
        return None
    completions = generate_completions(
        policy, list(prompts["prompt"]), num_samples=samples, batch_size=rows, seed=run.run.seed, engine=run.rollout,
        **sampling_of(run),
    )  # fmt: skip
    total, single = rewards.score(prompts, completions, samples)
    for reward in built:
        close_worker(reward)
    groups = [[value for value in values if value is not None] for values in total]
    unequal = sum(max(values) - min(values) > EQUAL_REWARDS for values in groups if values)
    earned = {name: [value for values in of for value in values if value is not None] for name, of in single.items()}
    is_easy = at_ceiling(run.reward_weights, earned, share=0.5)
    return Signal([fmean(values) for values in groups if values] or [0.0], samples, unequal, is_easy)
