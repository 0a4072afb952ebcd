"""A run on a machine without a GPU: how long a step takes there, and which shipped config fits."""

import os
import timeit
from functools import cache

from rloo_kit.config.run import RunConfig
from rloo_kit.plan.load import step_completions
from rloo_kit.plan.parts import Load
from rloo_kit.plan.result import Machine
from rloo_kit.system.gpu import GIB
from rloo_kit.system.problems import Problem

# A step of 32 completions of 512 tokens takes 8 FLOPs x 0.5B weights x 16384 tokens = 66 TFLOP: three minutes at
# 0.3 TFLOPS, and ten hours for 200 steps. Longer thinking takes days.
MOST_WEIGHTS = 0.5e9
MOST_HOURS = 24.0  # of a run without a GPU; a short test of two steps passes
STEP_FLOPS = 8  # per weight and token: 2 sample it, 6 train on it
STEP_SHARE = 0.9  # of the speed of large products in float32 (SmolLM2-135M, 64 completions of 24 and 64 tokens)
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


def find_lack_of_gpu(run: RunConfig, load: Load, machine: Machine) -> Problem | None:
    """A run on a CPU that takes long, an error above MOST_HOURS; None with a GPU or a small model."""
    if machine.on_cuda or load.shape.num_weights <= MOST_WEIGHTS:
        return None
    hours = (run.rloo.max_steps or 1) * _step_s(run, load) / 3600
    return Problem(
        "machine",
        f"No GPU: {run.model.name} has {load.shape.size}, and {describe_step(run, load)}",
        f"`rloo-kit plan FILE --gpu-gib N` plans for a GPU with N GiB; {ON_CPU} fits this machine",
        level="error" if hours > MOST_HOURS else "warning",
    )


def describe_step(run: RunConfig, load: Load) -> str:
    """Time of a step and of all steps on this machine's CPU, in words."""
    seconds, steps = _step_s(run, load), run.rloo.max_steps or 1
    return (
        f"on {os.cpu_count() or 1} CPU cores a step takes about {_time(seconds)}, {steps} of them "
        f"{_time(steps * seconds)} (computed)"
    )


def _step_s(run: RunConfig, load: Load) -> float:
    """Seconds of a step at full length; a prompt is computed once for its group."""
    tokens = step_completions(run) * (load.completion_tokens + load.prompt_tokens / load.num_generations)
    return STEP_FLOPS * load.shape.num_weights * tokens / (STEP_SHARE * matrix_flops())


@cache
def matrix_flops() -> float:
    """Operations a second of a product of two matrices on this machine's cores, in float32; the best of three."""
    import numpy

    matrix = numpy.ones((1024, 1024), numpy.float32)
    return 2 * len(matrix) ** 3 / min(timeit.repeat(lambda: matrix @ matrix, repeat=3, number=1))


def _time(seconds: float) -> str:
    """In the largest unit that gives at least 2."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
