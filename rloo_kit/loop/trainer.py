"""The patched RLOO loop: a subclass of whatever `trl.RLOOTrainer` is once Unsloth has been imported.

A rollout is sampled and judged in `_roll_out`; its gradient is made in `_compute_loss`, for all rows of an optimizer
step together at the step's last micro-step. `tests/contracts/test_upstream.py` fingerprints what it replaces.

Shapes: B completions of this process, A of all processes, P prompt, C completion tokens, F reward functions.
"""

import math
import time
from typing import Any

import torch
import trl
from accelerate.utils import gather
from transformers import TrainerCallback

from rloo_kit.errors import ConfigError
from rloo_kit.gradient.advantages import (
    RunningMoments,
    baseline_advantages,
    find_moments,
    kl_charge,
    kl_penalty,
    merge_moments,
    normalize_by,
    standardize,
    unscore_non_finite,
    zero_unscored,
)
from rloo_kit.gradient.objective import all_finite
from rloo_kit.gradient.passes import RowStatistics, Work, take_rows
from rloo_kit.loop.callbacks import use_text_progress
from rloo_kit.loop.metrics import TrainerLog
from rloo_kit.loop.old_trainer import prepare_old_dataset, translate_trainer_arguments
from rloo_kit.loop.options import RLOOConfig, refuse_sampling_filters
from rloo_kit.loop.step import Sampled, TrainerRollout
from rloo_kit.loop.trainer_setup import TrainerFiles, TrainerSetup, backend_name
from rloo_kit.models.adapters import check_reference, restore_precision, trainable_tensors, wrap_for_unsloth
from rloo_kit.models.parallel import Parallel, local_tensor
from rloo_kit.models.policy import keep_settings
from rloo_kit.models.transformers import keep_4bit_weights
from rloo_kit.rewarding.guard import guard
from rloo_kit.rollout.engine import choose_engine
from rloo_kit.runs.watch import FailureWatch, FiniteWatch
from rloo_kit.think_tags import bind_think_tags

# TRL's arguments behind eval_dataset, in its order, for code that gives them by position
FURTHER_ARGUMENTS = (
    "processing_class", "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config",
)  # fmt: skip

# Every attribute of a library's class, module or model that the kit replaces, by the place that does it, with the
# reason; tests/contracts/test_patched_attributes.py holds the list whole. Settings that a library documents as such
# (`padding_side`, `requires_grad`, `should_save`, ...) are no patches.
PATCHED_ATTRIBUTES = {
    "embedded/cold_start.py: full.generation_config._from_model_config": "else loading drops the second end token",
    "gradient/logprobs.py: model.forward": "one model instance takes calls for scores; others pass through unchanged",
    "gradient/logprobs.py: head.forward": "for one call: the head scores states where it would make all logits",
    "gradient/packing.py: AttentionInterface.register": "transformers' registry: attention that takes a packing plan",
    "gradient/packing.py: AttentionMaskInterface.register": "transformers' registry: the mask of that attention",
    "gradient/scorer.py: setattr(module, name)": "for the self-check: no dropout, no gradient checkpointing",
    "loop/step.py: generation.generate": "for one rollout: keeps vLLM's log-probabilities, which TRL's RLOO drops",
    "loop/step.py: logger.addFilter": "for one call: TRL would print a whole completion for each unscored sample",
    "loop/trainer.py: self.trainer._step": "TRL counts micro-steps from 0 in every process, also in a resumed run",
    "loop/trainer_setup.py: generation.logprobs": "vLLM returns the log-probability of the sampled token",
    "loop/trainer_setup.py: setattr(module, name)": "dropout that attentions keep as a number, which TRL leaves on",
    "models/transformers.py: module.support_avx512bf16_for_cpu": "else bitsandbytes changes 4-bit weights in eval mode",
    "models/unsloth.py: model.get_base_model().model._unsloth_keep_padding_mask": "else training ignores padding",
    "system/console.py: sys.modules[_NOTEBOOK_BARS]": "text bars in notebooks (TQDM_NOTEBOOK=false)",
    "system/processes.py: logger.addFilter": "one message for the run in place of one a process",
}


