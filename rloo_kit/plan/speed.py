"""Seconds of an optimizer step: the largest of bytes over bandwidth, operations over the GPU's rate, and launches.

A lower bound, not a forecast: nothing here was measured, and a real step takes longer.
"""

import os
import re
import timeit
from dataclasses import dataclass
from functools import cache
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.plan.parts import GIB, Workload, body_bytes, cache_bytes_per_token, state_bytes

MEAN_SHARE = 0.4  # mean length over the longest, of prompts and completions; the longest in a batch has full length
LAUNCHES_PER_LAYER = 3548 / 36  # of a token step without CUDA graphs, counted on 36 layers in 4 bit with an adapter
LAUNCH_S = 5e-6  # of one operation from Python
VLLM_STEP_S = 2e-3  # vLLM's overhead per token step: scheduler, sampler
TRAINING_FLOPS = 6  # per weight and token: forward, forward again (checkpointing), backward through frozen weights
SCORING_FLOPS = 2  # per further pass without gradients
TRAINING_SHARE = 0.4  # of the GPU's rate that training reaches
CPU_FLOPS = 8  # per weight and token of a whole step: 2 sample it, 6 train on it
CPU_SHARE = 0.9  # of the speed of large products in float32 (SmolLM2-135M, 64 completions of 24 and 64 tokens)


@dataclass(frozen=True)
class GpuSpeed:
    """A GPU's data sheet: GB as sold, memory GB/s, dense 16-bit TFLOPS with float32 accumulation."""

    name: str
    memory_gb: int
    bandwidth: float
    tflops: float


# `--gpu-gib` assumes the first GPU of that size.
GPUS = (
    GpuSpeed("RTX 3060 Ti", 8, 448, 32.4),
    GpuSpeed("RTX 4060", 8, 272, 30.2),
    GpuSpeed("RTX 3060", 12, 360, 25.5),
    GpuSpeed("RTX 4070", 12, 504, 58.3),
    GpuSpeed("RTX 4080", 16, 717, 97.5),
    GpuSpeed("RTX 4060 Ti", 16, 288, 44.1),
    GpuSpeed("T4", 16, 320, 65.0),
    GpuSpeed("RTX 4090", 24, 1008, 165.2),
    GpuSpeed("RTX 3090", 24, 936, 71.2),
    GpuSpeed("L4", 24, 300, 121.0),
    GpuSpeed("A100", 40, 1555, 312.0),
    GpuSpeed("H100", 80, 3350, 989.0),
    GpuSpeed("A100", 80, 2039, 312.0),
)


@dataclass(frozen=True)
class StepTime:
    """An optimizer step on the assumed GPU; computed, not measured. `tokens_per_s`: useful completion tokens while
    sampling; `max_steps`: of the run, if set."""

    gpu: str
    rollout_s: float
    training_s: float
    tokens_per_s: float
    max_steps: int | None = None

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.rollout_s + self.training_s

    def hours(self, steps: int) -> float:
        """Hours of `steps` steps, without evaluation and start-up."""
        return steps * self.seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """As plain values, seconds with one decimal."""
        found = {"gpu": self.gpu, "seconds": round(self.seconds, 1), "rollout_s": round(self.rollout_s, 1)}
        return found | {"training_s": round(self.training_s, 1), "tokens_per_s": round(self.tokens_per_s)}

    def __str__(self) -> str:
        step = f"{self.seconds:.0f} s" if self.seconds < 120 else f"{self.seconds / 60:.0f} min"
        hours = self.hours(self.max_steps or 0)
        whole = f", {self.max_steps} steps {hours:.{0 if hours >= 100 else 1}f} h" if self.max_steps else ""
        return f"Lower bound for {self.gpu} (computed, not measured): a step takes {step}{whole}"


