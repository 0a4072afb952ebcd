"""The arithmetic of docs/several-gpus.md, computed again from the parts of the memory plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from rloo_kit import load_config
from rloo_kit.plan import parts as vram_parts
from rloo_kit.plan.planner import Machine, read_load

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "several-gpus.md"
OVERRIDES = (
    "model.name=Qwen/Qwen3-32B",
    "model.backend=transformers",
    "model.gradient_checkpointing=true",
    "model.max_seq_length=9216",
    "data.max_prompt_length=512",
    "rloo.max_completion_length=8192",
    "rloo.thinking_budget=null",
    "rloo.answer_budget=null",
    "rloo.optim=adamw_torch",
    "rloo.num_generations=8",
    "rloo.per_device_train_batch_size=8",
    "rloo.gradient_accumulation_steps=1",
    "rloo.steps_per_generation=1",
)
ROWS = 8


@pytest.fixture(scope="module")
def in_4bit():
    """Qwen3-32B with LoRA r=16, one group of 8 completions of 8k tokens a GPU."""
    run = load_config(ROOT / "configs" / "qwen3_4b_thinking.yaml", *OVERRIDES)
    return read_load(run, Machine("a GPU", 80.0, 1.0, True, is_here=False))


def table(in_4bit):
    """Rows of the page's table, in its order: what it is, then GiB a GPU in each column."""
    in_bf16 = replace(in_4bit, four_bit=False)
    columns = [(in_4bit, 1), (in_bf16, 1), (in_bf16, 2), (in_bf16, 4), (in_bf16, 8)]
    found = {name: [] for name in NAMES}
    for load, share in columns:
        p = vram_parts
        weights = p.body_bytes(load) + p.table_bytes(load)
        trained = (4 * p.trained_weights(load) + p.gradient_bytes(load) + p.optimizer_bytes(load)) / share
        layers = 0 if share == 1 else 2 * p.body_bytes(load) / load.shape.num_layers + p.table_bytes(load)
        whole = 0 if share == 1 else weights
        rest = weights / share + trained + p.work_bytes(load) + p.context_bytes(load)
        cache = p.cache_bytes(load, ROWS) + p.decoding_bytes(load, ROWS) + p.sampling_bytes(load, ROWS)
        passes = p.activation_bytes(load) + p.head_bytes(load)
        values = (weights / share, trained, layers, passes, rest + layers + passes, whole, cache, rest + whole + cache)
        for name, value in zip(NAMES, values, strict=True):
            found[name].append(f"{value / p.GIB:.1f}" if value else "0")
    return [f"| {name} | {' | '.join(values)} |" for name, values in found.items()]


NAMES = (
    "weights, its share",
    "adapter, gradients, Adam, its share",
    "gathered while a layer is computed",
    "a training pass",
    "**training**",
    "gathered to sample",
    "cache of 8 rows, decoding",
    "**rollout on the same GPUs**",
)


def test_the_page_has_the_plans_own_numbers(in_4bit):
    """A figure typed into a page is right once; somebody buys GPUs by this one."""
    text = PAGE.read_text(encoding="utf-8")
    missing = [row for row in table(in_4bit) if row not in text]
    assert not missing, "\n".join(["docs/several-gpus.md should say:", *missing])
