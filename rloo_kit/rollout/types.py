"""What one call of an engine takes and returns, in token ids, and completions while they grow."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import nan
from typing import Any

import torch
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from rloo_kit.completion import Span

FOREIGN = ("vllm", "server")  # engines that sample with other kernels, from a LoRA that the kit gives them

Cut = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Limits:
    """How long completions may be, in tokens.

    Attributes:
        max_completion_length: hard cap on all tokens of a completion, forced ones and tools' results included.
        thinking_budget: tokens of a turn after which its open thinking is closed; None for no budget.
        answer_budget: tokens after the close, forced or not; None for what `max_completion_length` leaves.
        close_ids: ids that are forced when the budget is spent.
        think_end_id: the id of `</think>`, by which a completion closes its thinking itself.
    """

    max_completion_length: int
    thinking_budget: int | None = None
    answer_budget: int | None = None
    close_ids: tuple[int, ...] = ()
    think_end_id: int | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest completion of one turn."""
        if self.thinking_budget is None:
            return self.max_completion_length
        return min(self.max_completion_length, self.thinking_budget + len(self.close_ids) + self.answer_limit)

    @property
    def answer_limit(self) -> int:
        """Maximum number of tokens after the close, at least 1; only with a thinking budget."""
        if self.answer_budget is not None:
            return self.answer_budget
        return max(1, self.max_completion_length - (self.thinking_budget or 0) - len(self.close_ids))


@dataclass(frozen=True)
class Filters:
    """How the sampled distribution is truncated; by default not at all. Names and values are vLLM's.

    Attributes:
        top_p: keep the likeliest tokens that together have this probability, above 0; 1: all.
        top_k: keep this many of the likeliest tokens; 0: all.
    """

    top_p: float = 1.0
    top_k: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in asdict(self).items())

    @property
    def active(self) -> bool:
        """Whether any filter is set."""
        return self != WHOLE

    def to_vllm(self) -> dict[str, float]:
        """Parameters of a request, all that filter: vLLM takes missing ones from the checkpoint's generation config."""
        return {**asdict(self), "min_p": 0.0, "repetition_penalty": 1.0}

    def make_cut(self) -> Cut | None:
        """A function of the logits (R, V) divided by the temperature. It returns logits that are -inf for excluded
        tokens, by transformers' code and in the order of `generate`, and may change its input in place. None without
        filters."""
        steps = LogitsProcessorList()
        if self.top_k > 0:
            steps.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            steps.append(TopPLogitsWarper(self.top_p))
        return partial(steps, None) if steps else None  # neither reads the ids so far


WHOLE = Filters()  # distribution


@dataclass(frozen=True)
class Rollout(Sequence[list[int]]):
    """The completions of one call of an engine, one entry per prompt, in the prompts' order. It is a sequence of their
    ids, as TRL's hook `_generate_single_turn` returns them.

    Attributes:
        completion_ids: token ids, the end token included if there is one.
        forced: spans of the forced tokens that closed the thinking; one at most without tools.
        sampler_logps: log-probability of each token when it was drawn, after temperature and filters, float32, in nats;
            NaN for tokens that were not drawn. None at temperature 0.
        context: spans of the tools' results.
    """

    completion_ids: list[list[int]]
    forced: list[list[Span]]
    sampler_logps: list[list[float]] | None
    context: list[list[Span]]

    @classmethod
    def of(cls, completion_ids: Sequence[list[int]]) -> "Rollout":
        """Of completions of which nothing else is known."""
        return cls(list(completion_ids), [[] for _ in completion_ids], None, [[] for _ in completion_ids])

    def __len__(self) -> int:
        return len(self.completion_ids)

    def __getitem__(self, place: Any) -> Any:
        return self.completion_ids[place]


