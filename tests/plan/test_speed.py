"""The least time of a step: what it is made of, whose speed it is, and the estimates that it has to come near to."""

from dataclasses import replace
from pathlib import Path

import pytest

from rloo_kit import load_config, plan_vram
from rloo_kit.plan import parts
from rloo_kit.plan.parts import rows_at_once
from rloo_kit.plan.planner import find_machine, read_workload
from rloo_kit.plan.speed import GPUS, find_gpu, step_time, token_step_s

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "engine", "four_bit", "low", "high"),
    [
        ("RTX 3060", "generate", True, 60, 60),
        ("RTX 3060", "vllm", True, 220, 220),
        ("RTX 4090", "vllm", False, 1500, 2900),
        ("H100", "vllm", True, 4000, 8000),
    ],
)
def test_the_estimates_are_met_within_a_factor_of_two(
    name: str, engine: str, four_bit: bool, low: int, high: int
) -> None:
    """Useful tokens a second of the 12 GB config, two ways to one figure; one that is off by ten has a unit wrong."""
    gpu = next(gpu for gpu in reversed(GPUS) if gpu.name == name)
    machine = find_machine(gpu.memory_gb * 1e9 / parts.GIB)
    work = read_workload(load_config(ROOT / "configs" / "qwen3_4b_thinking_12gb.yaml"), machine, engine=engine)
    work = replace(work, four_bit=four_bit, shape=replace(work.shape, is_quantised=four_bit))
    rows = rows_at_once(work, machine.usable_gib, 8 if engine == "generate" else None)
    rate = step_time(work, rows, 32, gpu).tokens_per_s
    if engine == "vllm":  # with full rows
        rate = rows / token_step_s(work, rows, gpu)
    assert low / 2 <= rate <= high * 2


def test_a_gpu_is_known_by_its_name_and_size() -> None:
    """A laptop's GPU and a slice of a large one have the name of one that is much faster."""
    for name, gib, expected in (
        ("NVIDIA GeForce RTX 3060", 12.0, ("RTX 3060", 12)),
        ("NVIDIA GeForce RTX 3060 Ti", 8.0, ("RTX 3060 Ti", 8)),
        ("NVIDIA A100-SXM4-80GB", 79.25, ("A100", 80)),
        ("NVIDIA A100-PCIE-40GB", 39.39, ("A100", 40)),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 8.0, None),
        ("NVIDIA GeForce RTX 4070 SUPER", 12.0, None),
        ("NVIDIA A10", 22.5, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, None),
        ("a GPU with 11.18 GiB", 11.18, ("RTX 3060", 12)),
        ("a GPU with 140 GiB", 140, None),
    ):
        found = find_gpu(name, gib)
        assert (found and (found.name, found.memory_gb)) == expected, name


def test_the_plan_prints_it_where_it_knows_the_gpu() -> None:
    """Two days were found out about on the second day."""
    run = load_config(ROOT / "configs" / "qwen3_4b_thinking_12gb.yaml")
    plan = plan_vram(run, 12e9 / 2**30)
    assert plan.step is not None and plan.step.gpu == "RTX 3060" and "computed, not measured" in str(plan.step)
    assert f"{plan.step.seconds / 60:.0f} min, 200 steps {plan.step.hours(200):.1f} h" in " ".join(str(plan).split())
    assert plan_vram(run, 140).step is None, "an unknown GPU's speed is not known"
