"""From completions to rewards: which columns rewards get, and what they make of them.

For the loop, held-out evaluations, the judge of answers and the check before a model is loaded.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rloo_kit.completion import Completion, Tools, list_episodes
from rloo_kit.rewarding.guard import GuardedReward, Scored
from rloo_kit.rewarding.signature import CONVENTION, NOT_PASSED


def name_columns(dataset: Iterable[str], has_budget: bool, toolbox: Tools | None) -> list[str]:
    """The names of the columns that `make_columns` makes of a dataset's, without the convention's arguments."""
    names = [name for name in dataset if name not in (*CONVENTION, *NOT_PASSED)]
    if has_budget:
        names.append("thinking_forced")
    if toolbox is not None:
        names += ["completion_mask", "turns", *(["environments"] if toolbox.environment else [])]
    return names


def make_columns(completions: Sequence[Completion], has_budget: bool, toolbox: Tools | None) -> dict[str, list[Any]]:
    """What rewards get of completions, at least one, by name: the convention's arguments, the dataset's columns and,
    with a thinking budget, `thinking_forced`; with tools `completion_mask` (0 for a tool's result), `turns` (its
    messages) and the `environments` of `toolbox`, which are of this very batch."""
    columns: dict[str, list[Any]] = {
        "prompts": [completion.prompt for completion in completions],
        "completions": [completion.text for completion in completions],
        "completion_ids": [completion.ids for completion in completions],
    }
    for name in name_columns(completions[0].row, False, None):
        columns[name] = [completion.row[name] for completion in completions]
    if has_budget:
        columns["thinking_forced"] = [bool(completion.forced) for completion in completions]
    episodes = list_episodes(completions)
    if episodes:
        columns["completion_mask"] = [_mask_results(completion) for completion in completions]
        columns["turns"] = [episode.messages for episode in episodes]
    if toolbox is not None and toolbox.environment is not None:
        columns["environments"] = toolbox.environments()[: len(completions)]
    return columns


def score(rewards: Sequence[GuardedReward], columns: dict[str, Any], **arguments: Any) -> list[Scored]:
    """What each reward makes of a batch's columns; those that are async are awaited together, after the others.

    `arguments`: the further ones of TRL's convention, such as `trainer_state`."""
    begun = {}
    for place in sorted(range(len(rewards)), key=lambda place: rewards[place].is_async):
        begun[place] = rewards[place].begin(columns | arguments)
    return [begun[place].result() for place in range(len(rewards))]


def _mask_results(completion: Completion) -> list[int]:
    mask = [1] * len(completion.ids)
    for start, end in completion.context:
        mask[start:end] = [0] * (end - start)
    return mask
