"""What a run's rollout and training pass take on the machine at hand, next to what `plan_vram` computed.

A checkpoint of the run's true shape with random weights goes through the run's own code at its longest: 64 tokens of
decoding behind full caches, and two optimizer steps (the optimizer's state is there from the second on). On a GPU the
figure is torch's peak, without CUDA's context and the allocator's reserve; elsewhere resident memory.
"""

import gc
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from rloo_kit._stack import load_stack
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import BackendError
from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.run_arguments import loaded_engine, mixed_precision, training_arguments
from rloo_kit.loop.trainer import RLOOTrainer
from rloo_kit.measure.stand_ins import fill_cache, fill_slots
from rloo_kit.models.policy import Policy
from rloo_kit.plan.load import read_load
from rloo_kit.plan.parts import Load
from rloo_kit.plan.planner import plan_vram
from rloo_kit.rollout.engine import build_engine
from rloo_kit.rollout.types import Limits, Rollout
from rloo_kit.system.memory import GIB, ResidentPeak, resident_gib, trim_heap

DECODED_TOKENS = 64
LOCAL_ENGINES = ("auto", "native", "generate")
NOT_HERE = {
    "vllm": "vLLM takes its share of the GPU (rollout.vllm.gpu_memory_utilization) when it starts, and keeps to it",
    "server": "the server's GPUs hold its keys and values",
}


class Peak:
    """The most memory held inside the `with` block in GiB, torch's on a GPU, else resident; `reserved_gib` is what
    torch's allocator held, 0 elsewhere; `seconds` is how long the block took.

    Args:
        settled: garbage and the allocator's cache are freed first; False leaves them as a run does.
    """

    gib = reserved_gib = seconds = 0.0

    def __init__(self, settled: bool = True) -> None:
        self._settled = settled

    def __enter__(self) -> "Peak":
        self._cuda = torch.cuda if torch.cuda.is_available() else None
        self._watch: ResidentPeak | None = None
        if self._settled:
            gc.collect()
        if self._cuda is not None:
            self._cuda.synchronize()
            if self._settled:
                self._cuda.empty_cache()
            self._cuda.reset_peak_memory_stats()
        else:
            if self._settled:
                trim_heap()
            if self._settled or resident_gib() is not None:  # a figure that was asked for is refused without /proc
                self._watch = ResidentPeak()
        self._started = time.monotonic()
        return self

    def __exit__(self, *_error: Any) -> None:
        if self._watch is not None:
            self.gib = self._watch.finish()
        elif self._cuda is not None:
            self._cuda.synchronize()
            self.gib = self._cuda.max_memory_allocated() / GIB
            self.reserved_gib = self._cuda.max_memory_reserved() / GIB
        self.seconds = time.monotonic() - self._started


# ------------------------------------------------------------------------------------------------ the rollout


def measure_rollout(
    policy: Policy, run: RunConfig, rows: int, tokens: int, cache: str | None = None, decoded: int = DECODED_TOKENS
) -> Peak:
    """Decode the last tokens of `rows` completions that are `tokens` long with their prompts.

    Args:
        run: engine, cache and temperature are its own. rows: completions at once. tokens: more than `decoded`.
        cache: in place of `run.rollout.cache`. decoded: tokens that are decoded behind full caches, 1 or more.

    Raises:
        ConfigError, BackendError: the engine cannot be used here, or cannot keep this cache. Out of memory is raised as
            torch does: rows are not halved.
    """
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise BackendError(f"rows of {tokens} tokens were asked for, and the model has {positions} positions")
    engine = _full_engine(policy, run, rows, cache)
    with Peak() as peak, _autocast(run, policy):
        _decode_ends(engine, rows, tokens, decoded)
    return peak


def _full_engine(policy: Policy, run: RunConfig, rows: int, cache: str | None = None) -> Any:
    """The run's engine with its prefill replaced by a cache that is full already, and without the halving of rows."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    engine: Any = build_engine(
        policy.model,
        engine_to_measure(run),
        backend=policy.backend,
        temperature=run.rloo.temperature,
        end_ids=[vocabulary + 1],  # never drawn: every row reaches its end
        pad_id=policy.tokenizer.pad_token_id,
        rows=rows,
        cache=run.rollout.cache if cache is None else cache,
        say=lambda line: None,
    )
    engine._halve = _out_of_rows
    if engine.name == "native":
        engine._fill = fill_slots
    elif engine.name == "generate":
        engine._cache_options = lambda rows, width: {"past_key_values": fill_cache(engine, rows, width)}
    return engine


def _decode_ends(engine: Any, rows: int, tokens: int, decoded: int) -> None:
    """The last `decoded` tokens of `rows` rows, behind full caches."""
    if tokens <= decoded:
        raise BackendError(f"rows of {tokens} tokens were asked for; take more than the {decoded} decoded")
    prompts = [[row % 200 + 1] * (tokens - decoded) for row in range(rows)]  # unlike, as those of groups are not
    lengths = {len(ids) for ids in engine.sample(prompts, Limits(decoded)).completion_ids}
    if lengths != {decoded}:
        raise BackendError(f"rows of {sorted(lengths)} tokens came back where {decoded} were to be decoded")


def _autocast(run: RunConfig, policy: Policy) -> AbstractContextManager[Any]:
    """Mixed precision as the trainer samples in it."""
    chosen = mixed_precision(run)
    if not any(chosen.values()):
        return nullcontext()
    return torch.autocast(policy.model.device.type, torch.bfloat16 if chosen["bf16"] else torch.float16)


def engine_to_measure(run: RunConfig) -> str:
    """The engine to measure; vLLM, here or on a server, is refused."""
    if run.rollout.engine not in LOCAL_ENGINES:
        raise BackendError(
            f"the rollout of rollout.engine={run.rollout.engine} has no peak to measure: "
            f"{NOT_HERE[run.rollout.engine]}. Measure another engine's with rollout.engine=native or generate"
        )
    return str(run.rollout.engine)


def _out_of_rows(tried: int, _left: int) -> None:
    raise torch.OutOfMemoryError(f"out of memory with {tried} completions at once")


# ------------------------------------------------------------------------------------------------ training


def measure_training(policy: Policy, run: RunConfig) -> Peak:
    """Take two optimizer steps on completions of full length, in passes as large as the run's largest; spoils the
    policy. Raises ConfigError where the run's keys contradict each other; out of memory as torch does."""
    load = load_of(run, policy)
    with Peak() as peak:
        _take_steps(policy, run, load, _FullRows(load.row_tokens))
    return peak


