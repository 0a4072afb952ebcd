"""One optimizer step of RLOO, top to bottom, without TRL.

    sample -> judge -> replace tied groups -> lay out -> score -> advantages -> loss, pass by pass -> record

`trainer` calls it: `roll_out` for prompts, `loss` for the gradient of rows that were rolled out, `close` before the
optimizer's step. Sampler, rewarder, scorer and recorder are attributes; they exchange the types of `records`.

On-policy, the policy is scored once, with its graph: the log-ratio to the policy that sampled is 0, its gradient is
not. With a KL penalty the advantages come from the same pass (`memory: fast`). In all other cases scoring comes first.

Shapes: B completions of this process, A of all processes, K a group, R of a pass, N their tokens end to end.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rloo_kit.gradient.advantages import AdvantageSettings, make_advantages
from rloo_kit.gradient.objective import Objective, all_finite, correction_weights, policy_loss, spread
from rloo_kit.gradient.scorer import PolicyScorer
from rloo_kit.loop.collaborators import FailureCount, PromptReservoir, Rewarder, Sampler, replace_tied_groups
from rloo_kit.loop.metrics import Recorder
from rloo_kit.loop.records import Judged, RolloutBatch, StepStats, pick, put
from rloo_kit.models.parallel import Parallel, local_parts
from rloo_kit.rollout.types import Filters
from rloo_kit.system.processes import say

Backward = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class StepSettings:
    """The options that the step reads, under their names in `RLOOConfig`, and what follows from them.

    Attributes:
        num_generations, num_generations_eval: K, in training and in evaluation.
        on_policy: every completion is used before the weights that sampled it change.
        scores_first: why advantages cannot come from the training pass, one line; None if they can.
        aux_loss_coef: weight of a mixture of experts' auxiliary loss; 0 for none.
        filters: of the sampled distribution.
    """

    num_generations: int
    num_generations_eval: int
    on_policy: bool
    scores_first: str | None
    advantage: AdvantageSettings
    objective: Objective
    memory: str
    tokens_per_pass: int
    resample_rounds: int
    aux_loss_coef: float
    filters: Filters
    mask_truncated_completions: bool
    baseline_includes_masked: bool
    sampler_correction: str
    sampler_correction_floor: float
    sampler_correction_cap: float


@dataclass(eq=False)
class RLOOStep:
    """The step, with its collaborators.

    Attributes:
        broken: what was NaN or infinite in this step. skipped: counts the steps that were dropped for it.
    """

    settings: StepSettings
    sampler: Sampler
    rewarder: Rewarder
    scorer: PolicyScorer
    recorder: Recorder
    parallel: Parallel
    skipped: FailureCount
    reservoir: PromptReservoir | None = None
    broken: str | None = None

    # ------------------------------------------------------------------------------------------------ the rollout

    def roll_out(self, model: torch.nn.Module, rows: list[dict[str, Any]], leave_open: bool = False) -> RolloutBatch:
        """Sample completions of B rows of the dataset, each prompt K times, with their rewards and advantages.

        The policy's mode says if this is training. `leave_open`: KL and advantages may wait for the pass that scores
        the policy, see `StepSettings.scores_first`."""
        self.recorder.begin()
        judged = self.judge(rows)
        if model.training and self.reservoir is not None:
            rounds = self.settings.resample_rounds, self.settings.num_generations
            judged, replaced = replace_tied_groups(judged, self.judge, self.reservoir, *rounds, self.parallel)
            self.recorder.count("rollout/resampled_groups", replaced)
        failed_share = judged.failed.any(dim=1).float().mean().item()
        self.recorder.count("rewards/failed_ratio", failed_share)
        if model.training:
            self.rewarder.watch(failed_share, judged.failures)
            if self.sampler.tools is not None:
                self.sampler.watch(judged.completions)
        batch = self.lay_out(judged, model.training)
        if leave_open and model.training and self.settings.advantage.beta and self.settings.scores_first is None:
            batch.kl = batch.zeros()
            return batch
        with self.recorder.timed("gradient"):
            self.score(model, batch)
        self.settle(batch)
        return batch

    def judge(self, rows: list[dict[str, Any]]) -> Judged:
        """Sample a completion for each row and score it."""
        before = self.sampler.engine.token_steps
        with self.recorder.timed("rollout"):
            completions = self.sampler.sample(rows)
        self.recorder.sampled(completions, self.sampler.engine.token_steps - before)
        with self.recorder.timed("reward"):
            return self.rewarder.judge(completions)

    def lay_out(self, judged: Judged, training: bool) -> RolloutBatch:
        """Token ids and masks on the device, and the scores to compare."""
        completions, device = judged.completions, self.parallel.accelerator.device

        def ragged(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> list[torch.Tensor]:
            flat = torch.tensor([value for row in rows for value in row], dtype=dtype)
            return list(flat.to(device).split([len(row) for row in rows]))

        masks = []
        for completion in completions:
            is_trained = completion.ended or not self.settings.mask_truncated_completions
            mask = [is_trained] * len(completion.ids)
            for start, end in (*completion.forced, *completion.context):
                mask[start:end] = [False] * (end - start)
            masks.append(mask)
        scores = self.rewarder.normalize(judged.scores, training)
        if not self.settings.baseline_includes_masked:
            is_masked = torch.tensor([not any(mask) for mask in masks], device=device)
            scores = scores.masked_fill(self.parallel.gather(is_masked), torch.nan)
        logps = [completion.logps for completion in completions if completion.logps is not None]
        return RolloutBatch(
            judged=judged,
            group_size=self.settings.num_generations if training else self.settings.num_generations_eval,
            first=self.parallel.rows(len(masks)).start,
            prompts=ragged([completion.prompt_ids for completion in completions], torch.long),
            completions=ragged([completion.ids for completion in completions], torch.long),
            mask=ragged(masks, torch.bool),
            scores=scores,
            sampler_logps=ragged(logps, torch.float32) if len(logps) == len(masks) else None,
        )

    def score(self, model: torch.nn.Module, batch: RolloutBatch) -> None:
        """Log-probabilities under the policy and, with a KL penalty, the reference, without a graph, if needed."""
        stale = model.training and not self.settings.on_policy
        beta = self.settings.advantage.beta
        if not stale and not beta:
            return
        self.scorer.choose_layout(batch.groups(range(len(batch))))
        batch.old_logps, batch.kl = batch.zeros(), batch.zeros()
        with torch.no_grad():
            for rows in self._cut_without_graph(batch, range(len(batch))):
                groups = batch.groups(rows)
                logps = self.scorer.score(model, groups, need_entropy=False).logps
                put(batch.old_logps, rows, logps)
                put(batch.kl, rows, self._log_ratio(batch, rows, logps, self.scorer.reference(model, groups)))
        if model.training and not all_finite(*batch.kl):
            self.broken = "the KL"
        batch.old_logps = batch.old_logps if stale else None
        batch.kl = batch.kl if beta else None

    def settle(self, batch: RolloutBatch) -> None:
        """Compute the advantages of the whole batch and record the rollout, so the log has what is trained."""
        kl = None if batch.kl is None else pick(batch.kl)
        together = (self.parallel.gather, self.parallel.rows(len(batch)))
        settings = self.settings.advantage
        batch.advantages = make_advantages(
            batch.scores, kl, pick(batch.mask), batch.lengths, batch.group_size, settings, *together
        )
        self.recorder.rollout(batch)

    # ------------------------------------------------------------------------------------------------ the gradient

    def loss(
        self, model: torch.nn.Module, batch: RolloutBatch, rows: list[int], backward: Backward, micro_steps: float = 1
    ) -> torch.Tensor:
        """The negative objective, summed over the rows, ascending, with the graph of the last pass.

        All of the batch's rows if its advantages are open. Earlier passes go through `backward` here, so that only one
        graph is alive at a time. `micro_steps`: how many the rows represent."""
        self.scorer.choose_layout(batch.groups(range(len(batch))))  # one layout for all steps of the batch
        is_open = batch.advantages is None
        weight = self._weigh(batch, rows)
        stats = StepStats(len(batch), rows, self.parallel.accelerator.device)
        if self.settings.aux_loss_coef:  # a micro-step's experts are balanced over all of its rows
            size = max(1, round(len(rows) / micro_steps))
            passes = [rows[first : first + size] for first in range(0, len(rows), size)]
        else:
            passes = self.cut(batch, rows if is_open else batch.with_signal(rows), whole_groups=is_open)
        count = self.parallel.equalize(len(passes))  # with sharded weights, all processes run equally many
        for number, chosen in enumerate([*[[]] * (count - len(passes)), *passes], 1):
            part = self._pass(model, batch, chosen, stats, weight) if chosen else self._empty_pass(model, batch)
            if number < count and part.requires_grad:
                backward(part)
                part = part.detach()
            stats.loss = stats.loss + part
        if is_open:
            self.settle(batch)
        if not self.parallel.any(count > 0):
            self._observe(model, batch, stats)
        if model.training and not stats.is_finite:  # an evaluation affects no step
            self.broken = "the log-probabilities or the KL"
        self.recorder.step(stats, on_policy=self.settings.on_policy or not model.training)
        return stats.loss if stats.loss.requires_grad or not torch.is_grad_enabled() else stats.loss.requires_grad_()

    def _weigh(self, batch: RolloutBatch, rows: list[int]) -> float:
        """The factor of a row's loss that turns the mean over rows into one over the trained tokens of all processes.

        1 unless `token_mean: batch`. Every row of the step counts, including rows without a signal."""
        if self.settings.objective.token_mean != "batch":
            return 1.0
        tokens = pick(batch.mask, rows).sum()
        every = self.parallel.gather(torch.stack([torch.full_like(tokens, len(rows)), tokens])[None])  # (processes, 2)
        completions, tokens_of_all = every.sum(dim=0).tolist()
        return completions / max(tokens_of_all, 1)

    def cut(self, batch: RolloutBatch, rows: Iterable[int], whole_groups: bool) -> list[list[int]]:
        """The rows of each pass with a gradient: up to `tokens_per_pass` tokens; one sequence with `memory: low`."""
        limit = 0 if self.settings.memory == "low" else self.settings.tokens_per_pass
        return batch.passes(rows if whole_groups else self._sort(batch, rows), self.scorer.tokens, limit, whole_groups)

    def _sort(self, batch: RolloutBatch, rows: Iterable[int]) -> Iterable[int]:
        """Padded rows by length, so that those of a pass need little padding; others as they are."""
        if self.scorer.layout != "padded":
            return rows
        return sorted(rows, key=lambda row: len(batch.prompts[row]) + len(batch.completions[row]))

    def _cut_without_graph(self, batch: RolloutBatch, rows: Sequence[int]) -> list[list[int]]:
        """The rows of each pass without a graph; with `memory: low`, up to the tokens of the longest sequence. With
        sharded weights the last pass is repeated until all processes have equally many."""
        limit = self.settings.tokens_per_pass
        if self.settings.memory == "low":
            limit = max(self.scorer.tokens(batch.groups([row])) for row in rows)
        passes = batch.passes(self._sort(batch, rows), self.scorer.tokens, limit, whole_groups=False)
        return passes + passes[-1:] * (self.parallel.equalize(len(passes)) - len(passes))

    def _pass(
        self, model: torch.nn.Module, batch: RolloutBatch, rows: list[int], stats: StepStats, weight: float
    ) -> torch.Tensor:
        """The loss of some rows times their weight, from one scoring pass with its graph.

        Open advantages are computed from the same pass."""
        lengths, mask, groups = [len(batch.mask[row]) for row in rows], pick(batch.mask, rows), batch.groups(rows)
        if batch.advantages is None:
            reference = self.scorer.reference(model, groups)  # before the graph takes its memory
            scores = self.scorer.score(model, groups)
            kl = self._log_ratio(batch, rows, scores.logps.detach(), reference)
            assert batch.kl is not None
            put(batch.kl, rows, kl)
            stats.is_finite &= all_finite(kl)
            own = batch.scores[[batch.first + row for row in rows]]
            made = make_advantages(own, kl, mask, lengths, batch.group_size, self.settings.advantage)
            advantages, per_token = made.trained, made.per_token
        else:
            scores = self.scorer.score(model, groups, balanced=mask if self.settings.aux_loss_coef else None)
            advantages, per_token = batch.advantages.of(rows), batch.advantages.per_token
        if self.settings.objective.ratio_form == "per_token" and not per_token:
            advantages = spread(advantages, lengths)
        old = scores.logps.detach() if batch.old_logps is None else pick(batch.old_logps, rows)
        weights = self._correct(batch, rows, old, mask, stats)
        parts = policy_loss(scores.logps, old, lengths, mask, advantages, self.settings.objective, weights)
        stats.add(rows, mask, scores, old, parts)
        stats.add_entropy(rows, lengths, mask, scores)
        policy = parts.per_row.sum() * weight
        stats.policy_loss += policy.detach()
        if scores.aux_loss is None:
            return policy
        stats.aux_loss += torch.stack([scores.aux_loss.detach(), torch.ones_like(scores.aux_loss)])
        return policy + self.settings.aux_loss_coef * scores.aux_loss * len(rows)

    def _empty_pass(self, model: torch.nn.Module, batch: RolloutBatch) -> torch.Tensor:
        """A loss of 0 with a graph, computed like the other processes' losses."""
        groups = batch.groups([0])
        if batch.advantages is None:
            self.scorer.reference(model, groups)
        return self.scorer.score(model, groups).logps.sum() * 0.0

    def _log_ratio(
        self, batch: RolloutBatch, rows: list[int], logps: torch.Tensor, reference: torch.Tensor | None
    ) -> torch.Tensor:
        """Log-ratio of policy and reference at each token, (N,), 0 if masked or if the two are the same."""
        ratio = torch.zeros_like(logps) if reference is None else logps - reference
        return ratio.where(pick(batch.mask, rows), 0.0)

    def _correct(
        self, batch: RolloutBatch, rows: list[int], old: torch.Tensor, mask: torch.Tensor, stats: StepStats
    ) -> torch.Tensor | None:
        """Importance weights of the trainer over the sampler, (N,), or None if not enabled; records the gap."""
        if batch.sampler_logps is None:
            return None
        sampled = pick(batch.sampler_logps, rows)
        stats.add_gap(old, sampled, mask)
        settings = self.settings
        if settings.sampler_correction == "none":
            return None
        lengths = [len(batch.mask[row]) for row in rows]
        band = settings.sampler_correction_floor, settings.sampler_correction_cap
        weights = correction_weights(old, sampled, mask, lengths, settings.sampler_correction, *band)
        stats.weight += torch.stack([(weights * mask).sum(), mask.sum().float()])
        return weights

    def _observe(self, model: torch.nn.Module, batch: RolloutBatch, stats: StepStats) -> None:
        """Record entropy (it shows a collapsed policy) and sampler gap of a step without a learning signal."""
        with torch.no_grad():
            for rows in self._cut_without_graph(batch, stats.rows):
                lengths, mask = [len(batch.mask[row]) for row in rows], pick(batch.mask, rows)
                scores = self.scorer.score(model, batch.groups(rows))
                stats.add_entropy(rows, lengths, mask, scores)
                if batch.sampler_logps is not None:
                    stats.add_gap(scores.logps, pick(batch.sampler_logps, rows), mask)

    # ------------------------------------------------------------------------------------------------ its end

    def close(self, parameters: list[torch.nn.Parameter], number: int) -> None:
        """Before the optimizer's step: drop the gradients of a step with a NaN or an infinity, and count it.

        A step without a learning signal has gradients of 0, not none, as in TRL: Adam's momentum still moves. `number`:
        of the optimizer step, from 1."""
        gradients = local_parts([parameter.grad for parameter in parameters if parameter.grad is not None])
        scales_itself = self.parallel.accelerator.scaler is not None  # float16: the scaler skips steps itself
        if gradients and not scales_itself and not all_finite(*torch._foreach_norm(gradients)):
            self.broken = self.broken or "the gradient"
        is_broken = self.parallel.any(self.broken is not None)
        reason = (self.broken or "another process") if is_broken else None
        if self.skipped.add(reason):
            how_often = f"{self.skipped.in_a_row} in a row; {self.skipped.patience} stop the run"
            say(f"WARNING: step {number} is skipped: NaN or infinity in {reason} ({how_often})")
        self.broken = None
        for parameter in parameters:
            if is_broken:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.recorder.count("steps/skipped", self.skipped.total)
