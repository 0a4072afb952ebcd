"""The first half of a step: what is sampled for a batch of prompts, what it earns, and the tensors made of it.

A mixin of `RLOOTrainer`, because TRL's rewards, counters and vLLM path are methods of the trainer.

Shapes: B completions of this process, A of all processes, P prompt, C completion tokens, F reward functions.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from trl.trainer.utils import pad

from rloo_kit.errors import DataError, RewardError
from rloo_kit.gradient.advantages import combine_rewards, standardize
from rloo_kit.loop.resample import find_tied_groups, replace_tied_groups
from rloo_kit.loop.trainer_setup import TrainerParts
from rloo_kit.rollout.types import Rollout

# fields of `Sampled` with the rows of one process
OF_A_PROCESS = ("inputs", "prompts", "prompt_ids", "completion_ids", "completions", "truncated")


@dataclass
class Sampled:
    """Completions of some prompts and what they earned; the fields of this process have B entries.

    Attributes:
        inputs: the data set's rows. prompts: their prompts, as TRL has them.
        prompt_ids, completion_ids: without padding. completions: decoded.
        rollout: what the engine returned; None where TRL sampled.
        truncated: whether a completion was cut off.
        rewards_per_func: (A, F), NaN where a reward does not apply or any failed. failed: (A,) bool, any reward did.
        raw_scores: (A,), the weighted sum, NaN where a completion is not scored.
        scores: (A,), the same less the penalty for a missing end.
    """

    inputs: list[dict[str, Any]]
    prompts: list[Any]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    completions: list[Any]
    rollout: Rollout | None
    truncated: list[bool]
    rewards_per_func: torch.Tensor
    failed: torch.Tensor
    raw_scores: torch.Tensor
    scores: torch.Tensor

    @property
    def thinking_forced(self) -> list[bool]:
        """Whether the thinking of each completion was closed for it."""
        return [False] * len(self.inputs) if self.rollout is None else self.rollout.thinking_forced

    def of_all(self) -> "Sampled":
        """The same with the rows of all processes; called by all of them at once."""
        rows = {name: gather_object(getattr(self, name)) for name in OF_A_PROCESS}
        rollout = self.rollout
        if rollout is not None:
            logps = rollout.sampler_logps
            logps = None if logps is None else gather_object(logps)
            rollout = Rollout(gather_object(rollout.completion_ids), gather_object(rollout.forced), logps)
        return replace(self, **rows, rollout=rollout)

    def part(self, rows: slice) -> "Sampled":
        """The same with some of the rows; what is of all processes stays so."""
        rollout = self.rollout
        if rollout is not None:
            logps = None if rollout.sampler_logps is None else rollout.sampler_logps[rows]
            rollout = Rollout(rollout.completion_ids[rows], rollout.forced[rows], logps)
        return replace(self, **{name: getattr(self, name)[rows] for name in OF_A_PROCESS}, rollout=rollout)


class TrainerRollout(TrainerParts):
    """Sampling and scoring of `RLOOTrainer`."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any) -> Any:
        """Completions by the kit's engine, or by TRL's code (vLLM). Where not all rows fit at once, those of prompts
        that took long before start first: the tail gets shorter."""
        if not all(prompt_ids):
            raise DataError(f"prompt {prompt_ids.index([])} of a rollout has no tokens; there is nothing to continue")
        if self._engine is None:
            return self._generate_elsewhere(prompt_ids, images, multimodal_fields)
        waits = self._engine.rows is not None and self._engine.rows < len(prompt_ids)
        keys = [hash(tuple(ids)) for ids in prompt_ids]
        usual = sum(self._lengths.values()) / max(len(self._lengths), 1)
        expected = [self._lengths.get(key, usual) for key in keys] if waits else None
        is_here = self._engine.name != "server"  # which gets the adapter alone, and samples elsewhere
        with (
            self._parallel.whole_weights(self.model_wrapped) if is_here else nullcontext(),
            self.accelerator.autocast(),
        ):
            self._rollout = self._engine.sample(prompt_ids, self._limits, expected)
        for key, ids in zip(keys, self._rollout.completion_ids, strict=True):
            self._lengths[key] = (self._lengths.get(key, len(ids)) + len(ids)) / 2
        return self._rollout.completion_ids

    def _generate_elsewhere(self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any) -> list[list[int]]:
        """Completions by vLLM through TRL; its log-probabilities, which TRL drops, are kept where it returns them."""
        generation: Any = getattr(self, "vllm_generation", None)
        found_logps: list[Any] = []
        if not hasattr(generation, "logprobs"):
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields)
        plain = generation.generate

        def generate(*arguments: Any, **keywords: Any) -> Any:
            found = plain(*arguments, **keywords)
            found_logps.extend(found[2] or [])
            return found

        generation.generate = generate
        try:
            completion_ids = super()._generate_single_turn(prompt_ids, images, multimodal_fields)
        finally:
            generation.generate = plain
        if [len(row) for row in found_logps] == [len(ids) for ids in completion_ids]:
            logps = [[math.nan if token[0] is None else token[0] for token in row] for row in found_logps]
            self._rollout = Rollout(completion_ids, [None] * len(completion_ids), logps)
        return completion_ids

    def _sample(self, inputs: list[dict[str, Any]]) -> Sampled:
        """Completions of the prompts, their rewards and scores."""
        if any(column in inputs[0] for column in ("image", "images")):
            raise DataError("the data set has an image column; the kit trains text models only: drop the column")
        prompts = [row["prompt"] for row in inputs]
        self._rollout = None
        prompt_ids, completion_ids, completions = self._generate(prompts)
        rollout = self._rollout
        seen = inputs
        if self._limits.thinking_budget is not None:
            forced = [False] * len(inputs) if rollout is None else rollout.thinking_forced
            seen = [row | {"thinking_forced": flag} for row, flag in zip(inputs, forced, strict=True)]
        rewards_per_func = self._calculate_rewards(seen, prompts, completions, completion_ids)  # (A, F)
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        truncated = [not row or row[-1] not in ends for row in completion_ids]
        raw_scores = combine_rewards(rewards_per_func, self.reward_weights.to(rewards_per_func.device))
        scores, penalty = raw_scores, self._option("missing_eos_penalty")
        if penalty is not None:
            cut = torch.tensor(truncated, device=self.accelerator.device)
            scores = raw_scores - penalty * gather(cut).float()
        return Sampled(
            inputs, prompts, prompt_ids, completion_ids, completions, rollout, truncated,
            rewards_per_func, self._failed, raw_scores, scores,
        )  # fmt: skip

    def _resample(self, sampled: Sampled) -> Sampled:
        """Dynamic sampling: groups without a learning signal give way to groups of fresh prompts, for a few rounds."""
        rounds = self._option("resample_rounds") if self.model.training else 0
        replaced = 0
        for _ in range(rounds):
            tied = find_tied_groups(sampled.scores, self._group_size)
            inputs = self._draw_again(len(tied), sampled.prompts) if tied else []
            if not inputs:
                break
            everywhere, fresh = sampled.of_all(), self._sample(inputs).of_all()
            exchanged, groups = replace_tied_groups(everywhere, fresh, self._group_size)
            sampled = exchanged.part(self._local_rows(len(sampled.inputs)))
            replaced += len(groups)
        if rounds:
            self._metrics["train"]["rollout/resampled_groups"].append(float(replaced))
        return sampled

    def _draw_again(self, groups: int, prompts: list[Any]) -> list[dict[str, Any]]:
        """This process's rows of fresh prompts for so many groups of all: each draws the same, from the same seed, and
        takes its share. Each process gets equally many, or none does."""
        processes = self.accelerator.num_processes
        in_use = [{"prompt": prompt} for prompt in gather_object(prompts)]
        assert self._reservoir is not None  # there is one wherever there are rounds
        drawn = self._reservoir.draw(math.ceil(groups / processes) * processes, in_use)
        share = len(drawn) // processes
        first = self.accelerator.process_index * share
        return [row for row in drawn[first : first + share] for _ in range(self._group_size)]

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        """TRL's rewards (A, F); a sample for which any reward failed is NaN throughout, so it is not scored."""
        with _mute("All reward functions returned None", super()._calculate_rewards.__module__):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        flags = [guarded.failed for guarded in self.reward_funcs if hasattr(guarded, "failed")]
        local = torch.tensor([any(row) for row in zip(*flags, strict=True)] if flags else [False] * len(prompts))
        self._failed = gather(local.to(rewards.device)) | rewards.isinf().any(dim=1)  # (A,)
        return rewards.masked_fill(self._failed[:, None], torch.nan)

    def _watch_failures(self, failed: torch.Tensor) -> None:
        share = failed.float().mean().item()
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["rewards/failed_ratio"].append(share)
        if mode == "eval":
            return
        messages = [message for guarded in self.reward_funcs for message in getattr(guarded, "failures", [])[:1]]
        if failed.any() and not messages:
            messages = ["a reward model returned infinity, or a reward failed in another process"]
        self._failures.observe(share, messages)
        if not self._failures.exceeded:
            return
        self._save_checkpoint(self.model, trial=None)
        limit, steps = self._failures.limit, self._failures.patience
        raise RewardError(
            f"rewards failed for {share:.0%} of the samples, more than max_reward_failure_share = {limit:.0%} in "
            f"{steps} generation batches in a row, so training stopped. The state is saved in {self.args.output_dir}; "
            f"fix the reward and resume. A failure: {' | '.join(messages)}"
        )

    def _normalized(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (A,) after `normalize_rewards` and `reward_clip_range`."""
        form = self._option("normalize_rewards")
        if form == "running":
            if self.model.training:
                self._running.update(scores)
            scores = self._running.normalize(scores, eps=1e-8)
        elif form:
            scores = standardize(scores, eps=1e-8)
        return scores.clamp(*self.reward_clip_range) if self.reward_clip_range else scores

    def _tensors(self, sampled: Sampled) -> dict[str, Any]:
        """Prompts padded on the left and completions on the right, as TRL has them; lengths and groups as lists.
        `loss_mask` (B, C) leaves out forced tokens, and truncated completions by choice."""
        pad_id = self._tokenizer.pad_token_id
        batch: dict[str, Any] = {}
        parts = (("prompt", sampled.prompt_ids, "left"), ("completion", sampled.completion_ids, "right"))
        for name, rows, side in parts:
            tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
            masks = [torch.ones_like(row) for row in tensors]
            batch[f"{name}_ids"] = pad(tensors, padding_value=pad_id, padding_side=side)
            batch[f"{name}_mask"] = pad(masks, padding_value=0, padding_side=side)
        batch["truncated"] = torch.tensor(sampled.truncated)
        batch["thinking_forced"] = torch.tensor(sampled.thinking_forced)
        keep = ~batch["truncated"] if self.mask_truncated_completions else torch.ones_like(batch["truncated"])
        batch["loss_mask"] = batch["completion_mask"] * keep[:, None]  # (B, C)
        rollout = sampled.rollout
        if rollout is not None:
            for row, span in enumerate(rollout.forced):
                if span is not None:
                    batch["loss_mask"][row, slice(*span)] = 0
            if rollout.sampler_logps is not None:
                known = [torch.tensor(row, dtype=torch.float32) for row in rollout.sampler_logps]
                batch["sampler_logps"] = pad(known, padding_value=torch.nan, padding_side="right")
        batch = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
        batch["lengths"] = [len(row) for row in sampled.completion_ids]
        batch["prompt_lengths"] = [len(row) for row in sampled.prompt_ids]
        mine = self._local_rows(len(sampled.inputs))
        batch["group"] = [row // self._group_size for row in range(mine.start, mine.stop)]
        return batch


@contextmanager
def _mute(beginning: str, logger_name: str) -> Iterator[None]:
    """Drop TRL's warning about unscored samples, which prints a whole completion each rollout; `rewards/unscored_ratio`
    counts them, and failures have a line of their own."""
    logger = logging.getLogger(logger_name)

    def keep(record: logging.LogRecord) -> bool:
        return beginning not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
