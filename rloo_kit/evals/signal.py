"""Measures whether RLOO has a signal: the share of prompts with both right and wrong completions."""

from dataclasses import dataclass

from rloo_kit.config.run import RunConfig
from rloo_kit.data.answers import gold_answers, is_missing
from rloo_kit.data.load import Data
from rloo_kit.evals.difficulty import measure_pass_rates
from rloo_kit.models.policy import Policy
from rloo_kit.results.intervals import Estimate, wilson

ENOUGH = 0.2  # share of prompts with a signal; below it most of a rollout is wasted


@dataclass(frozen=True)
class Signal:
    """Pass rates of training prompts.

    Attributes:
        rates: for each prompt, the share of its `num_generations` completions that are right.
    """

    rates: list[float]
    num_generations: int

    @property
    def num_mixed(self) -> int:
        """Number of prompts with right and wrong completions; for all others every advantage is 0."""
        return sum(0.0 < rate < 1.0 for rate in self.rates)

    @property
    def share(self) -> Estimate:
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
        return "too easy" if self.mean_rate > 0.5 else "too low"

    def __str__(self) -> str:
        share, low, high = self.share
        found = f"{self.num_mixed} ({share:.0%} [{low:.0%}, {high:.0%}])"
        meaning = {
            "enough": "enough signal for RLOO",
            "too low": f"still too low for RLOO, which needs {ENOUGH:.0%}: use more or better worked solutions "
            "(sft.source), more steps (sft.max_steps, sft.num_train_epochs), a higher sft.learning_rate, or easier "
            "prompts (data.source)",
            "too easy": "nearly everything is solved, so little is left for RLOO: use harder prompts (data.source) or "
            "fewer steps (sft.max_steps)",
        }[self.verdict]
        return (
            f"signal: of {len(self.rates)} training prompts {found} have right and wrong "
            f"among {self.num_generations} completions, mean pass rate {self.mean_rate:.0%}: {meaning}"
        )


def measure_signal(run: RunConfig, policy: Policy, data: Data, num_prompts: int = 64) -> Signal | None:
    """The pass rates of the first `num_prompts` training prompts with an answer, from `rloo.num_generations`
    completions each, sampled as RLOO samples; None if no prompt has an answer."""
    answers = gold_answers(data.train) or []
    rows = [row for row, answer in enumerate(answers) if not is_missing(answer)][:num_prompts]
    if not rows:
        return None
    measured = run.model_copy(deep=True)
    samples = run.rloo.num_generations
    measured.rollout = run.rollout.model_copy(update={"difficulty_samples": samples})
    prompts = data.train.select(rows)["prompt"]
    rates, _ = measure_pass_rates(measured, policy, list(prompts), [answers[row] for row in rows])
    return Signal(rates, samples)