class CompletionState:
    """One completion while it grows, token by token, by the rules of `thinking_budget`.

    Tokens that are not drawn (a forced close, a tool's result) have a log-probability of NaN and a recorded span, so
    that the loss leaves them out.

    Attributes:
        number: its index in the result. prompt: the prompt's token ids.
        ids: its tokens so far. logps: their log-probabilities under the sampler, NaN where not drawn.
        forced: spans of the forced tokens so far. context: spans of the tools' results.
        finished: it takes no more tokens, unless a tool's result continues it (`resume`).
        turns: turns that were begun before the current one.
    """

    def __init__(self, limits: Limits, end_ids: Collection[int], number: int = 0, prompt: Sequence[int] = ()) -> None:
        self.number, self.prompt = number, list(prompt)
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.forced: list[Span] = []
        self.context: list[Span] = []
        self.turns = 0
        self.finished = limits.max_completion_length < 1
        self._limits, self._ends = limits, end_ids
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn_start = len(self.ids)
        self._answer_ends: int | None = None  # length at which the answer budget is spent
        self._pending: list[int] = []  # forced tokens still to come, the next one last
        if self._limits.thinking_budget == 0:
            self._close()

    @property
    def last(self) -> int:
        """The last token so far, the prompt's included."""
        return self.ids[-1] if self.ids else self.prompt[-1]

    @property
    def position(self) -> int:
        """Position of the last token so far in prompt and completion."""
        return len(self.prompt) + len(self.ids) - 1

    @property
    def room(self) -> int:
        """How many more tokens it may take."""
        return self._limits.max_completion_length - len(self.ids)

    @property
    def has_budget(self) -> bool:
        """Whether its thinking may be closed by force."""
        return self._limits.thinking_budget is not None

    @property
    def requests(self) -> int:
        """How many requests up to `next_stretch` came before, at most: each turn has two with a budget."""
        return 2 * self.turns + (self._answer_ends is not None)

    @property
    def ended(self) -> bool:
        """Whether its last token is an end token."""
        return bool(self.ids) and self.ids[-1] in self._ends

    @property
    def turn_ids(self) -> list[int]:
        """The tokens of the current turn."""
        return self.ids[self._turn_start :]

    @property
    def next_stretch(self) -> tuple[int, list[int]]:
        """How many tokens may be sampled in one request before a limit, and the ids that stop it earlier."""
        budget = self._limits.thinking_budget
        if budget is None:
            return self.room, [*self._ends]
        if self._answer_ends is not None:
            return min(self.room, self._answer_ends - len(self.ids)), [*self._ends]
        closing = [] if self._limits.think_end_id is None else [self._limits.think_end_id]
        return min(self.room, self._turn_start + budget - len(self.ids)), [*self._ends, *closing]

    @property
    def next_forced(self) -> int | None:
        """The id that is forced next; None while the model may choose."""
        return self._pending[-1] if self._pending and not self.finished else None

    def take(self, token: int, logp: float) -> None:
        """Add the sampled token, or the forced one that is due instead."""
        if self._pending:
            if self.forced and self.forced[-1][1] == len(self.ids):
                self.forced[-1] = (self.forced[-1][0], len(self.ids) + 1)
            else:
                self.forced.append((len(self.ids), len(self.ids) + 1))
            self.ids.append(self._pending.pop())
            self.logps.append(nan)
            if not self._pending:
                self._answer_ends = len(self.ids) + self._limits.answer_limit
        else:
            self.ids.append(token)
            self.logps.append(logp)
            if token in self._ends:
                self.finished = True
                return
            budget = self._limits.thinking_budget
            if budget is not None and self._answer_ends is None:
                if token == self._limits.think_end_id:
                    self._answer_ends = len(self.ids) + self._limits.answer_limit
                elif len(self.ids) - self._turn_start >= budget:
                    self._close()
        length = len(self.ids)
        self.finished = length >= self._limits.max_completion_length or length == self._answer_ends

    def resume(self, context: Sequence[int]) -> None:
        """Continue with a new turn after the ids that a tool's result takes."""
        start = len(self.ids)
        self.ids += context
        self.logps += [nan] * len(context)
        self.context.append((start, len(self.ids)))
        self.turns += 1
        self.finished = False
        self._begin_turn()

    def _close(self) -> None:
        self._pending = list(reversed(self._limits.close_ids))
