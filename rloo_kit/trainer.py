"""The patched RLOO loop: a subclass of whatever `trl.RLOOTrainer` is once Unsloth has had its turn.

A step reads top to bottom in `_generate_and_score_completions` (rollout, rewards, KL, advantages) and `_compute_loss`.
What differs from TRL 1.15, and why:

- log-probabilities come from `logprobs.py`: no Triton, no left padding, no [tokens, vocabulary];
- an on-policy step compares the policy with itself under stop-gradient, so its ratio is exactly 1 and nothing is
  clipped by numeric drift; TRL's extra pass is made only where the KL penalty needs it;
- a reward that fails is named and its samples are not scored; too many failures stop the run with its state saved;
- `missing_eos_penalty`, `normalize_rewards`, `kl_form` and `reference` are options of the loop (`rloo_config.py`);
- an adapter that is still the identity is its own reference, so TRL's second copy of it is dropped.

Left out: images, mixture-of-experts auxiliary losses, packing. `tests/contracts/test_upstream.py` fingerprints the
methods that this class stands in for.

Shapes: B completions of this process, A of all processes, P prompt, C completion tokens, F reward functions.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rloo_kit._stack import load_stack
from rloo_kit.errors import ConfigError, DataError, RewardError

load_stack()

import torch
import trl
from accelerate.utils import gather, gather_object, is_peft_model
from transformers import TrainerCallback
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad, use_adapter

from rloo_kit.adapters import is_identity, restore_precision, trainable_tensors, wrap_for_unsloth
from rloo_kit.advantages import (
    combine_rewards,
    kl_penalty,
    leave_one_out,
    standardize,
    unscore_non_finite,
    zero_unscored,
)
from rloo_kit.backends import keep_settings
from rloo_kit.callbacks import use_text_progress
from rloo_kit.logprobs import attach_token_scoring, completion_scores
from rloo_kit.loop_metrics import (
    GenerationBatch,
    loss_metrics,
    rollout_metrics,
    rollout_rows,
    sample_statistics,
)
from rloo_kit.reward_failures import FailureWatch
from rloo_kit.reward_guard import guard
from rloo_kit.rloo_config import RLOOConfig, prepare_old_dataset, translate_trainer_arguments
from rloo_kit.saves import saving
from rloo_kit.tokens import bind_think_tags

# TRL's arguments behind eval_dataset, in its order, for code that gives them by position
FURTHER_ARGUMENTS = (
    "processing_class", "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config",
)  # fmt: skip


class RLOOTrainer(trl.RLOOTrainer):
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
    """

    def __init__(
        self, model=None, reward_funcs=None, args=None, train_dataset=None, eval_dataset=None, *more, **keywords
    ):
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
        masters = trainable_tensors(arguments.get("model"))
        with keep_settings(arguments.get("args"), arguments.get("processing_class")):
            super().__init__(**arguments)
        if self.aux_loss_enabled:
            raise ConfigError("mixture-of-experts auxiliary losses are not scored here: set router_aux_loss_coef=0.0")
        restore_precision(self.model, masters)
        self._drop_redundant_reference()
        attach_token_scoring(self._causal_model(self.model), self.temperature)
        if self.ref_model is not None:
            attach_token_scoring(self._causal_model(self.ref_model), self.temperature)
        self.think_tags = bind_think_tags(self._tokenizer)
        self.rollout_listeners: list[Callable[[list[dict[str, Any]]], None]] = []
        self._train_sampler: Any = None
        self._failures = FailureWatch(self._option("max_reward_failure_share"), self._option("reward_failure_steps"))
        self._episodes = 0
        self._started_at: float | None = None
        self.add_callback(_AlignMicroSteps(self))
        use_text_progress(self)

    # ------------------------------------------------------------------------------------------------ set-up

    def _option(self, name: str) -> Any:
        """An option of the kit's config; its default where `args` is TRL's own config."""
        return getattr(self.args, name, RLOOConfig.__dataclass_fields__[name].default)

    def _causal_model(self, model: torch.nn.Module) -> torch.nn.Module:
        unwrapped = self.accelerator.unwrap_model(model)
        return unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped

    def _drop_redundant_reference(self) -> None:
        """TRL copies every adapter as "ref"; one that is the identity, or not wanted, is only memory and time."""
        model = self.accelerator.unwrap_model(self.model)
        if not is_peft_model(model) or "ref" not in model.peft_config:
            return
        if self._option("reference") == "base" or is_identity(model):
            model.delete_adapter("ref")

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the adapter and its reference as they were.

        transformers loads the adapters in a checkpoint's subfolders or the one beside them, not both; and a run that
        is resumed in the process it was cut in has a trained adapter, which TRL has just copied as the reference.
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        policy = self.accelerator.unwrap_model(self.model)
        if not is_peft_model(policy):
            return
        if os.path.isdir(os.path.join(resume_from_checkpoint, "ref")):
            policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)
            policy.set_adapter("default")
        elif "ref" in policy.peft_config:
            policy.delete_adapter("ref")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with saving(os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")):
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's; whoever ends the process waits for it (`rloo_kit.saves`)."""
        with saving(output_dir or self.args.output_dir):
            super().save_model(output_dir, _internal_call)

    @property
    def _on_policy(self) -> bool:
        """Whether every completion is used before the weights that sampled it change."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    # ------------------------------------------------------------------------------------------------ a step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Rollout, rewards, KL and advantages of one generation batch, as tensors for `_compute_loss`."""
        if any(column in inputs[0] for column in ("image", "images")):
            raise DataError("the data set has an image column; the kit trains text models only: drop the column")
        self._started_at = self._started_at or time.monotonic()
        prompts = [row["prompt"] for row in inputs]
        prompt_ids, completion_ids, completions = self._generate(prompts)
        batch = self._tensors(prompt_ids, completion_ids)
        rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids)  # (A, F)
        logps, ref_logps = self._rollout_logps(batch)
        per_token_kl = None if ref_logps is None else (logps - ref_logps) * batch["completion_mask"]  # (B, C)
        outcome = self._judge(rewards_per_func, per_token_kl, batch)
        batch["advantages"] = self._local_advantages(outcome["advantages"], per_token_kl, batch)
        if not self._on_policy:
            batch["old_per_token_logps"] = logps
        everyones = outcome | {"advantages": zero_unscored(outcome["advantages"])}
        self._record_rollout(
            GenerationBatch(
                inputs, prompts, completions, completion_ids, batch, rewards_per_func, per_token_kl, **everyones
            )
        )
        return batch

    def _tensors(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> dict[str, torch.Tensor]:
        """Padded as TRL does (prompts left, completions right), so its buffering and splitting apply."""
        pad_id = self._tokenizer.pad_token_id
        batch = {}
        for name, rows, side in (("prompt", prompt_ids, "left"), ("completion", completion_ids, "right")):
            tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
            masks = [torch.ones_like(row) for row in tensors]
            batch[f"{name}_ids"] = pad(tensors, padding_value=pad_id, padding_side=side)
            batch[f"{name}_mask"] = pad(masks, padding_value=0, padding_side=side)
        ended = [*self.eos_token_ids, pad_id]
        batch["truncated"] = torch.tensor([not row or row[-1] not in ended for row in completion_ids])
        batch = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
        keep = ~batch["truncated"] if self.mask_truncated_completions else torch.ones_like(batch["truncated"])
        batch["loss_mask"] = batch["completion_mask"] * keep[:, None]  # (B, C)
        return batch

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """TRL's rewards (A, F); a sample for which any reward failed is NaN throughout, so it is not scored."""
        with _mute("All reward functions returned None", super()._calculate_rewards.__module__):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        flags = [guarded.failed for guarded in self.reward_funcs if hasattr(guarded, "failed")]
        local = torch.tensor([any(row) for row in zip(*flags, strict=True)] if flags else [False] * len(prompts))
        failed = gather(local.to(rewards.device)) | rewards.isinf().any(dim=1)  # (A,)
        self._watch_failures(failed)
        return rewards.masked_fill(failed[:, None], torch.nan)

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
            f"mend the reward and resume. A failure: {' | '.join(messages)}"
        )

    def _rollout_logps(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Log-probabilities under the sampling policy and the reference, (B, C); None where nothing needs them."""
        if self._on_policy and self.beta == 0.0:
            return None, None
        batch_size = (
            self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        )
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logps, _ = self._score(self.model, batch, batch_size)
            if self.beta == 0.0:
                return logps, None
            if self.ref_model is not None:
                return logps, self._score(self.ref_model, batch, batch_size)[0]
            policy = self.accelerator.unwrap_model(self.model)
            with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
                return logps, self._score(self.model, batch, batch_size)[0]

    def _score(self, model, batch: dict[str, torch.Tensor], batch_size: int | None):
        """Log-probabilities and entropies of the batch's completions under `model`, (B, C) each."""
        prompts = [ids[mask.bool()] for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
        completions = [
            ids[mask.bool()] for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        ]
        with self.accelerator.autocast():
            width = batch["completion_ids"].size(1)
            return completion_scores(model, prompts, completions, width, self._tokenizer.pad_token_id, batch_size)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **_unused
    ):
        """TRL's interface to the scoring above: (B, P + C) in, log-probabilities and entropies (B, C) out."""
        batch = {}
        for name, part in (("prompt", slice(None, -logits_to_keep)), ("completion", slice(-logits_to_keep, None))):
            batch[f"{name}_ids"] = input_ids[:, part]
            batch[f"{name}_mask"] = attention_mask[:, part]
        logps, entropies = self._score(model, batch, batch_size)
        return logps, entropies if compute_entropy else None, None

    def _judge(self, rewards_per_func, per_token_kl, batch) -> dict[str, torch.Tensor]:
        """Scores, rewards after the KL penalty, and advantages of all completions, (A,) each; NaN where unscored."""
        raw_scores = scores = combine_rewards(rewards_per_func, self.reward_weights.to(rewards_per_func.device))
        penalty = self._option("missing_eos_penalty")
        if penalty is not None:
            scores = scores - penalty * gather(batch["truncated"]).float()
        if self._option("normalize_rewards"):
            scores = standardize(scores, eps=1e-8)
        if self.reward_clip_range:
            scores = scores.clamp(*self.reward_clip_range)
        rewards = scores
        if per_token_kl is not None and self._option("kl_form") != "per_token":
            kl = kl_penalty(per_token_kl, batch["loss_mask"], self._option("kl_form"))
            rewards = unscore_non_finite(scores - self.beta * gather(kl))
        if self._group_size > 1:
            advantages = leave_one_out(rewards, self._group_size)
        else:  # evaluation with a single generation: there is no baseline
            advantages = torch.full_like(rewards, torch.nan)
        if self.normalize_advantages:
            advantages = standardize(advantages, eps=1e-4)
        return {"raw_scores": raw_scores, "scores": scores, "rewards": rewards, "advantages": advantages}

    def _local_advantages(self, advantages, per_token_kl, batch) -> torch.Tensor:
        """This process's advantages, (B,), 0 where unscored; (B, C) when the KL penalty is paid token by token."""
        mine = advantages[self._local_rows(len(batch["truncated"]))]
        if per_token_kl is None or self._option("kl_form") != "per_token":
            return zero_unscored(mine)
        to_go = kl_penalty(per_token_kl, batch["loss_mask"], "per_token")
        return zero_unscored(unscore_non_finite(mine[:, None] - self.beta * to_go))

    def _local_rows(self, rows: int) -> slice:
        first = self.accelerator.process_index * rows
        return slice(first, first + rows)

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _compute_loss(self, model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Clipped policy-gradient loss, a mean over completions.

        The ratio is that of the whole completion; with advantages per token, (B, C), it is each token's.
        """
        logps, entropies = self._score(model, inputs, batch_size=None)  # (B, C)
        mask, advantages = inputs["loss_mask"], inputs["advantages"]
        old_logps = inputs.get("old_per_token_logps", logps.detach())
        log_ratio = (logps - old_logps) * mask  # differences token by token: sums of long sequences lose digits
        if advantages.dim() == 1:
            log_ratio = log_ratio.sum(dim=1)  # (B,)
        ratio = torch.exp(log_ratio)
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        objective = torch.min(ratio * advantages, clipped * advantages)
        if advantages.dim() == 2:
            objective = (objective * mask).sum(dim=1)
        self._record_loss(ratio.detach(), advantages, entropies.detach(), inputs)
        return -objective.mean()

    # ------------------------------------------------------------------------------------------------ what is logged

    def _record_rollout(self, rollout: GenerationBatch) -> None:
        """Metrics, TRL's table of completions, and the rows for the listeners."""
        mode = "train" if self.model.training else "eval"
        names = self.reward_func_names
        statistics = sample_statistics(rollout.tensors, self.think_tags, self.eos_token_ids, rollout.per_token_kl)
        gathered = gather(statistics)  # (A, columns)
        for name, value in rollout_metrics(rollout, gathered, names, self._group_size, self.beta).items():
            self._metrics[mode][name].append(value)
        self._log_completions(rollout, mode)
        if mode == "train":
            self._episodes += len(gathered)
            if self.rollout_listeners:
                first = self._local_rows(len(rollout.prompts)).start
                rows = rollout_rows(rollout, statistics, names, first, self.state.global_step)
                for listener in self.rollout_listeners:
                    listener(rows)

    def _log_completions(self, rollout: GenerationBatch, mode: str) -> None:
        """Fill TRL's table of completions and flush what rewards logged themselves, in one order on all processes."""
        self._logs["prompt"].extend(gather_object(rollout.prompts))
        self._logs["completion"].extend(gather_object(rollout.completions))
        for index, name in enumerate(self.reward_func_names):
            self._logs["rewards"][name].extend(rollout.rewards_per_func[:, index].tolist())
        self._logs["advantages"].extend(rollout.advantages.tolist())
        for column in sorted(set(gather_object(list(self._pending_extra_logs)))):
            self._logs["extra"][column].extend(
                gather_object(self._pending_extra_logs.get(column, [None] * len(rollout.prompts)))
            )
        self._pending_extra_logs.clear()
        for name in sorted(set(gather_object(list(self._pending_metrics)))):
            values = gather_object(self._pending_metrics.get(name, []))
            self._metrics[mode][name].append(sum(values) / len(values))
        self._pending_metrics.clear()

    def _record_loss(self, ratio, advantages, entropies, inputs) -> None:
        mode = "train" if self.model.training else "eval"
        limits = (1 - self.epsilon_low, 1 + self.epsilon_high)
        for name, value in loss_metrics(self.accelerator, ratio, advantages, entropies, inputs, limits).items():
            self._metrics[mode][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training and self._started_at is not None and self._metrics["train"]:
            elapsed = max(time.monotonic() - self._started_at, 1e-9)
            self._metrics["train"]["eps"] = [self._episodes / elapsed]
        super().log(logs, start_time)


class _AlignMicroSteps(TrainerCallback):
    """TRL counts micro-steps from 0 in every process, and its sampler draws the first pass's order anew; a resumed run
    has to go on with both where they were."""

    def __init__(self, trainer: RLOOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._step = state.global_step * args.gradient_accumulation_steps
        sampler = self.trainer._train_sampler
        if sampler is not None and sampler.shuffle:
            for _ in range(int(state.epoch or 0)):  # passes that are over
                torch.randperm(sampler.num_samples, generator=sampler.generator)


@contextmanager
def _mute(beginning: str, logger_name: str) -> Iterator[None]:
    """Drop TRL's warning about unscored samples: it prints a whole completion each rollout.

    `rewards/unscored_ratio` counts them, failures have a line of their own, and the health rules say the rest.
    """
    logger = logging.getLogger(logger_name)

    def keep(record: logging.LogRecord) -> bool:
        return beginning not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


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
