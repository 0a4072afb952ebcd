"""Seconds of an optimizer step by arithmetic: bytes over the GPU's bandwidth, operations over its rate, launches.

A bound rather than a forecast: nothing here was measured, and a real step takes longer.
"""

import re
from dataclasses import dataclass
from typing import Any

from rloo_kit.plan import parts
from rloo_kit.plan.parts import Load

MEAN_SHARE = 0.4  # of the longest prompt and completion, in the mean; the longest of a batch takes all of it
LAUNCHES_PER_LAYER = 3548 / 36  # of a token step without CUDA graphs, counted on 36 layers in 4 bit with an adapter
LAUNCH_S = 5e-6  # of one operation from Python
VLLM_STEP_S = 2e-3  # vLLM's own work around a token step: scheduler, sampler
TRAINING_FLOPS = 6  # a weight and token: forward, forward again (checkpointing), backward through frozen weights
SCORING_FLOPS = 2  # of each further pass without gradients
TRAINING_SHARE = 0.4  # of the GPU's rate that training reaches


@dataclass(frozen=True)
class GpuSpeed:
    """A GPU as its maker describes it: GB as sold, GB/s of its memory, TFLOPS of dense 16 bit with sums in float32."""

    name: str
    memory_gb: int
    bandwidth: float
    tflops: float


# The first of a size is the one that is assumed for `--gpu-gib`.
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
        gpu: the one that is assumed. rollout_s, training_s: seconds of both halves.
        tokens_per_s: useful tokens of completions, while they are sampled. max_steps: of the run, if it counts them.
    """

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
        """Of so many steps; evaluation and start are not counted."""
        return steps * self.seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """As plain values, seconds with one decimal."""
        found = {"gpu": self.gpu, "seconds": round(self.seconds, 1), "rollout_s": round(self.rollout_s, 1)}
        return found | {"training_s": round(self.training_s, 1), "tokens_per_s": round(self.tokens_per_s)}

    def __str__(self) -> str:
        step = f"{self.seconds:.0f} s" if self.seconds < 120 else f"{self.seconds / 60:.0f} min"
        whole = f", {self.max_steps} steps {self.hours(self.max_steps):.3g} h" if self.max_steps else ""
        return f"At the limit of {self.gpu}'s speed a step takes {step}{whole}; at least, computed, not measured"


def find_gpu(name: str, total_gib: float) -> GpuSpeed | None:
    """The GPU of that name and memory; a name that is no GPU's stands for the usual one of that size."""
    near = [gpu for gpu in GPUS if abs(gpu.memory_gb * 1e9 / parts.GIB / total_gib - 1) < 0.12]
    named = [gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b(?! Ti| SUPER| Laptop)", name, re.I)]
    if named:
        return next((gpu for gpu in named if gpu in near), None)
    return near[0] if near and name.startswith("a GPU with") else None


def step_time(load: Load, rows: int, step_completions: int, gpu: GpuSpeed, max_steps: int | None = None) -> StepTime:
    """The least time of an optimizer step.

    Args:
        load: of the run with the engine that samples, "vllm", "native" or "generate".
        rows: completions at once. step_completions: of an optimizer step in this process.
    """
    mean = MEAN_SHARE * load.completion_tokens
    token_step = token_step_s(load, rows, gpu)
    rollout_s = _token_steps(load, rows, step_completions) * token_step
    tokens = step_completions * (mean + MEAN_SHARE * load.prompt_tokens)
    flops = TRAINING_FLOPS + (0 if load.reference == "none" else SCORING_FLOPS)
    training_s = flops * load.shape.num_weights * tokens / (TRAINING_SHARE * gpu.tflops * 1e12)
    return StepTime(gpu.name, rollout_s, training_s, step_completions * mean / rollout_s, max_steps)


def _token_steps(load: Load, rows: int, step_completions: int) -> float:
    """Forward passes that sample a step's completions.

    `generate` carries a batch to its longest completion; the others fill a row that has ended with the next one.
    """
    rollouts = max(step_completions / load.completions, 1)
    of_each = min(load.completions, step_completions)
    if load.engine == "generate":
        return rollouts * -(-of_each // rows) * load.completion_tokens
    return rollouts * max(of_each * MEAN_SHARE * load.completion_tokens / rows, load.completion_tokens)


def token_step_s(load: Load, rows: int, gpu: GpuSpeed) -> float:
    """Seconds of one token of `rows` completions: the slowest of memory, arithmetic and launches."""
    memory = token_step_bytes(load, rows) / (gpu.bandwidth * 1e9)
    arithmetic = 2 * load.shape.num_weights * rows / (gpu.tflops * 1e12)
    launches = LAUNCHES_PER_LAYER * load.shape.num_layers * LAUNCH_S
    if load.engine == "vllm":
        return max(memory, arithmetic, launches if load.enforce_eager else 0.0) + VLLM_STEP_S
    return max(memory, arithmetic, launches)


def token_step_bytes(load: Load, rows: int) -> float:
    """Bytes that a token step moves: the weights once, and every row's keys and values.

    A matrix in 4 bit is read, written in 16 bit and read again, once for all rows.
    """
    shape = load.shape
    unpacked = 2 * shape.body_weights * load.compute_bytes if load.four_bit else 0
    head = shape.vocab_size * shape.hidden_size * load.weight_bytes
    # Half of what a row comes to; in `generate` rows that have ended stay up to the end of the longest.
    grown = load.completion_tokens if load.engine == "generate" else MEAN_SHARE * load.completion_tokens
    context = MEAN_SHARE * load.prompt_tokens + grown / 2
    return parts.body_bytes(load) + unpacked + head + rows * context * parts.cache_bytes_per_token(load)
