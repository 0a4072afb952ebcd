"""Whole steps of Qwen3-4B in 4-bit: the kit's vs. TRL's under Unsloth, the shipped configs on GPUs simulated by a cap,
and two real steps of an evening.

Equal on both sides of the comparison: the model, LoRA of rank 16 on the seven projections, bf16, Unsloth's
checkpointing, 16 completions in two groups of K 8 with imposed lognormal lengths up to 1k tokens, prompts of about 101
tokens, beta 0.05. Stock's side is loaded as its users load it. A step with a short rollout comes first: Unsloth's
training forward drops the mask of left-padded rows until the model has generated.

A shipped config runs as is except for its checkpoint (all layers in 4-bit; Unsloth's copies keep some in 16). Rows at
their full length come from full caches (`full_rows`). A cap cannot show a small GPU's bandwidth and shared memory.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import reporting
import step_workload
from step_workload import Workload

from on_gpu import memory
from on_gpu.bench import MAX_TOKENS, Bench
from on_gpu.checks import check

LONGEST = 1024  # tokens of the longest completion
STEPS = 2  # of each side, if there is time; kernels of these lengths are compiled in the first
SIDES = {"ours, generate": ("fast", "generate"), "ours, native": ("fast", "native"), "TRL": ("stock", "")}
GPUS_GB = (8, 12, 16, 24)
TAIL, TINY_TAIL = 64, 4  # tokens decoded after full caches
WARM = 8  # of them before the clock starts
TINY = (
    "data.max_prompt_length=32", "rloo.max_completion_length=20", "rloo.thinking_budget=10", "rloo.answer_budget=6",
    "model.max_seq_length=128", "model.dtype=float32", "rloo.optim=adamw_torch", "rloo.num_generations=2",
    "rloo.per_device_train_batch_size=1", "rloo.gradient_accumulation_steps=2",
)  # fmt: skip
LONG = ("model.max_seq_length=40960",)  # one load serves every config
FP16 = ("rloo.fp16=true", "rloo.bf16=false", "model.dtype=float16")
OFFLINE = (
    "data.source=embedded/addition", "data.subset=null", "data.prompt_column=prompt", "data.answer_column=answer",
    "data.answer_after=null", "data.system_prompt=null", "data.num_prompts=64", "data.test_size=8",
)  # fmt: skip
SAME = "tiny, it is the check of 12 GB"


# ------------------------------------------------------------------------------------------------ ours against TRL's


@check(1, 170)
def takes_a_step_of_1k(bench: Bench) -> None:
    """The kit's step with `generate` and with the native engine, and TRL's: 16 completions of at most 1k tokens, whole,
    rollout and training."""
    from rloo_kit.errors import BackendError

    for label, (name, engine) in SIDES.items():
        try:
            measure_side(bench, label, name, engine)
        except BackendError as error:
            bench.report(**{label: {"refused": str(error)}})
        except RuntimeError as error:
            from rloo_kit.system.memory import is_out_of_memory

            if not is_out_of_memory(error):
                raise
            bench.report(**{label: {"fits": False}})
        memory.settle(bench.cuda)


def measure_side(bench: Bench, label: str, name: str, engine: str) -> None:
    """Build a side, take a step with a short rollout, then whole ones; everything is reported at once."""
    from rloo_kit.training.memory_watch import MemoryPeak

    started, steps = time.monotonic(), list[dict[str, float]]()
    with built_side(bench, name, make_workload(bench), engine) as side:
        bench.report(**{label: {"built_s": round(time.monotonic() - started, 1)}})
        full, started = side.targets, time.monotonic()
        side.targets = [min(tokens, 16) for tokens in full]
        side.step(canned=False)
        side.targets = full
        bench.report(**{label: {"short_s": round(time.monotonic() - started, 1), "tokens": sum(full)}})
        while len(steps) < (1 if bench.rehearsed else STEPS):
            memory.settle(bench.cuda)
            with MemoryPeak() as peak:
                step = side.step(canned=False)
            if side.completion_lengths != side.targets:
                raise AssertionError(f"other lengths than imposed: {side.completion_lengths}")
            times = {part: round(getattr(step, part), 4) for part in ("whole_s", "generation_s", "training_s")}
            steps.append(times | {"peak_gib": round(peak.gib, 2)})
            bench.report(**{label: {"steps": steps, "best_s": min(one["whole_s"] for one in steps)}})
            if bench.left_s < 3 * peak.seconds:
                break


def make_workload(bench: Bench) -> Workload:
    """The step that is compared; tiny in a rehearsal."""
    full = Workload(8, 151936, checkpointing=True, beta=0.05, longest=LONGEST)
    if not bench.rehearsed:
        return full
    step_workload.PROMPT_TOKENS, step_workload.SHORTEST = (5, 8), 3
    return replace(full, num_generations=2, vocabulary=2048, completions=4, longest=6)


@contextmanager
def built_side(bench: Bench, name: str, workload: Workload, engine: str) -> Iterator[Any]:
    """A side of `step_sides`: "fast" of the kit on the shared policy, or "stock" on a model of its own. A reference
    adapter that a trainer adds is removed afterwards."""
    import torch
    from step_sides import wrap_model

    from rloo_kit.system import environment

    precision = environment.current().precision
    options: dict[str, Any] = {"use_cpu": bench.rehearsed, "bf16": precision == "bf16", "fp16": precision == "fp16"}
    options |= {"optim": "adamw_torch"}  # which Unsloth does not replace
    variables: AbstractContextManager[Any] = nullcontext()
    if name == "stock":
        model, tokenizer = bench.shared("stock", lambda: load_stock(bench))
        options |= {"gradient_checkpointing": False}
        # Unsloth's trainers in float32 would leave mixed precision switched on
        variables = mock.patch.dict("os.environ", {"UNSLOTH_MIXED_PRECISION": "bfloat16"} if bench.interpreted else {})
    else:
        policy = bench.policy("4b")
        model, tokenizer = policy.model, policy.tokenizer
        with torch.no_grad():  # a trainer takes a trained adapter as its own reference
            for parameter_name, value in model.named_parameters():
                if "lora_B" in parameter_name:
                    value.zero_()
        options |= policy.config_arguments | {"rollout_engine": engine}
    with variables:
        side = wrap_model(name, workload, model, tokenizer, None, **options)
        try:
            yield side
        finally:
            model = side.trainer.model
            if "ref" in getattr(model, "peft_config", {}):
                model.delete_adapter("ref")
            model.zero_grad(set_to_none=True)
            side.trainer = None
            memory.settle(bench.cuda)


def load_stock(bench: Bench) -> tuple[Any, Any]:
    """Model with its adapter and tokenizer, as in Unsloth's docs."""
    import torch
    from unsloth import FastLanguageModel

    from rloo_kit.system import environment

    lora = {name: value for name, value in step_workload.LORA.items() if name != "task_type"}
    bench.keep_on_cpu()
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(bench.checkpoint("4b")),
        max_seq_length=128 if bench.rehearsed else MAX_TOKENS,
        dtype=torch.float32 if bench.rehearsed else getattr(torch, environment.current().dtype_name),
        load_in_4bit=not bench.rehearsed,
    )
    model = FastLanguageModel.get_peft_model(model, **lora, use_gradient_checkpointing="unsloth", random_state=0)
    bench.keep_on_cpu()
    return model, tokenizer


