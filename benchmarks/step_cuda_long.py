"""Long thoughts on small GPUs: 16k thinking tokens with K 4 on 12 GB and K 8 on 24 GB, trained under a cap on memory.

Each cell is one run by the kit's own `train`, two steps of one rollout each, from the shipped config of that GPU with
longer completions. A rollout is made up but for its last 64 tokens of thinking and its answer, whose caches are full
(`tests/on_gpu/full_length.py`); then the gradient is computed for all of it. Where the cache is plain, as many rows are
sampled at once as the plan says and the others wait; in 8 bits more of them fit, which only the native engine can, so
that cell runs through transformers. What is shown is that it fits, and what was left; time is shown by other cells.
"""

import tempfile
from pathlib import Path
from typing import Any

import cells
import checkpoints
import reporting
import step_cuda_models as models
from step_cuda_models import Kind

ANSWER, PROMPT, CLOSE = 511, 512, 1  # tokens behind 16k of thinking: 16384 + 1 + 511 = 16896
THINKING, TAIL = 16384, 64
TINY_ANSWER, TINY_PROMPT, TINY_THINKING, TINY_TAIL = 6, 8, 17, 4
GB_IN_GIB = 1e9 / 2**30


def measure_long(kind: Kind, gpu_gb: int, generations: int) -> None:
    """Two steps under the cap; the peaks of rollout and training pass, next to what the plan computed.

    Raises:
        AssertionError: it does not fit, or fewer rows fitted at once than the plan says.
    """
    import rloo_kit

    full_length = reporting.load_file("tests/on_gpu/full_length.py")
    memory = models.find_memory()
    tail = TINY_TAIL if cells.rehearsing() else TAIL
    with tempfile.TemporaryDirectory(prefix="rloo-step-") as folder:
        run = make_run(kind, gpu_gb, generations, Path(folder))
        full = run.rloo.max_completion_length
        parts = full_length.Parts(memory, lambda peaks: cells.report(peaks_gib=peaks))
        around = (parts.begin_rollout, parts.end_rollout)
        with memory.capped(gpu_gb) as limit:
            cells.report(gpu_gb=gpu_gb, limit_gib=round(limit, 3), backend=kind.backend, cache=run.rollout.cache)
            policy = models.load_policy(run)
            cells.report(after_load_gib=round(memory.held_gib, 3))
            with full_length.full_length_rollouts(tail, *around) as watch, memory.measure() as whole:
                result = rloo_kit.train(run, policy, _data(run), [_id_reward])
            parts.close()
    cells.report(rollouts=watch.rows, ran_out=watch.ran_out, seconds=whole["seconds"])
    cells.report(left_gib=round(limit - max(parts.peaks.values()), 3))
    if result.steps != 2 or [row["tokens"] for row in watch.rows] != [[full, full]] * 2:
        raise AssertionError(f"{result.steps} steps, rollouts {watch.rows}: not what was to be shown")
    if watch.ran_out:
        raise AssertionError(f"not all rows fitted at once: {'; '.join(watch.ran_out)}")


def make_run(kind: Kind, gpu_gb: int, generations: int, folder: Path) -> Any:
    """The shipped config of that GPU with 16k tokens of thinking, rows and passes as planned for it."""
    from rloo_kit import load_config, plan_vram

    answer, prompt, thinking = (TINY_ANSWER, TINY_PROMPT, TINY_THINKING) if cells.rehearsing() else (
        ANSWER, PROMPT, THINKING,
    )  # fmt: skip
    file = reporting.ROOT / "configs" / f"qwen3_4b_thinking_{gpu_gb}gb.yaml"
    overrides = [
        f"model.name={checkpoints.find_checkpoint(models.size())}", f"model.backend={kind.backend}",
        f"model.max_seq_length={max(-(-(prompt + thinking + CLOSE + answer) // 64) * 64, 64)}",
        f"data.max_prompt_length={prompt}", f"run.output_dir={folder}", "run.sample_every_steps=0",
        f"rloo.max_completion_length={thinking + CLOSE + answer}", f"rloo.thinking_budget={thinking}",
        f"rloo.answer_budget={answer}", "rloo.thinking_close=tag", f"rloo.num_generations={generations}",
        "rloo.per_device_train_batch_size=1", f"rloo.steps_per_generation={generations}",
        f"rloo.gradient_accumulation_steps={generations}", "rloo.max_steps=2", "rloo.save_steps=1000",
        "rloo.report_to=[]", f"rollout.cache={kind.cache}", f"rollout.engine={kind.engine}",
    ]  # fmt: skip
    if cells.rehearsing():
        overrides += ["model.dtype=float32", "rloo.optim=adamw_torch"]
        overrides += ["model.load_in_4bit=false"] if kind.backend == "unsloth" else []
    plan = plan_vram(load_config(file, *overrides), gpu_gb * GB_IN_GIB)
    cells.report(
        planned={"rollout_gib": round(plan.rollout_gib, 2), "training_gib": round(plan.training_gib, 2)},
        planned_rows=plan.rows, fits=plan.fits, completions=plan.completions, tokens=prompt + thinking + CLOSE + answer,
    )  # fmt: skip
    overrides += [f"rollout.rows={plan.rows}", f"rloo.tokens_per_pass={plan.tokens_per_pass}"]
    return load_config(file, *overrides)


def _data(run: Any) -> Any:
    """Prompts that are as long as they may be; a byte is a token."""
    from datasets import Dataset

    from rloo_kit.data.load import Data

    rows = [{"prompt": str(number % 10) * run.data.max_prompt_length} for number in range(16)]
    return Data(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:1]))


def _id_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The mean id: rewards differ, so every completion has a gradient."""
    return [sum(ids) / len(ids) / 151936 for ids in completion_ids]
