"""The patched RLOO loop: a subclass of whatever `trl.RLOOTrainer` is once Unsloth has been imported.

It has the hooks that TRL calls; the step is in `step`, and `build` assembles it. `tests/contracts/test_upstream.py`
fingerprints the methods it replaces.
"""

import functools
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from accelerate.utils import is_peft_model
from transformers import TrainerCallback

from rloo_kit.config.checks import find_eval_problem
from rloo_kit.errors import ConfigError, NonFiniteError
from rloo_kit.gradient.packing import without_cudnn
from rloo_kit.loop.build import build_step, check_prompts, describe, refuse_idle
from rloo_kit.loop.options import FURTHER_ARGUMENTS, make_toolbox, name_settings, naming_settings, prepare_arguments
from rloo_kit.loop.progress_bar import use_text_progress
from rloo_kit.loop.records import RolloutBatch
from rloo_kit.loop.saving import LOOP_STATE, find_micro_step, save_checkpoint
from rloo_kit.loop.step import RLOOStep
from rloo_kit.models import adapters
from rloo_kit.models.backends import keep_settings
from rloo_kit.models.transformers import keep_4bit_weights
from rloo_kit.rewarding.guard import log_names
from rloo_kit.runs.files import read_object, saving
from rloo_kit.think_tags import ThinkTags, bind_think_tags


