"""Optimizer steps of a run at full length: their memory, the gradient, and whether the learning rate moves the weights
in their number format. The steps run the run's own code on made-up completions."""

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
from rloo_kit.plan.planner import find_remedies, plan_vram, read_workload
from rloo_kit.plan.vram_plan import VramPlan
from rloo_kit.rollout.types import FOREIGN, Rollout
from rloo_kit.system.memory import is_out_of_memory
from rloo_kit.system.problems import Problem
from rloo_kit.tools.toolbox import open_toolbox
from rloo_kit.training.memory_watch import MemoryPeak, planned_limits

Tell = Callable[[str], None]  # shows a line
# Share of the weights with a gradient that move: below the first an error, below the second a warning.
MOVED_LEAST, MOVED_MOST = 0.05, 0.5
STEPS, STEPS_FP16 = 2, 12  # in float16 the first steps are skipped while the loss scale falls
SAMPLED = 2**20  # values per tensor, to find the rate at which it would move
SMALLER = 0.8  # share of the computed peak that a fix after an out-of-memory error has to reach


class FirstSteps(TrainerCallback):
    """Records gradient, weight change and time of the first optimizer steps. `weights`: by name, before these steps.

    Attributes:
        grad_norm: of the first step, before clipping; None until there is one. moved: share of the weights with a
            gradient that changed in the first step that changed any. needed: a learning rate that would change half.
        step_s: seconds of the last step.
    """

    def __init__(self, weights: dict[str, torch.Tensor], tell: Tell) -> None:
        self._before, self._tell = weights, tell
        self._has_gradient: dict[str, torch.Tensor] = {}
        self._began = 0.0
        self.grad_norm: float | None = None
        self.moved, self.needed, self.step_s = 0.0, 0.0, 0.0
        self.dtype: torch.dtype | None = None

    def on_step_begin(self, *_arguments: Any, **_more: Any) -> None:
        self._began = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_more: Any) -> None:
        if self.moved:
            return
        for name, value in model.named_parameters():
            if name in self._before and value.grad is not None:
                self._has_gradient[name] = (value.grad != 0).cpu()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_more: Any) -> None:
        self.step_s = time.monotonic() - self._began
        self._tell(f"step {state.global_step} at full length took {self.step_s:.1f} s")
        if not self.moved:
            self._look(dict(model.named_parameters()))
        if self.moved and state.global_step >= STEPS:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
        is_open = self.grad_norm is None or (args.fp16 and not math.isfinite(self.grad_norm))
        if is_open and "grad_norm" in (logs or {}):
            self.grad_norm = float(logs["grad_norm"])

    def _look(self, now: dict[str, Any]) -> None:
        """The share of weights with a gradient that changed, and the learning rate that would change half of them."""
        moved, count, sizes = 0, 0, []
        for name, has_gradient in self._has_gradient.items():
            before = self._before[name]
            moved += int(((now[name].detach().cpu() != before) & has_gradient).sum())
            count += int(has_gradient.sum())
            sizes.append(before[has_gradient].abs()[:SAMPLED].float())
            self.dtype = before.dtype
        self.moved = moved / count if count else 0.0
        if count and self.dtype is not None:  # half the spacing: Adam's first step changes each by the learning rate
            self.needed = torch.cat(sizes).median().item() * torch.finfo(self.dtype).eps / 2


