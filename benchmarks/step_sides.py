"""The two sides of `rloo_step.py`: stock TRL's trainer and the kit's, driven through `train()` and timed from outside.

A step is everything between TRL's callbacks `on_step_begin` and `on_step_end`: rollout, rewards, scoring, loss,
backward and optimizer. Its rollout is the trainer's own `_generate_single_turn`, timed alone, or canned completions.
The training part is the step less its rollout and its rewards, on both sides, whatever a trainer's internals.

Completion lengths do not depend on chance or on the side: see `imposed_lengths`.
"""

import contextlib
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import step_workload
import torch
from imposed_lengths import impose_lengths
from step_workload import Workload

LEARNING_RATE = 1e-6  # TRL's default; the weights barely move, with no effect on times or gradients
_OUTPUTS = tempfile.TemporaryDirectory(prefix="rloo-step-")  # for all trainers; nothing is saved


@dataclass(frozen=True)
class StepTime:
    """One step, in seconds of wall-clock and processor time."""

    whole_s: float
    generation_s: float
    reward_s: float
    whole_cpu_s: float
    generation_cpu_s: float

    @property
    def training_s(self) -> float:
        return self.whole_s - self.generation_s - self.reward_s

    @property
    def training_cpu_s(self) -> float:
        return self.whole_cpu_s - self.generation_cpu_s - self.reward_s


