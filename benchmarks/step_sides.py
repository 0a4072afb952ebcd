"""The two sides of `rloo_step.py`: stock TRL's trainer and the kit's, driven through `train()` and timed from outside.

A step is everything between TRL's callbacks `on_step_begin` and `on_step_end`: rollout, rewards, scoring, loss,
backward and optimizer. Its rollout is the trainer's own `_generate_single_turn`, timed alone, or canned completions.
The training part is the step less its rollout and its rewards, on both sides, whatever a trainer's internals.

The lengths of a random model's completions must not depend on chance, the side or the engine, so they are imposed where
an engine decides whether a row ends (at the end of this file). The model still computes every step. Left out: vLLM.
"""

import contextlib
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import step_workload
import torch
from step_workload import Workload

LEARNING_RATE = 1e-6  # TRL's default; the weights barely move, with no effect on times or gradients
_OUTPUTS = tempfile.TemporaryDirectory(prefix="rloo-step-")  # for all trainers; nothing is saved


@dataclass(frozen=True)
class StepTime:
    """One step, in seconds of wall-clock and of processor time; training is the step less rollout and rewards."""

    whole_s: float
    generation_s: float
    training_s: float
    whole_cpu_s: float
    generation_cpu_s: float
    training_cpu_s: float


class Side:
    """A trainer on a workload.

    Args:
        name: see `wrap_model`.
        trainer: from `wrap_model`; its rollout and its rewards are wrapped here.
    """

    def __init__(self, name: str, workload: Workload, trainer: Any, end_id: int):
        self.name, self.workload, self.trainer = name, workload, trainer
        self.canned = True
        self.gradients: dict[str, torch.Tensor] = {}  # of the first step, before the optimizer uses them
        self.completion_lengths: list[int] = []
        self.canned_completions = step_workload.completions(workload, end_id)
        self.targets = step_workload.completion_lengths(workload)
        self._seconds: dict[str, list[float]] = {}  # wall-clock and processor time by section of a step
        self._wrap(end_id)

    @property
    def engine(self) -> Any:
        """The engine that the kit's trainer samples with; None on the other sides."""
        rloo = getattr(self.trainer, "rloo", None)
        return None if rloo is None else rloo.sampler.engine

    def step(self, canned: bool = True) -> StepTime:
        """One optimizer step through `trainer.train()`."""
        self.canned, self._seconds = canned, {name: [0.0, 0.0] for name in ("whole", "rollout", "rewards")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer.train()
        times = []
        for whole, rollout, rewards in zip(*self._seconds.values(), strict=True):
            times += [whole, rollout, whole - rollout - rewards]
        return StepTime(*times)

    @contextlib.contextmanager
    def _timed(self, section: str) -> Iterator[None]:
        _synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            _synchronize()
            self._seconds[section][0] += time.perf_counter() - wall
            self._seconds[section][1] += time.process_time() - cpu

    def _wrap(self, end_id: int) -> None:
        """Time the trainer's rollout, rewards and steps, answer with canned completions, keep the first gradients."""
        from transformers import TrainerCallback

        side, trainer = self, self.trainer
        generate = trainer._generate_single_turn
        rewarder, method = (trainer.rloo.rewarder, "reward") if self.engine else (trainer, "_calculate_rewards")
        calculate_rewards = getattr(rewarder, method)

        def roll_out(prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> Any:
            with side._timed("rollout"):
                if side.canned:
                    return [list(ids) for ids in side.canned_completions]
                with impose_lengths(side.trainer, prompt_ids, side.targets, end_id):
                    completion_ids = generate(prompt_ids, *arguments, **keywords)
            side.completion_lengths = [len(row) for row in completion_ids]
            return completion_ids

        def rewards(*arguments: Any, **keywords: Any) -> Any:
            with side._timed("rewards"):
                return calculate_rewards(*arguments, **keywords)

        class Steps(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.section = side._timed("whole")
                self.section.__enter__()

            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                if not side.gradients:
                    named = {name: value.grad for name, value in side.trainer.model.named_parameters()}
                    side.gradients = {name: grad.detach().clone() for name, grad in named.items() if grad is not None}

            def on_step_end(self, *_: Any, **__: Any) -> None:
                self.section.__exit__(None, None, None)

        trainer._generate_single_turn = roll_out
        setattr(rewarder, method, rewards)
        trainer.add_callback(Steps())


def build_side(name: str, workload: Workload) -> Side:
    """The side "stock", "fast", "balanced" or "low" on the small Qwen3 in float32; equal workloads, equal weights."""
    from peft import LoraConfig
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rloo_kit.demo.embedded import build_tokenizer

    tokenizer = build_tokenizer("thinking", "qwen3" if workload.vocabulary > 2048 else "compact")  # one token a byte
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=workload.vocabulary, **step_workload.BACKBONE, **ids))
    return wrap_model(name, workload, model, tokenizer, LoraConfig(**step_workload.LORA))


def wrap_model(name: str, workload: Workload, model: Any, tokenizer: Any, peft_config: Any, **options: Any) -> Side:
    """The trainer of one side around a model.

    Args:
        name: "stock" (TRL's, patched by Unsloth or not) or the kit's "fast", "balanced" or "low".
        peft_config: None if the model has its adapter. options: more arguments of the config.
    """
    import trl
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback

    config_class, trainer_class = trl.RLOOConfig, trl.RLOOTrainer
    if name != "stock":
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
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():  # as in the middle of a run; while B is zero, the policy is its own reference
        for parameter_name, parameter in trainer.model.named_parameters():
            if "lora_B" in parameter_name and ".ref." not in parameter_name:
                parameter.copy_((torch.randn(parameter.shape, generator=draw) * 0.02).to(parameter))
    return Side(name, workload, trainer, tokenizer.eos_token_id)


def trainer_arguments(workload: Workload) -> dict[str, Any]:
    """The arguments of both configs. Clipping is on, as by default, at a norm that leaves the gradient unchanged."""
    return {
        "output_dir": _OUTPUTS.name, "use_cpu": True, "bf16": False, "max_steps": 1,
        "learning_rate": LEARNING_RATE, "max_grad_norm": 1e9,
        "per_device_train_batch_size": workload.num_generations,
        "gradient_accumulation_steps": workload.groups,
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


# ----------------------------------------------------------------------------------------------- imposed lengths


@contextlib.contextmanager
def impose_lengths(trainer: Any, prompt_ids: list[list[int]], lengths: list[int], end_id: int) -> Iterator[None]:
    """Inside the block, row i of the trainer's rollout ends, with the end token, after `lengths[i]` tokens.

    In `generate`, of any library, a logits processor makes the end token impossible before a row's target and certain
    at it. Rows of equal prompts get their targets in order, whatever the order in which the prompts are taken.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for ids, length in zip(prompt_ids, lengths, strict=True):
        by_prompt.setdefault(tuple(ids), []).append(length)
    targets = {ids: itertools.cycle(found) for ids, found in by_prompt.items()}
    original: Callable[..., Any] = trainer.model.generate

    def generate(*arguments: Any, input_ids: torch.Tensor, logits_processor: Any = (), **keywords: Any) -> Any:
        masks, prompt_tokens = keywords["attention_mask"].bool(), input_ids.size(1)
        rows = [tuple(ids[mask].tolist()) for ids, mask in zip(input_ids, masks, strict=True)]
        if rows[0] not in targets:  # the engine's check of padding, with prompts of its own
            return original(*arguments, input_ids=input_ids, logits_processor=logits_processor, **keywords)
        due_at = torch.tensor([next(targets[row]) for row in rows])

        def end(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            is_due = due_at.to(scores.device) <= ids.size(1) - prompt_tokens + 1
            scores[:, end_id] = torch.where(is_due, 1e4, -torch.inf).to(scores.dtype)
            return scores

        processors = [end, *(logits_processor or ())]
        return original(*arguments, input_ids=input_ids, logits_processor=processors, **keywords)

    with mock.patch.object(trainer.model, "generate", generate), _imposed_in_native(lengths, end_id):
        yield


@contextlib.contextmanager
def _imposed_in_native(lengths: list[int], end_id: int) -> Iterator[None]:
    """The native engine makes a `CompletionState` for each row, in the prompts' order; it gets its target here."""
    from rloo_kit.rollout import engine

    waiting = iter(lengths)

    class TargetedState(engine.CompletionState):  # type: ignore[misc]
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            self.target = next(waiting)

        def take(self, token: int, logp: float) -> None:
            due = len(self.ids) + 1 >= self.target
            super().take(end_id if due else 0 if token == end_id else token, logp)

    with mock.patch.object(engine, "CompletionState", TargetedState):
        yield