def find_gpu(name: str, total_gib: float) -> GpuSpeed | None:
    """The GPU of that name and memory; for `--gpu-gib`, the first GPU of that size."""
    near = [gpu for gpu in GPUS if abs(gpu.memory_gb * 1e9 / GIB / total_gib - 1) < 0.12]
    named = [gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b(?! Ti| SUPER| Laptop)", name, re.I)]
    if named:
        return next((gpu for gpu in named if gpu in near), None)
    return near[0] if near and name.startswith("a GPU with") else None


def step_time(
    work: Workload, rows: int, step_completions: int, gpu: GpuSpeed, max_steps: int | None = None
) -> StepTime:
    """The least time of an optimizer step of `step_completions` in this process, `rows` sampled at once by the engine
    of `work`: "vllm", "native" or "generate"."""
    mean = MEAN_SHARE * work.completion_tokens
    rollouts, of_each = max(step_completions / work.completions, 1), min(work.completions, step_completions)
    if work.engine == "generate":  # a batch runs until its longest completion ends
        token_steps: float = -(-of_each // rows) * work.completion_tokens
    else:  # a finished row is refilled
        token_steps = max(of_each * MEAN_SHARE * work.completion_tokens / rows, work.completion_tokens)
    rollout_s = rollouts * token_steps * token_step_s(work, rows, gpu)
    tokens = step_completions * (mean + MEAN_SHARE * work.prompt_tokens)
    flops = TRAINING_FLOPS + (0 if work.reference == "none" else SCORING_FLOPS)
    training_s = flops * work.shape.num_weights * tokens / (TRAINING_SHARE * gpu.tflops * 1e12)
    return StepTime(gpu.name, rollout_s, training_s, step_completions * mean / rollout_s, max_steps)


def token_step_s(work: Workload, rows: int, gpu: GpuSpeed) -> float:
    """Seconds of one token step of `rows` completions: the slowest of memory, arithmetic and launches."""
    memory = token_step_bytes(work, rows) / (gpu.bandwidth * 1e9)
    arithmetic = 2 * work.shape.num_weights * rows / (gpu.tflops * 1e12)
    launches = LAUNCHES_PER_LAYER * work.shape.num_layers * LAUNCH_S
    if work.engine == "vllm":
        return max(memory, arithmetic, launches if work.enforce_eager else 0.0) + VLLM_STEP_S
    return max(memory, arithmetic, launches)


def token_step_bytes(work: Workload, rows: int) -> float:
    """Bytes that a token step moves: the weights once, and the keys and values of every row.

    A 4-bit matrix is read, written in 16 bit and read again, once for all rows.
    """
    shape = work.shape
    unpacked = 2 * shape.body_weights * work.compute_bytes if work.four_bit else 0
    head = shape.vocab_size * shape.hidden_size * work.weight_bytes
    # Half of a row's final length; in `generate` finished rows stay until the longest ends.
    grown = work.completion_tokens if work.engine == "generate" else MEAN_SHARE * work.completion_tokens
    context = MEAN_SHARE * work.prompt_tokens + grown / 2
    row = context * cache_bytes_per_token(work) + 2 * state_bytes(work)  # a state is also written
    return body_bytes(work) + unpacked + head + rows * row


# ------------------------------------------------------------------------------------------ on a CPU


def step_completions(run: RunConfig) -> int:
    """Completions per optimizer step in this process."""
    return run.rloo.per_device_train_batch_size * run.rloo.gradient_accumulation_steps


def describe_step(run: RunConfig, work: Workload) -> str:
    """Time of a step and of all steps on this machine's CPU, in words."""
    seconds, steps = step_on_cpu_s(run, work), run.rloo.max_steps or 1

    def written(seconds: float) -> str:
        """In the largest unit that gives at least 2."""
        units = (("days", 86400), ("h", 3600), ("min", 60))
        name, size = next(((name, size) for name, size in units if seconds >= 2 * size), ("s", 1))
        return f"{seconds / size:.0f} {name}"

    cores = os.cpu_count() or 1
    whole = f"{steps} of them {written(steps * seconds)}"
    return f"on {cores} CPU cores a step takes about {written(seconds)}, {whole} (computed)"


def step_on_cpu_s(run: RunConfig, work: Workload) -> float:
    """Seconds of a step on this machine's CPU at full length; a prompt is computed once for its group."""
    tokens = step_completions(run) * (work.completion_tokens + work.prompt_tokens / work.num_generations)
    return CPU_FLOPS * work.shape.num_weights * tokens / (CPU_SHARE * matrix_flops())


@cache
def matrix_flops() -> float:
    """Operations a second of a product of two matrices on this machine's cores, in float32; the best of three."""
    import numpy

    matrix = numpy.ones((1024, 1024), numpy.float32)
    return 2 * len(matrix) ** 3 / min(timeit.repeat(lambda: matrix @ matrix, repeat=3, number=1))
