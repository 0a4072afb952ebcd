"""The records passed between the stages of a step: completions, their rewards, the batch for the gradient, its stats.

Nothing is padded: per-token data is one tensor per completion, (C_i,), or all of them end to end, (N,).

Shapes: B completions of this process, A of all processes, P_i and C_i tokens of one, N of all, F reward functions.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from rloo_kit.completion import Completion
from rloo_kit.gradient.advantages import Advantages
from rloo_kit.gradient.objective import RATIO_STATISTICS, LossParts, all_finite, sum_rows
from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.scorer import Scores


@dataclass(frozen=True)
class Judged:
    """Completions of this process, and the rewards of all processes.

    Attributes:
        rewards_per_func: (A, F), NaN where a reward does not apply, or any of the sample's rewards failed.
        failed: (A, F) bool. failures: a message for each reward that failed in this process.
        raw_scores: (A,), the weighted sum; NaN where a completion is not scored.
        scores: (A,), the same minus the penalty for a missing end.
    """

    completions: list[Completion]
    rewards_per_func: torch.Tensor
    failed: torch.Tensor
    raw_scores: torch.Tensor
    scores: torch.Tensor
    failures: list[str]


@dataclass
class RolloutBatch:
    """One rollout of this process, ready for its gradient.

    Attributes:
        judged: completions and rewards. group_size: K. first: where this process's rows begin among all (A).
        prompts, completions: token ids on the device, B times (P_i,) and (C_i,).
        mask: B times (C_i,) bool, the trained tokens: without forced closes, tools' results, masked completions.
        scores: (A,), compared with siblings: after normalising and clipping, before the KL penalty; NaN for a
            completion that is not scored.
        on_policy: no weight moves while the batch is in use, so each pass computes its own `old_logps`.
        sampler_logps: B times (C_i,), log-probabilities under the sampler; None if unknown.
        old_logps: the same under the policy before it moved; read off-policy only.
        kl: B times (C_i,), log-ratio of policy and reference, 0 where masked and without a penalty.
        is_open: `kl` and `advantages` are not final: `RLOOStep.settle` has not been called.
    """

    judged: Judged
    group_size: int
    first: int
    prompts: list[torch.Tensor]
    completions: list[torch.Tensor]
    mask: list[torch.Tensor]
    scores: torch.Tensor
    on_policy: bool
    sampler_logps: list[torch.Tensor] | None
    old_logps: list[torch.Tensor] = field(init=False)
    kl: list[torch.Tensor] = field(init=False)
    is_open: bool = field(init=False, default=True)
    advantages: Advantages = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.old_logps = [torch.zeros_like(mask, dtype=torch.float32) for mask in self.mask]
        self.kl = list(self.old_logps)

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        return [len(ids) for ids in self.completions]

    def put_kl(self, rows: Sequence[int], logps: torch.Tensor, reference: torch.Tensor | None) -> None:
        """Fill in some rows' KL from (N,) log-probabilities; None for a reference that equals the policy."""
        ratio = torch.zeros_like(logps) if reference is None else logps - reference
        put(self.kl, rows, ratio.where(pick(self.mask, rows), 0.0))

    def by_group(self, rows: Iterable[int]) -> list[list[int]]:
        """The rows, neighbours of one group together."""
        return [list(part) for _, part in groupby(rows, key=lambda row: (self.first + row) // self.group_size)]

    def groups(self, rows: Iterable[int]) -> list[Group]:
        """The rows as prompts with their completions; an environment may give siblings different prompts."""
        done = self.judged.completions
        parts = [
            list(same)
            for part in self.by_group(rows)
            for _, same in groupby(part, key=lambda row: done[row].prompt_ids)
        ]
        return [Group(self.prompts[part[0]], [self.completions[row] for row in part]) for part in parts]

    def passes(
        self, rows: Iterable[int], tokens: Callable[[list[Group]], int], limit: int, whole_groups: bool
    ) -> list[list[int]]:
        """The rows of each pass: groups together up to `limit` of the `tokens` that a pass computes, and a group
        that exceeds it row by row, or whole. A row that exceeds it is a pass."""
        found: list[list[int]] = []
        for part in self.by_group(rows):
            stays_whole = whole_groups or tokens(self.groups(part)) <= limit
            for unit in [part] if stays_whole else [[row] for row in part]:
                if found and tokens(self.groups(found[-1] + unit)) <= limit:
                    found[-1] = found[-1] + unit
                else:
                    found.append(unit)
        return found

    def with_signal(self, rows: list[int]) -> list[int]:
        """The rows that can move the policy: with a non-zero advantage and a trained token."""
        moving = (self.advantages.of(range(len(self)), by_token=True) != 0) & pick(self.mask)
        flags = [bool(part.any()) for part in moving.cpu().split(self.lengths)]
        return [row for row in rows if flags[row]]


class StepStats:
    """Statistics of the passes of one optimizer step.

    Attributes:
        loss: sum over the rows. rows: those of the step. row_weight: factor of a row's loss in it.
        policy_loss: the same without the auxiliary loss. aux_loss: (2,), its sum over micro-steps, and their number.
        per_row: (B, 4), for each completion the `RATIO_STATISTICS` (with a ratio per token, their mean) and minus its
            log-probability, in nats; NaN where it was not computed.
        entropy: (2,), the sum over the trained tokens, in nats, and their number.
        approx_kl: (2,), the sum of half the squared log-ratio to the policy that sampled, and the tokens.
        gap: (3,), of |trainer's log-probability - sampler's|: sum, tokens, largest.
        weight: (2,), sum and number of the importance weights. is_finite: of every log-probability and KL.
    """

    def __init__(self, size: int, rows: list[int], row_weight: float, device: torch.device):
        self.rows, self.row_weight = rows, row_weight
        self.loss = torch.zeros((), device=device)
        self.per_row = torch.full((size, len(RATIO_STATISTICS) + 1), torch.nan, device=device)
        self.policy_loss = torch.zeros(1, device=device)
        self.entropy, self.approx_kl, self.weight, self.aux_loss = (torch.zeros(2, device=device) for _ in range(4))
        self.gap = torch.zeros(3, device=device)
        self.is_finite = True

    def add(self, rows: list[int], mask: torch.Tensor, scores: Scores, old: torch.Tensor, parts: LossParts) -> None:
        """Add one pass over some rows; `mask`, `scores` and `old` are of its tokens, (N,)."""
        now = scores.logps.detach()
        self.is_finite &= all_finite(now, mask=mask)
        self.approx_kl += torch.stack([((now - old) * mask).square().sum() / 2, mask.sum()])
        self.per_row[rows, :-1] = torch.stack([getattr(parts, name).float() for name in RATIO_STATISTICS], dim=1)

    def add_entropy(self, rows: list[int], lengths: list[int], mask: torch.Tensor, scores: Scores) -> None:
        """Add the policy's entropy on the tokens that the mask keeps, (N,)."""
        assert scores.entropies is not None
        self.entropy += torch.stack([(scores.entropies * mask).sum(), mask.sum()])
        self.per_row[rows, -1] = -sum_rows(scores.logps.detach() * mask, lengths).float()

    def add_gap(self, logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the gap between the trainer's and the sampler's log-probabilities, (N,), NaN if not sampled."""
        known = mask & ~sampled.isnan()
        gap = (logps - sampled).abs().where(known, 0.0)
        self.gap[:2] += torch.stack([gap.sum(), known.sum()])
        self.gap[2] = torch.maximum(self.gap[2], gap.max() if len(gap) else self.gap[2])


def pick(values: list[torch.Tensor], rows: Iterable[int] | None = None) -> torch.Tensor:
    """Some rows' tensors end to end, or all: B times (C_i,) -> (N,)."""
    return torch.cat(values if rows is None else [values[row] for row in rows])


def put(values: list[torch.Tensor], rows: Sequence[int], new: torch.Tensor) -> None:
    """The reverse of `pick`, in place."""
    for row, part in zip(rows, new.split([len(values[row]) for row in rows]), strict=True):
        values[row] = part
