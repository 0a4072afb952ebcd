"""Optimizer steps of a run at full length: their memory, time and gradient, by the run's own code on made-up
completions."""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from rloo_kit._stack import load_stack
from rloo_kit.checks.preflight_result import Measures
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RLOOSection
from rloo_kit.loop.options import RLOOConfig, loaded_engine, precision_flags, training_arguments
from rloo_kit.loop.trainer import RLOOTrainer
from rloo_kit.models.adapters import drop_reference
from rloo_kit.models.policy import Policy
from rloo_kit.plan.parts import Workload
from rloo_kit.plan.planner import plan_vram, read_workload
from rloo_kit.plan.vram_plan import VramPlan
from rloo_kit.rollout.types import FOREIGN, Rollout
from rloo_kit.system.memory import is_out_of_memory
from rloo_kit.system.problems import Problem
from rloo_kit.tools.toolbox import open_toolbox
from rloo_kit.training.memory_watch import MemoryPeak, planned_limits

Tell = Callable[[str], None]  # shows a line
# A smaller change leaves a bfloat16 weight around 0.01 as it is; below the first almost all weights (an error).
BFLOAT16_LEAST, BFLOAT16_STEP = 1e-5, 3e-5
STEPS, STEPS_FP16 = 2, 12  # in float16 the first steps are skipped while the loss scale falls


