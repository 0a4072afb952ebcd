"""Part 2, figures on Qwen3-4B in 4-bit: decoding, the training part, whole steps, and their memory.

Equal on all sides of a comparison: the model, LoRA of rank 16 on the seven projections, bf16, checkpointing (Unsloth's
own under Unsloth), 16 completions in two groups of K 8 with lognormal lengths (the mean 0.32 of the longest), prompts
of about 101 tokens, beta 0.05. Stock's sides are loaded as their users load them. A step with a short rollout
and, if the gradient is measured, one canned step are discarded: Unsloth's training forward drops the mask of
left-padded rows until the model has generated, and compilation happens then.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import step_workload
from step_workload import Workload

from on_gpu import memory
from on_gpu.bench import MAX_TOKENS, Bench, Skipped, check

ROWS, BEHIND, FEW, MANY = (8, 32, 128), 1024, 16, 64  # decoded rows, tokens before them; tokens of two measurements
TINY_ROWS, TINY_BEHIND, TINY_FEW, TINY_MANY = (2,), 20, 2, 4
LONGEST = {"512": 512, "2k": 2048, "4k": 4096, "8k": 8192}  # tokens of the longest completion
TINY = {"PROMPT_TOKENS": (5, 8), "SHORTEST": 3}
STEPS = 2  # of the kit's; one of another trainer's, which are slow
OTHER_LAYOUT = {"shared": "repeated", "repeated": "shared"}
ENGINES = {"unsloth": "generate", "transformers": "native"}


def make_workload(bench: Bench, length: str, rows: int | None = None) -> Workload:
    """The step that is compared; tiny in a rehearsal. `rows`: completions of a micro-batch, None for a group."""
    full = Workload(8, 151936, checkpointing=True, beta=0.05, longest=LONGEST[length], rows=rows)
    if not bench.rehearsed:
        return full
    for name, value in TINY.items():
        setattr(step_workload, name, value)
    return replace(full, num_generations=2, vocabulary=2048, completions=4, longest=6, rows=rows and min(rows, 2))


# ---------------------------------------------------------------------------------------------------------- decoding


@check(2, 90)
def decodes(bench: Bench) -> None:
    """The engine at 8, 32 and 128 rows after 1,024 tokens: milliseconds a step, tokens a second."""
    started = time.monotonic()
    policy = bench.policy("4b")
    if bench.cuda.is_available():
        bench.report(load_s=round(time.monotonic() - started, 1), held_gib=round(memory.held_gib(bench.cuda), 2))
    run = bench.make_run("4b", f"rollout.engine={ENGINES[bench.backend]}")
    rows = TINY_ROWS if bench.rehearsed else ROWS
    for count in rows:
        bench.report(**{f"rows {count}": measure_decoding(bench, policy, run, count, BEHIND)})


def measure_decoding(bench: Bench, policy: Any, run: Any, rows: int, behind: int) -> dict[str, Any]:
    """Milliseconds a step, from two lengths, so that one-off costs cancel; and the peak, in GiB."""
    from on_gpu.full_rows import measure_rollout
    from rloo_kit.system.memory import is_out_of_memory

    few, many = (TINY_FEW, TINY_MANY) if bench.rehearsed else (FEW, MANY)
    behind = TINY_BEHIND if bench.rehearsed else behind
    found = []
    try:
        for decoded in (few, few, many):  # the first is discarded
            found.append(measure_rollout(policy, run, rows, behind + decoded, decoded))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        memory.settle(bench.cuda)
        return {"fits": False}
    step_s = max(found[2].seconds - found[1].seconds, 1e-6) / (many - few)
    return {
        "ms_per_step": round(1e3 * step_s, 2),
        "tokens_per_s": round(rows / step_s),
        "peak_gib": round(found[2].gib, 2),
    }


# --------------------------------------------------------------------------------------------- training part, and steps


@check(2, 150)
def trains_4k(bench: Bench) -> None:
    """The kit's training part with completions up to 4k tokens, `memory: fast`."""
    with built_side(bench, "fast", make_workload(bench, "4k")) as side:
        bench.report(fast=measure_training(bench, side))


