"""docs/plan.md and docs/several-gpus.md: tables show what the arithmetic says, and examples are plans that fit."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config, plan_vram
from rloo_kit.plan import parts
from rloo_kit.plan.parts import GIB, Load
from rloo_kit.plan.peaks import largest_rows, rollout_gib, training_gib
from rloo_kit.plan.result import Machine
from rloo_kit.plan.shapes import PUBLISHED, ModelShape
from tests.plan.test_parts import load_of

GPUS = (8, 12, 16, 24, 40, 80)  # GB, as GPUs are sold
SHORT, LONG = 4096, 15872  # completion tokens; prompts have 512


def limit_of(gpu: int) -> float:
    return Machine("", gpu * 1e9 / GIB, 0.8, True).usable_gib


def parts_row(size: str, shape: ModelShape) -> str:
    """What a size takes, short and long."""
    load = load_of(shape, prompt_tokens=512, completion_tokens=SHORT)
    long = replace(load, completion_tokens=LONG)
    trained = parts.trained_weights(load)
    whole = 4 * trained + parts.gradient_bytes(load) + parts.optimizer_bytes(load)
    resting = training_gib(load) - (parts.activation_bytes(load) + parts.head_bytes(load)) / GIB
    a_token = (parts.activation_bytes(load) + parts.head_bytes(load)) / load.pass_tokens / 1024
    cells = [f"{parts.body_bytes(load) / GIB:.2f} + {parts.table_bytes(load) / GIB:.2f}", f"{whole / GIB:.2f}"]
    cells += [f"{resting:.1f}", f"{parts.cache_bytes_per_token(load) / 1024:.0f}"]
    cells += [f"{parts.decoding_bytes(load, 1) / load.cache_tokens / 1024:.0f}", f"{a_token:.0f}"]
    cells += [f"{rollout_gib(load, 8):.1f}", f"{training_gib(load):.1f}"]
    cells += [f"{rollout_gib(long, 8):.1f}", f"{training_gib(long):.1f}"]
    return f"| {size.upper()} | {' | '.join(cells)} |"


def held(load: Load, gpu: int) -> str:
    """Completions at once, of 64 that are asked for."""
    limit = limit_of(gpu)
    rows = largest_rows(replace(load, completions=64), limit)
    return str(rows) if max(rollout_gib(load, rows), training_gib(load)) <= limit else "-"


def rows_row(size: str, shape: ModelShape) -> str:
    """Completions at once by GPU under Unsloth, short and long."""
    long = load_of(shape, prompt_tokens=512, completion_tokens=LONG)
    pairs = [f"{held(replace(long, completion_tokens=SHORT), gpu)}, {held(long, gpu)}" for gpu in GPUS]
    return f"| {size.upper()} | {' | '.join(pairs)} |"


def row_of_16k(size: str, shape: ModelShape) -> str:
    """GiB of one long row with its layer, and of a long training pass, and long rows at once on 8, 12, 16, 24 GB; with
    Unsloth and without."""
    unsloth = load_of(shape, prompt_tokens=512, completion_tokens=LONG)
    loads = unsloth, replace(unsloth, fused=False, checkpointing="on")
    cells = [f"{(parts.cache_bytes(unsloth, 1) + parts.decoding_bytes(unsloth, 1)) / GIB:.2f}"]
    cells += [f"{training_gib(load):.1f}" for load in loads]
    cells += [" ".join(held(load, gpu) for gpu in (8, 12, 16, 24)) for load in loads]
    return f"| {size.upper()} | {' | '.join(cells)} |"


def page_rows() -> list[str]:
    """All rows of all tables."""
    return [make(size, shape) for make in (parts_row, rows_row, row_of_16k) for size, shape in PUBLISHED.items()]


@pytest.fixture(scope="module")
def page() -> str:
    return (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def test_the_page_shows_what_the_plan_computes(page: str) -> None:
    """A table of memory that was typed in by hand is wrong after the first change of the arithmetic."""
    lines = page.splitlines()
    missing = [row for row in page_rows() if row not in lines]
    assert not missing, "docs/plan.md lacks:\n" + "\n".join(missing)


EXAMPLE = re.compile(r"^# (.*)\nrloo-kit plan (configs/\S+) ((?:.*\\\n)*.*)$", re.M)


def test_the_examples_are_plans(page: str, repository: Path, monkeypatch: Any, tmp_path: Path) -> None:
    """16k tokens of thinking on 12 and 24 GB: a command of the page that does not fit any more is worse than none."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("RLOO_KIT_BACKEND", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = 0
    for said, file, words in EXAMPLE.findall(page):
        overrides = shlex.split(words.replace("\\\n", " "))
        gpu = overrides.pop(overrides.index("--gpu-gib") + 1)
        overrides.remove("--gpu-gib")
        run = load_config(repository / file, *overrides)
        assert run.rloo.thinking_budget == 16384
        plan = plan_vram(run, float(gpu))
        peaks = f"{plan.rollout_gib:.1f} in the rollout, {plan.training_gib:.1f} in training"
        verdict = "" if plan.fits else f", does not fit; {plan.changes[0].override} does"
        assert said == f"{plan.rows} of {plan.completions} at once: {peaks}{verdict}", (file, words)
        found += 1
    assert found == 2


if __name__ == "__main__":  # prints the rows, to be put into the page
    print("\n".join(page_rows()))


def test_the_table_of_32b_on_several_gpus(repository: Path) -> None:
    """Somebody buys GPUs by this table: Qwen3-32B, whole on each GPU (4-bit, bf16), then its bf16 weights shared."""
    in_4bit = load_of(
        PUBLISHED["32b"], optim="adamw_torch", checkpointing="on", fused=False, prompt_tokens=512,
        completion_tokens=8192,
    )  # fmt: skip
    in_bf16 = replace(in_4bit, four_bit=False)
    columns = []
    for load, gpus in ((in_4bit, 1), (in_bf16, 1), (in_bf16, 2), (in_bf16, 4), (in_bf16, 8)):
        weights = parts.body_bytes(load) + parts.table_bytes(load)
        trained = 4 * parts.trained_weights(load) + parts.gradient_bytes(load) + parts.optimizer_bytes(load)
        layers = 2 * parts.body_bytes(load) / load.shape.num_layers + parts.table_bytes(load) if gpus > 1 else 0
        gathered = weights if gpus > 1 else 0
        passes = parts.activation_bytes(load) + parts.head_bytes(load)
        cache = parts.cache_bytes(load, 8) + parts.decoding_bytes(load, 8) + parts.sampling_bytes(load, 8)
        rest = (weights + trained) / gpus + parts.work_bytes(load) + parts.context_bytes(load)
        sums = (rest + layers + passes, rest + gathered + cache)
        columns.append((weights / gpus, trained / gpus, layers, passes, sums[0], gathered, cache, sums[1]))
    table = [[f"{size / GIB:.1f}" if size else "0" for size in row] for row in zip(*columns, strict=True)]
    text = (repository / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ")[1:] for line in text.partition("| GiB per GPU |")[2].splitlines()[2:]]
    assert rows[: len(table)] == table
