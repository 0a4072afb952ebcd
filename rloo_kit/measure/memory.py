"""Measured memory of a run's rollout and training pass on this machine, to compare with `plan_vram`.

A checkpoint of the run's true shape with random weights goes through the run's own code at full length: 64 tokens of
decoding after full caches, and two optimizer steps (the optimizer's state exists from the second on). On a GPU the
figure is torch's peak, without CUDA's context and the allocator's reserve; elsewhere resident memory.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from rloo_kit._stack import load_stack
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import BackendError
from rloo_kit.loop.memory import MemoryPeak
from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.run_arguments import loaded_engine, mixed_precision, training_arguments
from rloo_kit.loop.trainer import RLOOTrainer
from rloo_kit.measure.stand_ins import fill_cache, fill_slots
from rloo_kit.models.adapters import drop_reference
from rloo_kit.models.policy import Policy
from rloo_kit.plan.parts import Workload
from rloo_kit.plan.planner import plan_vram, read_workload
from rloo_kit.rollout.engine import build_engine
from rloo_kit.rollout.types import Limits, Rollout

DECODED_TOKENS = 64
LOCAL_ENGINES = ("auto", "native", "generate")
NOT_HERE = {
    "vllm": "vLLM takes a fixed share of the GPU (rollout.vllm.gpu_memory_utilization) when it starts",
    "server": "the KV cache is on the server's GPUs",
}


# ------------------------------------------------------------------------------------------------ the rollout


def measure_rollout(
    policy: Policy, run: RunConfig, rows: int, tokens: int, decoded: int = DECODED_TOKENS
) -> MemoryPeak:
    """Decode the last tokens of `rows` completions of `tokens` tokens each, prompt included.

    Args:
        run: provides engine and temperature. rows: completions at once. tokens: more than `decoded`.
        decoded: tokens to decode after full caches, 1 or more.

    Raises:
        ConfigError, BackendError: the engine cannot be used here. torch's out-of-memory error is not caught: rows are
            not halved.
    """
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise BackendError(f"rows of {tokens} tokens were requested, and the model has {positions} positions")
    engine = _full_engine(policy, run, rows)
    precision = mixed_precision(run)  # as the trainer samples
    dtype = torch.bfloat16 if precision["bf16"] else torch.float16
    with MemoryPeak() as peak, torch.autocast(policy.model.device.type, dtype, enabled=any(precision.values())):
        _decode_ends(engine, rows, tokens, decoded)
    return peak


def _full_engine(policy: Policy, run: RunConfig, rows: int) -> Any:
    """The run's engine with its prefill replaced by a full cache, and without halving rows."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    engine: Any = build_engine(
        policy.model,
        engine_to_measure(run),
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
        engine._fill = fill_slots
    elif engine.name == "generate":
        engine._cache_options = lambda rows, width: {"past_key_values": fill_cache(engine._model, rows, width)}
    return engine


def _decode_ends(engine: Any, rows: int, tokens: int, decoded: int) -> None:
    """Decode the last `decoded` tokens of `rows` rows, after full caches."""
    if tokens <= decoded:
        raise BackendError(f"rows of {tokens} tokens were requested; set more than the {decoded} that are decoded")
    prompts = [[row % 200 + 1] * (tokens - decoded) for row in range(rows)]  # different, unlike those of a group
    lengths = {len(ids) for ids in engine.sample(prompts, Limits(decoded)).completion_ids}
    if lengths != {decoded}:
        raise BackendError(f"rows of {sorted(lengths)} tokens came back instead of {decoded}")


def engine_to_measure(run: RunConfig) -> str:
    """The engine to measure; vLLM, here or on a server, is refused."""
    if run.rollout.engine not in LOCAL_ENGINES:
        raise BackendError(
            f"the rollout of rollout.engine={run.rollout.engine} has no peak to measure: "
            f"{NOT_HERE[run.rollout.engine]}. Measure another engine with rollout.engine=native or generate"
        )
    return str(run.rollout.engine)


# ------------------------------------------------------------------------------------------------ training


def measure_training(policy: Policy, run: RunConfig) -> MemoryPeak:
    """Peak of two optimizer steps on completions of full length, in passes as large as the run's largest. Changes the
    policy's weights. Raises ConfigError if the run's keys contradict each other, and torch's out-of-memory error."""
    load = load_of(run, policy)
    with MemoryPeak() as peak:
        _take_steps(policy, run, load, _FullRows(load.row_tokens))
    return peak


