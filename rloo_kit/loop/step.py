"""One optimizer step of RLOO, top to bottom, without TRL.

    sample -> reward -> replace tied groups -> lay out -> score -> advantages -> loss, pass by pass -> record

`trainer` calls it: `roll_out` for prompts, `loss` for the gradient of rows that were rolled out, `close` before the
optimizer's step. Sampler, rewarder, scorer and recorder are attributes; they exchange the types of `records`.

On-policy, the policy is scored once, with its graph: the log-ratio to the policy that sampled is 0, its gradient is
not. A batch is open until its advantages are settled: at once, or with a KL penalty and `memory: fast` by `loss`.

Shapes: B completions of this process, A of all processes, K a group, R of a pass, N their tokens end to end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from rloo_kit.gradient.advantages import AdvantageSettings, make_advantages
from rloo_kit.gradient.objective import Objective, all_finite, correction_weights, policy_loss
from rloo_kit.gradient.scorer import PolicyScorer, Scores
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
    sampler_correction: str


@dataclass(eq=False)
class RLOOStep:
    """The step, with its collaborators.

    Attributes:
        broken: what was NaN or infinite in this step; None if nothing. skipped: counts the steps dropped for it.
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

    def roll_out(self, model: Module, rows: list[dict[str, Any]], leave_open: bool = False) -> RolloutBatch:
        """Sample completions of B rows of the dataset, each prompt K times, with their rewards and advantages.

        The policy's mode says if this is training. `leave_open`: KL and advantages may wait for the passes of `loss`,
        see `StepSettings.scores_first`."""
        self.recorder.begin()
        judged = self.sample(rows)
        if model.training and self.reservoir is not None:
            rounds = self.settings.resample_rounds, self.settings.num_generations
            judged, replaced = replace_tied_groups(judged, self.sample, self.reservoir, *rounds, self.parallel)
            self.recorder.count("rollout/resampled_groups", replaced)
        failed_share = judged.failed.any(dim=1).float().mean().item()
        self.recorder.count("rewards/failed_ratio", failed_share)
        if model.training:
            self.rewarder.watch(failed_share, judged.failures)
            if self.sampler.tools is not None:
                self.sampler.watch(judged.completions)
        batch = self.lay_out(judged, model.training)
        if leave_open and model.training and self.settings.advantage.beta and self.settings.scores_first is None:
            return batch  # the passes that train score the policy, and so settle it
        with self.recorder.timed("gradient"):
            self.score(model, batch)
        self.settle(batch)
        return batch

    def sample(self, rows: list[dict[str, Any]]) -> Judged:
        """Sample a completion for each row and score it."""
        before = self.sampler.engine.token_steps
        with self.recorder.timed("rollout"):
            completions = self.sampler.sample(rows)
        self.recorder.sampled(completions, self.sampler.engine.token_steps - before)
        with self.recorder.timed("reward"):
            return self.rewarder.reward(completions)

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
        logps = [completion.logps for completion in completions if completion.logps is not None]
        return RolloutBatch(
            judged=judged,
            group_size=self.settings.num_generations if training else self.settings.num_generations_eval,
            first=self.parallel.rows(len(masks)).start,
            prompts=ragged([completion.prompt_ids for completion in completions], torch.long),
            completions=ragged([completion.ids for completion in completions], torch.long),
            mask=ragged(masks, torch.bool),
            scores=self.rewarder.normalize(judged.scores),
            on_policy=self.settings.on_policy or not training,
            sampler_logps=ragged(logps, torch.float32) if len(logps) == len(masks) else None,
        )

    def score(self, model: Module, batch: RolloutBatch) -> None:
        """Log-probabilities of the policy before it moves, and the KL of the whole batch, without a graph."""
        if batch.on_policy and not self.settings.advantage.beta:  # then neither is read
            return
        self.scorer.choose_layout(batch.groups(range(len(batch))))
        with torch.no_grad():
            for rows in self._cut_without_graph(batch, range(len(batch))):
                groups = batch.groups(rows)
                logps = self.scorer.score(model, groups, need_entropy=False).logps
                put(batch.old_logps, rows, logps)
                batch.put_kl(rows, logps, self.scorer.reference(model, groups))
        if model.training:
            self._expect_finite("the KL", all_finite(*batch.kl))

    def settle(self, batch: RolloutBatch) -> None:
        """Compute the advantages of the whole batch and record the rollout, so the log has what is trained."""
        kl, mask, lengths, settings = pick(batch.kl), pick(batch.mask), batch.lengths, self.settings.advantage
        gather, mine = self.parallel.gather, self.parallel.rows(len(batch))
        batch.advantages = make_advantages(batch.scores, kl, mask, lengths, batch.group_size, settings, gather, mine)
        batch.is_open = False
        self.recorder.rollout(batch)

    # ------------------------------------------------------------------------------------------------ the gradient

    def loss(
        self, model: Module, batch: RolloutBatch, rows: list[int], backward: Backward, micro_steps: float = 1
    ) -> torch.Tensor:
        """The negative objective, summed over the rows, ascending, with the graph of the last pass.

        All of the batch's rows if it is open. Earlier passes go through `backward` here, so that only one graph is
        alive at a time. `micro_steps`: how many the rows represent."""
        self.scorer.choose_layout(batch.groups(range(len(batch))))  # one layout for all steps of the batch
        stats = StepStats(len(batch), rows, self._weigh(batch, rows), self.parallel.accelerator.device)
        limit = 0 if self.settings.memory == "low" else self.settings.tokens_per_pass  # 0: one sequence
        if batch.is_open:  # an advantage needs its siblings' KL, which the same pass computes
            run_pass, passes = self._open_pass, batch.passes(rows, self.scorer.tokens, limit, whole_groups=True)
        elif self.settings.aux_loss_coef:  # a micro-step's experts are balanced over all of its rows
            size = max(1, round(len(rows) / micro_steps))
            run_pass, passes = self._settled_pass, [rows[first : first + size] for first in range(0, len(rows), size)]
        else:
            run_pass, passes = self._settled_pass, self._cut(batch, batch.with_signal(rows), limit)
        count = self.parallel.equalize(len(passes))  # with sharded weights, all processes run equally many
        passes = [[]] * (count - len(passes)) + passes
        for number, chosen in enumerate(passes, 1):
            part = run_pass(model, batch, chosen, stats)
            if number < count and part.requires_grad:
                backward(part)
                part = part.detach()
            stats.loss = stats.loss + part
        if batch.is_open:
            self.settle(batch)
        if not self.parallel.any(count > 0):
            self._observe(model, batch, stats)
        if model.training:  # an evaluation affects no step
            self._expect_finite("the log-probabilities or the KL", stats.is_finite)
        self.recorder.step(stats, batch.on_policy)
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

    def _cut(self, batch: RolloutBatch, rows: Sequence[int], limit: int) -> list[list[int]]:
        """The rows of each pass, up to `limit` tokens; padded ones by length, so that a pass needs little padding."""
        if self.scorer.layout == "padded":
            rows = sorted(rows, key=lambda row: len(batch.prompts[row]) + len(batch.completions[row]))
        return batch.passes(rows, self.scorer.tokens, limit, whole_groups=False)

    def _cut_without_graph(self, batch: RolloutBatch, rows: Sequence[int]) -> list[list[int]]:
        """The rows of each pass without a graph; with `memory: low`, up to the tokens of the longest sequence. With
        sharded weights the last pass is repeated until all processes have equally many."""
        limit = self.settings.tokens_per_pass
        if self.settings.memory == "low":
            limit = max(self.scorer.tokens(batch.groups([row])) for row in rows)
        passes = self._cut(batch, rows, limit)
        return passes + passes[-1:] * (self.parallel.equalize(len(passes)) - len(passes))

    def _open_pass(self, model: Module, batch: RolloutBatch, rows: list[int], stats: StepStats) -> torch.Tensor:
        """The loss of whole groups: KL, advantages and gradient come from one scoring of the policy."""
        groups = batch.groups(rows or [0])
        reference = self.scorer.reference(model, groups)  # before the graph takes its memory
        scores = self.scorer.score(model, groups)
        if not rows:  # a loss of 0 with a graph, computed like the other processes' passes
            return scores.logps.sum() * 0.0
        batch.put_kl(rows, scores.logps.detach(), reference)
        kl, mask, lengths = pick(batch.kl, rows), pick(batch.mask, rows), [len(batch.mask[row]) for row in rows]
        stats.is_finite &= all_finite(kl)
        own = batch.scores[[batch.first + row for row in rows]]
        made = make_advantages(own, kl, mask, lengths, batch.group_size, self.settings.advantage)
        advantages = made.of(range(len(rows)), by_token=self.settings.objective.ratio_form == "per_token")
        return self._add_loss(batch, rows, scores, advantages, stats)

    def _settled_pass(self, model: Module, batch: RolloutBatch, rows: list[int], stats: StepStats) -> torch.Tensor:
        """The loss of some rows, with the advantages of the whole rollout."""
        balanced = pick(batch.mask, rows) if rows and self.settings.aux_loss_coef else None
        scores = self.scorer.score(model, batch.groups(rows or [0]), balanced=balanced)
        if not rows:
            return scores.logps.sum() * 0.0
        advantages = batch.advantages.of(rows, by_token=self.settings.objective.ratio_form == "per_token")
        return self._add_loss(batch, rows, scores, advantages, stats)

    def _add_loss(
        self, batch: RolloutBatch, rows: list[int], scores: Scores, advantages: torch.Tensor, stats: StepStats
    ) -> torch.Tensor:
        """The loss of rows that a pass has scored, with its statistics."""
        mask, lengths = pick(batch.mask, rows), [len(batch.mask[row]) for row in rows]
        # On-policy the ratio is exactly 1: the rounding of a separate pass could reach the clip.
        old = scores.logps.detach() if batch.on_policy else pick(batch.old_logps, rows)
        weights = self._correct(batch, rows, old, mask, stats)
        parts = policy_loss(scores.logps, old, lengths, mask, advantages, self.settings.objective, weights)
        stats.add(rows, mask, scores, old, parts)
        stats.add_entropy(rows, lengths, mask, scores)
        policy = parts.per_row.sum() * stats.row_weight
        stats.policy_loss += policy.detach()
        if scores.aux_loss is None:
            return policy
        stats.aux_loss += torch.stack([scores.aux_loss.detach(), torch.ones_like(scores.aux_loss)])
        return policy + self.settings.aux_loss_coef * scores.aux_loss * len(rows)

    def _correct(
        self, batch: RolloutBatch, rows: list[int], old: torch.Tensor, mask: torch.Tensor, stats: StepStats
    ) -> torch.Tensor | None:
        """Importance weights of the trainer over the sampler, (N,), or None if not enabled; records the gap."""
        if batch.sampler_logps is None:
            return None
        sampled = pick(batch.sampler_logps, rows)
        stats.add_gap(old, sampled, mask)
        form = self.settings.sampler_correction
        if form == "none":
            return None
        lengths = [len(batch.mask[row]) for row in rows]
        weights = correction_weights(old, sampled, mask, lengths, form)
        stats.weight += torch.stack([(weights * mask).sum(), mask.sum().float()])
        return weights

    def _observe(self, model: Module, batch: RolloutBatch, stats: StepStats) -> None:
        """Record entropy (it shows a collapsed policy) and sampler gap of a step without a learning signal."""
        with torch.no_grad():
            for rows in self._cut_without_graph(batch, stats.rows):
                lengths, mask = [len(batch.mask[row]) for row in rows], pick(batch.mask, rows)
                scores = self.scorer.score(model, batch.groups(rows))
                stats.add_entropy(rows, lengths, mask, scores)
                if batch.sampler_logps is not None:
                    stats.add_gap(scores.logps, pick(batch.sampler_logps, rows), mask)

    # ------------------------------------------------------------------------------------------------ its end

    def _expect_finite(self, what: str, is_finite: bool) -> None:
        """A step with a NaN or an infinity is broken: `close` drops it, and says where the last one was found."""
        if not is_finite:
            self.broken = what

    def close(self, parameters: list[torch.nn.Parameter], number: int) -> None:
        """Before the optimizer's step: drop the gradients of a step with a NaN or an infinity, and count it.

        A step without a learning signal has gradients of 0, not none, as in TRL: Adam's momentum still moves. `number`:
        of the optimizer step, from 1."""
        gradients = local_parts([parameter.grad for parameter in parameters if parameter.grad is not None])
        scales_itself = self.parallel.accelerator.scaler is not None  # float16: the scaler skips steps itself
        if self.broken is None and gradients and not scales_itself:
            self._expect_finite("the gradient", all_finite(*torch._foreach_norm(gradients)))
        reason = (self.broken or "another process") if self.parallel.any(self.broken is not None) else None
        if self.skipped.add(reason):
            how_often = f"{self.skipped.in_a_row} in a row; {self.skipped.patience} stop the run"
            say(f"WARNING: step {number} is skipped: NaN or infinity in {reason} ({how_often})")
        self.broken = None
        for parameter in parameters:
            if reason is not None:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.recorder.count("steps/skipped", self.skipped.total)