@check(2, 60)
def whole_step_512(bench: Bench) -> None:
    """The kit's whole step, real rollouts with imposed lengths up to 512 tokens."""
    with built_side(bench, "fast", make_workload(bench, "512")) as side:
        bench.report(**measure_whole(bench, side))


@check(2, 150)
def stock_trains_4k(bench: Bench) -> None:
    """TRL's RLOO trainer on the same completions; smaller micro-batches if a group does not fit."""
    measure_stock(bench, "stock", "4k")


@check(2, 150, backends=("unsloth",))
def grpo_trains_4k(bench: Bench) -> None:
    """Unsloth's GRPO trainer on the same completions."""
    measure_stock(bench, "grpo", "4k")


@check(2, 60)
def stock_whole_step_512(bench: Bench) -> None:
    """TRL's RLOO trainer, whole steps with the same lengths."""
    with built_side(bench, "stock", make_workload(bench, "512")) as side:
        bench.report(**measure_whole(bench, side))


@check(2, 90)
def trains_4k_otherwise(bench: Bench) -> None:
    """The same with the other layout (prompts shared or repeated), and with `memory: low`."""
    if bench.interpreted:
        raise Skipped("rehearsed through transformers: the interpreter takes its time")
    with built_side(bench, "low", make_workload(bench, "4k")) as side:
        bench.report(low=measure_training(bench, side, most=1))
        chosen = side.trainer.rloo.scorer.scorer.layout
    if chosen in OTHER_LAYOUT:
        with built_side(bench, "fast", make_workload(bench, "4k"), OTHER_LAYOUT[chosen]) as side:
            bench.report(**{OTHER_LAYOUT[chosen]: measure_training(bench, side, most=1)})


def measure_stock(bench: Bench, name: str, length: str) -> None:
    """Another trainer's training part, with the largest micro-batch that fits."""
    from rloo_kit.system.memory import is_out_of_memory

    for rows in (None,) if bench.rehearsed else (None, 4, 2, 1):
        try:
            with built_side(bench, name, make_workload(bench, length, rows)) as side:
                bench.report(rows=side.workload.micro_batch, **measure_training(bench, side, most=1))
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            bench.report(does_not_fit=make_workload(bench, length, rows).micro_batch)
        memory.settle(bench.cuda)
    raise MemoryError("one completion a micro-batch does not fit either: out of memory")


def measure_training(bench: Bench, side: Any, most: int = STEPS) -> dict[str, Any]:
    """Steps with canned completions, less rollout and rewards: seconds, and the peak above the level before."""
    roll_out_briefly(side)
    if not bench.rehearsed:
        side.step(canned=True)
    return take_steps(bench, side, canned=True, most=most) | {
        "layout": getattr(getattr(side.trainer, "_scorer", None), "layout", None)
    }


def measure_whole(bench: Bench, side: Any) -> dict[str, Any]:
    """Whole steps; their lengths are checked."""
    if not bench.rehearsed:
        side.step(canned=True)  # compiles what the gradient of this length needs
        roll_out_briefly(side)
    found = take_steps(bench, side, canned=False, most=1)
    engine = side.engine
    if side.completion_lengths != side.targets:
        raise AssertionError(f"other lengths than imposed: {side.completion_lengths}")
    return found | {"engine": "generate" if engine is None else engine.name}


def roll_out_briefly(side: Any) -> None:
    """A step with a real rollout of at most 16 tokens."""
    full = side.targets
    side.targets = [min(tokens, 16) for tokens in full]
    side.step(canned=False)
    side.targets = full


def take_steps(bench: Bench, side: Any, canned: bool, most: int) -> dict[str, Any]:
    """Medians over the steps, and tokens of a step; fewer steps if time is short."""
    from rloo_kit.loop.memory_watch import MemoryPeak

    steps: list[dict[str, float]] = []
    while len(steps) < (1 if bench.rehearsed else most):
        memory.settle(bench.cuda)
        held = memory.held_gib(bench.cuda) if bench.cuda.is_available() else 0.0
        with MemoryPeak() as peak:
            step = side.step(canned=canned)
        steps.append({name: getattr(step, name) for name in ("whole_s", "generation_s", "training_s")})
        steps[-1] |= {"peak_gib": peak.gib, "above_held_gib": peak.gib - held}
        if bench.left_s < 1.3 * peak.seconds:
            break
    found = {name: round(statistics.median(step[name] for step in steps), 4) for name in steps[0]}
    return found | {"steps": len(steps), "tokens": sum(step_workload.completion_lengths(side.workload))}