def try_steps(
    run: RunConfig,
    policy: Policy,
    weights: dict[str, torch.Tensor],
    measures: Measures,
    faults: list[Problem],
    tell: Tell,
) -> float | None:
    """Take the run's optimizer steps at full length. Fills `measures` and appends to `faults`.

    Returns seconds of a trained token; None if memory ran out, or would on a CPU. Raises ConfigError if memory cannot
    be planned."""
    plan = plan_vram(run, config=policy.model.config.to_dict(), engine=loaded_engine(run, policy))
    measures.usable_gib = plan.machine.usable_gib
    machine = f"{plan.machine.usable_gib:.2f} GiB on {plan.machine.name}"
    if not plan.machine.on_cuda and plan.headroom_gib < 0:  # no error on a CPU: the system kills programs
        text = f"the run takes {plan.peak_gib:.2f} GiB (computed), of {machine}; the step was not run"
        faults.append(Problem("memory", text, _changes(run, plan, policy)))
        return None
    load = load_of(run, policy)
    _, completions = rows_of_a_pass(load)
    tell(f"steps at full length: {completions} completions of {load.row_tokens} tokens with their prompts")
    looked = FirstSteps(weights, tell)
    try:
        with MemoryPeak() as peak:
            steps = STEPS_FP16 if precision_flags(run)["fp16"] else STEPS
            take_steps(policy, run, callbacks=[looked], steps=steps)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = f"an optimizer step at full length ran out of memory, of {machine}"
        faults.append(Problem("memory", text, _changes(run, plan, policy)))
        return None
    measures.rollout_gib, measures.training_gib = None if plan.engine.name in FOREIGN else plan.rollout_gib, peak.gib
    measures.grad_norm, measures.moved = looked.grad_norm, looked.moved
    faults += find_step_faults(run, looked)
    return looked.step_s / (completions * load.row_tokens)


def _changes(run: RunConfig, plan: VramPlan, policy: Policy) -> str:
    """Changes from the memory plan, cumulative; if the plan says that the run fits, those that lower its peak."""
    changes = plan.changes
    if not changes:
        load = read_workload(run, plan.machine, policy.model.config.to_dict(), plan.engine.name)
        changes = tuple(find_remedies(run, load, plan.rows, SMALLER * plan.peak_gib))
    if not changes:
        return "take a smaller model.name"
    return f"set {', then '.join(change.override for change in changes)}"


def find_step_faults(run: RunConfig, looked: FirstSteps) -> list[Problem]:
    """Problems shown by the gradient and by how the weights changed."""
    rate, level = run.rloo.learning_rate, "error"
    if looked.grad_norm is None or not math.isfinite(looked.grad_norm):
        found = "the gradient of a step at full length is not finite"
        fix = "set model.dtype=float32" + (" or model.dtype=bfloat16" if run.model.dtype == "float16" else "")
    elif looked.grad_norm == 0.0:
        found = "the gradient of completions with unequal rewards is 0, so nothing is trained"
        fix = "check model.lora.target_modules, or set model.lora=null"
    elif rate == 0.0:
        usual = RLOOSection.model_fields["learning_rate"].default
        found, fix = "rloo.learning_rate is 0, so nothing moves", f"set rloo.learning_rate={usual:g}"
    elif looked.moved >= MOVED_MOST:
        return []
    else:
        name = str(looked.dtype).removeprefix("torch.")
        found = f"rloo.learning_rate={rate:g} changes {looked.moved:.1%} of the weights; it is below the {name} "
        found += "spacing of the others"
        fixes = [] if looked.dtype == torch.float32 else ["set model.dtype=float32"]
        if "adam" in run.rloo.optim:
            exponent = math.floor(math.log10(looked.needed)) if looked.needed > 0 else 0
            digit = math.ceil(round(looked.needed / 10**exponent, 6))  # rounded up to one digit
            fixes.append(f"rloo.learning_rate={digit * 10.0**exponent:.0e}")
        fix, level = " or ".join(fixes), "error" if looked.moved < MOVED_LEAST else "warning"
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
        "steps_per_generation": None, "num_generations": generations, "logging_steps": 1,
        "rollout_engine": engine, "rollout_server_url": None,
        "lr_scheduler_type": "constant", "warmup_steps": 0, "mask_truncated_completions": False,
        "sampler_correction": "none", "sampler_correction_floor": 0.0, "reward_clip_range": None,
        "max_skipped_steps": steps + 1, "tools": [], "environment": None,
    }  # fmt: skip
    prompts = [{"prompt": "0" * load.prompt_tokens}] * (2 * completions // generations)
    dataset = load_stack().datasets.Dataset.from_list(prompts)
    with make_trainer(policy, run, [_alternate], dataset, callbacks, changed) as trainer:
        sampler: Any = trainer.rloo.sampler
        sampler.engine = _FullRows(load.row_tokens, partial(before, sampler.engine))
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
