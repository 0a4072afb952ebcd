"""The leave-one-out advantage in plain Python: the oracle that the trainer's tensor code is tested against.

Each completion is judged against the mean reward of its siblings, the other completions of the same prompt. The
baseline does not contain the completion's own reward, so it lowers the variance of REINFORCE without biasing it.
Left out: clipping, normalisation and the KL penalty, which the caller applies before or after.

Source: Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740, equation 8; Kool et al. 2019.
"""

from collections.abc import Sequence

from rloo_kit.errors import ConfigError


def leave_one_out_advantages(rewards: Sequence[float | None], num_generations: int) -> list[float]:
    """Advantages of completions that lie group by group.

    Args:
        rewards: one reward per completion, K completions of a prompt side by side; None where it was not scored.
        num_generations: K, at least 2.

    Returns:
        One advantage per completion. 0.0 for a completion that was not scored, and for one whose siblings were not:
        without a baseline there is nothing to learn from.

    Raises:
        ConfigError: K is below 2, or the rewards do not divide into groups of K.

    Example, four completions of each of three prompts (the case that TRL's documentation tests):

    >>> advantages = leave_one_out_advantages([1, 2, 5, 8, 2, 3, 6, 9, 3, 4, 7, 10], 4)
    >>> [round(advantage, 3) for advantage in advantages[:4]]
    [-4.0, -2.667, 1.333, 5.333]
    >>> leave_one_out_advantages([1.0, None, 0.0], 3)
    [1.0, 0.0, -1.0]
    """
    if num_generations < 2:
        raise ConfigError(f"leave-one-out needs at least 2 generations per prompt, got {num_generations}")
    if len(rewards) % num_generations:
        raise ConfigError(f"{len(rewards)} rewards do not divide into groups of {num_generations}")
    advantages: list[float] = []
    for start in range(0, len(rewards), num_generations):
        advantages.extend(_group_advantages(rewards[start : start + num_generations]))
    return advantages


def _group_advantages(group: Sequence[float | None]) -> list[float]:
    scored = [reward for reward in group if reward is not None]
    if len(scored) < 2:
        return [0.0] * len(group)
    total = sum(scored)
    return [0.0 if reward is None else reward - (total - reward) / (len(scored) - 1) for reward in group]
