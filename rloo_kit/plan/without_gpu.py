"""A run on a machine without a GPU: how long a step takes there, and which shipped config fits."""

import os

from rloo_kit.config.run import RunConfig
from rloo_kit.plan.load import step_completions
from rloo_kit.plan.parts import Load
from rloo_kit.plan.result import LackOfGpu, Machine
from rloo_kit.plan.speed import GpuSpeed, step_time
from rloo_kit.system.gpu import GIB

# A step of 32 completions of 512 tokens trains 6 FLOPs x 0.5B weights x 16384 tokens = 49 TFLOP: nine minutes on four
# cores at TRAINING_SHARE of CORE_TFLOPS, and more than a day for 200 steps. Longer thinking takes days.
MOST_WEIGHTS = 0.5e9
CORE_TFLOPS = 0.06  # per core in float32: a server core with AVX-512 has 0.13 in torch (measured), AVX2 half of that
BANDWIDTH = 40.0  # GB/s; two channels of DDR4-3200 have 51
# Shipped configs and the GB of the GPU that each is for, largest first. The wheel does not include them.
ON_GPU = (
    ("configs/qwen3_4b_thinking.yaml", 40),
    ("configs/qwen3_4b_thinking_24gb.yaml", 24),
    ("configs/qwen3_4b_thinking_16gb.yaml", 16),
    ("configs/qwen3_4b_thinking_12gb.yaml", 12),
    ("configs/qwen3_4b_thinking_8gb.yaml", 8),
)
ON_CPU = "configs/arithmetic_thinking.yaml"


def fitting_config(machine: Machine) -> str | None:
    """The shipped config for this machine: the largest that fits its GPU; without a GPU the embedded model's."""
    if not machine.on_cuda:
        return ON_CPU
    return next((file for file, size in ON_GPU if size * 1e9 / GIB <= 1.01 * machine.total_gib), None)


def find_lack_of_gpu(run: RunConfig, load: Load, machine: Machine, rows: int) -> LackOfGpu | None:
    """Why a run on a CPU takes too long; None with a GPU or a small model."""
    if machine.on_cuda or load.shape.num_weights <= MOST_WEIGHTS:
        return None
    cores = os.cpu_count() or 1
    cpu = GpuSpeed("the CPU", 0, BANDWIDTH, cores * CORE_TFLOPS)
    step = step_time(load, rows, step_completions(run), cpu, run.rloo.max_steps)
    steps = run.rloo.max_steps or 1
    return LackOfGpu(
        f"No GPU: {run.model.name} has {load.shape.size}, and on {cores} CPU cores a step takes "
        f"{_time(step.seconds)} at least, {steps} of them {_time(steps * step.seconds)} (computed).",
        f"`rloo-kit plan FILE --gpu-gib N` plans for a GPU with N GiB; {ON_CPU} fits this machine.",
        steps * step.seconds / 3600,
    )


def _time(seconds: float) -> str:
    """In the largest unit that gives at least 2."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
