"""Seconds of an optimizer step: the largest of bytes over bandwidth, operations over the GPU's rate, and launches.

A lower bound, not a forecast: nothing here was measured, and a real step takes longer.
"""

import re
from dataclasses import dataclass
from typing import Any

from rloo_kit.plan import parts
from rloo_kit.plan.parts import Load

MEAN_SHARE = 0.4  # mean length over the longest, of prompts and completions; the longest in a batch has full length
LAUNCHES_PER_LAYER = 3548 / 36  # of a token step without CUDA graphs, counted on 36 layers in 4 bit with an adapter
LAUNCH_S = 5e-6  # of one operation from Python
VLLM_STEP_S = 2e-3  # vLLM's overhead per token step: scheduler, sampler
TRAINING_FLOPS = 6  # per weight and token: forward, forward again (checkpointing), backward through frozen weights
SCORING_FLOPS = 2  # per further pass without gradients
TRAINING_SHARE = 0.4  # of the GPU's rate that training reaches


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
    """An optimizer step; computed, not measured.

    Attributes:
        gpu: the assumed GPU. rollout_s, training_s: seconds of both halves.
        tokens_per_s: useful completion tokens per second while sampling. max_steps: of the run, if set.
    """

    gpu: str
    rollout_s: float
    training_s: float
    tokens_per_s: float
    max_steps: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
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
    near = [gpu for gpu in GPUS if abs(gpu.memory_gb * 1e9 / parts.GIB / total_gib - 1) < 0.12]
    named = [gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b(?! Ti| SUPER| Laptop)", name, re.I)]
    if named:
        return next((gpu for gpu in named if gpu in near), None)
    return near[0] if near and name.startswith("a GPU with") else None


def step_time(load: Load, rows: int, step_completions: int, gpu: GpuSpeed, max_steps: int | None = None) -> StepTime:
    """The least time of an optimizer step.

    Args:
        load: of the run, with the engine that samples: "vllm", "native" or "generate".
        rows: completions at once. step_completions: per optimizer step in this process.
    """
    mean = MEAN_SHARE * load.completion_tokens
    rollouts, of_each = max(step_completions / load.completions, 1), min(load.completions, step_completions)
    if load.engine == "generate":  # a batch runs until its longest completion ends
        token_steps: float = -(-of_each // rows) * load.completion_tokens
    else:  # a finished row is refilled
        token_steps = max(of_each * MEAN_SHARE * load.completion_tokens / rows, load.completion_tokens)
    rollout_s = rollouts * token_steps * token_step_s(load, rows, gpu)
    tokens = step_completions * (mean + MEAN_SHARE * load.prompt_tokens)
    flops = TRAINING_FLOPS + (0 if load.reference == "none" else SCORING_FLOPS)
    training_s = flops * load.shape.num_weights * tokens / (TRAINING_SHARE * gpu.tflops * 1e12)
    return StepTime(gpu.name, rollout_s, training_s, step_completions * mean / rollout_s, max_steps)


def token_step_s(load: Load, rows: int, gpu: GpuSpeed) -> float:
    """Seconds of one token step of `rows` completions: the slowest of memory, arithmetic and launches."""
    memory = token_step_bytes(load, rows) / (gpu.bandwidth * 1e9)
    arithmetic = 2 * load.shape.num_weights * rows / (gpu.tflops * 1e12)
    launches = LAUNCHES_PER_LAYER * load.shape.num_layers * LAUNCH_S
    if load.engine == "vllm":
        return max(memory, arithmetic, launches if load.enforce_eager else 0.0) + VLLM_STEP_S
    return max(memory, arithmetic, launches)


def token_step_bytes(load: Load, rows: int) -> float:
    """Bytes that a token step moves: the weights once, and the keys and values of every row.

    A 4-bit matrix is read, written in 16 bit and read again, once for all rows.
    """
    shape = load.shape
    unpacked = 2 * shape.body_weights * load.compute_bytes if load.four_bit else 0
    head = shape.vocab_size * shape.hidden_size * load.weight_bytes
    # Half of a row's final length; in `generate` finished rows stay until the longest ends.
    grown = load.completion_tokens if load.engine == "generate" else MEAN_SHARE * load.completion_tokens
    context = MEAN_SHARE * load.prompt_tokens + grown / 2
    row = context * parts.cache_bytes_per_token(load) + 2 * parts.state_bytes(load)  # a state is also written
    return parts.body_bytes(load) + unpacked + head + rows * row
