"""`rloo.memory: low` with a KL penalty: the exact gradient of a group while one sequence's graph is alive at a time.

    A_i = A^R_i - beta (own kl_i - others (kl_1 + ... + kl_K)),    kl of a sequence, on-policy, not normalised

with own = K/(K-1) and others = 1/(K-1) for leave-one-out, K and the sum over the scored siblings. Each sequence adds
its gradient times the known part of A_i; the plain sum of the gradients follows times beta x others x the sum of the
KL.
"""

import torch

from rloo_kit.gradient.advantages import affine_kl, kl_penalty_rows, zero_unscored
from rloo_kit.gradient.passes import FlatRows, PolicyPass, Work, group_rows, make_groups

Gradients = list[torch.Tensor | None]


class StreamedPass(PolicyPass):
    """`PolicyPass` whose open advantages are settled group by group, one sequence at a time."""

    def loss(self, work: Work) -> torch.Tensor:
        """As `PolicyPass.loss`; where advantages are open, all gradients are in place already when it returns."""
        if work.is_known or self.settings.kl_form == "per_token" or not torch.is_grad_enabled():
            return super().loss(work)
        total = sum(self._group_loss(work, rows) for rows in group_rows(work.batch, range(len(work.batch["lengths"]))))
        return torch.tensor(float(total), device=work.batch["completion_ids"].device, requires_grad=True)

    def _group_loss(self, work: Work, rows: list[int]) -> float:
        """Leave the group's gradient in `.grad`; the value of its loss."""
        scores = work.batch["scores"][rows]
        task = zero_unscored(self.baselined(scores)).tolist()
        scored = ~scores.isnan()
        own, others = affine_kl(self.settings.baseline, scored, self.settings.num_generations)
        beta = self.settings.beta
        parameters = [parameter for parameter in work.model.parameters() if parameter.requires_grad]
        together: Gradients = [None] * len(parameters)
        known_part = bases = kl_sum = 0.0
        for row, reward, moves in zip(rows, task, (scored & (own > 0)).tolist(), strict=True):
            with torch.set_grad_enabled(moves):
                base, kl = self._unit_loss(work, row)
            if not moves:
                continue
            held = _take(parameters)
            work.backward(base)
            gradients = _take(parameters)
            factor = reward - beta * own * kl
            _put(parameters, _add(held, gradients, factor))
            together = _add(together, gradients, 1.0)
            known_part, bases, kl_sum = known_part + factor * base.item(), bases + base.item(), kl_sum + kl
        _put(parameters, _add(_take(parameters), together, beta * others * kl_sum))
        return known_part + beta * others * kl_sum * bases

    def _unit_loss(self, work: Work, row: int) -> tuple[torch.Tensor, float]:
        """Minus the objective of a sequence at advantage 1, with its graph, and its KL in the form of the run."""
        groups, flat = make_groups(work.batch, [row]), FlatRows(work.batch, [row])
        reference = self.reference(work.model, groups)
        scores = self.score(work.model, groups)
        kl = self.keep_kl(work, flat, scores.logps, reference)
        mask = flat.read(work.batch["loss_mask"])
        penalty = kl_penalty_rows(kl, mask, flat.lengths, self.settings.kl_form)
        one = self.for_ratio(torch.ones(1, device=kl.device), flat)
        return self.objective(work, flat, scores.logps, one, scores.entropies).sum(), penalty.item()


def _take(parameters: list[torch.nn.Parameter]) -> Gradients:
    gradients: Gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _put(parameters: list[torch.nn.Parameter], gradients: Gradients) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _add(sums: Gradients, gradients: Gradients, factor: float) -> Gradients:
    """sums + factor x gradients; `sums` is changed in place where it is there."""
    result: Gradients = []
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is None:
            result.append(total)
        else:
            result.append(gradient * factor if total is None else total.add_(gradient, alpha=factor))
    return result
