"""One completion: the record that sampling makes, rewards read, the gradient trains and pages show.

No torch here: the checks before a model is loaded make completions up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# Columns that rewards get in some runs only: with a thinking budget, with tools, with an environment.
ADDED_COLUMNS = ("thinking_forced", "completion_mask", "turns", "environments")
Span = tuple[int, int]  # first token of a completion, and the one after the last


@dataclass
class Episode:
    """What happened between the turns of a completion that calls tools.

    Attributes:
        messages: the assistant's (content, and reasoning_content and tool_calls if it has any) and the tools'.
        calls: (name, kind of its `Result`) each. failures: why tools failed, for the user.
        cut: the limit that ended it, "max_turns" or "length" (no room for a result); None if the model ended it.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cut: str | None = None

    def count(self, kind: str) -> int:
        """The calls of one kind."""
        return sum(called == kind for _, called in self.calls)


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        row: of the dataset, or what stands for it. prompt: its text or messages; with an environment, with the
            observation that begins the episode.
        prompt_ids, ids: token ids; forced tokens, tools' results and the end token (if there is one) included.
        text: as rewards get it, without special tokens, the thinking tags included: of the last turn; a list of
            messages if the prompt is one.
        ended: the model ended it itself; False if a limit cut it off.
        thinking_tokens: tokens before the first `</think>` of each turn, or all of a turn without one; those of a
            forced sentence are left out. closed: the last turn contains `</think>`.
        forced: spans of the tokens that closed its thinking. context: spans of the tools' results.
        logps: of each token when it was sampled, in nats, NaN if it was not; None if the sampler reports none.
        episode: with tools, what happened; else None.
    """

    ids: list[int]
    text: Any
    ended: bool
    thinking_tokens: int = 0
    closed: bool = False
    forced: list[Span] = field(default_factory=list)
    context: list[Span] = field(default_factory=list)
    logps: list[float] | None = None
    episode: Episode | None = None
    prompt_ids: list[int] = field(default_factory=list)
    prompt: Any = ""
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> list[list[int]]:
        """The token ids of each turn, without the tools' results between them."""
        return split_turns(self.ids, self.context)

    @property
    def tokens(self) -> int:
        """The number of its tokens, without the tools' results."""
        return len(self.ids) - sum(end - start for start, end in self.context)


class Tools(Protocol):
    """What the core reads of a run's tools (`tools.toolbox.Toolbox`).

    Attributes:
        schemas: of each tool, as chat templates read them. environment: name of the environment's class, None without.
        owns_reward: the environment has a reward of its own.
    """

    schemas: list[dict[str, Any]]
    environment: str | None
    owns_reward: bool

    def environments(self) -> list[Any]:
        """The environments of the last batch, as rewards get them."""


def list_episodes(completions: Sequence[Completion]) -> list[Episode]:
    """The episodes of completions; none without tools."""
    return [completion.episode for completion in completions if completion.episode is not None]


def split_turns(ids: list[int], context: Sequence[Span]) -> list[list[int]]:
    """The tokens of each turn of a completion, without the tools' results between them."""
    cuts = [0, *(place for span in context for place in span), len(ids)]
    return [ids[start:end] for start, end in zip(cuts[::2], cuts[1::2], strict=True)]


def measure_calls(calls: Sequence[tuple[str, str]], turns: Sequence[int]) -> dict[str, float]:
    """Means of a run with tools: call_frequency and turns (per completion), failure_frequency and invalid_frequency
    (shares of the calls). `calls`: of all episodes, as in `Episode`; `turns`: of each completion."""
    kinds = [kind for _, kind in calls]
    return {
        "call_frequency": len(kinds) / len(turns),
        "turns": sum(turns) / len(turns),
        "failure_frequency": kinds.count("failed") / max(1, len(kinds)),
        "invalid_frequency": kinds.count("invalid") / max(1, len(kinds)),
    }
