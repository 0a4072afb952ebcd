"""The optimizer steps at full length of a preflight: memory, gradient, and whether the learning rate changes the
weights in their number format."""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RLOOSection
from rloo_kit.loop.memory import MemoryPeak
from rloo_kit.loop.run_arguments import loaded_engine, mixed_precision
from rloo_kit.measure.memory import measure_steps, size_of_steps
from rloo_kit.models.policy import Policy
from rloo_kit.plan.planner import find_changes, plan_vram, read_workload
from rloo_kit.plan.result import VramPlan
from rloo_kit.preflight.result import Measures
from rloo_kit.rollout.types import FOREIGN
from rloo_kit.system.memory import is_out_of_memory
from rloo_kit.system.problems import Problem

Weights = dict[str, torch.Tensor]  # by name
Tell = Callable[[str], None]  # shows a line
# Share of the weights with a gradient that move: below the first an error, below the second a warning.
MOVED_LEAST, MOVED_MOST = 0.05, 0.5
DECODED = 16  # tokens to decode after full caches
STEPS, STEPS_FP16 = 2, 12  # in float16 the first steps are skipped while the loss scale falls
SAMPLED = 2**20  # values per tensor, to find the rate at which it would move
SMALLER = 0.8  # share of the computed peak that a fix after an out-of-memory error has to reach


class FirstSteps(TrainerCallback):
    """Records gradient, weight change and time of the first optimizer steps.

    Args:
        weights: the trained weights by name, before these steps. tell: gets a line after each step.

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
        """The share of weights with a gradient that changed, and the rate that would change half of them: half the
        spacing of the number format, since Adam's first step changes each weight by the learning rate."""
        moved, count, sizes = 0, 0, []
        for name, has_gradient in self._has_gradient.items():
            before = self._before[name]
            moved += int(((now[name].detach().cpu() != before) & has_gradient).sum())
            count += int(has_gradient.sum())
            sizes.append(before[has_gradient].abs()[:SAMPLED].float())
            self.dtype = before.dtype
        self.moved = moved / count if count else 0.0
        if count and self.dtype is not None:
            self.needed = torch.cat(sizes).median().item() * torch.finfo(self.dtype).eps / 2


@dataclass
class StepsFound:
    """Results of `try_steps`: the callback, peaks of rollout and training (None if out of memory), rows and decoded
    tokens of the rollout, and trained tokens."""

    looked: FirstSteps
    rollout: MemoryPeak | None = None
    training: MemoryPeak | None = None
    rows: int = 0
    decoded: int = 0
    trained_tokens: int = 0
    faults: list[Problem] = field(default_factory=list)


def try_steps(run: RunConfig, policy: Policy, weights: Weights, measures: Measures, tell: Tell) -> StepsFound:
    """Take the run's optimizer steps at full length, after the end of a full rollout if the engine is local.

    Raises:
        ConfigError: the model's memory cannot be planned.
    """
    engine = loaded_engine(run, policy)
    plan = plan_vram(run, config=policy.model.config.to_dict(), engine=engine)
    measures.usable_gib = plan.machine.usable_gib
    found = StepsFound(FirstSteps(weights, tell))
    if not plan.machine.on_cuda and plan.headroom_gib < 0:  # no error on a CPU: the system kills programs
        limit = f"and {plan.machine.name} has {plan.machine.usable_gib:.2f}; the step was not run"
        text = f"the run takes {plan.peak_gib:.2f} GiB (computed), {limit}"
        found.faults.append(Problem("memory", text, _changes(run, plan, policy)))
        return found
    found.rows = 0 if engine in FOREIGN else plan.rows
    completions, row_tokens = size_of_steps(policy, run)
    found.decoded, found.trained_tokens = min(DECODED, row_tokens - 1), completions * row_tokens
    tell(f"steps at full length: {completions} completions of {row_tokens} tokens with their prompts")
    steps = STEPS_FP16 if mixed_precision(run)["fp16"] else STEPS

    def measure(rows: int) -> tuple[MemoryPeak, MemoryPeak] | None:
        """The peaks; None if memory ran out, which is freed."""
        found.looked = FirstSteps(weights, tell)
        try:
            return measure_steps(policy, run, rows, found.decoded, [found.looked], steps)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    peaks = measure(found.rows)
    if peaks is None and found.rows:
        text = f"{found.rows} full completions do not fit: fewer are sampled at once, which takes longer"
        fix = f"set rollout.rows={max(found.rows // 2, 1)}, or free memory: {_changes(run, plan, policy)}"
        found.rows, peaks = 0, measure(0)
        if peaks is not None:
            found.faults.append(Problem("memory", text, fix, level="warning"))
    if peaks is None:
        machine = f"{plan.machine.usable_gib:.2f} GiB on {plan.machine.name}"
        text = f"an optimizer step at full length ran out of memory, of {machine}"
        found.faults.append(Problem("memory", text, _changes(run, plan, policy)))
        return found
    found.rollout, found.training = peaks if found.rows else (None, peaks[1])
    measures.rollout_gib = found.rollout.gib if found.rollout else None
    measures.training_gib = found.training.gib
    measures.grad_norm, measures.moved = found.looked.grad_norm, found.looked.moved
    found.faults += find_step_faults(run, found.looked)
    return found


def _changes(run: RunConfig, plan: VramPlan, policy: Policy) -> str:
    """Changes from the memory plan, cumulative; if the plan says that the run fits, those that lower its peak."""
    changes = plan.changes
    if not changes:
        load = read_workload(run, plan.machine, policy.model.config.to_dict(), plan.engine.name)
        changes = tuple(find_changes(run, load, plan.rows, SMALLER * plan.peak_gib))
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
        found = (
            f"rloo.learning_rate={rate:g} changes {looked.moved:.1%} of the weights; it is below the {name} spacing "
        )
        found += "of the others"
        fixes = [] if looked.dtype == torch.float32 else ["set model.dtype=float32"]
        if "adam" in run.rloo.optim:
            fixes.append(f"rloo.learning_rate={_round_up(looked.needed)}")
        fix, level = " or ".join(fixes), "error" if looked.moved < MOVED_LEAST else "warning"
    return [Problem("gradient", found, fix, level=level)]


def _round_up(number: float) -> str:
    """Rounded up to one digit.

    >>> _round_up(2.1e-05), _round_up(0.00096)
    ('3e-05', '1e-03')
    """
    exponent = math.floor(math.log10(number)) if number > 0 else 0
    digit = math.ceil(round(number / 10**exponent, 6)) if number > 0 else 0
    return f"{digit * 10.0**exponent:.0e}"
