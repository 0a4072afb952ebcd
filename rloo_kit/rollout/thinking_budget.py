"""Thinking budgets: at the budget the closing ids are forced, and the model answers within an answer budget.

Forced tokens have a log-probability of NaN and a recorded span, so that the loss leaves them out. A completion that
ends inside its thinking is left as is. Sources: docs/rollout.md.
"""

from collections.abc import Collection, Sequence
from math import nan
from typing import Any

from rloo_kit.errors import ConfigError
from rloo_kit.rollout.types import Limits, Rollout
from rloo_kit.think_tags import THINK_END, ThinkTags

# The Qwen3 report's instruction for a spent budget, with the blank line that its chat template puts before an answer.
CLOSING_SENTENCE = (
    "Considering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    f"{THINK_END}\n\n"
)


def close_ids_for(tokenizer: Any, tags: ThinkTags, close: str = "tag") -> tuple[int, ...]:
    """The ids that close thinking: `</think>` alone ("tag"), or with the Qwen3 report's sentence ("sentence").

    Raises:
        ConfigError: the tokenizer has no `</think>`, `close` is neither of the two, or the tokenizer does not encode
            `</think>` in the sentence as one token.
    """
    if tags.end_id is None:
        raise ConfigError(
            "a thinking budget is set, but the tokenizer has no </think>, so there is no thinking to close. "
            "Set rloo.thinking_budget: null, and in a run's file eval.thinking_budgets: []"
        )
    if close == "tag":
        return (tags.end_id,)
    if close != "sentence":
        raise ConfigError(f"rloo.thinking_close is {close!r}; it is one of tag, sentence")
    ids = tuple(tokenizer(CLOSING_SENTENCE, add_special_tokens=False)["input_ids"])
    if ids.count(tags.end_id) != 1:
        raise ConfigError(
            f"the tokenizer does not encode </think> in the closing sentence as its id {tags.end_id}. Set "
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


class CompletionState:
    """One completion while it grows, token by token.

    Attributes:
        ids: its tokens so far. logps: their log-probabilities under the sampler, NaN where forced.
        forced: (start, end) of the forced tokens so far, None if there are none.
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
        self._answer_ends: int | None = None  # length at which the answer budget is spent
        self._pending: list[int] = []  # forced tokens still to come, the next one last
        if limits.thinking_budget == 0:
            self._close()

    @property
    def room(self) -> int:
        """How many more tokens it may take."""
        return self._limits.max_completion_length - len(self.ids)

    @property
    def has_budget(self) -> bool:
        """Whether its thinking may be closed by force."""
        return self._limits.thinking_budget is not None

    @property
    def answers(self) -> bool:
        """Whether its thinking was closed, with a budget."""
        return self._answer_ends is not None

    @property
    def next_stretch(self) -> tuple[int, list[int]]:
        """How many tokens may be sampled in one request before a limit, and the ids that stop it earlier."""
        if self._limits.thinking_budget is None:
            return self.room, [*self._ends]
        if self._answer_ends is not None:
            return min(self.room, self._answer_ends - len(self.ids)), [*self._ends]
        closing = [] if self._limits.think_end_id is None else [self._limits.think_end_id]
        return min(self.room, self._limits.thinking_budget - len(self.ids)), [*self._ends, *closing]

    @property
    def next_forced(self) -> int | None:
        """The id that is forced next; None while the model may choose."""
        return self._pending[-1] if self._pending and not self.finished else None

    def take(self, token: int, logp: float) -> None:
        """Add the sampled token, or the forced one that is due instead."""
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


def begin_completions(limits: Limits, end_ids: Collection[int], count: int) -> list[CompletionState]:
    """`count` completions without a token."""
    return [CompletionState(limits, end_ids) for _ in range(count)]


def take_tokens(states: Sequence[CompletionState], tokens: Sequence[float], logps: Sequence[float]) -> bool:
    """Give each completion one token with its log-probability; returns whether any of them ended with it."""
    for state, token, logp in zip(states, tokens, logps, strict=True):
        state.take(int(token), logp)
    return any(state.finished for state in states)


def collect_rollout(states: Sequence[CompletionState], temperature: float) -> Rollout:
    """The finished completions as an engine returns them, without log-probabilities at temperature 0."""
    logps = None if temperature == 0 else [state.logps for state in states]
    return Rollout([state.ids for state in states], [state.forced for state in states], logps)
