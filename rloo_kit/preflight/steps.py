"""Optimizer steps of a run at full length: their memory, the gradient, and whether the learning rate moves the weights
in their number format. The steps run the run's own code on made-up completions."""

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from rloo_kit._stack import load_stack
from rloo_kit.checks.result import Measures
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RLOOSection
from rloo_kit.loop.arguments import loaded_engine, mixed_precision, training_arguments
from rloo_kit.loop.memory import MemoryPeak
from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.trainer import RLOOTrainer
from rloo_kit.models.adapters import drop_reference
from rloo_kit.models.policy import Policy
from rloo_kit.plan.parts import Workload
from rloo_kit.plan.planner import find_changes, plan_vram, read_workload
from rloo_kit.plan.result import VramPlan
from rloo_kit.rollout.engine import build_engine
from rloo_kit.rollout.types import FOREIGN, Limits, Rollout
from rloo_kit.system.memory import is_out_of_memory
from rloo_kit.system.problems import Problem

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
    """What `try_steps` timed: `decode_s` of a token of `rows` full rows (0 without a rollout), and `gradient_s` of a
    trained token."""

    rows: int
    decode_s: float
    gradient_s: float


def try_steps(
    run: RunConfig,
    policy: Policy,
    weights: dict[str, torch.Tensor],
    measures: Measures,
    faults: list[Problem],
    tell: Tell,
) -> StepsFound | None:
    """Take the run's optimizer steps at full length, after the end of a full rollout if the engine is local. Fills
    `measures` and appends to `faults`.

    Returns:
        None if memory ran out, or would on a CPU.

    Raises:
        ConfigError: the model's memory cannot be planned.
    """
    engine = loaded_engine(run, policy)
    plan = plan_vram(run, config=policy.model.config.to_dict(), engine=engine)
    measures.usable_gib = plan.machine.usable_gib
    machine = f"{plan.machine.usable_gib:.2f} GiB on {plan.machine.name}"
    if not plan.machine.on_cuda and plan.headroom_gib < 0:  # no error on a CPU: the system kills programs
        text = f"the run takes {plan.peak_gib:.2f} GiB (computed), of {machine}; the step was not run"
        faults.append(Problem("memory", text, _changes(run, plan, policy)))
        return None
    load = load_of(run, policy)
    completions = rows_of_a_pass(load)[1]
    tell(f"steps at full length: {completions} completions of {load.row_tokens} tokens with their prompts")
    decoded, looked = min(DECODED, load.row_tokens - 1), FirstSteps(weights, tell)

    def measure(rows: int) -> tuple[MemoryPeak | None, MemoryPeak] | None:
        """The peaks; None if memory ran out, which is freed."""
        nonlocal looked
        looked = FirstSteps(weights, tell)
        steps = STEPS_FP16 if mixed_precision(run)["fp16"] else STEPS
        try:
            return measure_steps(policy, run, rows, decoded, [looked], steps)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    rows = 0 if engine in FOREIGN else plan.rows
    peaks = measure(rows)
    if peaks is None and rows and (peaks := measure(0)) is not None:
        text = f"{rows} full completions do not fit: fewer are sampled at once, which takes longer"
        fix = f"set rollout.rows={max(rows // 2, 1)}, or free memory: {_changes(run, plan, policy)}"
        faults.append(Problem("memory", text, fix, level="warning"))
    if peaks is None:
        text = f"an optimizer step at full length ran out of memory, of {machine}"
        faults.append(Problem("memory", text, _changes(run, plan, policy)))
        return None
    rollout, training = peaks
    measures.rollout_gib, measures.training_gib = rollout and rollout.gib, training.gib
    measures.grad_norm, measures.moved = looked.grad_norm, looked.moved
    faults += find_step_faults(run, looked)
    rollout_s = rollout.seconds if rollout else 0.0
    return StepsFound(rows, rollout_s / decoded, (looked.step_s - rollout_s) / (completions * load.row_tokens))


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


