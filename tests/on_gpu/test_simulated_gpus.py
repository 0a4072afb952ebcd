"""The shipped configs on GPUs of 8, 12, 16 and 24 GB, played on whatever GPU is here by a cap on what torch may take.

One run of two steps by the kit's own `train`, each with one rollout and its gradient: the first makes the optimizer's
state, the second has everything in memory that a run ever has. Completions have their full length
(`full_length.py`). Unlike in the shipped checkpoints all layers are in 4 bit here, so the real ones take more: how much
was left is in the result.
"""

from pathlib import Path
from typing import Any

import cells
import pytest

from tests.on_gpu.conftest import ROOT, id_reward
from tests.on_gpu.edge import GB, GIB, holds
from tests.on_gpu.full_length import Parts, full_length_rollouts

GPUS = (8, 12, 16, 24)
TAIL = 64
TINY = {"prompt": 8, "completion": 24, "answer": 6, "tail": 4}
PRECISIONS = {"bf16": (), "fp16": ("rloo.fp16=true", "rloo.bf16=false", "model.dtype=float16")}


def load_run(gpu_gb: int, precision: str, model: Path, folder: Path, interpreted: bool) -> Any:
    """The shipped config, on the checkpoint at hand, cut to two steps of one rollout each."""
    from rloo_kit import load_config, plan_vram

    file = ROOT / "configs" / f"qwen3_4b_thinking_{gpu_gb}gb.yaml"
    shipped = load_config(file).rloo
    length, answer = shipped.max_completion_length, shipped.answer_budget
    overrides = [
        f"model.name={model}", f"run.output_dir={folder}", "run.sample_every_steps=0", "rloo.max_steps=2",
        f"rloo.gradient_accumulation_steps={shipped.steps_per_generation}", "rloo.save_steps=1000", "rloo.report_to=[]",
        "rloo.thinking_close=tag",  # the sentence has four times as many tokens in this tokenizer
    ]  # fmt: skip
    if cells.rehearsing():
        length, answer = TINY["completion"], TINY["answer"]
        overrides += [f"data.max_prompt_length={TINY['prompt']}", "model.max_seq_length=128", "model.dtype=float32"]
        overrides += [f"rloo.answer_budget={answer}", f"rloo.max_completion_length={length}", "rloo.optim=adamw_torch"]
        overrides += ["model.load_in_4bit=false"] if interpreted else []
    else:
        overrides += PRECISIONS[precision]
    overrides += [f"rloo.thinking_budget={length - answer - 1}"]
    plan = plan_vram(load_config(file, *overrides), gpu_gb * GB / GIB)
    overrides += [f"rollout.rows={plan.rows}", f"rloo.tokens_per_pass={plan.tokens_per_pass}"]
    cells.report(planned={"rollout_gib": round(plan.rollout_gib, 2), "training_gib": round(plan.training_gib, 2)})
    return load_config(file, *overrides)


def make_data(run: Any) -> Any:
    """Prompts that are as long as they may be; a byte is a token."""
    from datasets import Dataset

    from rloo_kit.data.load import Data

    prompts = [{"prompt": str(number % 10) * run.data.max_prompt_length} for number in range(16)]
    return Data(train=Dataset.from_list(prompts), test=Dataset.from_list(prompts[:1]))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gpu_gb", GPUS)
def test_a_shipped_config_trains_at_full_length(
    gpu_gb: int, precision: str, gpu: Any, memory: Any, interpreted: bool, checkpoint: Any, load: Any, tmp_path: Path
) -> None:
    """The plan is arithmetic. What it leaves out is found after ten hours, when the first batch thinks to its limit."""
    import rloo_kit

    model = checkpoint("4b")
    run = load_run(gpu_gb, precision, model, tmp_path, interpreted)
    full = run.rloo.max_completion_length
    tail = TINY["tail"] if cells.rehearsing() else TAIL
    parts = Parts(memory, lambda peaks: cells.report(peaks_gib=peaks))
    with memory.capped(gpu_gb) as limit, memory.measure() as whole:
        assert not holds(memory, limit + 0.5), "the cap does not hold, so nothing is shown"
        cells.report(gpu_gb=gpu_gb, limit_gib=round(limit, 3), backend=gpu.backend, precision=precision)
        policy = load(run)
        cells.report(after_load_gib=round(memory.held_gib, 3))
        with full_length_rollouts(tail, parts.begin_rollout, parts.end_rollout) as watch:
            result = rloo_kit.train(run, policy, make_data(run), [id_reward])
        parts.close()
        cells.report(rollouts=watch.rows, ran_out_of_memory=watch.ran_out)
    cells.report(seconds=whole["seconds"], reserved_gib=whole["peak_reserved_gib"])
    lengths = [row["completions/mean_length"] for row in result.metrics if "grad_norm" in row]
    assert result.steps == 2 and lengths == [full, full]
    assert [row["tokens"] for row in watch.rows] == [[full, full]] * 2
    assert parts.peaks["rollout"] > 0 and parts.peaks["training"] > 0
    fraction = limit - max(parts.peaks.values())
    cells.report(left_gib=round(fraction, 3))
    assert fraction > 0
    assert not watch.ran_out, f"not all rows fitted at once: {'; '.join(watch.ran_out)}: lower rollout.rows"
