"""Thinking that ends in time: at the budget `</think>` is forced, and the model answers within an answer budget.

`Turn` is one completion while it grows, for an engine that can put in a token between two that it samples (native,
generate); `think_then_answer` does the same in two calls for an engine that only continues prompts. Both keep the same
rules:

- at `thinking_budget` tokens without `</think>` the closing ids are forced: their log-probabilities are NaN and their
  span is recorded, so that the loss leaves them out;
- after the close, forced or not, come at most `answer_limit` tokens;
- a completion that ends inside its thinking stays as it is.

The close is `</think>` alone, or the sentence of the Qwen3 report before it. Left out: forcing a model to go on
thinking (s1's "Wait").

Source: Qwen3 technical report, section 4.3, https://arxiv.org/abs/2505.09388; budget forcing (s1),
https://arxiv.org/abs/2501.19393; separate budgets, https://arxiv.org/abs/2505.05315.
"""

from collections.abc import Callable, Collection
from math import nan
from typing import Any, NamedTuple

from rloo_kit.errors import ConfigError
from rloo_kit.rollout.types import Limits, Rollout
from rloo_kit.think_tags import THINK_END, ThinkTags

# The Qwen3 report's instruction for a spent budget, with the blank line that its chat template puts before an answer.
CLOSING_SENTENCE = (
    "Considering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    f"{THINK_END}\n\n"
)


def close_ids_for(tokenizer: Any, tags: ThinkTags, close: str = "tag") -> tuple[int, ...]:
    """The ids that close thinking: `</think>` alone ("tag"), or the Qwen3 report's sentence around it ("sentence").

    Raises:
        ConfigError: the tokenizer has no `</think>`, another word than the two, or a sentence in which the tokenizer
            does not find `</think>` as one token.
    """
    if tags.end_id is None:
        raise ConfigError(
            "a thinking budget was asked for, but the tokenizer has no </think>, so there is no thinking to close. "
            "Set rloo.thinking_budget: null and eval.thinking_budgets: []"
        )
    if close == "tag":
        return (tags.end_id,)
    if close != "sentence":
        raise ConfigError(f"rloo.thinking_close is {close!r}; it is one of tag, sentence")
    ids = tuple(tokenizer(CLOSING_SENTENCE, add_special_tokens=False)["input_ids"])
    if ids.count(tags.end_id) != 1:
        raise ConfigError(
            f"the tokenizer writes </think> in the closing sentence as other tokens than its id {tags.end_id}. Set "
            "rloo.thinking_close: tag"
        )
    return ids


def make_limits(
    tokenizer: Any,
    tags: ThinkTags,
    max_completion_length: int,
    thinking_budget: int | None = None,
    answer_budget: int | None = None,
    close: str = "tag",
) -> Limits:
    """The limits of a rollout, from the keys of `rloo`.

    Raises:
        ConfigError: a budget for a tokenizer without `</think>`, or one that leaves no token for an answer.
    """
    if thinking_budget is None:
        return Limits(max_completion_length)
    close_ids = close_ids_for(tokenizer, tags, close)
    spent = thinking_budget + len(close_ids)
    if spent + (answer_budget or 1) > max_completion_length:
        raise ConfigError(
            f"rloo.thinking_budget ({thinking_budget}) + {len(close_ids)} forced tokens + rloo.answer_budget "
            f"({answer_budget or 'at least 1'}) is more than rloo.max_completion_length = {max_completion_length}. "
            f"Lower rloo.thinking_budget, or set rloo.max_completion_length to {spent + (answer_budget or 1)} or more"
        )
    return Limits(max_completion_length, thinking_budget, answer_budget, close_ids, tags.end_id)


