"""The gradient of a rollout, pass by pass: what is scored when, and what is kept meanwhile.

The three modes of `rloo.memory` give the same gradient: `fast` scores once, with a graph; `balanced` scores first,
without one; `low` is `streamed_pass`. Rows whose advantage is known to be 0 need no pass.

Shapes: B rows of a batch, R rows of a pass, N their completion tokens end to end, C padded completion tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rloo_kit.gradient.advantages import baseline_advantages, kl_penalty_rows, truncated_weights, zero_unscored
from rloo_kit.gradient.objective import Objective, all_finite, policy_loss, spread, sum_rows
from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.scorer import Scores

Batch = dict[str, Any]
Reference = Callable[[torch.nn.Module, list[Group]], torch.Tensor | None]


@dataclass(frozen=True)
class PassSettings:
    """The keys of `RLOOConfig` that all passes of a run share."""

    objective: Objective
    num_generations: int
    beta: float = 0.0
    kl_form: str = "sum"
    baseline: str = "leave_one_out"
    memory: str = "fast"
    tokens_per_pass: int = 8192
    sampler_correction: str = "none"
    sampler_correction_cap: float = 2.0


RATIO_STATISTICS = ("ratio", "clipped_low", "clipped_high", "bounded")


class RowStatistics:
    """What the passes found, by row of the batch; NaN where a row was not computed.

    Attributes:
        ratio, clipped_low, clipped_high, bounded: (B,), see `LossParts`; of each token's, the mean over its completion.
        entropy: (2,), the sum over the scored tokens, in nats, and their number.
        gap: (3,), of |log-probability of the trainer less that of the sampler|: sum, tokens, largest.
        weight: (2,), sum and number of the truncated importance weights.
        is_finite: whether every log-probability and every KL was a finite number.
    """

    def __init__(self, rows: int, device: torch.device):
        for name in RATIO_STATISTICS:
            setattr(self, name, torch.full((rows,), torch.nan, device=device))
        self.entropy = torch.zeros(2, device=device)
        self.gap = torch.zeros(3, device=device)
        self.weight = torch.zeros(2, device=device)
        self.is_finite = True


@dataclass
class Work:
    """One call: the rows, where their gradient goes and what is found on the way.

    Attributes:
        batch: prompt_ids (B, P), padded on the left; completion_ids, loss_mask (B, C), padded on the right;
            prompt_lengths, lengths and group, B ints each; and either advantages, (B,) or (B, C), or scores, (B,), with
            whole groups in a row. Optional: old_per_token_logps and sampler_logps, (B, C). `per_token_kl`, (B, C), is
            filled where advantages are open.
        backward: takes a loss that is summed over rows to the gradients.
    """

    model: torch.nn.Module
    batch: Batch
    backward: Callable[[torch.Tensor], None]
    found: RowStatistics

    @property
    def is_known(self) -> bool:
        """Whether the advantages were made before, so that a pass may hold any rows."""
        return "advantages" in self.batch


class FlatRows:
    """Rows of a batch laid end to end: reads from and writes into padded (B, C) tensors."""

    def __init__(self, batch: Batch, rows: list[int]):
        device = batch["completion_ids"].device
        width = batch["completion_ids"].size(1)
        self.lengths = [batch["lengths"][row] for row in rows]
        self.rows = torch.tensor(rows, device=device)  # (R,)
        places = [torch.arange(row * width, row * width + batch["lengths"][row]) for row in rows]
        self.at = torch.cat(places).to(device)  # (N,)

    def read(self, padded: torch.Tensor) -> torch.Tensor:
        """(B, C) -> (N,)."""
        return padded.reshape(-1)[self.at]

    def write(self, padded: torch.Tensor, values: torch.Tensor) -> None:
        """(N,) into (B, C), in place."""
        padded.view(-1)[self.at] = values.to(padded.dtype)


class PolicyPass:
    """Scores rows and makes their loss.

    Args:
        score: `(model, groups, need_entropy=True) -> Scores`. tokens: what a pass over groups computes.
        reference: log-probabilities (N,) of groups under the reference, without a graph; None where the reference is
            the policy itself, whose own serve then.
        equalize: from the passes that this process needs to those that it makes; where weights are sharded, every
            process has to make as many as any other (`Parallel`).
    """

    def __init__(
        self,
        settings: PassSettings,
        score: Callable[..., Scores],
        tokens: Callable[[list[Group]], int],
        reference: Reference,
        equalize: Callable[[int], int] = int,
    ):
        self.settings, self.score, self.tokens, self.reference = settings, score, tokens, reference
        self.equalize = equalize

    def score_all(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities of every row under the policy and, with a KL penalty, the reference; (B, C), no graph."""
        logps = torch.zeros(batch["completion_ids"].shape, device=batch["completion_ids"].device)
        ref_logps = torch.zeros_like(logps) if self.settings.beta else None
        with torch.no_grad():
            passes = list(self._cut(batch, range(len(logps)), whole_groups=False))
            for rows in self._fill_up(passes):
                groups, flat = make_groups(batch, rows), FlatRows(batch, rows)
                values = self.score(model, groups, need_entropy=False).logps
                flat.write(logps, values)
                if ref_logps is not None:
                    reference = self.reference(model, groups)
                    flat.write(ref_logps, values if reference is None else reference)
        return logps, ref_logps

    def loss(self, work: Work) -> torch.Tensor:
        """Minus the objective, summed over the batch's rows, with the graph of the last pass. All passes before it go
        through `work.backward` here, so that one graph is alive at a time."""
        rows = rows_with_learning_signal(work.batch) if work.is_known else list(range(len(work.batch["lengths"])))
        own_kl_is_enough = work.is_known or self.settings.kl_form == "per_token"
        passes = list(self._cut(work.batch, rows, whole_groups=not own_kl_is_enough))
        total = torch.zeros((), device=work.batch["completion_ids"].device)
        count = self.equalize(len(passes))
        for number, chosen in enumerate([*([None] * (count - len(passes))), *passes], 1):
            part = self._empty_pass(work) if chosen is None else self._pass_loss(work, chosen)
            if number < count and part.requires_grad:
                work.backward(part)
                part = part.detach()
            total = total + part
        return total if total.requires_grad or not torch.is_grad_enabled() else total.requires_grad_()

    def _pass_loss(self, work: Work, rows: list[int]) -> torch.Tensor:
        """The loss of some rows from one scoring pass with its graph; advantages that are open are made on the way."""
        groups, flat = make_groups(work.batch, rows), FlatRows(work.batch, rows)
        reference = None if work.is_known else self.reference(work.model, groups)  # before the graph takes its memory
        scores = self.score(work.model, groups)
        if work.is_known:
            advantages = work.batch["advantages"]
            advantages = self.for_ratio(advantages[flat.rows], flat) if advantages.dim() == 1 else flat.read(advantages)
        else:
            kl = self.keep_kl(work, flat, scores.logps, reference)
            advantages = self._advantages(work.batch, flat, kl)
        return self.objective(work, flat, scores.logps, advantages, scores.entropies).sum()

    def _empty_pass(self, work: Work) -> torch.Tensor:
        """A loss of 0 with a graph, computed as the other processes compute theirs."""
        groups = make_groups(work.batch, [0])
        if not work.is_known:
            self.reference(work.model, groups)
        return self.score(work.model, groups).logps.sum() * 0.0

    def _fill_up(self, passes: list[list[int]]) -> list[list[int]]:
        """The passes, the last one repeated until there are as many as all processes make."""
        return passes + passes[-1:] * (self.equalize(len(passes)) - len(passes))

    def keep_kl(self, work: Work, flat: FlatRows, logps: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
        """log-ratio of policy and reference at each token, (N,), 0 where masked; the log reads it from the batch."""
        kl = torch.zeros_like(logps) if reference is None else logps.detach() - reference
        kl = kl.where(flat.read(work.batch["loss_mask"]).bool(), 0.0)
        flat.write(work.batch["per_token_kl"], kl)
        work.found.is_finite &= all_finite(kl)
        return kl

    def _advantages(self, batch: Batch, flat: FlatRows, kl: torch.Tensor) -> torch.Tensor:
        """(R,) for rows that are whole groups; (N,) where the penalty is paid token by token."""
        penalty = kl_penalty_rows(kl, flat.read(batch["loss_mask"]), flat.lengths, self.settings.kl_form)
        if self.settings.kl_form != "per_token":
            advantages = self.baselined(batch["scores"][flat.rows] - self.settings.beta * penalty)
            return self.for_ratio(zero_unscored(advantages), flat)
        task = self.baselined(batch["scores"])[flat.rows]
        return zero_unscored(spread(task, flat.lengths) - self.settings.beta * penalty)

    def for_ratio(self, advantages: torch.Tensor, flat: FlatRows) -> torch.Tensor:
        """(R,) as the objective takes them: for each token where each has its own ratio."""
        return spread(advantages, flat.lengths) if self.settings.objective.ratio_form == "per_token" else advantages

    def baselined(self, rewards: torch.Tensor) -> torch.Tensor:
        """Rewards of whole groups less their baseline, (R,); NaN where there is none."""
        return baseline_advantages(rewards, self.settings.num_generations, self.settings.baseline)

    def objective(
        self,
        work: Work,
        flat: FlatRows,
        logps: torch.Tensor,
        advantages: torch.Tensor,
        entropies: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Minus each row's objective, (R,), with its graph; what there is to know about it goes into `work.found`."""
        batch, found, mask = work.batch, work.found, flat.read(work.batch["loss_mask"])
        now = logps.detach()
        old = flat.read(batch["old_per_token_logps"]) if "old_per_token_logps" in batch else now
        sampled = flat.read(batch["sampler_logps"]) if "sampler_logps" in batch else None
        weights = None if sampled is None else self._correction(old, sampled, mask, flat, found)
        loss = policy_loss(logps, old, flat.lengths, mask, advantages, self.settings.objective, weights)
        found.is_finite &= all_finite(now, mask=mask)
        if entropies is not None:
            found.entropy += torch.stack([(entropies * mask).sum(), mask.sum().float()])
        for name in RATIO_STATISTICS:
            values = getattr(loss, name)
            if not loss.is_per_row:
                values = sum_rows(values * mask, flat.lengths) / sum_rows(mask.float(), flat.lengths).clamp(min=1)
            getattr(found, name)[flat.rows] = values.float()
        return loss.per_row

    def _correction(
        self, old: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, flat: FlatRows, found: RowStatistics
    ) -> torch.Tensor | None:
        """Truncated importance weights, (N,), where they are asked for; the gap to the sampler goes into the log."""
        known = mask.bool() & ~sampled.isnan()
        gap = (old - sampled).abs().where(known, 0.0)
        found.gap[:2] += torch.stack([gap.sum(), known.sum().float()])
        found.gap[2] = torch.maximum(found.gap[2], gap.max() if len(gap) else found.gap[2])
        form = self.settings.sampler_correction
        if form == "none":
            return None
        weights = truncated_weights(old, sampled, mask, flat.lengths, form, self.settings.sampler_correction_cap)
        found.weight += torch.stack([(weights * mask).sum(), mask.sum().float()])
        return weights

    def _cut(self, batch: Batch, rows: Iterable[int], whole_groups: bool) -> Iterator[list[int]]:
        """Rows of the passes: groups, in parts where they may be cut, up to `tokens_per_pass` tokens."""
        if self.settings.memory == "low" and not whole_groups:
            yield from ([row] for row in rows)
            return
        chosen: list[int] = []
        for part in group_rows(batch, rows):
            stays_whole = whole_groups or self._tokens(batch, part) <= self.settings.tokens_per_pass
            for unit in [part] if stays_whole else [[row] for row in part]:
                if chosen and self._tokens(batch, chosen + unit) > self.settings.tokens_per_pass:
                    yield chosen
                    chosen = []
                chosen = chosen + unit
        if chosen:
            yield chosen

    def _tokens(self, batch: Batch, rows: list[int]) -> int:
        return self.tokens(make_groups(batch, rows))


def group_rows(batch: Batch, rows: Iterable[int]) -> Iterator[list[int]]:
    """Neighbouring rows of one group, together."""
    part: list[int] = []
    for row in rows:
        if part and batch["group"][row] != batch["group"][part[-1]]:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def make_groups(batch: Batch, rows: list[int]) -> list[Group]:
    """The rows as prompts with their completions, without padding, in the order of the rows."""
    groups = []
    for part in group_rows(batch, rows):
        prompt = batch["prompt_ids"][part[0], -batch["prompt_lengths"][part[0]] :]
        groups.append(Group(prompt, [batch["completion_ids"][row, : batch["lengths"][row]] for row in part]))
    return groups


def rows_with_learning_signal(batch: Batch) -> list[int]:
    """Rows that can move the policy: an advantage that is not 0 and a token that is not masked."""
    advantages, mask = batch["advantages"], batch["loss_mask"].bool()
    per_token = advantages if advantages.dim() == 2 else advantages[:, None]
    return ((per_token != 0) & mask).any(dim=1).nonzero().flatten().tolist()


def take_rows(batch: Batch, rows: list[int]) -> Batch:
    """The batch of some of its rows."""
    at = torch.tensor(rows, device=batch["completion_ids"].device)
    taken = {}
    for name, value in batch.items():
        taken[name] = value[at] if isinstance(value, torch.Tensor) else [value[row] for row in rows]
    return taken