def measure_steps(
    policy: Policy,
    run: RunConfig,
    rows: int,
    decoded: int,
    callbacks: Sequence[TrainerCallback] = (),
    steps: int = STEPS,
) -> tuple[MemoryPeak | None, MemoryPeak]:
    """Take optimizer steps on completions of full length, in passes as large as the run's largest, each after the last
    `decoded` tokens of a rollout of `rows` full rows (0: no rollout). Changes the policy's weights.

    Warm-up, masks and the sampler correction are off: with them made-up completions would get no gradient.

    Args:
        callbacks: for the trainer. steps: number of steps; the optimizer's state exists from the second on.

    Returns:
        (peak of the rollouts, None without; peak of the rest); their seconds are those of the last step.

    Raises:
        RuntimeError: torch's out-of-memory error.
    """
    load = load_of(run, policy)
    generations, completions = rows_of_a_pass(load)
    prompts = [{"prompt": "0" * load.prompt_tokens}] * (2 * completions // generations)
    changed = {
        "max_steps": steps, "per_device_train_batch_size": completions, "gradient_accumulation_steps": 1,
        "steps_per_generation": None, "num_generations": generations, "logging_steps": 1,
        "rollout_engine": "auto", "rollout_server_url": None,
        "lr_scheduler_type": "constant", "warmup_steps": 0, "mask_truncated_completions": False,
        "sampler_correction": "none", "sampler_correction_floor": 0.0, "reward_clip_range": None,
        "max_skipped_steps": steps + 1,
    }  # fmt: skip
    engine = _FullRows(load.row_tokens, full_engine(policy, run, rows) if rows else None, rows, decoded)
    dataset = load_stack().datasets.Dataset.from_list(prompts)
    with make_trainer(policy, run, [_alternate], dataset, callbacks, changed) as trainer:
        trainer.rloo.sampler.engine = engine
        try:
            trainer.train()
        finally:
            engine.finish()
    return engine.rollout if rows else None, engine.training


def load_of(run: RunConfig, policy: Policy) -> Workload:
    """The inputs of the arithmetic, with the training pass that `train` would plan on this machine."""
    config = policy.model.config.to_dict()
    plan = plan_vram(run, config=config, engine=loaded_engine(run, policy))
    return replace(read_workload(run, plan.machine, config, plan.engine.name), tokens_per_pass=plan.tokens_per_pass)


def rows_of_a_pass(load: Workload) -> tuple[int, int]:
    """(K, completions) of the smallest batch with a pass as large as the run's largest; two passes if all weights are
    trained."""
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
    """Stands in for an engine: decodes the end of `count` full rows with the real one, if it is given, and returns
    made-up completions that fill every row to `tokens`. Keeps the peaks of both halves of a step."""

    name, reason = "synthetic", "to measure memory"
    rows: int | None = None

    def __init__(self, tokens: int, engine: Any, count: int, decoded: int) -> None:
        self._tokens, self._engine, self._count, self._decoded = tokens, engine, count, decoded
        self.rollout, self.training = MemoryPeak(settled=False), MemoryPeak(settled=False)
        self._running: tuple[MemoryPeak, MemoryPeak] | None = None  # that of a half, and the largest so far

    def sample(self, prompt_ids: list[list[int]], *_more: Any, **_named: Any) -> Rollout:
        if self._engine is not None:
            self._begin(self.rollout)
            decode_ends(self._engine, self._count, self._tokens, self._decoded)
        self._begin(self.training)
        ids = [torch.randint(1, 200, (self._tokens - len(prompt),)).tolist() for prompt in prompt_ids]
        return Rollout(ids, [None] * len(ids), [[-1.0] * len(row) for row in ids])

    def _begin(self, largest: MemoryPeak) -> None:
        self.finish()
        self._running = MemoryPeak(settled=False).start(), largest

    def finish(self) -> None:
        """End the half that runs."""
        if self._running is not None:
            (peak, largest), self._running = self._running, None
            peak.finish()
            largest.gib, largest.reserved_gib = max(largest.gib, peak.gib), max(largest.reserved_gib, peak.reserved_gib)
            largest.seconds = peak.seconds


@contextmanager
def make_trainer(
    policy: Policy,
    run: RunConfig,
    reward_funcs: Sequence[Any],
    dataset: Any,
    callbacks: Sequence[TrainerCallback] = (),
    changed: Mapping[str, Any] | None = None,
) -> Iterator[RLOOTrainer]:
    """A trainer as in `train`, in a temporary folder; the adapter "ref" and the gradients are deleted at the end.
    `changed` overrides the run's `RLOOConfig` arguments."""
    was_training = policy.model.training
    with tempfile.TemporaryDirectory(prefix="rloo-kit-preflight-") as folder:
        Path(folder).chmod(0o755)  # a server that loads the adapter from here may run as another user
        arguments = training_arguments(run, policy, Path(folder))
        arguments |= {"resample_rounds": 0, "save_strategy": "no", "report_to": "none", **(changed or {})}
        trainer = None
        try:
            trainer = RLOOTrainer(
                model=policy.model,
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


# ------------------------------------------------------------------------------------------------ the end of a rollout


def full_engine(policy: Policy, run: RunConfig, rows: int) -> Any:
    """The run's local engine with its prefill replaced by a full cache, and without halving rows."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    engine: Any = build_engine(
        policy.model,
        run.rollout.engine,
        backend=policy.backend,
        temperature=run.rloo.temperature,
        end_ids=[vocabulary + 1],  # never drawn: every row reaches its end
        pad_id=policy.tokenizer.pad_token_id,
        rows=rows,
        say=lambda line: None,
    )

    def refuse(tried: int, _left: int) -> None:
        raise torch.OutOfMemoryError(f"out of memory with {tried} completions at once")

    engine._halve = refuse
    if engine.name == "native":
        engine._fill = _fill_slots
    elif engine.name == "generate":
        engine._cache_options = lambda rows, width: {"past_key_values": _fill_cache(engine._model, rows, width)}
    return engine


def decode_ends(engine: Any, rows: int, tokens: int, decoded: int) -> None:
    """Decode the last `decoded` of the `tokens` tokens of each of `rows` rows, after full caches."""
    prompts = [[row % 200 + 1] * (tokens - decoded) for row in range(rows)]  # different, unlike those of a group
    engine.sample(prompts, Limits(decoded))


def _fill_slots(decoder: Any, cache: Any, rows: list[Any], first: int) -> None:
    """Fill slots of the native engine with one token's keys and values at every position."""
    states: dict[int, tuple[Any, Any]] = {}  # (G, 1, D) by layer

    def insert(layer: int, _first: int, _count: int, keys: Any, values: Any) -> None:
        states[layer] = keys, values

    decoder.prefill([[0]], SimpleNamespace(insert=insert), [(0, 1)])
    for layer, (keys, values) in states.items():
        for slot, row in enumerate(rows, first):
            length = row.position
            cache.insert(layer, slot, 1, keys.expand(-1, length, -1), values.expand(-1, length, -1))


def _fill_cache(model: Any, rows: int, width: int) -> Any:
    """transformers' cache for (B, P) prefixes without their last token: views of one token's keys and values, which the
    first step materialises layer by layer."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    one = model(input_ids=ids, use_cache=True).past_key_values
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for place, found in enumerate(one.layers if hasattr(one, "layers") else one):
        if hasattr(found, "recurrent_states"):  # a delta net's, which one token fills
            found.reorder_cache(torch.zeros(rows, dtype=torch.long))
            cache.layers[place] = found
        else:
            pair, layer = (found.keys, found.values) if hasattr(found, "keys") else found, cache.layers[place]
            wide = [states.expand(rows, -1, width - 1, -1) for states in pair]
            layer.lazy_initialization(*wide)
            layer.keys, layer.values = wide
    return cache
