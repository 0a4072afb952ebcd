"""Inputs and outputs of a rollout in token ids, completions while they grow, and what all engines are."""

import copy
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field
from math import nan
from typing import Any, Protocol

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rloo_kit.completion import Span
from rloo_kit.gradient.packing import without_cudnn

FOREIGN = ("vllm", "server")  # engines that sample with other kernels, from a LoRA that the kit gives them

Cut = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Limits:
    """How long completions may be, in tokens.

    Attributes:
        max_completion_length: hard cap on all tokens of a completion, forced ones and tools' results included.
        thinking_budget: tokens of a turn after which its open thinking is closed; None for no budget.
        answer_budget: tokens after the close, forced or not; None for what `max_completion_length` leaves.
        close_ids: ids that are forced when the budget is spent.
        think_end_id: the id of `</think>`, by which a completion closes its thinking itself.
        thinking_total: tokens of thinking in all turns together; None for no such limit.
    """

    max_completion_length: int
    thinking_budget: int | None = None
    answer_budget: int | None = None
    close_ids: tuple[int, ...] = ()
    think_end_id: int | None = None
    thinking_total: int | None = None

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
        min_p: keep tokens with at least this share of the likeliest one's probability; 0: all.
        repetition_penalty: above 0; logits of tokens that occurred already are divided by it (negative ones
            multiplied); 1: none.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in asdict(self).items())

    @property
    def active(self) -> bool:
        """Whether any filter is set."""
        return self != WHOLE

    def make_cut(self) -> Cut | None:
        """A function of the ids so far (R, L) and the logits (R, V) divided by the temperature. It returns logits that
        are -inf for excluded tokens, by transformers' code and in the order of `generate`, and may change its input in
        place. None without filters."""
        steps = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            steps.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.top_k > 0:
            steps.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            steps.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            steps.append(MinPLogitsWarper(self.min_p))
        return steps or None


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


Progress = Callable[[int, int], None]  # called with the number of completions done so far and in total
# Called with a prompt's index and the ids of its completion so far, forced ones included, each time it grows. The list
# belongs to the engine: read it, do not keep it. After the engine ran out of memory it may have fewer ids.
OnTokens = Callable[[int, list[int]], None]


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
        self._begin_turn(limits.thinking_total)

    def _begin_turn(self, left: int | None) -> None:
        """`left`: tokens of thinking that the turns before leave of the total."""
        self._turn_start = len(self.ids)
        self._left = left
        budgets = [budget for budget in (self._limits.thinking_budget, left) if budget is not None]
        self._budget = min(budgets, default=None)  # of this turn, in tokens
        self._thought: int | None = None  # tokens of this turn's thinking, once it was closed
        self._answer_ends: int | None = None  # length at which the answer budget is spent
        self._pending: list[int] = []  # forced tokens still to come, the next one last
        if self._budget == 0:
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
        return self._budget is not None

    @property
    def requests(self) -> int:
        """How many requests up to `next_stretch` came before, at most: each turn has two with a budget."""
        return 2 * self.turns + (self._answer_ends is not None)

    def copy(self) -> "CompletionState":
        """A state that grows by itself."""
        other = copy.copy(self)
        other.ids, other.logps, other._pending = [*self.ids], [*self.logps], [*self._pending]
        other.forced, other.context = [*self.forced], [*self.context]
        return other

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
        if self._budget is None:
            return self.room, [*self._ends]
        if self._answer_ends is not None:
            return min(self.room, self._answer_ends - len(self.ids)), [*self._ends]
        closing = [] if self._limits.think_end_id is None else [self._limits.think_end_id]
        return min(self.room, self._turn_start + self._budget - len(self.ids)), [*self._ends, *closing]

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
            if self._budget is not None and self._answer_ends is None:
                thought = len(self.ids) - self._turn_start
                if token == self._limits.think_end_id:
                    self._thought = thought - 1
                    self._answer_ends = len(self.ids) + self._limits.answer_limit
                elif thought >= self._budget:
                    self._close()
        length = len(self.ids)
        self.finished = length >= self._limits.max_completion_length or length == self._answer_ends

    def resume(self, context: Sequence[int]) -> None:
        """Continue with a new turn after the ids that a tool's result takes."""
        start = len(self.ids)
        left = self._left
        if left is not None:
            thought = len(self.turn_ids) if self._thought is None else self._thought
            left = max(0, left - thought)
        self.ids += context
        self.logps += [nan] * len(context)
        self.context.append((start, len(self.ids)))
        self.turns += 1
        self.finished = False
        self._begin_turn(left)

    def _close(self) -> None:
        self._thought = len(self.turn_ids)
        self._pending = list(reversed(self._limits.close_ids))


class Dialogue(Protocol):
    """What completions of several turns talk to. Called in the thread that samples, or in a server engine's threads."""

    def ask(self, number: int, turn: list[int], turns: int) -> "Future[Any] | None":
        """The reply to a turn that has ended; None if the completion is over.

        Args:
            number: index of the prompt. turn: ids of the turn. turns: those before it.
        """

    def read(self, number: int, reply: "Future[Any]", room: int) -> list[int]:
        """The ids between the turn and the next one, of which there are fewer than `room`; empty if the completion is
        over. `reply`: from `ask`, arrived."""


