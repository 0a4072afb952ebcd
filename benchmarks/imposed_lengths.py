"""Imposed lengths: the lengths of a random model's completions must not depend on chance, the side or the engine.

Inside `impose_lengths` each row of a trainer's rollout ends, with the end token, after a given number of tokens. Each
engine is patched where it decides whether a row ends:

- `generate`, of any library: a logits processor makes the end token impossible before a row's target and certain at it;
  it sets one column a step, at negligible cost.
- the kit's native engine: the drawn token is replaced, at the cost of one comparison a token.

The model still computes every step. Rows of equal prompts get their targets in order, whatever the order in which an
engine takes the prompts. Left out: vLLM.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


class Targets:
    """The lengths of a rollout's rows, given out by prompt; a prompt that has no more starts over.

    >>> targets = Targets([[1, 2], [1, 2], [3]], [5, 6, 7])
    >>> [targets.take(prompt) for prompt in ([3], [1, 2], [1, 2], [1, 2])]
    [7, 5, 6, 5]
    """

    def __init__(self, prompt_ids: list[list[int]], lengths: list[int]):
        self._waiting: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
        for ids, length in zip(prompt_ids, lengths, strict=True):
            self._waiting[tuple(ids)].append(length)

    def __contains__(self, prompt: list[int]) -> bool:
        return tuple(prompt) in self._waiting

    def take(self, prompt: list[int]) -> int:
        """The next row's length, in tokens with the end token."""
        waiting = self._waiting[tuple(prompt)]
        waiting.rotate(-1)
        return waiting[-1]


@contextlib.contextmanager
def impose_lengths(trainer: Any, prompt_ids: list[list[int]], lengths: list[int], end_id: int) -> Iterator[None]:
    """Inside the block, row i of the trainer's rollout ends, with the end token, after `lengths[i]` tokens."""
    targets = Targets(prompt_ids, lengths)
    with _end_in_generate(trainer.model, targets, end_id), _end_in_native(lengths, end_id):
        yield


# ---------------------------------------------------------------------------------------------------- the engines


class EndAt:
    """A logits processor: the end token is impossible before a row's target and certain at it."""

    def __init__(self, targets: list[int], prompt_tokens: int, end_id: int):
        self.targets, self.prompt_tokens, self.end_id = torch.tensor(targets), prompt_tokens, end_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.targets.device != scores.device:
            self.targets = self.targets.to(scores.device)
        due = self.targets <= input_ids.size(1) - self.prompt_tokens + 1
        scores[:, self.end_id] = torch.where(due, 1e4, -torch.inf).to(scores.dtype)
        return scores


@contextlib.contextmanager
def _end_in_generate(model: Any, targets: Targets, end_id: int) -> Iterator[None]:
    original: Callable[..., Any] = model.generate

    def generate(*arguments: Any, input_ids: torch.Tensor, logits_processor: Any = (), **keywords: Any) -> Any:
        masks = keywords["attention_mask"].bool()
        rows = [ids[mask].tolist() for ids, mask in zip(input_ids, masks, strict=True)]
        if rows[0] not in targets:  # the engine's check of padding, with prompts of its own
            return original(*arguments, input_ids=input_ids, logits_processor=logits_processor, **keywords)
        end = EndAt([targets.take(row) for row in rows], input_ids.size(1), end_id)
        processors = [end, *(logits_processor or ())]
        return original(*arguments, input_ids=input_ids, logits_processor=processors, **keywords)

    with mock.patch.object(model, "generate", generate):
        yield


@contextlib.contextmanager
def _end_in_native(lengths: list[int], end_id: int) -> Iterator[None]:
    """The native engine makes a `CompletionState` for each row, in the prompts' order; it gets its target here."""
    from rloo_kit.rollout import types

    waiting = iter(lengths)

    class TargetedState(types.CompletionState):  # type: ignore[misc]
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            self.target = next(waiting)

        def take(self, token: int, logp: float) -> None:
            due = len(self.ids) + 1 >= self.target
            super().take(end_id if due else 0 if token == end_id else token, logp)

    with mock.patch.object(types, "CompletionState", TargetedState):
        yield