class RLOOTrainer(trl.RLOOTrainer):
    """Drop-in for `trl.RLOOTrainer`: the same arguments; keywords of TRL's older trainer work with a warning.

    Args:
        model: a causal language model, a PeftModel, or the name or folder of a checkpoint.
        reward_funcs: one reward or a list; each is called as
            `reward(prompts, completions, completion_ids, **columns) -> list[float | None]`, with the arguments that
            its signature accepts.
        args: the kit's `RLOOConfig`, or TRL's (the kit's options then have their defaults).
        train_dataset: a `datasets.Dataset` with a column `prompt`.
        tools, environment_factory: as in TRL's `GRPOTrainer`: functions that the model may call, and a class of
            environments. They run in this process; those of a `Toolbox`, as `tools`, in their own.

    Attributes:
        rloo: the step, with its collaborators: sampler, rewarder, scorer, recorder, parallel.
        think_tags: ids of the model's thinking tags.
        checkpoint_record: what the manifest of each checkpoint says about the run.

    Raises:
        ConfigError: an argument no longer has a meaning, or asks for something that the loop does not do.
        RewardError: a reward cannot be called; or, from `train()`, rewards failed too often.
        NonFiniteError: from `train()`, three steps in a row had a NaN or an infinity. Before this error
            and the one before it a checkpoint is saved.
    """

    rloo: RLOOStep
    think_tags: ThinkTags
    checkpoint_record: Mapping[str, Any] = {}
    _staging: Path | None = None  # where a checkpoint is being written

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *more: Any,
        tools: Any = None,
        environment_factory: Any = None,
        **keywords: Any,
    ) -> None:
        named = {"model": model, "reward_funcs": reward_funcs, "args": args}
        named |= {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        named |= dict(zip(FURTHER_ARGUMENTS[: len(more)], more, strict=True))
        toolbox = make_toolbox(tools, environment_factory, named)
        given = {name: value for name, value in named.items() if value is not None} | keywords
        arguments = prepare_arguments(given, toolbox)
        masters = adapters.trainable_tensors(arguments.get("model"))
        with keep_settings(arguments), adapters.keep_base(arguments["model"]):
            super().__init__(**arguments)
        adapters.restore_precision(self.model, masters)
        keep_4bit_weights(self.model)
        self.reward_func_names: list[str] = log_names(self.reward_func_names, self.reward_funcs)
        self.think_tags = bind_think_tags(self._tokenizer)
        with naming_settings(self.args):
            policy = self.accelerator.unwrap_model(self.model)
            adapters.settle_reference(policy, self.beta, self.args.reference)
            self.rloo = build_step(self, self.think_tags, toolbox)
        self._window: RolloutBatch | None = None  # the rollout in use
        self._order: list[int] = []  # in which its rows are taken
        self._due: list[int] = []  # rows whose gradient this step still has to compute
        self._gradient_at: float | None = None  # when the gradient of this step's last rollout was begun
        self._drawn: Any = None  # the sampler of the training prompts
        self._step_ends: list[tuple[Callable[..., Any], Any]] = []  # what the last step left: a setter, its argument
        self.add_callback(_LoopCallback(self))
        use_text_progress(self)
        if self.accelerator.is_main_process:
            print(self.describe(), flush=True)

    @property
    def rollout_listeners(self) -> list[Any]:
        """Called once per generation batch with one dict for each completion of this process."""
        return self.rloo.recorder.listeners

    def describe(self) -> str:
        """One line each for the engine, the scoring, the memory mode (each with its reason) and the processes."""
        return name_settings(describe(self), self.args)

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """TRL's."""
        with naming_settings(self.args):
            return super().train(*arguments, **keywords)

    # ------------------------------------------------------------------------------------------------ a step

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Sample at a window's first micro-step; return the rows of an optimizer step at its last one, else nothing.

        TRL returns one micro-batch at a time; here the gradient of all rows is computed at once."""
        if not self.model.training:
            return {"rollout": self.rloo.roll_out(self.model, generation_batch)}
        passes = self.args.steps_per_generation
        place = self._step % (passes * self.num_iterations)
        if place == 0 or self._window is None:  # None: resumed inside a window
            self._count_gradient()  # of a rollout before, in the same step
            self._window = self.rloo.roll_out(self.model, generation_batch, leave_open=True)
            self._order = self._shuffle_rows(len(generation_batch))
        micro = place % passes
        size = self.args.per_device_train_batch_size
        self._due += self._order[micro * size : (micro + 1) * size]
        if not self.accelerator.sync_gradients and micro + 1 < passes:
            return {}
        rows, self._due, self._gradient_at = sorted(self._due), [], time.monotonic()
        return {"rollout": self._window, "rows": rows, "micro_steps": len(rows) / size}

    def _count_gradient(self) -> None:
        """Count the seconds since a gradient was begun."""
        if self._gradient_at is not None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # it is still running
            self.rloo.recorder.seconds["gradient"] += time.monotonic() - self._gradient_at
            self._gradient_at = None

    def _shuffle_rows(self, rows: int) -> list[int]:
        """The order in which off-policy steps take the rows: random, by whole groups if they fit a step."""
        if self.rloo.settings.on_policy:
            return list(range(rows))
        step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        unit = self.num_generations if step % self.num_generations == rows % self.num_generations == 0 else 1
        return [first * unit + row for first in torch.randperm(rows // unit).tolist() for row in range(unit)]

    def _generate_single_turn(self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any) -> Any:
        """TRL's: the ids of the completions, from the engine; the last argument has the options of `Sampler.draw`."""
        return self.rloo.sampler.draw(prompt_ids, **multimodal_fields)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Clipped policy-gradient loss, a mean over completions, times the micro-steps that it represents.

        All passes but the last are backpropagated here; the returned value has the last one's graph. An empty batch (a
        micro-step before the last one) gives a loss of 0.
        """
        if not inputs:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        batch, parallel = inputs["rollout"], self.rloo.parallel
        rows = inputs.get("rows", list(range(len(batch))))
        micro_steps = inputs.get("micro_steps", 1)
        share = micro_steps / len(rows)

        def backward(loss: torch.Tensor) -> None:
            steps = getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
            self.accelerator.backward(loss * share / steps)

        return self.rloo.loss(parallel.model_of_passes(model), batch, rows, backward, micro_steps) * share

    @without_cudnn()  # the backward pass too: gradient checkpointing computes layers again there
    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """TRL's; after a step's last pass, gradients are averaged over processes, before clipping."""
        loss = super().training_step(*arguments, **keywords)
        if self.accelerator.sync_gradients:
            self.rloo.parallel.average_gradients(
                [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            )
        return loss

    def _close_step(self) -> None:
        """Before the optimizer's step; too many broken steps in a row end the run after a checkpoint."""
        skipped = self.rloo.skipped
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.rloo.close(trained, self.state.global_step + 1)
        if skipped.exceeded:
            self._save_checkpoint(self.model, trial=None)
            raise NonFiniteError(
                f"NaN or infinity in {skipped.reason}, {skipped.patience} steps in a row, so "
                f"training stopped; none of them moved a weight. The state is saved in {self.args.output_dir}. Lower "
                "learning_rate, raise beta, and prefer bf16 to fp16; then start from an earlier checkpoint"
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, with what the recorder adds."""
        super().log(self.rloo.recorder.log(logs), start_time)

    # ------------------------------------------------------------------------------------------------ the datasets

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """TRL's, which checks the batch size only if evaluations are part of training."""
        if problem := find_eval_problem(self.args.per_device_eval_batch_size, self.num_generations_eval):
            raise ConfigError(problem)
        return super().get_eval_dataloader(eval_dataset)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        check_prompts(self, len(self.train_dataset if dataset is None else dataset))
        self._drawn = super()._get_train_sampler(dataset)
        return self._drawn

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the adapter and its reference as they were.

        transformers loads the adapters in a checkpoint's subfolders or the one above them, not both. A run that is
        resumed in the process where it was interrupted has a trained adapter, which TRL has just copied as the
        reference.
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        loop = read_object(Path(resume_from_checkpoint) / LOOP_STATE)  # a checkpoint of TRL's trainer has none
        self.rloo.recorder.episodes = loop.get("episodes", 0)
        if self.rloo.reservoir is not None and loop.get("reservoir"):
            self.rloo.reservoir.load_state_dict(loop["reservoir"])
        policy = self.accelerator.unwrap_model(self.model)
        if not is_peft_model(policy):
            return
        if os.path.isdir(os.path.join(resume_from_checkpoint, "ref")):
            policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)
            policy.set_adapter("default")
        else:
            adapters.drop_reference(policy)
        self.rloo.scorer.copy = policy.peft_config.get("ref")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        for set_back, state in self._step_ends:  # a resumed run draws what an unfinished step has drawn
            set_back(state)
        write = functools.partial(super()._save_checkpoint, model, trial)
        save_checkpoint(self, Path(self._get_output_dir(trial)), write)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's; a process that ends waits for it (`rloo_kit.runs.files`)."""
        with saving(output_dir or self.args.output_dir) if self._staging is None else nullcontext():
            super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                adapters.follow_umask(Path(output_dir or self.args.output_dir))