# -------------------------------------------------------------------------------------------------- small GPUs


@check(0, 140, "unsloth", "transformers", not_rehearsed=SAME)
def trains_on_8gb(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_8gb.yaml under a cap of 8 GB: two steps at full length, and seconds a step."""
    train_on(bench, 8)


@check(0, 90, "transformers")
@check(2, 90)
def trains_on_12gb(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_12gb.yaml under a cap of 12 GB."""
    train_on(bench, 12)


@check(0, 90, "unsloth", "transformers", not_rehearsed=SAME)
def trains_on_16gb(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_16gb.yaml under a cap of 16 GB."""
    train_on(bench, 16)


@check(0, 110, "unsloth", "transformers", not_rehearsed=SAME)
def trains_on_24gb(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_24gb.yaml under a cap of 24 GB."""
    train_on(bench, 24)


@check(0, 120, "unsloth", "transformers", not_rehearsed=SAME)
def trains_on_8gb_fp16(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_8gb.yaml under a cap of 8 GB in float16, as on a GPU without bfloat16."""
    train_on(bench, 8, *FP16)


@check(0, 110, "transformers")
@check(2, 110)
def takes_an_evening_s_steps(bench: Bench) -> None:
    """Two real steps of configs/evening_12gb.yaml under a cap of 12 GB: sampled to the budget, closed, answered and
    trained, on sums (there is no network) and by a reward that differs whatever random weights write."""
    import rloo_kit
    from rloo_kit.training.memory_watch import MemoryPeak

    def remainder(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    with memory.capped(bench.cuda, 12) as limit:
        policy = load_policy(bench)
        run, plan = load_shipped(bench, "evening_12gb", 12, *OFFLINE, "rloo.max_steps=2", "run.name=evening",
                                 f"run.output_dir={bench.scratch / f'outputs-{bench.backend}'}")  # fmt: skip
        bench.report(limit_gib=round(limit, 2), rows=plan.rows, engine=plan.engine.name, computed=computed_peaks(plan))
        data = rloo_kit.load_data(run, policy.tokenizer)
        with MemoryPeak() as peak:
            result = rloo_kit.train(run, policy, data, [remainder], overwrite=True)
        rows = [row for row in result.metrics if "grad_norm" in row]
        names = ("step_time", "time/rollout_s", "time/decode_ms_per_token_step", "time/gradient_s",
                 "completions/mean_length", "grad_norm")  # fmt: skip
        steps = [{name: round(row[name], 4) for name in names if name in row} for row in rows]
        bench.report(steps=steps, peak_gib=round(peak.gib, 3), reserved_gib=round(peak.reserved_gib, 3))
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows), "two steps with a gradient were asked for"
    bench.release()


def train_on(bench: Bench, gpu_gb: int, *overrides: str) -> None:
    """The shipped config of a GPU: two steps at full length under its cap, and what a step takes."""
    from on_gpu.full_rows import measure_steps
    from rloo_kit.preflight.trial_steps import load_of, rows_of_a_pass

    with memory.capped(bench.cuda, gpu_gb) as limit:
        policy = load_policy(bench, *overrides)
        stem = f"qwen3_4b_thinking_{gpu_gb}gb"
        run, _ = load_shipped(bench, stem, gpu_gb, *overrides)
        load = load_of(run, policy)  # whole rows: as many as fit the tokens of one pass
        words = [*overrides, f"rloo.tokens_per_pass={rows_of_a_pass(load)[1] * load.row_tokens}"]
        run, plan = load_shipped(bench, stem, gpu_gb, *words)
        bench.report(
            limit_gib=round(limit, 3), computed=computed_peaks(plan), rows=plan.rows,
            tokens_per_pass=plan.tokens_per_pass,
        )  # fmt: skip
        rollout, training = measure_steps(policy, run, plan.rows, TINY_TAIL if bench.rehearsed else TAIL)
        outside = gpu_gb * memory.GB / memory.GIB - limit
        bench.report(
            context_gib=round(outside, 3), rollout_gib=round(rollout.gib, 3), training_gib=round(training.gib, 3),
            reserved_gib=round(max(rollout.reserved_gib, training.reserved_gib), 3),
        )  # fmt: skip
        bench.report(**time_step(bench, policy, run, plan, training.seconds))


def computed_peaks(plan: Any) -> dict[str, float]:
    """The plan's peaks in GiB, as torch counts."""
    counted = [part for part in plan.parts if part.name not in ("context", "correction")]
    return {name: round(sum(getattr(part, name) for part in counted), 3) for name in ("rollout_gib", "training_gib")}


def load_policy(bench: Bench, *overrides: str) -> Any:
    """The policy that all configs share, with room for the longest rows."""
    return bench.policy("4b", overrides=(*(() if bench.rehearsed else LONG), *overrides))


def load_shipped(bench: Bench, stem: str, gpu_gb: int, *overrides: str) -> tuple[Any, Any]:
    """The config of that name on the random checkpoint, with the rows and passes of its plan on that GPU."""
    from rloo_kit import load_config, plan_vram

    file = reporting.ROOT / "configs" / f"{stem}.yaml"
    words = [f"model.name={bench.checkpoint('4b')}", f"model.backend={bench.backend}", "rloo.report_to=[]"]
    words += ["rloo.thinking_close=tag"]  # the sentence has four times as many tokens in a byte tokenizer
    words += [*(TINY if bench.rehearsed else ()), *(["model.load_in_4bit=false"] if bench.interpreted else [])]
    plan = plan_vram(load_config(file, *words, *overrides), gpu_gb * memory.GB / memory.GIB)
    words += [f"rollout.rows={plan.rows}", f"rloo.tokens_per_pass={plan.tokens_per_pass}"]
    return load_config(file, *words, *overrides), plan


def time_step(bench: Bench, policy: Any, run: Any, plan: Any, training_s: float) -> dict[str, Any]:
    """Seconds of an optimizer step in which every completion reaches its limit, from the milliseconds of a token at the
    beginning, the middle and the end of a row.

    Args:
        training_s: of a step of `measure_steps`, whose completions are those of the run's largest pass.
    """
    from on_gpu.decoding import clocked
    from on_gpu.full_rows import decode_ends, full_engine
    from rloo_kit.preflight.trial_steps import load_of, rows_of_a_pass

    rloo, prompt = run.rloo, run.data.max_prompt_length
    length, tail = rloo.max_completion_length, TINY_TAIL if bench.rehearsed else TAIL
    engine, steps_ms = full_engine(policy, run, plan.rows), []
    for share in (1,) if bench.rehearsed else (0, 0.5, 1):
        memory.settle(bench.cuda)
        with clocked(bench, engine) as clock, engine.autocast():
            decode_ends(engine, plan.rows, prompt + int(share * (length - tail)) + tail, tail)
        steps_ms.append(clock.token_ms(1 if bench.rehearsed else WARM))
    completions = rloo.per_device_train_batch_size * rloo.gradient_accumulation_steps
    rollout_s = statistics.mean(steps_ms) / 1e3 * length * -(-completions // plan.rows)
    gradient_s = training_s * completions / rows_of_a_pass(load_of(run, policy))[1]
    return {
        "decode_ms": steps_ms, "rollout_s": round(rollout_s, 1), "gradient_s": round(gradient_s, 1),
        "step_s": round(rollout_s + gradient_s, 1),
    }  # fmt: skip
