"""Rewards for length and repetition: words of the text, tokens of the ids."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any, ClassVar

from ._binding import Reward, Sample, check_int, check_positive
from .answer import AnswerReward
from .text import as_ids, cut_turns


@dataclass(frozen=True)
class LengthReward(Reward):
    """Rewards a completion (thinking included; with tools its last turn) of readable length that ends with a full stop.

    From `min_words` to `max_words` words, both included: 1.0. Fewer: -0.5. More: 0.0. A stripped text that ends with a
    full stop gains 0.5. Words are what whitespace separates. Range -0.5 to 1.5.

    >>> length_reward(completions=["Too short.", "word " * 10])
    [0.0, 1.0]
    """

    __name__: ClassVar[str] = "length_reward"
    needs: ClassVar[tuple[str, ...]] = ("completions",)

    min_words: int = 10
    max_words: int = 50

    def __post_init__(self) -> None:
        check_int("min_words", self.min_words, 0)
        check_int("max_words", self.max_words, self.min_words)

    def score(self, sample: Sample) -> float:
        words = len(sample.text.split())
        full_stop = 0.5 if sample.text.strip().endswith(".") else 0.0
        if words < self.min_words:
            return -0.5 + full_stop
        return (1.0 if words <= self.max_words else 0.0) + full_stop


@dataclass(frozen=True)
class SoftOverlongPenalty(Reward):
    """A penalty that ramps up over the last tokens before the limit, instead of a cliff at it.

    With L tokens: 0.0 up to `max_completion_length - cache_tokens`, then linearly down to -1.0 at
    `max_completion_length`, and -1.0 beyond. Tool results do not count. Range -1.0 to 0.0. Source: DAPO, equation 13
    (arXiv 2503.14476); the defaults are that paper's.

    Args:
        max_completion_length: the length at which the penalty is full, in tokens.
        cache_tokens: the last tokens before it, over which the penalty grows; default: a fifth of the limit.

    >>> soft_overlong_penalty.with_(max_completion_length=100, cache_tokens=20)(completion_ids=[[5] * 80, [5] * 90])
    [0.0, -0.5]
    """

    __name__: ClassVar[str] = "soft_overlong_penalty"
    needs: ClassVar[tuple[str, ...]] = ("completion_ids",)

    max_completion_length: int = 20480
    cache_tokens: int | None = None

    def __post_init__(self) -> None:
        check_int("max_completion_length", self.max_completion_length, 1)
        check_int("cache_tokens", self.cache_tokens, 0, none_allowed=True)
        if (self.cache_tokens or 0) > self.max_completion_length:
            raise ValueError(
                f"cache_tokens is {self.cache_tokens}; it must not exceed max_completion_length, "
                f"{self.max_completion_length}"
            )

    def score(self, sample: Sample) -> float:
        cache = self.max_completion_length // 5 if self.cache_tokens is None else self.cache_tokens
        over = sum(map(len, sample.turns)) - (self.max_completion_length - cache)
        if over <= 0:
            return 0.0
        return -over / cache if over < cache else -1.0


@dataclass(frozen=True)
class RepetitionPenalty(Reward):
    """A repetition penalty: the share of token-id n-grams that occurred before, times `penalty`.

    0.0 if no n-gram repeats or there are too few tokens for one; approaches `-penalty` if everything repeats. Counted
    within the model's turns: no n-gram has a token of a tool result.
    Source: appendix C.2 of "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373).

    Args:
        ngram_size: tokens in an n-gram.
        penalty: the cost of full repetition, a positive number that is subtracted.

    >>> repetition_penalty.with_(ngram_size=2)(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]])
    [0.0, -0.75]
    """

    __name__: ClassVar[str] = "repetition_penalty"
    needs: ClassVar[tuple[str, ...]] = ("completion_ids",)

    ngram_size: int = 4
    penalty: float = 1.0

    def __post_init__(self) -> None:
        check_int("ngram_size", self.ngram_size, 1)
        check_positive("penalty", self.penalty)

    def score(self, sample: Sample) -> float:
        size = self.ngram_size
        ngrams = [tuple(turn[i : i + size]) for turn in sample.turns for i in range(len(turn) - size + 1)]
        repeated = len(ngrams) - len(set(ngrams))
        return -self.penalty * repeated / len(ngrams) if repeated else 0.0


@dataclass(frozen=True)
class RelativeLengthPenalty(AnswerReward):
    """Of the right answers to a prompt, the longer one costs more: next to `answer_reward`, with a weight below 1, the
    sum is accuracy x (1 - weight x sigmoid((length - mean) / deviation)), so a right answer always beats a wrong one.

    A right answer: minus that sigmoid, mean and deviation over the right ones of its group, which are the neighbours
    with an equal prompt. A wrong one: 0.0. Length is in tokens, thinking included, tool results not. Range -1.0 to 0.0.
    Takes the parameters of `answer_reward`; set the same. Source: "Training Language Models to Reason Efficiently"
    (arXiv 2502.04463).

    >>> batch = {"completion_ids": [[5] * n + [151668, 19] for n in (8, 16, 8)], "answer": ["4", "4", "4"]}
    >>> penalties = relative_length_penalty(["2+2="] * 3, ["..</think>4", "...</think>4", "..</think>5"], **batch)
    >>> [round(penalty, 2) for penalty in penalties]
    [-0.27, -0.73, 0.0]
    """

    __name__: ClassVar[str] = "relative_length_penalty"
    is_relative: ClassVar[bool] = True  # its mean over held-out prompts says nothing

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        completion_ids: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        right = super().__call__(prompts, completions, completion_ids, **columns)
        prompts = self._require("prompts", prompts, columns)
        masks = self._read_column("completion_mask", columns, len(right))
        rows = zip(completion_ids or (), masks, strict=True)
        lengths = [0 if ids is None else sum(map(len, cut_turns(as_ids(ids), mask))) for ids, mask in rows]
        found = [None if value is None else 0.0 for value in right]
        for _, group in groupby(range(len(right)), key=lambda place: prompts[place]):
            places = [place for place in group if right[place] == 1.0]
            its = [lengths[place] for place in places]
            for place in places:
                distance = (lengths[place] - fmean(its)) / (pstdev(its) or 1.0)
                found[place] = -1.0 / (1.0 + math.exp(-distance))
        return found


length_reward = LengthReward()
relative_length_penalty = RelativeLengthPenalty()
soft_overlong_penalty = SoftOverlongPenalty()
repetition_penalty = RepetitionPenalty()
