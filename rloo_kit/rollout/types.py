"""Inputs and outputs of a rollout, in token ids, and the protocol of engines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

FOREIGN = ("vllm", "server")  # engines that sample with other kernels, from a LoRA that the kit gives them


@dataclass(frozen=True)
class Limits:
    """How long completions may be, in tokens.

    Attributes:
        max_completion_length: hard cap on all tokens of a completion, forced ones included.
        thinking_budget: tokens after which open thinking is closed; None for no budget.
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


WHOLE = Filters()  # distribution


@dataclass(frozen=True)
class Rollout:
    """The completions of one call of an engine, one entry per prompt, in the prompts' order.

    Attributes:
        completion_ids: token ids, the end token included if there is one.
        forced: (start, end) of the forced tokens that closed the thinking; None if none were forced.
        sampler_logps: log-probability of each token when it was drawn, after temperature and filters, float32, in nats;
            NaN for forced tokens. None at temperature 0.
    """

    completion_ids: list[list[int]]
    forced: list[tuple[int, int] | None]
    sampler_logps: list[list[float]] | None

    @property
    def thinking_forced(self) -> list[bool]:
        """For each completion, whether its thinking was closed by force."""
        return [span is not None for span in self.forced]


class Progress(Protocol):
    """Called with the number of completions done so far and in total."""

    def __call__(self, done: int, total: int, /) -> None: ...


class OnTokens(Protocol):
    """Called with a prompt's index and the ids of its completion so far, forced ones included, each time it grows.

    The list belongs to the engine: read it, do not keep it. After the engine ran out of memory it may have fewer ids.
    """

    def __call__(self, number: int, ids: list[int], /) -> None: ...


class Engine(Protocol):
    """Samples completions of prompts; `engine.build_engine` chooses one.

    Attributes:
        name: native, generate, vllm or server. reason: why that one, in one readable line.
        rows: completions at once; None for all of a call. Halved for good when the device runs out of memory.
    """

    name: str
    reason: str
    rows: int | None

    def sample(
        self,
        prompt_ids: list[list[int]],
        limits: Limits,
        expected_lengths: Sequence[float] | None = None,
        on_progress: Progress | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Rollout:
        """One completion for each prompt; neighbours with equal prompts are a group.

        Args:
            prompt_ids: token ids, at least one each.
            limits: on the completions' lengths, see `make_limits`.
            expected_lengths: one number per prompt; if not all rows fit at once, the longest start first.
            on_progress: called with the number of completions done so far and in total.
            on_tokens: called while completions grow, in this thread; it does not change what is sampled.

        The model is put into evaluation mode and restored afterwards. Random numbers are torch's global ones.
        """
        ...