class Turn:
    """One completion while it grows, token by token.

    Attributes:
        ids: its tokens so far. logps: their log-probabilities under the sampler, NaN where forced.
        forced: (start, end) of what was forced, None so far.
        finished: it takes no more tokens.
    """

    __slots__ = ("_answer_ends", "_ends", "_limits", "_pending", "finished", "forced", "ids", "logps")

    def __init__(self, limits: Limits, end_ids: Collection[int]) -> None:
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.forced: tuple[int, int] | None = None
        self.finished = limits.max_completion_length < 1
        self._limits = limits
        self._ends = end_ids
        self._answer_ends: int | None = None  # tokens in all at which the answer's budget is spent
        self._pending: list[int] = []  # forced tokens that are still to come, the next one last
        if limits.thinking_budget == 0:
            self._close()

    @property
    def room(self) -> int:
        """Tokens that it may still take at most."""
        return self._limits.max_completion_length - len(self.ids)

    @property
    def has_budget(self) -> bool:
        """Whether its thinking may be closed for it."""
        return self._limits.thinking_budget is not None

    @property
    def next_forced(self) -> int | None:
        """The id that comes next whatever is sampled; None while the model may choose."""
        return self._pending[-1] if self._pending and not self.finished else None

    def take(self, token: int, logp: float) -> None:
        """Add the token that was sampled, or the forced one whose turn it is instead."""
        if self._pending:
            self._take_forced()
        else:
            self.ids.append(token)
            self.logps.append(logp)
            if token in self._ends:
                self.finished = True
                return
            if self._limits.thinking_budget is not None and self._answer_ends is None:
                if token == self._limits.think_end_id:
                    self._answer_ends = len(self.ids) + self._limits.answer_limit
                elif len(self.ids) >= self._limits.thinking_budget:
                    self._close()
        length = len(self.ids)
        self.finished = length >= self._limits.max_completion_length or length == self._answer_ends

    def _close(self) -> None:
        self._pending = list(reversed(self._limits.close_ids))

    def _take_forced(self) -> None:
        start = len(self.ids) if self.forced is None else self.forced[0]
        self.ids.append(self._pending.pop())
        self.logps.append(nan)
        self.forced = (start, len(self.ids))
        if not self._pending:
            self._answer_ends = len(self.ids) + self._limits.answer_limit


class Continued(NamedTuple):
    """New ids of each prefix, up to and with the first stop, and their log-probabilities (None: not known)."""

    ids: list[list[int]]
    logps: list[list[float]] | None


# extend(prefixes, at most so many new tokens for each, further ids that stop) -> Continued
Extend = Callable[[list[list[int]], list[int], tuple[int, ...]], Continued]


def think_then_answer(extend: Extend, prompts: list[list[int]], limits: Limits, end_ids: Collection[int]) -> Rollout:
    """Thinking up to the budget in one call of `extend`, all answers in a second one; without a budget one call."""
    cap = limits.max_completion_length
    if limits.thinking_budget is None or limits.think_end_id is None:
        ids, logps = extend(prompts, [cap] * len(prompts), ())
        return Rollout(ids, [None] * len(ids), logps)
    first = [min(limits.thinking_budget, cap)] * len(prompts)
    ids, logps = extend(prompts, first, (limits.think_end_id,))
    over = [bool(row) and row[-1] in end_ids for row in ids]  # ended inside its thinking: left as it is
    forced: list[tuple[int, int] | None] = [None] * len(ids)
    for number, row in enumerate(ids):
        if not over[number] and row[-1:] != [limits.think_end_id]:
            close = list(limits.close_ids[: cap - len(row)])
            forced[number] = (len(row), len(row) + len(close)) if close else None
            ids[number] = row + close
            if logps is not None:
                logps[number] = logps[number] + [nan] * len(close)
    going_on = [number for number, row in enumerate(ids) if not over[number] and len(row) < cap]
    rooms = [min(limits.answer_limit, cap - len(ids[number])) for number in going_on]
    answers = extend([prompts[number] + ids[number] for number in going_on], rooms, ())
    for place, number in enumerate(going_on):
        ids[number] = ids[number] + answers.ids[place]
        if logps is not None and answers.logps is not None:
            logps[number] = logps[number] + answers.logps[place]
    return Rollout(ids, forced, logps)
