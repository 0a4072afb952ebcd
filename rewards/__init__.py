"""Reward functions that decide by token ids. Standard library only.

Each follows TRL's calling convention, `reward(prompts, completions, completion_ids, **columns) -> list[float | None]`,
and works unchanged in any TRL trainer: `reward_funcs=[thinking_reward]`. Parameters are bound with `with_`:

>>> from rewards import thinking_reward
>>> strict = thinking_reward.with_(min_tokens=50, full_tokens=200)
>>> strict(completions=["a b</think>c"], completion_ids=[[64, 65, 151668, 66]])
[0.3]

None means that the reward does not apply to the sample. docs/rewarding.md lists the exact values. Rewards that need
a library, a checkpoint or a separate process are in `rloo_kit.rewarding`.
"""

from ._binding import Reward, Sample
from .answer import AnswerReward, answer_reward
from .format import MissingEosPenalty, ThinkFormatReward, missing_eos_penalty, think_format_reward
from .length import (
    LengthReward,
    RelativeLengthPenalty,
    RepetitionPenalty,
    SoftOverlongPenalty,
    length_reward,
    relative_length_penalty,
    repetition_penalty,
    soft_overlong_penalty,
)
from .text import EOS_TOKEN_IDS, THINK_END_ID
from .thinking import ThinkingBudgetReward, ThinkingReward, thinking_budget_reward, thinking_reward

__all__ = [
    "EOS_TOKEN_IDS",
    "THINK_END_ID",
    "AnswerReward",
    "LengthReward",
    "MissingEosPenalty",
    "RelativeLengthPenalty",
    "RepetitionPenalty",
    "Reward",
    "Sample",
    "SoftOverlongPenalty",
    "ThinkFormatReward",
    "ThinkingBudgetReward",
    "ThinkingReward",
    "answer_reward",
    "length_reward",
    "missing_eos_penalty",
    "relative_length_penalty",
    "repetition_penalty",
    "soft_overlong_penalty",
    "think_format_reward",
    "thinking_budget_reward",
    "thinking_reward",
]