class _LoopCallback(TrainerCallback):
    """The loop's hooks into transformers' training loop.

    TRL restarts its micro-steps and its sampler's order in every process, so a resumed run restores both and drops what
    the interrupted process left over."""

    def __init__(self, trainer: RLOOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_more: Any) -> None:
        trainer = self.trainer
        refuse_idle(trainer)
        trainer._window, trainer._due, trainer._step_ends = None, [], []  # in use when training was interrupted
        trainer.rloo.broken = None
        state.compute_steps(args, state.max_steps)  # the checkpoint's state has those of before
        trainer._step = find_micro_step(args, state, len(train_dataloader))
        if (sampler := trainer._drawn) is not None and sampler.shuffle:
            for _ in range(int(state.epoch or 0)):  # completed passes
                torch.randperm(sampler.num_samples, generator=sampler.generator)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.trainer._close_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.trainer._count_gradient()  # not in `on_step_end`, where an evaluation may be interrupted
        cuda, reservoir, ends = torch.cuda, self.trainer.rloo.reservoir, self.trainer._step_ends
        ends[:] = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
        ends += [(torch.set_rng_state, torch.get_rng_state())]
        ends += [(cuda.set_rng_state_all, cuda.get_rng_state_all())] if cuda.is_initialized() else []
        ends += [(reservoir.load_state_dict, reservoir.state_dict())] if reservoir else []

    def on_train_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if hasattr(engine := self.trainer.rloo.sampler.engine, "close"):  # a server unloads the adapter
            engine.close()