def measure_steps(
    policy: Policy,
    run: RunConfig,
    rows: int,
    decoded: int = DECODED_TOKENS,
    callbacks: Sequence[TrainerCallback] = (),
    steps: int = 2,
) -> tuple[Peak, Peak]:
    """The steps of `measure_training` as a run takes them: each begins with the last `decoded` tokens of a rollout
    of `rows` full rows by the run's engine (0: no rollout), with optimizer and whatever else a run holds in place.

    Args:
        callbacks: of the trainer, which look at the steps. steps: the optimizer's state is there from the second on.

    Returns:
        the larger peak of the rollouts and of what lies around them; their seconds are those of the last step.
    """
    load = load_of(run, policy)
    if not rows:
        with Peak(settled=False) as training:
            _take_steps(policy, run, load, _FullRows(load.row_tokens), callbacks, steps)
        return Peak(), training
    engine = _FullRows(load.row_tokens, _full_engine(policy, run, rows), rows, decoded)
    with engine.around:
        _take_steps(policy, run, load, engine, callbacks, steps)
    return engine.rollout, engine.training


def size_of_steps(policy: Policy, run: RunConfig) -> tuple[int, int]:
    """(completions, tokens of each with its prompt) of a step of `measure_steps`."""
    load = load_of(run, policy)
    return rows_of_a_pass(load)[1], load.row_tokens


def _take_steps(
    policy: Policy,
    run: RunConfig,
    load: Load,
    engine: "_FullRows",
    callbacks: Sequence[TrainerCallback] = (),
    steps: int = 2,
) -> None:
    """Optimizer steps on what the engine gives; the policy is left with another adapter and nothing else. What would
    leave made-up completions without a gradient (a warm-up, masks, the sampler's correction) is off."""
    generations, rows = rows_of_a_pass(load)
    prompts = load_stack().datasets.Dataset.from_list(
        [{"prompt": "0" * load.prompt_tokens}] * (2 * rows // generations)
    )
    changed = {
        "max_steps": steps, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1,
        "steps_per_generation": None, "num_generations": generations, "logging_steps": 1,
        "rollout_engine": "auto", "rollout_cache": "plain", "rollout_server_url": None,
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
    """A trainer as `train` makes it, in a folder that is deleted; the adapter "ref" and the gradients go with it.

    Args:
        changed: arguments of `RLOOConfig` that are not the run's.
    """
    was_training = policy.model.training
    with tempfile.TemporaryDirectory(prefix="rloo-kit-measure-") as folder:
        Path(folder).chmod(0o755)  # a server that is handed the adapter there may run as another user
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
            if close is not None:  # a server gives the adapter up
                close()
            policy.model.zero_grad(set_to_none=True)
            if "ref" in getattr(policy.model, "peft_config", {}):
                policy.model.delete_adapter("ref")
            policy.model.train(was_training)
            del trainer


def rows_of_a_pass(load: Load) -> tuple[int, int]:
    """(K, completions) of the smallest batch with a pass as large as the largest of the run; with two where all weights
    are trained."""
    needed = -(-load.pass_tokens // load.row_tokens)
    generations = load.num_generations if load.whole_groups else min(load.num_generations, max(2, needed))
    groups = -(-min(needed, load.completions) // generations)
    if load.lora_rank is None:  # a second pass finds the gradients of the first, as large as the model
        groups = max(groups, min(2 * groups, load.completions // generations))
    return generations, generations * groups


def alternate(completions: Any, **_columns: Any) -> list[float]:
    """A reward under which every completion has an advantage: 0, 1, 0, 1, ..."""
    return [float(row % 2) for row in range(len(completions))]


class _FullRows:
    """In the place of an engine: made-up completions that fill every row to `tokens`, behind the end of a rollout of
    `rows` rows by a real engine where one is given."""

    name, reason = "synthetic", "to measure memory"
    rows: int | None = None

    def __init__(self, tokens: int, engine: Any = None, rows: int = 0, decoded: int = 0) -> None:
        self._tokens, self._engine, self._rows, self._decoded = tokens, engine, rows, decoded
        self.rollout, self.training = Peak(settled=False), Peak(settled=False)
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
        """Add what a block takes to the peak of its part."""
        total: Peak = getattr(self, part)
        with Peak(settled=False) as peak:
            yield
        total.gib, total.reserved_gib = max(total.gib, peak.gib), max(total.reserved_gib, peak.reserved_gib)
        total.seconds = peak.seconds


def load_of(run: RunConfig, policy: Policy) -> Load:
    """What the arithmetic reads of the run, with the pass that `train` would plan for it on this machine."""
    config = policy.model.config.to_dict()
    plan = plan_vram(run, config=config, engine=loaded_engine(run, policy))
    return replace(read_load(run, plan.machine, config, plan.engine.name), tokens_per_pass=plan.tokens_per_pass)
