"""The leave-one-out advantage in plain Python: the oracle that the trainer's tensor code is tested against."""

from collections.abc import Sequence


def leave_one_out_advantages(rewards: Sequence[float | None], num_generations: int) -> list[float]:
    """Advantages of completions that lie group by group: the reward less the mean of its scored siblings.

    Source: Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740, equation 8; Kool et al. 2019.

    Args:
        rewards: one reward per completion, K completions of a prompt side by side; None where it was not scored.
        num_generations: K, at least 2.

    Returns:
        One advantage per completion; 0.0 for one that was not scored, and for one without a scored sibling.

    >>> advantages = leave_one_out_advantages([1, 2, 5, 8, 2, 3, 6, 9, 3, 4, 7, 10], 4)
    >>> [round(advantage, 3) for advantage in advantages[:4]]
    [-4.0, -2.667, 1.333, 5.333]
    >>> leave_one_out_advantages([1.0, None, 0.0], 3)
    [1.0, 0.0, -1.0]
    """
    advantages: list[float] = []
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations]
        scored = [reward for reward in group if reward is not None]
        for reward in group:
            siblings = len(scored) - 1
            advantages.append(0.0 if reward is None or not siblings else reward - (sum(scored) - reward) / siblings)
    return advantages
