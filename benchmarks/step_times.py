"""Tables of docs/plan.md: the step time of the shipped configs with vLLM and without, by arithmetic alone.

`python benchmarks/step_times.py` writes them into the page.
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from reporting import ROOT, table

from rloo_kit import load_config, plan_vram
from rloo_kit.plan import speed, vllm_memory
from rloo_kit.plan.load import find_machine, read_load
from rloo_kit.plan.parts import GIB, Load
from rloo_kit.plan.peaks import rows_at_once
from rloo_kit.plan.speed import GPUS, GpuSpeed

CONFIGS = ROOT / "configs"
STEPS = 200
# Claims for configs/qwen3_4b_thinking_12gb.yaml, useful tokens a second: GPU, engine, 4 bit, from, to.
CLAIMS = (
    ("RTX 3060", "generate", True, 60, 60),
    ("RTX 4090", "generate", True, 140, 140),
    ("RTX 3060", "vllm", True, 220, 220),
    ("RTX 4090", "vllm", True, 1500, 2900),
    ("RTX 4090", "vllm", False, 1500, 2900),
    ("H100", "vllm", True, 4000, 8000),
    ("H100", "vllm", False, 4000, 8000),
)


@contextmanager
def alone() -> Iterator[None]:
    """Ignore this machine's model cache and any launcher, so that the tables are the same everywhere."""
    hidden = ("HF_HUB_CACHE", "RLOO_KIT_BACKEND", "WORLD_SIZE")
    before = {name: os.environ.pop(name, None) for name in hidden}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HUB_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["HF_HUB_CACHE"]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def gpu_configs() -> Iterator[tuple[Path, int]]:
    """The shipped configs for a GPU, with the GB that their headers require; the smallest first."""
    found = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        wanted = re.search(r"one NVIDIA GPU with (\d+) GB", path.read_text(encoding="utf-8"))
        if wanted:
            found.append((path, int(wanted[1])))
    yield from sorted(found, key=lambda pair: (pair[1], pair[0].stem))


def _times() -> list[list[str]]:
    """Cells of `times_table`, a row for each config."""
    rows = []
    with alone():
        for path, size in gpu_configs():
            gpu = next(gpu for gpu in GPUS if gpu.memory_gb == size)
            cells = [f"`{path.name}`", f"{gpu.name}, {size} GB"]
            for engine in ("generate", "vllm"):
                plan = plan_vram(load_config(path, f"rollout.engine={engine}"), size * 1e9 / GIB)
                if not plan.fits or plan.step is None:
                    cells += ["does not fit", "", ""]
                    continue
                cells += [str(plan.rows), f"{plan.step.seconds:.0f}", f"{plan.step.hours(STEPS):.1f}"]
            rows.append(cells)
    return rows


def times_table(_result: Any = None) -> list[str]:
    """Each config on its GPU: rows at once, seconds a step, hours; with what `make setup` installs and with vLLM."""
    head = ["config", "GPU", "rows, `generate`", "s a step", f"h, {STEPS} steps", "rows, vLLM", "s a step"]
    return table([*head, f"h, {STEPS} steps"], _times())


def hours_table(_result: Any = None) -> list[str]:
    """Only lengths and hours of Qwen3-4B-Thinking's configs, for the README."""
    rows = []
    for config, gpu, _, _, hours, _, _, with_vllm in _times():
        if "thinking_" in config:
            longest = load_config(CONFIGS / config.strip("`")).rloo.max_completion_length
            rows.append([gpu, config, f"{longest:,}", hours, with_vllm])
    return table(["GPU", "config", "tokens a completion, at most", f"hours, {STEPS} steps", "with vLLM"], rows)


def gpus_table(_result: Any = None) -> list[str]:
    """The GPUs' specifications, from their manufacturer."""
    rows = [[gpu.name, str(gpu.memory_gb), f"{gpu.bandwidth:g}", f"{gpu.tflops:g}"] for gpu in GPUS]
    return table(["GPU", "GB", "GB/s", "16-bit TFLOPS"], rows)


def assumptions_table(_result: Any = None) -> list[str]:
    """Every number that is assumed rather than computed."""
    batched = ", ".join(
        f"{tokens} {'above' if gib == float('inf') else f'up to {gib} GiB'}"
        for gib, tokens in vllm_memory.UNSLOTH_BATCHED_TOKENS
    )
    rows = [
        ["mean prompt and completion, of the longest", f"{speed.MEAN_SHARE:g}"],
        ["operations of a token step and layer, without CUDA graphs", f"{speed.LAUNCHES_PER_LAYER:.1f}"],
        ["seconds to launch one", f"{speed.LAUNCH_S:g}"],
        ["seconds of vLLM's own work around a token step", f"{speed.VLLM_STEP_S:g}"],
        [
            "FLOPs of training, a weight and token",
            f"{speed.TRAINING_FLOPS}, {speed.SCORING_FLOPS} more with a reference",
        ],
        ["share of the GPU's TFLOPS that training reaches", f"{speed.TRAINING_SHARE:g}"],
        ["share of the GPU's bandwidth that decoding reaches", "1: a bound, not a forecast"],
        ["4-bit weights of a token step", "read, written in 16 bit, read again; once for all rows"],
        ["GiB of vLLM's CUDA graphs", f"{vllm_memory.GRAPHS_GIB:g}, and {vllm_memory.GRAPH_MIB} MiB a graph"],
        ["GiB of vLLM outside torch", f"{vllm_memory.OUTSIDE_GIB:g} (unsloth_zoo's table in `load_vllm`)"],
        ["bytes of vLLM's logits, a row and token of the vocabulary", f"{vllm_memory.LOGITS_BYTES} (the same table)"],
        ["tokens of one forward pass of vLLM", f"{vllm_memory.BATCHED_TOKENS}; under Unsloth by the pool: {batched}"],
    ]
    return table(["taken, not measured", "value"], rows)


def claims() -> list[tuple[GpuSpeed, Load, int, float, tuple[int, int]]]:
    """(GPU, load, rows, useful tokens a second, claimed range) for each of `CLAIMS`; vLLM with full rows, `generate`
    with the 8 of its claim."""
    found = []
    with alone():
        run = load_config(CONFIGS / "qwen3_4b_thinking_12gb.yaml")
        for name, engine, four_bit, low, high in CLAIMS:
            gpu = next(gpu for gpu in reversed(GPUS) if gpu.name == name)
            machine = find_machine(gpu.memory_gb * 1e9 / GIB)
            load = read_load(run, machine, engine=engine)
            load = replace(load, four_bit=four_bit, shape=replace(load.shape, is_quantised=four_bit))
            rows = rows_at_once(load, machine.usable_gib, 8 if engine == "generate" else None)
            rate = speed.step_time(load, rows, 32, gpu).tokens_per_s
            if engine == "vllm":
                rate = rows / speed.token_step_s(load, rows, gpu)
            found.append((gpu, load, rows, rate, (low, high)))
    return found


def claims_table(_result: Any = None) -> list[str]:
    """The arithmetic vs. the earlier claims."""
    rows = []
    for gpu, load, at_once, rate, (low, high) in claims():
        bits = "4-bit" if load.four_bit else "bf16"
        wanted = str(low) if low == high else f"{low} to {high}"
        rows.append([gpu.name, f"{load.engine}, {bits}", str(at_once), wanted, f"{rate:.0f}"])
    return table(["GPU", "engine", "rows", "estimated before", "this arithmetic"], rows)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    from doc_tables import write_tables

    write_tables((ROOT / "docs" / "plan.md",))
