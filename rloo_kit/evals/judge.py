"""Whether answers are right: those to which the run's own answer reward gives exactly 1.0, and no others.

The reward is `answer_reward` or `math_answer_reward` with the parameters it has in the run, `answer_reward` where the
run has neither. Evaluation and the difficulty cache judge by this one thing, so a pass rate before training and an
accuracy after it mean the same. Left out: judging by anything but the answer.
"""

import math
from typing import Any

from rloo_kit.config.schema import RewardSection
from rloo_kit.data.load import REWARDS_WITH_ANSWERS
from rloo_kit.rewarding.registry import build_reward
from rloo_kit.rollout.engine import Completion

JUDGED_AT_ONCE = 32  # completions in one call of the answer reward: its time limit is for a call


def answer_reward_entry(run: Any) -> Any:
    """The entry of `run.rewards` that judges answers, or one that is made for it."""
    entry = next((entry for entry in run.rewards if entry.name in REWARDS_WITH_ANSWERS), None)
    return entry or RewardSection(name="answer_reward")


class AnswerJudge:
    """Says of completions whether their answers are right.

    Args:
        run: a `RunConfig`; read are `rewards`, `model` and `rloo`. tokenizer: the policy's.
        gold: the right answer of each prompt; None where there are none.

    Attributes:
        unscored: completions so far that the reward could not judge; they count as wrong.
    """

    def __init__(self, run: Any, tokenizer: Any, gold: list[Any] | None) -> None:
        self.unscored = 0
        self.gold = gold
        self.reward = None if gold is None else build_reward(run, tokenizer, answer_reward_entry(run))

    def judge(self, completions: list[Completion]) -> list[bool] | None:
        """One verdict a completion, by the answer of its `prompt_index`; None without gold answers."""
        if self.reward is None or self.gold is None:
            return None
        verdicts: list[bool] = []
        for start in range(0, len(completions), JUDGED_AT_ONCE):
            batch = completions[start : start + JUDGED_AT_ONCE]
            scores = self.reward(
                prompts=[""] * len(batch),
                completions=[completion.text for completion in batch],
                completion_ids=[completion.ids for completion in batch],
                answer=[self.gold[completion.prompt_index] for completion in batch],
                thinking_forced=[completion.forced for completion in batch],
            )
            self.unscored += sum(score is None or math.isnan(score) for score in scores)
            verdicts += [score == 1.0 for score in scores]
        return verdicts

    def close(self) -> None:
        """End the process of a reward that has one."""
        worker = None if self.reward is None else vars(self.reward).get("worker")  # asking for it would start one
        if worker is not None:
            worker.close()