@dataclass(frozen=True)
class Sampling:
    """What every engine is made with.

    Attributes:
        temperature: 0 is greedy decoding. end_ids: ids that end a completion.
        rows: completions at once, at most; None for all. filters: truncate the sampled distribution.
        say: gets one line when rows are halved because memory ran out.
    """

    temperature: float
    end_ids: tuple[int, ...]
    rows: int | None = None
    filters: Filters = WHOLE
    say: Callable[[str], None] = print


@dataclass(frozen=True)
class Call:
    """The arguments of one call of `Engine.sample`, with a state for each prompt, and the unfinished ones in the order
    in which they start."""

    limits: Limits
    states: list[CompletionState]
    order: list[int]
    expected_lengths: Sequence[float] | None
    on_progress: Progress | None
    on_tokens: OnTokens | None
    dialogue: Dialogue | None = None
    away: "dict[Future[Any], CompletionState]" = field(default_factory=dict)  # those that wait for a reply

    def send_away(self, state: CompletionState) -> bool:
        """Ask for the reply to a turn that has ended; False if the completion is over."""
        reply = self._ask(state)
        if reply is not None:
            self.away[reply] = state
        return reply is not None

    def come_back(self, wait_s: float | None = 0.0) -> list[CompletionState]:
        """Completions whose reply has arrived, ready for their next turn; those that it ends are not among them.
        `wait_s`: for the first reply, None as long as it takes."""
        if not self.away:
            return []
        done = sorted(wait(self.away, wait_s, FIRST_COMPLETED).done, key=lambda one: self.away[one].number)
        return [state for reply in done if self._resume(state := self.away.pop(reply), reply)]

    def ask_and_wait(self, state: CompletionState) -> bool:
        """`send_away` and `come_back` of one completion, in a thread of its own; False if it is over."""
        reply = self._ask(state)
        return reply is not None and self._resume(state, reply)

    def _ask(self, state: CompletionState) -> "Future[Any] | None":
        if self.dialogue is None or not (state.finished and state.ended):
            return None
        return self.dialogue.ask(state.number, state.turn_ids, state.turns)

    def _resume(self, state: CompletionState, reply: "Future[Any]") -> bool:
        assert self.dialogue is not None
        context = self.dialogue.read(state.number, reply, state.room)
        if context:
            state.resume(context)
        return bool(context)

    def report(self, done: int) -> None:
        """Call `on_progress` with the number of completions done."""
        if self.on_progress is not None:
            self.on_progress(done, len(self.states))


class Engine:
    """Samples completions of prompts; `engine.build_engine` chooses one.

    Attributes:
        name: native, generate, vllm or server. reason: why that one, in one readable line.
        rows: completions at once; None for all of a call. Halved for good when the device runs out of memory.
        token_steps: decoding steps so far, each of all rows at once; 0 if the engine does not see them.
    """

    name: str

    def __init__(self, reason: str, sampling: Sampling) -> None:
        self.reason, self.sampling, self.rows = reason, sampling, sampling.rows
        self.token_steps = 0

    @without_cudnn()
    def sample(
        self,
        prompt_ids: list[list[int]],
        limits: Limits,
        expected_lengths: Sequence[float] | None = None,
        on_progress: Progress | None = None,
        on_tokens: OnTokens | None = None,
        dialogue: Dialogue | None = None,
    ) -> Rollout:
        """One completion for each prompt; neighbours with equal prompts are a group.

        Args:
            prompt_ids: token ids, at least one each.
            limits: on the completions' lengths, see `make_limits`.
            expected_lengths: one number per prompt; if not all rows fit at once, the longest start first.
            on_progress: called with the number of completions done so far and in total.
            on_tokens: called while completions grow, in this thread; it does not change what is sampled.
            dialogue: answers turns, for completions of several; None: a completion is one turn.

        The model is put into evaluation mode and restored afterwards. Random numbers are torch's global ones.

        Raises:
            BackendError: the engine cannot hold the completions, or the weights are broken.
        """
        ends = self.sampling.end_ids
        states = [CompletionState(limits, ends, number, prompt) for number, prompt in enumerate(prompt_ids)]
        order = [number for number, state in enumerate(states) if not state.finished]
        if expected_lengths is not None:
            order.sort(key=lambda number: -expected_lengths[number])  # stable: siblings stay neighbours
        self._finish(Call(limits, states, order, expected_lengths, on_progress, on_tokens, dialogue))
        logps = None if self.sampling.temperature == 0 else [state.logps for state in states]
        ids, forced = [state.ids for state in states], [state.forced for state in states]
        return Rollout(ids, forced, logps, [state.context for state in states])

    def _finish(self, call: Call) -> None:
        """Finish all states of the call."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what a server keeps for this engine; the next `sample` prepares it again."""

    def _halve(self, tried: int, left: str) -> None:
        """After memory ran out with `tried` completions at once: half as many from now on. `left`: what happens to the
        unfinished ones."""
        self.rows = max(1, tried // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.sampling.say(
            f"rollout: out of memory with {tried} completions at once; {left}, {self.rows} at once "
            f"(rollout.rows={self.rows} starts with that)"
        )