class FirstSteps(TrainerCallback):
    """Records gradient and time of the first optimizer steps.

    Attributes:
        grad_norm: of the first step that was not skipped, before clipping. step_s: seconds of the last step.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell, self._began = tell, 0.0
        self.grad_norm: float | None = None
        self.step_s = 0.0

    def on_step_begin(self, *_arguments: Any, **_more: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.step_s = time.monotonic() - self._began
        self._tell(f"step {state.global_step} at full length took {self.step_s:.1f} s")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
        if "grad_norm" in (logs or {}) and not self.has_gradient:
            self.grad_norm = float(logs["grad_norm"])
        if self.has_gradient and state.global_step >= STEPS:
            control.should_training_stop = True

    @property
    def has_gradient(self) -> bool:
        """Whether a step had a finite gradient; in float16 the first are skipped."""
        return self.grad_norm is not None and math.isfinite(self.grad_norm)


def try_steps(run: RunConfig, policy: Policy, measures: Measures, faults: list[Problem], tell: Tell) -> float | None:
    """Take the run's optimizer steps at full length. Fills `measures` and appends to `faults`.

    Returns seconds of a trained token; None if memory ran out, or would on a CPU. Raises ConfigError if memory cannot
    be planned."""
    plan = plan_vram(run, config=policy.model.config.to_dict(), engine=loaded_engine(run, policy))
    measures.usable_gib = plan.machine.usable_gib
    machine = f"{plan.machine.usable_gib:.2f} GiB on {plan.machine.name}"
    if not plan.machine.on_cuda and plan.headroom_gib < 0:  # no error on a CPU: the system kills programs
        text = f"the run takes {plan.peak_gib:.2f} GiB (computed), of {machine}; the step was not run"
        faults.append(Problem("memory", text, _changes(run, plan)))
        return None
    load = load_of(run, policy)
    _, completions = rows_of_a_pass(load)
    tell(f"steps at full length: {completions} completions of {load.row_tokens} tokens with their prompts")
    looked = FirstSteps(tell)
    try:
        with MemoryPeak() as peak:
            steps = STEPS_FP16 if precision_flags(run)["fp16"] else STEPS
            take_steps(policy, run, callbacks=[looked], steps=steps)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = f"an optimizer step at full length ran out of memory, of {machine}"
        faults.append(Problem("memory", text, _changes(run, plan)))
        return None
    measures.rollout_gib, measures.training_gib = None if plan.engine.name in FOREIGN else plan.rollout_gib, peak.gib
    measures.grad_norm = looked.grad_norm
    faults += find_step_faults(run, looked.grad_norm)
    return looked.step_s / (completions * load.row_tokens)


def _changes(run: RunConfig, plan: VramPlan) -> str:
    """Changes from the memory plan, cumulative; if the plan says that the run fits, the cheapest."""
    usual = [*["rloo.memory=low"][run.rloo.memory == "low" :], "a lower rloo.max_completion_length"]
    changes = [change.override for change in plan.changes] or usual
    return f"set {', then '.join(changes)}"


def find_step_faults(run: RunConfig, grad_norm: float | None) -> list[Problem]:
    """Problems shown by the gradient of the first step, and a learning rate that moves nothing."""
    rate, level = run.rloo.learning_rate, "error"
    if grad_norm is None or not math.isfinite(grad_norm):
        found = "the gradient of a step at full length is not finite"
        fix = "set model.dtype=float32" + (" or model.dtype=bfloat16" if run.model.dtype == "float16" else "")
    elif grad_norm == 0.0:
        found = "the gradient of completions with unequal rewards is 0, so nothing is trained"
        fix = "check model.lora.target_modules, or set model.lora=null"
    elif rate == 0.0:
        usual = RLOOSection.model_fields["learning_rate"].default
        found, fix = "rloo.learning_rate is 0, so nothing moves", f"set rloo.learning_rate={usual:g}"
    elif run.model.lora is None and run.model.dtype == "bfloat16" and rate < BFLOAT16_STEP:
        found = f"rloo.learning_rate={rate:g} moves few bfloat16 weights: those around 0.01 are 6e-5 apart"
        fix = f"set model.dtype=float32 or rloo.learning_rate={BFLOAT16_STEP:.0e}"
        level = "error" if rate < BFLOAT16_LEAST else "warning"
    else:
        return []
    return [Problem("gradient", found, fix, level=level)]


# ------------------------------------------------------------------------------------------------ the steps themselves


def take_steps(
    policy: Policy,
    run: RunConfig,
    before: Callable[[Any], None] = lambda engine: None,
    callbacks: Sequence[TrainerCallback] = (),
    steps: int = STEPS,
) -> None:
    """Take optimizer steps on made-up completions of full length, in passes as large as the run's largest.

    Warm-up, masks and the sampler correction are off: with them made-up completions would get no gradient. `before` is
    called with the run's engine in the place of each rollout. The optimizer's state exists from the second step on."""
    load = load_of(run, policy)
    generations, completions = rows_of_a_pass(load)
    engine = "auto" if load.engine in FOREIGN else run.rollout.engine
    changed: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": completions, "gradient_accumulation_steps": 1,
        "steps_per_generation": None, "num_generations": generations,
        "rollout_engine": engine, "rollout_server_url": None,
        "lr_scheduler_type": "constant", "warmup_steps": 0, "mask_truncated_completions": False,
        "sampler_correction": "none", "reward_clip_range": None, "tools": [], "environment": None,
    }  # fmt: skip
    prompts = [{"prompt": "0" * load.prompt_tokens}] * (2 * completions // generations)
    dataset = load_stack().datasets.Dataset.from_list(prompts)
    with make_trainer(policy, run, [_alternate], dataset, callbacks, changed) as trainer:
        sampler: Any = trainer.rloo.sampler
        sampler.engine = _FullRows(load.row_tokens, partial(before, sampler.engine))
        trainer.rloo.skipped.patience = steps + 1
        trainer.train()


def load_of(run: RunConfig, policy: Policy) -> Workload:
    """The inputs of the arithmetic, with the training pass that `train` would plan on this machine."""
    config = policy.model.config.to_dict()
    plan = plan_vram(run, config=config, engine=loaded_engine(run, policy))
    return replace(read_workload(run, plan.machine, config, plan.engine.name), tokens_per_pass=plan.tokens_per_pass)


def rows_of_a_pass(load: Workload) -> tuple[int, int]:
    """(K, completions) of the smallest batch with a pass as large as the run's largest."""
    needed = -(-load.pass_tokens // load.row_tokens)
    generations = load.num_generations if load.whole_groups else min(load.num_generations, max(2, needed))
    groups = -(-min(needed, load.completions) // generations)
    if load.lora_rank is None:  # a second pass runs with the gradients of the first in memory, as large as the model
        groups = max(groups, min(2 * groups, load.completions // generations))
    return generations, generations * groups


def _alternate(completions: Any, **_columns: Any) -> list[float]:
    """A reward that gives every completion an advantage: 0, 1, 0, 1, ..."""
    return [float(row % 2) for row in range(len(completions))]


class _FullRows:
    """Stands in for an engine: made-up completions that fill every row to `tokens`, after a call of `before`."""

    name, reason, token_steps = "synthetic", "to measure memory", 0
    rows: int | None = None

    def __init__(self, tokens: int, before: Callable[[], None]) -> None:
        self._tokens, self._before = tokens, before

    def sample(self, prompt_ids: list[list[int]], *_more: Any, **_named: Any) -> Rollout:
        self._before()
        ids = [torch.randint(1, 200, (self._tokens - len(prompt),)).tolist() for prompt in prompt_ids]
        return replace(Rollout.of(ids), sampler_logps=[[-1.0] * len(row) for row in ids])


@contextmanager
def make_trainer(
    policy: Policy,
    run: RunConfig,
    reward_funcs: Sequence[Any],
    dataset: Any,
    callbacks: Sequence[TrainerCallback] = (),
    changed: Mapping[str, Any] | None = None,
) -> Iterator[RLOOTrainer]:
    """A trainer as in `train`, in a temporary folder, with `changed` arguments; its traces are deleted at the end."""
    was_training = policy.model.training
    with tempfile.TemporaryDirectory(prefix="rloo-kit-preflight-") as folder:
        Path(folder).chmod(0o755)  # a server that loads the adapter from here may run as another user
        arguments = training_arguments(run, policy, Path(folder)) | planned_limits(run, policy)
        arguments |= {"resample_rounds": 0, "save_strategy": "no", "report_to": "none", **(changed or {})}
        trainer = None
        try:
            trainer = RLOOTrainer(
                model=policy.model,
                tools=open_toolbox(run) if arguments.get("tools") or arguments.get("environment") else None,
                reward_funcs=list(reward_funcs),
                args=RLOOConfig(**arguments),
                train_dataset=dataset,
                processing_class=policy.tokenizer,
                callbacks=list(callbacks),
            )
            trainer.remove_callback(PrinterCallback)
            yield trainer
        finally:
            close = getattr(trainer and trainer.rloo.sampler.engine, "close", None)
            if close is not None:  # a server unloads the adapter
                close()
            policy.model.zero_grad(set_to_none=True)
            drop_reference(policy.model)
            policy.model.train(was_training)
            del trainer