@contextmanager
def built_side(bench: Bench, name: str, workload: Workload, layout: str = "") -> Iterator[Any]:
    """A side of `step_sides` on the shared model: "fast", "low" or "balanced" of the kit, "stock" or "grpo"; `layout`
    is the scorer's. A reference adapter that a trainer adds is removed afterwards."""
    from step_sides import wrap_model

    from rloo_kit.system import environment

    precision = environment.current().precision
    options: dict[str, Any] = {"use_cpu": bench.rehearsed, "bf16": precision == "bf16", "fp16": precision == "fp16"}
    options |= {"optim": "adamw_torch"}  # which Unsloth does not replace
    is_stock = name in ("stock", "grpo")
    if is_stock:
        model, tokenizer, peft_config = stock_model(bench)
        options |= {"gradient_checkpointing": bench.backend == "transformers"}
    else:
        policy, peft_config = bench.policy("4b"), None
        model, tokenizer = policy.model, policy.tokenizer
        forget_steps(model)
        options |= policy.config_arguments | {"rollout_engine": ENGINES[bench.backend]}
    with head(bench), environment_kept(bench, is_stock):
        side = wrap_model(name, workload, model, tokenizer, peft_config, **options)
        if layout:
            scorer = side.trainer.rloo.scorer.scorer
            scorer.layout, scorer.layouts = layout, (layout,)
        try:
            yield side
        finally:
            model = side.trainer.model
            if "ref" in getattr(model, "peft_config", {}):
                model.delete_adapter("ref")
            model.zero_grad(set_to_none=True)
            side.trainer = None
            memory.settle(bench.cuda)


def forget_steps(model: Any) -> None:
    """Make the adapter the identity again: a trainer takes a trained one as its own reference."""
    import torch

    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.zero_()


def head(bench: Bench) -> AbstractContextManager[Any]:
    """TRL's Triton head with a GPU or an interpreter, else its stand-in."""
    if not bench.rehearsed or bench.interpreted:
        return nullcontext()
    import trl_head

    return trl_head.installed()


def environment_kept(bench: Bench, is_stock: bool) -> AbstractContextManager[Any]:
    """Restore the environment after Unsloth's trainers, which in float32 would leave mixed precision switched on."""
    more = {"UNSLOTH_MIXED_PRECISION": "bfloat16"} if is_stock and bench.interpreted else {}
    return mock.patch.dict("os.environ", more)


def stock_model(bench: Bench) -> tuple[Any, Any, Any]:
    """Model, tokenizer and the adapter's config (None if the model has its adapter already), as in their docs."""
    from peft import LoraConfig

    lora = dict(step_workload.LORA)
    if bench.backend == "transformers":
        bench.release()  # a trainer wraps it in an adapter, so the next one needs another
        return *load_by_transformers(bench), LoraConfig(**lora)
    del lora["task_type"]
    return *bench.shared("stock", lambda: load_by_unsloth(bench, lora)), None


def load_by_transformers(bench: Bench) -> tuple[Any, Any]:
    """The model in NF4 with double quantisation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from rloo_kit.system import environment

    checkpoint, dtype = bench.checkpoint("4b"), getattr(torch, environment.current().dtype_name)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    four_bit, device = BitsAndBytesConfig(load_in_4bit=True, **nf4), "cpu" if bench.rehearsed else 0
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=four_bit, dtype=dtype, device_map={"": device}
    )
    return model, AutoTokenizer.from_pretrained(checkpoint)


def load_by_unsloth(bench: Bench, lora: dict[str, Any]) -> tuple[Any, Any]:
    """The model with its adapter."""
    import torch
    from unsloth import FastLanguageModel

    from rloo_kit.system import environment

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
