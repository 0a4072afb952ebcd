"""What goes into a rollout and what comes out: limits on its length, completions with what the sampler thought of them.

Left out: text. Engines see token ids only.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Limits:
    """How long completions may be, in tokens.

    Attributes:
        max_completion_length: of all tokens of a completion, forced ones too; a hard cap.
        thinking_budget: tokens after which thinking that is still open is closed; None for no budget.
        answer_budget: tokens after the close, whoever closed; None for what `max_completion_length` leaves.
        close_ids: ids that are forced at the end of the budget.
        think_end_id: the id of `</think>`, by which a completion closes its thinking itself.
    """

    max_completion_length: int
    thinking_budget: int | None = None
    answer_budget: int | None = None
    close_ids: tuple[int, ...] = ()
    think_end_id: int | None = None

    @property
    def answer_limit(self) -> int:
        """Tokens after the close at most, at least 1; only with a thinking budget."""
        if self.answer_budget is not None:
            return self.answer_budget
        return max(1, self.max_completion_length - (self.thinking_budget or 0) - len(self.close_ids))


@dataclass(frozen=True)
class Rollout:
    """The completions of one call of an engine, one entry a prompt and in its order.

    Attributes:
        completion_ids: token ids, the end token included where there is one.
        forced: (start, end) of the tokens in the completion that were forced to close its thinking; None where none
            were.
        sampler_logps: log-probability of each token when it was drawn, at the engine's temperature, float32, in nats;
            NaN for forced tokens. None at temperature 0, and from an engine that does not say.
    """

    completion_ids: list[list[int]]
    forced: list[tuple[int, int] | None]
    sampler_logps: list[list[float]] | None

    @property
    def thinking_forced(self) -> list[bool]:
        """For each completion whether its thinking was closed for it."""
        return [span is not None for span in self.forced]


class Progress(Protocol):
    """Called with the completions done so far and their number in all."""

    def __call__(self, done: int, total: int, /) -> None: ...