def measure_steps(
    policy: Policy,
    run: RunConfig,
    rows: int,
    decoded: int = DECODED_TOKENS,
    callbacks: Sequence[TrainerCallback] = (),
    steps: int = 2,
) -> tuple[MemoryPeak, MemoryPeak]:
    """The steps of `measure_training`, each after the last `decoded` tokens of a rollout of `rows` full rows by the
    run's engine (0: no rollout), with the optimizer and everything else of a run in memory.

    Args:
        callbacks: for the trainer. steps: number of steps; the optimizer's state exists from the second on.

    Returns:
        (peak of the rollouts, peak of the rest); their seconds are those of the last step.
    """
    load = load_of(run, policy)
    if not rows:
        with MemoryPeak(settled=False) as training:
            _take_steps(policy, run, load, _FullRows(load.row_tokens), callbacks, steps)
        return MemoryPeak(), training
    engine = _FullRows(load.row_tokens, _full_engine(policy, run, rows), rows, decoded)
    with engine.around:
        _take_steps(policy, run, load, engine, callbacks, steps)
    return engine.rollout, engine.training


def size_of_steps(policy: Policy, run: RunConfig) -> tuple[int, int]:
    """(completions, tokens of each with its prompt) of one step of `measure_steps`."""
    load = load_of(run, policy)
    return rows_of_a_pass(load)[1], load.row_tokens


def _take_steps(
    policy: Policy,
    run: RunConfig,
    load: Workload,
    engine: Any,
    callbacks: Sequence[TrainerCallback] = (),
    steps: int = 2,
) -> None:
    """Optimizer steps on the engine's completions; they change nothing but the trained weights. Warm-up, masks and the
    sampler correction are off: with them made-up completions would get no gradient."""
    generations, rows = rows_of_a_pass(load)
    prompts = load_stack().datasets.Dataset.from_list(
        [{"prompt": "0" * load.prompt_tokens}] * (2 * rows // generations)
    )
    changed = {
        "max_steps": steps, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1,
        "steps_per_generation": None, "num_generations": generations, "logging_steps": 1,
        "rollout_engine": "auto", "rollout_server_url": None,
        "lr_scheduler_type": "constant", "warmup_steps": 0, "mask_truncated_completions": False,
        "sampler_correction": "none", "sampler_correction_floor": 0.0, "reward_clip_range": None,
        "max_skipped_steps": steps + 1,
    }  # fmt: skip
    with make_trainer(policy, run, [alternate], prompts, callbacks, changed) as trainer:
        trainer.rloo.sampler.engine = engine
        trainer.train()


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

    Args:
        changed: overrides of the run's `RLOOConfig` arguments.
    """
    was_training = policy.model.training
    with tempfile.TemporaryDirectory(prefix="rloo-kit-measure-") as folder:
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


def rows_of_a_pass(load: Workload) -> tuple[int, int]:
    """(K, completions) of the smallest batch with a pass as large as the run's largest; two passes if all weights are
    trained."""
    needed = -(-load.pass_tokens // load.row_tokens)
    generations = load.num_generations if load.whole_groups else min(load.num_generations, max(2, needed))
    groups = -(-min(needed, load.completions) // generations)
    if load.lora_rank is None:  # a second pass runs with the gradients of the first in memory, as large as the model
        groups = max(groups, min(2 * groups, load.completions // generations))
    return generations, generations * groups


def alternate(completions: Any, **_columns: Any) -> list[float]:
    """A reward that gives every completion an advantage: 0, 1, 0, 1, ..."""
    return [float(row % 2) for row in range(len(completions))]


class _FullRows:
    """Stands in for an engine: made-up completions that fill every row to `tokens`, after the end of a rollout of
    `rows` rows if a real engine is given."""

    name, reason = "synthetic", "to measure memory"
    rows: int | None = None

    def __init__(self, tokens: int, engine: Any = None, rows: int = 0, decoded: int = 0) -> None:
        self._tokens, self._engine, self._rows, self._decoded = tokens, engine, rows, decoded
        self.rollout, self.training = MemoryPeak(settled=False), MemoryPeak(settled=False)
        self.around = ExitStack()

    def sample(self, prompt_ids: list[list[int]], *_more: Any, **_named: Any) -> Rollout:
        if self._engine is not None:
            self.around.close()
            with self._watch("rollout"):
                _decode_ends(self._engine, self._rows, self._tokens, self._decoded)
            self.around.enter_context(self._watch("training"))
        ids = [torch.randint(1, 200, (self._tokens - len(prompt),)).tolist() for prompt in prompt_ids]
        return Rollout(ids, [None] * len(ids), [[-1.0] * len(row) for row in ids])

    @contextmanager
    def _watch(self, part: str) -> Iterator[None]:
        """Update the peak of a part with that of the block."""
        total: MemoryPeak = getattr(self, part)
        with MemoryPeak(settled=False) as peak:
            yield
        total.gib, total.reserved_gib = max(total.gib, peak.gib), max(total.reserved_gib, peak.reserved_gib)
        total.seconds = peak.seconds


def load_of(run: RunConfig, policy: Policy) -> Workload:
    """The inputs of the arithmetic, with the training pass that `train` would plan on this machine."""
    config = policy.model.config.to_dict()
    plan = plan_vram(run, config=config, engine=loaded_engine(run, policy))
    return replace(read_workload(run, plan.machine, config, plan.engine.name), tokens_per_pass=plan.tokens_per_pass)
