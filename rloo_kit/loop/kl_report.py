"""How much the KL penalty weighs beside the task reward: pure functions on tensors for the step's metrics.

The penalty is subtracted from the reward, so its size is only part of the story: what a group is taught depends on how
its members differ. `kl_spread_ratio` compares these spreads; above 1 the policy is mostly told to stay near the
reference, and under `kl_form: sum` that means to think briefly. Left out: what follows from it (`health`).

Shapes: A completions in groups of K.
"""

import torch


def kl_share(penalty: torch.Tensor, scores: torch.Tensor, beta: float) -> float:
    """`kl/share_of_reward`: mean |beta * penalty| over itself plus mean |score|, 0 to 1.

    >>> kl_share(torch.tensor([2.0, -2.0]), torch.tensor([1.0, 0.0]), beta=0.25)
    0.5

    Args:
        penalty: (A,), `advantages.kl_charge`.
        scores: (A,), what is subtracted from; NaN where a sample is not scored, and
            such samples are left out.

    Returns:
        the share; 0 where both are 0, NaN where nothing is scored.
    """
    scored = ~scores.isnan()
    if not scored.any():
        return float("nan")
    charged, earned = (beta * penalty[scored]).abs().mean().item(), scores[scored].abs().mean().item()
    return charged / (charged + earned) if charged + earned != 0 else 0.0


def kl_spread_ratio(penalty: torch.Tensor, scores: torch.Tensor, beta: float, num_generations: int) -> float | None:
    """`kl/spread_ratio`: how much beta * penalty differs within a group, over how much the scores do.

    >>> penalty, scores = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    >>> kl_spread_ratio(penalty, scores, beta=1.0, num_generations=2)
    2.0

    Args:
        penalty, scores: as for `kl_share`. num_generations: K.

    Returns:
        mean standard deviation of a group's penalties over that of its scores, groups with fewer than two scored
        samples left out; infinity where no group's scores differ but penalties do (the penalty alone makes the
        gradient); None where neither differs or no group has two scored samples.
    """
    grouped, charges = scores.view(-1, num_generations), (beta * penalty).view(-1, num_generations)
    spreads = [
        (charge[kept].std().item(), score[kept].std().item())
        for score, charge in zip(grouped, charges, strict=True)
        if (kept := ~score.isnan()).sum() >= 2
    ]
    of_penalty, of_scores = (sum(spread[part] for spread in spreads) for part in (0, 1))
    if of_scores == 0:
        return float("inf") if of_penalty > 0 else None
    return of_penalty / of_scores