class Clock:
    """Wall and processor time of a section."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        _synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            _synchronize()
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.process_time() - cpu

    def reset(self) -> None:
        self.wall_s = self.cpu_s = 0.0


class Side:
    """A trainer on a workload.

    Args:
        name: see `wrap_model`.
        trainer: from `wrap_model`; its rollout and its rewards are wrapped here.
    """

    def __init__(self, name: str, workload: Workload, trainer: Any, end_id: int):
        self.name, self.workload, self.trainer = name, workload, trainer
        self.canned = True
        self.whole = Clock()
        self.gradients: dict[str, torch.Tensor] = {}
        self.completion_lengths: list[int] = []
        self._rollout, self._rewards = Clock(), Clock()
        self.canned_completions = step_workload.completions(workload, end_id)
        self.targets = step_workload.completion_lengths(workload)
        self._wrap_rollout(end_id)
        self._wrap_rewards()
        trainer.add_callback(_step_clock(self))

    @property
    def engine(self) -> Any:
        """The engine that the kit's trainer samples with; None on the other sides."""
        rloo = getattr(self.trainer, "rloo", None)
        return None if rloo is None else rloo.sampler.engine

    def step(self, canned: bool = True) -> StepTime:
        """One optimizer step through `trainer.train()`."""
        self.canned = canned
        for clock in (self._rollout, self._rewards, self.whole):
            clock.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer.train()
        return StepTime(
            self.whole.wall_s, self._rollout.wall_s, self._rewards.wall_s, self.whole.cpu_s, self._rollout.cpu_s
        )

    def _wrap_rollout(self, end_id: int) -> None:
        original = self.trainer._generate_single_turn

        def rollout(prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> Any:
            with self._rollout.running():
                if self.canned:
                    return self._answer([list(ids) for ids in self.canned_completions])
                with impose_lengths(self.trainer, prompt_ids, self.targets, end_id):
                    completion_ids = original(prompt_ids, *arguments, **keywords)
            ids = completion_ids[0] if isinstance(completion_ids, tuple) else completion_ids
            self.completion_lengths = [len(row) for row in ids]
            return completion_ids

        self.trainer._generate_single_turn = rollout

    def _answer(self, completion_ids: list[list[int]]) -> Any:
        """What the trainer's rollout returns: with TRL's GRPO trainer, log-probabilities too (None from `generate`)."""
        return (completion_ids, None) if self.name == "grpo" else completion_ids

    def keep_gradients(self) -> None:
        """Keep the gradients of the first step, before the optimizer uses them."""
        if not self.gradients:
            self.gradients = {
                name: parameter.grad.detach().clone()
                for name, parameter in self.trainer.model.named_parameters()
                if parameter.requires_grad and parameter.grad is not None
            }

    def _wrap_rewards(self) -> None:
        original = self.trainer._calculate_rewards

        def rewards(*arguments: Any, **keywords: Any) -> Any:
            with self._rewards.running():
                return original(*arguments, **keywords)

        self.trainer._calculate_rewards = rewards


def _step_clock(side: Side) -> Any:
    """A callback that runs a side's clock from the beginning of a step to its end, and keeps its first gradients."""
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.section = side.whole.running()
            self.section.__enter__()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            side.keep_gradients()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.section.__exit__(None, None, None)

    return StepClock()


def build_side(name: str, workload: Workload, **options: Any) -> Side:
    """A side on the small Qwen3; equal weights for equal workloads.

    Args:
        name: "stock", "fast", "balanced" or "low". options: more arguments of the config.
    """
    from peft import LoraConfig

    tokenizer = step_workload.build_tokenizer(workload)
    model = step_workload.build_model(workload, tokenizer)
    return wrap_model(name, workload, model, tokenizer, LoraConfig(**step_workload.LORA), **options)


def wrap_model(name: str, workload: Workload, model: Any, tokenizer: Any, peft_config: Any, **options: Any) -> Side:
    """The trainer of one side around a model.

    Args:
        name: "stock", "grpo" (TRL's, patched by Unsloth or not) or the kit's "fast", "balanced" or "low".
        peft_config: None if the model has its adapter. options: more arguments of the config.
    """
    import trl
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback

    config_class, trainer_class = trl.RLOOConfig, trl.RLOOTrainer
    if name == "grpo":
        config_class, trainer_class = trl.GRPOConfig, trl.GRPOTrainer
    elif name != "stock":
        from rloo_kit.loop.options import RLOOConfig
        from rloo_kit.loop.trainer import RLOOTrainer

        config_class, trainer_class = RLOOConfig, RLOOTrainer
        options = {"memory": name} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_class(
            model=model,
            reward_funcs=step_workload.length_reward,
            args=config_class(**trainer_arguments(workload) | options),
            train_dataset=Dataset.from_list(step_workload.prompt_rows(workload)),
            processing_class=tokenizer,
            peft_config=peft_config,
        )
    trainer.remove_callback(PrinterCallback)  # it would print a line for every call of `train()`
    step_workload.move_adapter(trainer.model)
    return Side(name, workload, trainer, tokenizer.eos_token_id)


def trainer_arguments(workload: Workload) -> dict[str, Any]:
    """The arguments of both configs. Clipping is on, as by default, at a norm that leaves the gradient unchanged."""
    return {
        "output_dir": _OUTPUTS.name, "use_cpu": True, "bf16": False, "max_steps": 1,
        "learning_rate": LEARNING_RATE, "max_grad_norm": 1e9,
        "per_device_train_batch_size": workload.micro_batch,
        "gradient_accumulation_steps": workload.completions // workload.micro_batch,
        "num_generations": workload.num_generations,
        "max_completion_length": workload.longest or step_workload.LONGEST,
        "gradient_checkpointing": workload.checkpointing, "beta": workload.beta, "temperature": 1.0, "seed": 0,
        "shuffle_dataset": False, "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
        "disable_tqdm": True,
    }  # fmt: skip


def gradient_error(side: Side, stock: Side) -> float:
    """|ours - stock| / |stock| over all LoRA parameters together, float64 arithmetic."""
    if side.gradients.keys() != stock.gradients.keys():
        raise AssertionError(f"{side.name} and stock train different parameters")
    names = sorted(stock.gradients)
    ours, theirs = (torch.cat([one.gradients[name].double().flatten() for name in names]) for one in (side, stock))
    return ((ours - theirs).norm() / theirs.norm()).item()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
