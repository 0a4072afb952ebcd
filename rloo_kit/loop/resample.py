"""Dynamic sampling: groups whose scores are all equal are replaced by groups of fresh prompts (DAPO, section 3.2).

Groups that are still tied after `rollout.resample_rounds` rounds stay, so the batch keeps its size.

Shapes: A completions = prompts x K, group by group, of all processes.
"""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from rloo_kit.errors import DataError
from rloo_kit.gradient.advantages import tied_groups
from rloo_kit.loop.records import Judged


def find_tied_groups(scores: torch.Tensor, num_generations: int) -> list[int]:
    """Indices of the groups without a learning signal: all scores equal, or fewer than two scored.

    Args:
        scores: (A,), group by group, before the KL penalty (which alone keeps a group from being equal); NaN if a
            completion is not scored. num_generations: K.

    >>> find_tied_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, float("nan"), 1.0]), 2)
    [0, 2]
    """
    return tied_groups(scores, num_generations).nonzero().flatten().tolist()


def replace_tied_groups(batch: Judged, fresh: Judged, num_generations: int) -> tuple[Judged, list[int]]:
    """The batch with as many of its tied groups as possible replaced by groups of `fresh` that are not tied.

    Args:
        batch: of all processes. fresh: completions of other prompts; it may have fewer groups than are tied.
        num_generations: K.

    Returns:
        A new batch of the same size, and the indices of the replaced groups.
    """
    size, useless = len(batch.scores), find_tied_groups(fresh.scores, num_generations)
    useful = [group for group in range(len(fresh.scores) // num_generations) if group not in useless]
    pairs = list(zip(find_tied_groups(batch.scores, num_generations), useful, strict=False))
    rows = list(range(size))  # of the batch, with those of `fresh` behind them
    for out, into in pairs:
        start, end = (size + group * num_generations for group in (into, into + 1))
        rows[out * num_generations : (out + 1) * num_generations] = range(start, end)

    def exchange(old: Any, new: Any) -> Any:
        if isinstance(old, torch.Tensor):
            return torch.cat([old, new.to(old)])[torch.tensor(rows, device=old.device)]
        return None if old is None else [(old + new)[row] for row in rows]

    mine, others = batch.completions, fresh.completions
    lists = {one.name: exchange(getattr(mine, one.name), getattr(others, one.name)) for one in fields(mine)}
    judged = Judged(
        completions=replace(mine, **lists),
        rewards_per_func=exchange(batch.rewards_per_func, fresh.rewards_per_func),
        failed=exchange(batch.failed, fresh.failed),
        raw_scores=exchange(batch.raw_scores, fresh.raw_scores),
        scores=exchange(batch.scores, fresh.scores),
        failures=batch.failures or fresh.failures,
    )
    return judged, [out for out, _ in pairs]


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
        taken = {str(row["prompt"]) for row in batch}
        drawn: list[dict[str, Any]] = []
        for _ in range(len(self._order)):  # each row once, so that the loop ends on a small dataset
            if len(drawn) == count:
                break
            if self.position == len(self._order):
                self.passes, self.position = self.passes + 1, 0
                self._order = self._shuffled()
            row = dict(self.dataset[self._order[self.position]])
            self.position += 1
            if str(row["prompt"]) not in taken:
                taken.add(str(row["prompt"]))
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

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.dataset)))
        random.Random(f"resample-{self.seed}-{self.passes}").shuffle(order)
        return order
