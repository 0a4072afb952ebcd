"""Rewards for format: thinking closed exactly once, an answer after it, an end token."""

from dataclasses import dataclass, field
from typing import ClassVar

from ._binding import Reward, Sample, check_bool, check_ids, check_int, check_positive
from .text import EOS_TOKEN_IDS, THINK_END, THINK_END_ID, Decode, split_at_tag


@dataclass(frozen=True)
class ThinkFormatReward(Reward):
    """1.0 for a well-formed completion, 0.0 otherwise.

    Well-formed: the closing tag occurs exactly once in the ids, the model wrote it itself (with
    `forced_counts_as_closed` the thinking budget may have), something other than end tokens and whitespace follows it,
    and the last id is an end token (the completion was not cut off). With tools each turn has to close its thinking
    once and go on after it, with a call or an answer.

    >>> think_format_reward(completions=["so</think>4", "so</think>4"],
    ...                     completion_ids=[[7, 151668, 19, 151645], [7, 151668, 19]])
    [1.0, 0.0]
    """

    __name__: ClassVar[str] = "think_format_reward"

    think_end_id: int = THINK_END_ID
    eos_token_ids: tuple[int, ...] = EOS_TOKEN_IDS
    forced_counts_as_closed: bool = False
    decode: Decode | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("think_end_id", self.think_end_id, 0)
        check_ids("eos_token_ids", self.eos_token_ids)
        check_bool("forced_counts_as_closed", self.forced_counts_as_closed)

    def score(self, sample: Sample) -> float:
        if sample.forced and not self.forced_counts_as_closed:
            return 0.0
        if not sample.token_ids or sample.token_ids[-1] not in self.eos_token_ids:
            return 0.0
        return float(all(self._is_whole(text, turn) for text, turn in sample.turns_with_text))

    def _is_whole(self, text: str, ids: list[int]) -> bool:
        """Whether one turn closes its thinking exactly once, with something after it."""
        if ids.count(self.think_end_id) != 1:
            return False
        after = [token for token in ids[ids.index(self.think_end_id) + 1 :] if token not in self.eos_token_ids]
        parts = split_at_tag(text, ids, self.think_end_id, last=True, decode=self.decode)
        readable = THINK_END in text or self.decode is not None
        blank = readable and parts is not None and not parts[1].strip()
        return bool(after) and not blank


@dataclass(frozen=True)
class MissingEosPenalty(Reward):
    """`-penalty` if the last id is not an end token (the completion was cut off, or is empty), 0.0 otherwise.

    `rloo.missing_eos_penalty` does the same in the loop; use one of the two. A completion whose thinking the budget
    closed is judged by its last id like any other.

    >>> missing_eos_penalty(completion_ids=[[7, 151645], [7, 8]])
    [0.0, -1.0]
    """

    __name__: ClassVar[str] = "missing_eos_penalty"
    needs: ClassVar[tuple[str, ...]] = ("completion_ids",)

    penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = EOS_TOKEN_IDS

    def __post_init__(self) -> None:
        check_positive("penalty", self.penalty)
        check_ids("eos_token_ids", self.eos_token_ids)

    def score(self, sample: Sample) -> float:
        ended = bool(sample.token_ids) and sample.token_ids[-1] in self.eos_token_ids
        return 0.0 if ended else -self.penalty


think_format_reward = ThinkFormatReward()
missing_eos_penalty = MissingEosPenalty()