class RLOOTrainer(TrainerRollout, TrainerSetup, TrainerFiles, TrainerLog, trl.RLOOTrainer):
    """Drop-in for `trl.RLOOTrainer`: the same arguments, and the keywords of TRL's older trainer with a warning.

    Args:
        model: a causal language model, a PeftModel, or the name or folder of a checkpoint.
        reward_funcs: one reward or a list; each is called as
            `reward(prompts, completions, completion_ids, **columns) -> list[float | None]`.
        args: an `RLOOConfig` of the kit, or TRL's own (the kit's options then have their defaults).
        train_dataset: a `datasets.Dataset` with a column `prompt`.

    Attributes:
        rollout_listeners: called once a generation batch with one dict for each completion of this process.

    Raises:
        ConfigError: an argument has no meaning today, or names something that the loop does not do.
        RewardError: from `train()`, when rewards failed for more than `max_reward_failure_share` of the samples in
            `reward_failure_steps` generation batches in a row; a checkpoint is saved first.
        NonFiniteError: from `train()`, when `max_skipped_steps` steps in a row had to be skipped because of a NaN or
            an infinity; a checkpoint is saved first.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *more: Any,
        **keywords: Any,
    ) -> None:
        named = {"model": model, "reward_funcs": reward_funcs, "args": args}
        named |= {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        named |= dict(zip(FURTHER_ARGUMENTS[: len(more)], more, strict=True))
        given = {name: value for name, value in named.items() if value is not None}
        arguments = translate_trainer_arguments(given | keywords)
        rewards = arguments.get("reward_funcs")
        rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
        arguments["args"] = _with_reward_weights(arguments.get("args") or _default_config(arguments["model"]), rewards)
        arguments["reward_funcs"] = [guard(reward) for reward in rewards]
        for name in ("train_dataset", "eval_dataset"):
            if arguments.get(name) is not None:
                arguments[name] = prepare_old_dataset(arguments[name], arguments.get("processing_class"))
        arguments = wrap_for_unsloth(arguments)
        check_reference(arguments)
        if getattr(arguments["args"], "rollout_engine", "auto") == "vllm":
            choose_engine("vllm", backend_name(), arguments.get("model"))  # names what to install before TRL looks
            arguments["args"].use_vllm = True
            if url := getattr(arguments["args"], "rollout_server_url", None):
                arguments["args"].vllm_mode, arguments["args"].vllm_server_base_url = "server", url
        masters = trainable_tensors(arguments.get("model"))
        with keep_settings(arguments.get("args"), arguments.get("processing_class")):
            super().__init__(**arguments)
        if self.aux_loss_enabled:
            raise ConfigError("mixture-of-experts auxiliary losses are not scored here: set router_aux_loss_coef=0.0")
        refuse_sampling_filters(self.args)
        restore_precision(self.model, masters)
        keep_4bit_weights(self.model)
        self._drop_redundant_reference()
        self.think_tags = bind_think_tags(self._tokenizer)
        self.rollout_listeners = []
        self._train_sampler = None
        self._failures = FailureWatch(self._option("max_reward_failure_share"), self._option("reward_failure_steps"))
        self._finite = FiniteWatch(self._option("max_skipped_steps"))
        self._running = RunningMoments()
        self._reservoir = self._build_reservoir()
        self._lengths = {}
        self._episodes, self._started_at = 0, None
        self._window, self._order, self._due = None, [], []
        self._may_be_reference, self._broken = True, None
        self._parallel = Parallel(self.accelerator)
        self._build_passes()
        self._build_engine()
        self.add_callback(_LoopCallback(self))
        use_text_progress(self)
        if self.accelerator.is_main_process:
            print(self.describe(), flush=True)

    # ------------------------------------------------------------------------------------------------ a step

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Sample at a window's first micro-step; hand out the rows of an optimizer step at its last one, else nothing.
        TRL hands out one micro-batch at a time; here the gradient of all rows is made at once."""
        if not self.model.training:
            return self._roll_out(generation_batch)
        passes = self.args.steps_per_generation
        place = self._step % (passes * self.num_iterations)
        if place == 0 or self._window is None:  # None: resumed inside a window
            is_open = self._why_not_open() is None and self.beta != 0.0
            self._window = self._roll_out(generation_batch, leave_open=is_open)
            self._order = self._shuffle_rows(len(generation_batch))
        micro = place % passes
        size = self.args.per_device_train_batch_size
        self._due += self._order[micro * size : (micro + 1) * size]
        if not self.accelerator.sync_gradients and micro + 1 < passes:
            return {}
        rows, self._due = sorted(self._due), []
        whole = len(rows) == len(self._window["lengths"])
        batch = self._window if whole else take_rows(self._window, rows)
        return batch | {"micro_steps": len(rows) / size}

    def _shuffle_rows(self, rows: int) -> list[int]:
        """The order in which off-policy steps take the rows: random, by whole groups where they fit a step."""
        if self._on_policy:
            return list(range(rows))
        step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        unit = self.num_generations if step % self.num_generations == rows % self.num_generations == 0 else 1
        return [first * unit + row for first in torch.randperm(rows // unit).tolist() for row in range(unit)]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's interface: rollout, rewards, KL and advantages of one generation batch, for `_compute_loss`."""
        return self._roll_out(inputs)

    def _roll_out(self, inputs: list[dict[str, Any]], leave_open: bool = False) -> dict[str, Any]:
        """One rollout as tensors; with `leave_open`, KL and advantages wait for the pass that scores the policy."""
        self._started_at = self._started_at or time.monotonic()
        sampled = self._resample(self._sample(inputs))
        self._watch_failures(sampled.failed)
        batch = self._tensors(sampled)
        scores = self._normalized(sampled.scores)  # (A,)
        if not self._option("baseline_includes_masked"):
            masked = gather(batch["loss_mask"].sum(dim=1) == 0)
            scores = scores.masked_fill(masked, torch.nan)
        batch["scores"] = scores[self._local_rows(len(inputs))]
        if leave_open:
            batch["per_token_kl"] = torch.zeros(batch["completion_ids"].shape, device=self.accelerator.device)
            batch["record"] = (sampled, scores)
            return batch
        self._score_rollout(batch)
        self._settle(batch, sampled, scores)
        return batch

    def _score_rollout(self, batch: dict[str, Any]) -> None:
        """Log-probabilities under the sampling policy and the reference, (B, C), where something needs them."""
        stale = self.model.training and not self._on_policy
        if not stale and self.beta == 0.0:
            return
        logps, ref_logps = self._passes.score_all(self.model, batch)
        if stale:
            batch["old_per_token_logps"] = logps
        if ref_logps is not None:
            batch["per_token_kl"] = (logps - ref_logps).where(batch["loss_mask"].bool(), 0.0)
            if self.model.training and not all_finite(batch["per_token_kl"]):
                self._broken = "the KL"

    def _settle(self, batch: dict[str, Any], sampled: Sampled, scores: torch.Tensor) -> None:
        """Advantages of this process into the batch, (B,), or (B, C) with the penalty paid token by token; the log."""
        kl, form, mask = batch.get("per_token_kl"), self._option("kl_form"), batch["loss_mask"]
        by_token = kl is not None and form == "per_token"
        rewards = scores
        if kl is not None:
            charged = self.beta * gather(kl_charge(kl, mask, form))
            rewards = unscore_non_finite(scores - charged)  # the step is skipped; others may use the same rollout
        compared = scores.masked_fill(rewards.isnan(), torch.nan) if by_token else rewards
        if self._group_size > 1:
            advantages = baseline_advantages(compared, self._group_size, self._option("baseline"))  # (A,)
        else:  # evaluation with a single generation: there is no baseline
            advantages = torch.full_like(compared, torch.nan)
        mine = self._local_rows(len(batch["lengths"]))
        if by_token:
            local = (advantages[mine][:, None] - self.beta * kl_penalty(kl, mask, form)).where(mask.bool(), torch.nan)
            if self.normalize_advantages:  # the task's part alone would leave the penalty's scale as it is
                moments = merge_moments(gather(find_moments(local)[None].to(local.device)).cpu())
                local = normalize_by(local, moments, eps=1e-4)
        else:
            if self.normalize_advantages:
                advantages = standardize(advantages, eps=1e-4)
            local = advantages[mine]
        if "advantages" not in batch:
            batch["advantages"] = zero_unscored(local)
        self._record_rollout(sampled, batch, scores, rewards, zero_unscored(advantages))

    # ------------------------------------------------------------------------------------------------ the gradient

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Clipped policy-gradient loss, a mean over completions, times the micro-steps that it stands for.

        All passes but the last are backpropagated here; the value that is returned carries the last one's graph. An
        empty batch (a micro-step before the last one) is a loss of 0.
        """
        if not inputs:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        share = inputs.get("micro_steps", 1) / len(inputs["lengths"])

        def backward(loss: torch.Tensor) -> None:
            steps = getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
            self._parallel.backward(loss * share / steps)

        found = RowStatistics(len(inputs["lengths"]), self.accelerator.device)
        work = Work(self._parallel.model_of_passes(model), inputs, backward, found)
        loss = self._passes.loss(work) * share
        if self.model.training and not work.found.is_finite:  # an evaluation's concerns no step
            self._broken = "the log-probabilities or the KL"
        if "record" in inputs:
            sampled, scores = inputs["record"]
            self._settle(inputs, sampled, scores)
        self._record_loss(work.found)
        return loss

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """TRL's; after a step's last pass the gradients of all processes become one, before they are clipped."""
        loss = super().training_step(*arguments, **keywords)
        if self.accelerator.sync_gradients:
            self._parallel.average_gradients(self._trained_parameters())
        return loss

    def _trained_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _forget_window(self) -> None:
        """Nothing of a rollout that was in use when training was cut; its gradients go with transformers' own reset."""
        self._window, self._due, self._broken = None, [], None

    def _close_step(self) -> None:
        """Before the optimizer's step: drop the gradients of a step with a NaN or an infinity in it, and count it. A
        step without a learning signal has gradients of 0, not none, as in TRL: Adam's momentum still moves."""
        parameters = self._trained_parameters()
        gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        scales_itself = self.accelerator.scaler is not None  # float16: skips steps of its own, and goes on
        if gradients and not scales_itself and not all_finite(*torch._foreach_norm(gradients)):
            self._broken = self._broken or "the gradient"
        broken_here = torch.tensor([self._broken is not None], device=self.accelerator.device)
        is_broken = bool(gather(broken_here).any())
        self._finite.observe(self.state.global_step + 1, (self._broken or "another process") if is_broken else None)
        self._broken = None
        for parameter in parameters:
            if is_broken:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._metrics["train"]["steps/skipped"].append(float(self._finite.skipped))
        if self._finite.exceeded:
            self._save_checkpoint(self.model, trial=None)
            raise self._finite.make_error(self.args.output_dir)


class _LoopCallback(TrainerCallback):
    """What the loop does at points of transformers' training loop: TRL restarts its micro-steps and its sampler's order
    in every process, so a resumed run restores both and drops what the interrupted process left over."""

    def __init__(self, trainer: RLOOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_more: Any) -> None:
        self.trainer._forget_window()
        accumulation, steps = args.gradient_accumulation_steps, state.global_step
        pass_length = 0 if train_dataloader is None else len(train_dataloader)  # micro-steps; a stream has none
        steps_a_pass = max(math.ceil(pass_length / accumulation), 1)  # the last one may be of fewer micro-steps
        passes, rest = divmod(steps, steps_a_pass) if pass_length else (0, steps)
        self.trainer._step = passes * pass_length + rest * accumulation
        sampler = self.trainer._train_sampler
        if sampler is not None and sampler.shuffle:
            for _ in range(int(state.epoch or 0)):  # passes that are over
                torch.randperm(sampler.num_samples, generator=sampler.generator)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.trainer._close_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        close = getattr(self.trainer._engine, "close", None)
        if close is not None:  # a server gives the adapter up
            close()


def _default_config(model: Any) -> RLOOConfig:
    """What TRL makes where no `args` are given, as the kit's own: TRL's refuses to run without an accelerator."""
    name = model if isinstance(model, str) else model.config.name_or_path
    return RLOOConfig(output_dir=f"{name.rstrip('/').split('/')[-1]}-RLOO")


def _with_reward_weights(args: Any, rewards: list[Any]) -> Any:
    """Rewards that `build_rewards` made carry their weights; `reward_weights` of the config goes before them."""
    weights = [getattr(reward, "weight", 1.0) for reward in rewards]
    if args.reward_weights is None:
        args.reward_weights = [float(weight) if isinstance(weight, (int, float)) else 1.0 for weight in weights]
    return args
