"""How often the thinking budget had to close a thought, and how good the answers are with and without its help.

`thinking/forced_accuracy` far below `thinking/unforced_accuracy` says that thoughts are cut off before they have found
anything; equal ones, that the budget could be smaller. Right is what evaluation calls right: exactly 1.0 from the run's
answer reward, before its weight. Left out: what a forced close does to the loss (its tokens have no part in it).

Shapes: A completions of all processes, F reward functions.
"""

import torch

from rloo_kit.data.load import REWARDS_WITH_ANSWERS


def find_answer_column(rewards_per_func: torch.Tensor, names: list[str]) -> torch.Tensor | None:
    """The answer reward's values, (A,), or None where the run has no such reward.

    Args:
        rewards_per_func: (A, F), unweighted, NaN where a reward does not apply. names: of the F reward functions.
    """
    index = next((index for index, name in enumerate(names) if name in REWARDS_WITH_ANSWERS), None)
    return None if index is None else rewards_per_func[:, index]


def thinking_metrics(forced: torch.Tensor, answers: torch.Tensor | None) -> dict[str, float]:
    """`thinking/forced_ratio`, and `thinking/forced_accuracy` and `thinking/unforced_accuracy` where there are answers.

    Args:
        forced: (A,) bool, whether the budget closed the completion's thinking.
        answers: (A,), the answer reward's values (`find_answer_column`); one that is NaN counts as wrong.

    Returns:
        The metrics; an accuracy over no completions at all is NaN, which TRL's log leaves out.

    >>> thinking_metrics(torch.tensor([True, False, False, False]), torch.tensor([0.0, 1.0, 1.0, float("nan")]))
    {'thinking/forced_ratio': 0.25, 'thinking/forced_accuracy': 0.0, 'thinking/unforced_accuracy': 0.6666666865348816}
    """
    forced = forced.bool()
    metrics = {"thinking/forced_ratio": forced.float().mean().item()}
    if answers is not None:
        right = (answers == 1.0).float()
        metrics["thinking/forced_accuracy"] = right[forced].mean().item()
        metrics["thinking/unforced_accuracy"] = right[~forced].mean().item()
    return metrics
