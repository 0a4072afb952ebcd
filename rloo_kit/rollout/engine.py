"""The class of all engines, what each is made with and called with, and what turns of a completion talk to."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rloo_kit.completion import Episode
from rloo_kit.gradient.packing import without_cudnn
from rloo_kit.rollout.types import WHOLE, CompletionState, Filters, Limits, Rollout

Progress = Callable[[int, int], None]  # called with the number of completions done so far and in total
# Called with a prompt's index and the ids of its completion so far, forced ones included, each time it grows. The list
# belongs to the engine: read it, do not keep it. After the engine ran out of memory it may have fewer ids.
OnTokens = Callable[[int, list[int]], None]


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


class Episodes(Dialogue, Protocol):
    """The dialogue of one batch of completions with a run's tools (`tools.episodes.Episodes`). `prompts`: of its rows,
    with the observations that begin the episodes."""

    prompts: list[Any]

    def finish(self, rollout: Rollout) -> list[Episode]:
        """What happened in each completion."""


class ToolUse(Protocol):
    """What completions may call, for `complete`; `tools.episodes.make_tool_use` makes one."""

    def begin(self, rows: Sequence[dict[str, Any]]) -> Episodes:
        """Start an episode for each row of the dataset."""


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

    def send_away(self, state: CompletionState) -> None:
        """Ask for the reply to a turn that has ended, unless the completion is over."""
        if (reply := self._ask(state)) is not None:
            self.away[reply] = state

    def come_back(self, wait_s: float | None = 0.0) -> list[CompletionState]:
        """Completions whose reply has arrived, ready for their next turn; those that it ends are not among them.
        `wait_s`: for the first reply, None as long as it takes."""
        if not self.away:
            return []
        done = sorted(wait(self.away, wait_s, FIRST_COMPLETED).done, key=lambda reply: self.away[reply].number)
        return [state for reply in done if self._resume(state := self.away.pop(reply), reply)]

    def ask_and_wait(self, state: CompletionState) -> bool:
        """`send_away` and `come_back` of one completion, in a thread of its own; False if it is over."""
        return (reply := self._ask(state)) is not None and self._resume(state, reply)

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
        if self.on_progress is not None:
            self.on_progress(done, len(self.states))


class Engine:
    """Samples completions of prompts; `choice.build_engine` chooses one.

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
            on_progress, on_tokens: see `Progress` and `OnTokens`; called in this thread.
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
