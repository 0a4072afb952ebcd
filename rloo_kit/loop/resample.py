"""Dynamic sampling: groups whose scores are all equal are replaced by groups of fresh prompts (DAPO, section 3.2).

Groups that are still tied after `rollout.resample_rounds` rounds stay, so the batch keeps its size.

Shapes: A completions = prompts x K, group by group, of all processes.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from rloo_kit.errors import DataError
from rloo_kit.gradient.advantages import tied_groups

Batch = TypeVar("Batch")


def find_tied_groups(scores: torch.Tensor, num_generations: int) -> list[int]:
    """Indices of the groups without a learning signal: all scores equal, or fewer than two scored.

    Args:
        scores: (A,), group by group, before the KL penalty (which alone keeps a group from being equal); NaN if a
            completion is not scored. num_generations: K.

    >>> find_tied_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, float("nan"), 1.0]), 2)
    [0, 2]
    """
    return tied_groups(scores, num_generations).nonzero().flatten().tolist()


def rows_of(groups: Sequence[int], num_generations: int) -> list[int]:
    """The rows of the batch that belong to these groups.

    >>> rows_of([2, 0], 2)
    [4, 5, 0, 1]
    """
    return [group * num_generations + sibling for group in groups for sibling in range(num_generations)]


def replace_tied_groups(
    batch: Batch, fresh: Batch, num_generations: int, scores: str = "scores"
) -> tuple[Batch, list[int]]:
    """The batch with as many of its tied groups as possible replaced by groups of `fresh` that are not tied.

    Args:
        batch: a dataclass. Every field that has one entry for each completion (a list, a tuple, a tensor by its first
            dimension, a dict of such, or another dataclass of such) is replaced row by row; others stay as they are.
        fresh: the same dataclass for other prompts, with at least one group; it may have fewer groups than are tied.
        num_generations: K. scores: the name of the field with the scores, (A,).

    Returns:
        A new batch of the same size (neither input is changed), and the indices of the replaced groups.
    """
    tied = find_tied_groups(getattr(batch, scores), num_generations)
    useless = set(find_tied_groups(getattr(fresh, scores), num_generations))
    useful = [group for group in range(len(getattr(fresh, scores)) // num_generations) if group not in useless]
    pairs = list(zip(tied, useful, strict=False))
    if not pairs:
        return batch, []
    out, into = ([pair[side] for pair in pairs] for side in (0, 1))
    sizes = (len(getattr(batch, scores)), len(getattr(fresh, scores)))
    exchange = _Exchange(rows_of(out, num_generations), rows_of(into, num_generations), *sizes)
    return exchange.in_dataclass(batch, fresh), out


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Replaces rows `out` of values with `old_size` rows by rows `into` of values with `new_size` rows."""

    out: list[int]
    into: list[int]
    old_size: int
    new_size: int

    def in_dataclass(self, old: Any, new: Any) -> Any:
        names = [field.name for field in dataclasses.fields(old) if field.init]
        return dataclasses.replace(
            old, **{name: self.in_value(getattr(old, name), getattr(new, name)) for name in names}
        )

    def in_value(self, old: Any, new: Any) -> Any:
        if dataclasses.is_dataclass(old) and not isinstance(old, type):
            return self.in_dataclass(old, new)
        if isinstance(old, dict):
            return {key: self.in_value(value, new[key]) for key, value in old.items()}
        if isinstance(old, torch.Tensor) and old.dim() and len(old) == self.old_size and len(new) == self.new_size:
            result = old.clone()
            result[torch.tensor(self.out, device=old.device)] = new[torch.tensor(self.into, device=new.device)].to(old)
            return result
        if isinstance(old, (list, tuple)) and len(old) == self.old_size and len(new) == self.new_size:
            rows = list(old)
            for target, source in zip(self.out, self.into, strict=True):
                rows[target] = new[source]
            return type(old)(rows)
        return old


class PromptReservoir:
    """Training prompts in a separate shuffled order, for the groups that are replaced.

    Each pass over the dataset has a different order, fixed by the seed; prompts that are currently in the batch are
    skipped. The trainer's own sampler is not affected: these prompts come in addition.

    Args:
        dataset: with a length and rows by index (`datasets.Dataset`); a row is a dict with `prompt`.
        seed: of the order.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.passes = 0
        self.position = 0
        self._order = self._shuffled()

    def draw(self, count: int, batch: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """At most `count` rows with different prompts, none in `batch`; fewer if none are left."""
        taken = {_key(row) for row in batch}
        drawn: list[dict[str, Any]] = []
        for _ in range(len(self._order)):  # each row once, so that the loop ends on a small dataset
            if len(drawn) == count:
                break
            row = self._next()
            if _key(row) not in taken:
                taken.add(_key(row))
                drawn.append(row)
        return drawn

    def state_dict(self) -> dict[str, int]:
        """Its position, JSON-serialisable; a resumed run continues from it with `load_state_dict`."""
        return {"seed": self.seed, "passes": self.passes, "position": self.position, "size": len(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a checkpoint's state; raises DataError if that is of a dataset of another size."""
        if state["size"] != len(self.dataset):
            raise DataError(
                f"the checkpoint's reservoir has {state['size']} training prompts, and there are "
                f"{len(self.dataset)} now: resume with the data of the run (data.*), or start over"
            )
        self.seed, self.passes, self.position = state["seed"], state["passes"], state["position"]
        self._order = self._shuffled()

    def _next(self) -> dict[str, Any]:
        if self.position == len(self._order):
            self.passes, self.position = self.passes + 1, 0
            self._order = self._shuffled()
        self.position += 1
        return dict(self.dataset[self._order[self.position - 1]])

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.dataset)))
        random.Random(f"resample-{self.seed}-{self.passes}").shuffle(order)
        return order


def _key(row: dict[str, Any]) -> str:
    return str(row["prompt"])
