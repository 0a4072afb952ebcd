"""Rewards for thinking: its length in tokens before the first closing tag; in runs with tools that of all turns
together, of which each has to close its own.

A chat template that opens `<think>` in the prompt (Thinking-2507) leaves only the thinking there; a hybrid model writes
the opening tag, which counts as one token. Thinking that the budget closed (the column `thinking_forced`) counts as
never closed, unless `forced_counts_as_closed`.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from ._binding import Reward, Sample, check_bool, check_int
from .text import THINK_END_ID, Decode, count_thinking, split_at_tag


@dataclass(frozen=True)
class ThinkingReward(Reward):
    """Rewards thinking that was closed, by its length in tokens.

    No closing tag, or one that the budget forced: -1.0. Fewer than `min_tokens` tokens before it: 0.3. Fewer than
    `full_tokens`: 0.7. Otherwise: 1.0. The two upper bands gain 0.1 if the thinking contains a question mark.
    Range -1.0 to 1.1.

    Args:
        think_end_id: id of `</think>`; 151668 is Qwen3's.
        min_tokens: where the band of 0.7 begins, in tokens.
        full_tokens: where the band of 1.0 begins, in tokens.
        forced_counts_as_closed: whether a close that the thinking budget forced is judged like the model's own.
        decode: a tokenizer's `decode`, used only if the text alone does not show which tag is the real one.

    >>> batch = {"completions": ["Why?</think>4"], "completion_ids": [[7] * 30 + [151668, 19]]}
    >>> thinking_reward(**batch), thinking_reward(**batch, thinking_forced=[True])
    ([1.1], [-1.0])
    """

    __name__: ClassVar[str] = "thinking_reward"

    think_end_id: int = THINK_END_ID
    min_tokens: int = 10
    full_tokens: int = 30
    forced_counts_as_closed: bool = False
    decode: Decode | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("think_end_id", self.think_end_id, 0)
        check_int("min_tokens", self.min_tokens, 0)
        check_int("full_tokens", self.full_tokens, self.min_tokens)
        check_bool("forced_counts_as_closed", self.forced_counts_as_closed)

    def score(self, sample: Sample) -> float:
        length = count_thinking(sample.turns, self.think_end_id)
        if length is None or (sample.forced and not self.forced_counts_as_closed):
            return -1.0
        if length < self.min_tokens:
            return 0.3
        parts = [
            split_at_tag(text, turn, self.think_end_id, last=False, decode=self.decode)
            for text, turn in sample.turns_with_text
        ]
        asked = any(part is not None and "?" in part[0] for part in parts)
        if length < self.full_tokens:
            return 0.8 if asked else 0.7
        return 1.1 if asked else 1.0


@dataclass(frozen=True)
class ThinkingBudgetReward(Reward):
    """Rewards thinking whose length is within a target band of tokens.

    From `min_tokens` to `max_tokens`, both included: 1.0. Outside, it falls linearly to 0.0 over
    `margin_tokens` (0: at once). Thinking that was never closed, or that the budget closed: 0.0. Range 0.0 to 1.0.

    >>> thinking_budget_reward.with_(min_tokens=4, max_tokens=8, margin_tokens=4)(completion_ids=[[7] * 9 + [151668]])
    [0.75]
    """

    __name__: ClassVar[str] = "thinking_budget_reward"
    needs: ClassVar[tuple[str, ...]] = ("completion_ids",)

    think_end_id: int = THINK_END_ID
    min_tokens: int = 30
    max_tokens: int = 512
    margin_tokens: int = 0
    forced_counts_as_closed: bool = False

    def __post_init__(self) -> None:
        check_int("think_end_id", self.think_end_id, 0)
        check_int("min_tokens", self.min_tokens, 0)
        check_int("max_tokens", self.max_tokens, self.min_tokens)
        check_int("margin_tokens", self.margin_tokens, 0)
        check_bool("forced_counts_as_closed", self.forced_counts_as_closed)

    def score(self, sample: Sample) -> float:
        length = count_thinking(sample.turns, self.think_end_id)
        if length is None or (sample.forced and not self.forced_counts_as_closed):
            return 0.0
        outside = max(self.min_tokens - length, length - self.max_tokens, 0)
        if outside == 0:
            return 1.0
        return max(0.0, 1.0 - outside / self.margin_tokens) if self.margin_tokens else 0.0


thinking_reward = ThinkingReward()
thinking_budget_reward = ThinkingBudgetReward()
