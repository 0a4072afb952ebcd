"""Hours of a run on a GPU: sampling, training and evaluations, from bytes, operations and the host's time for a token.

An estimate: computed from data sheets and constants of one H100. docs/plan.md compares it with what was measured.
"""

import os
import re
import timeit
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rloo_kit.config.checks import CLOSE_TOKENS
from rloo_kit.config.run import RunConfig
from rloo_kit.plan.parts import Workload, body_bytes, cache_bytes_per_token, state_bytes
from rloo_kit.system.gpu import GIB
from rloo_kit.system.processes import count_processes

MEAN_SHARE = 0.4  # mean length over the longest, of prompts and completions; the longest in a batch has full length
MEAN_SHARES = (MEAN_SHARE, 0.9)  # of completions without and with a thinking budget, which most of them reach
BANDWIDTH_SHARE = 0.89  # of the data sheet's that copies reached (H100, results/gpu/part1.jsonl)
TOKEN_S = 2e-3  # of each token step: scheduler or `generate`, stop check, sampler
ROW_S = 12.5e-6  # of a row and layer in Unsloth's `generate`, whatever its length: the slope from 8 to 128 rows (H100)
LAUNCHES_PER_LAYER = 3548 / 36  # of a token step without CUDA graphs, counted on 36 layers in 4 bit with an adapter
LAUNCH_S = 5e-6  # of one operation from Python
# Between the kernels of the native engine's CUDA graphs: 30 a layer of 1.5 us each (counted on a CPU, estimated).
GRAPH_LAYER_S = 45e-6
# Rows up to which a 4-bit matrix is not unpacked: bitsandbytes' product, and Unsloth's by compute capability (else 1).
BNB_FUSED_ROWS, UNSLOTH_FUSED_ROWS = 32, {75: 4, 80: 2, 89: 4, 120: 4}
TRAINING_FLOPS = 6  # per weight and token: forward, forward again (checkpointing), backward through frozen weights
SCORING_FLOPS = 2  # per further pass without gradients
TRAINING_SHARE = 0.18  # of the GPU's rate: an H100 in passes of 26,000 tokens, and 0.10 in passes of 9,000
CPU_FLOPS = 8  # per weight and token of a whole step: 2 sample it, 6 train on it
CPU_SHARE = 0.9  # of the speed of large products in float32 (SmolLM2-135M, 64 completions of 24 and 64 tokens)


@dataclass(frozen=True)
class GpuSpeed:
    """A GPU's data sheet: GB as sold, memory GB/s, dense 16-bit TFLOPS with float32 accumulation, and its compute
    capability x 10."""

    name: str
    memory_gb: int
    bandwidth: float
    tflops: float
    capability: int


# `--gpu-gib` assumes the first GPU of that size.
GPUS = (
    GpuSpeed("RTX 3060 Ti", 8, 448, 32.4, 86),
    GpuSpeed("RTX 4060", 8, 272, 30.2, 89),
    GpuSpeed("RTX 3060", 12, 360, 25.5, 86),
    GpuSpeed("RTX 4070", 12, 504, 58.3, 89),
    GpuSpeed("RTX 4080", 16, 717, 97.5, 89),
    GpuSpeed("RTX 4060 Ti", 16, 288, 44.1, 89),
    GpuSpeed("T4", 16, 320, 65.0, 75),
    GpuSpeed("RTX 4090", 24, 1008, 165.2, 89),
    GpuSpeed("RTX 3090", 24, 936, 71.2, 86),
    GpuSpeed("L4", 24, 300, 121.0, 89),
    GpuSpeed("A100", 40, 1555, 312.0, 80),
    GpuSpeed("H100", 80, 3350, 989.0, 90),
    GpuSpeed("A100", 80, 2039, 312.0, 80),
)


@dataclass(frozen=True)
class RunTime:
    """A run on the assumed GPU; computed, not measured. Seconds of an optimizer step, and of all evaluations together;
    `tokens_per_s`: useful completion tokens while sampling; `max_steps`: of the run, if set."""

    gpu: str
    rollout_s: float
    training_s: float
    tokens_per_s: float
    evaluation_s: float
    max_steps: int | None = None

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.rollout_s + self.training_s

    @property
    def hours(self) -> float | None:
        """Of all steps and evaluations, without start-up; None without `max_steps`."""
        return None if self.max_steps is None else (self.max_steps * self.seconds + self.evaluation_s) / 3600

    def to_dict(self) -> dict[str, Any]:
        """As plain values, seconds with one decimal."""
        names = "seconds", "rollout_s", "training_s", "evaluation_s", "tokens_per_s"
        found = {name: round(getattr(self, name), 1) for name in names}
        return {"gpu": self.gpu} | found | {"hours": None if self.hours is None else round(self.hours, 2)}

    def __str__(self) -> str:
        step = f"{self.seconds:.0f} s" if self.seconds < 120 else f"{self.seconds / 60:.0f} min"
        share = f"{self.evaluation_s / 3600:.1f} of them evaluations"
        whole = "" if self.hours is None else f", {self.max_steps} steps {self.hours:.3g} h ({share})"
        return f"Estimate for {self.gpu} (computed, not measured): a step takes {step}{whole}"


def find_gpu(name: str, total_gib: float) -> GpuSpeed | None:
    """The GPU of that name and memory; for `--gpu-gib`, the first GPU of that size."""
    near = [gpu for gpu in GPUS if abs(gpu.memory_gb * 1e9 / GIB / total_gib - 1) < 0.12]
    named = [gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b(?! Ti| SUPER| Laptop)", name, re.I)]
    if named:
        return next((gpu for gpu in named if gpu in near), None)
    return near[0] if near and name.startswith("a GPU with") else None


def run_time(run: RunConfig, work: Workload, rows: int, gpu: GpuSpeed) -> RunTime:
    """The time of a run in this process, `rows` of a rollout sampled at once by the local engine of `work`."""
    completions = step_completions(run)
    of_each = min(work.completions, completions)
    rollout_s = completions / of_each * sampling_s(work, of_each, rows, work.num_generations, gpu)
    mean = work.mean_share * work.completion_tokens
    trained_s = training_s(work, completions * (mean + MEAN_SHARE * work.prompt_tokens), gpu)
    evaluation_s = sum(
        sampling_s(replace(work, completion_tokens=tokens), count, run.eval.batch_size, siblings, gpu)
        for count, siblings, tokens in list_evaluations(run, work.completion_tokens)
    )
    return RunTime(gpu.name, rollout_s, trained_s, completions * mean / rollout_s, evaluation_s, run.rloo.max_steps)


def list_evaluations(
    run: RunConfig, limit: int, held_out: int | None = None, max_steps: int | None = None
) -> list[tuple[int, int, int]]:
    """Each call of the engine in a run's evaluations, in this process: completions, those of one prompt, and tokens at
    most (`limit`: of the run).

    Args:
        held_out: prompts; None: `data.test_size`, or where that is a share `eval.num_prompts`, else 100. max_steps: of
            the run; None: `rloo.max_steps`.
    """
    asked, processes = run.eval, count_processes()
    held_out = held_out or int(run.data.test_size) or asked.num_prompts or 100
    tokens, each = asked.max_completion_length or limit, asked.num_samples
    prompts = min(asked.num_prompts or held_out, held_out)
    whole = [(prompts * each, each, tokens)] + [(prompts, 1, tokens)] * (asked.greedy and asked.temperature != 0)
    after = CLOSE_TOKENS.get(run.rloo.thinking_close, 1) + run.forced_answer
    whole += [(prompts, 1, budget + after) for budget in asked.thinking_budgets]
    steps = max_steps or run.rloo.max_steps or 1
    on_the_way = 1 + -(-steps // asked.every_steps) if asked.every_steps else 0  # at the start too
    passes = 2 * run.run.evaluate * whole + on_the_way * [(min(asked.every_prompts, held_out) * each, each, tokens)]
    return [(-(-count // processes), siblings, tokens) for count, siblings, tokens in passes]


def sampling_s(work: Workload, completions: int, rows: int, siblings: int, gpu: GpuSpeed) -> float:
    """Seconds to sample `completions`, `rows` at once, `siblings` of each prompt."""
    rows = min(rows, completions)
    if work.engine == "generate":  # a batch runs until its longest completion ends
        token_steps: float = -(-completions // rows) * work.completion_tokens
    else:  # a finished row is refilled
        token_steps = max(completions * work.mean_share * work.completion_tokens / rows, work.completion_tokens)
    return token_steps * token_step_s(work, rows, gpu, padded=rows > siblings)


def training_s(work: Workload, tokens: float, gpu: GpuSpeed) -> float:
    """Seconds to train on so many tokens."""
    flops = TRAINING_FLOPS + (0 if work.reference == "none" else SCORING_FLOPS)
    return flops * work.shape.num_weights * tokens / (TRAINING_SHARE * gpu.tflops * 1e12)


def token_step_s(work: Workload, rows: int, gpu: GpuSpeed, padded: bool = False) -> float:
    """Seconds of one token step of `rows` completions: the slowest of memory, arithmetic and host, and fixed costs."""
    shape = work.shape
    memory = token_step_bytes(work, rows, gpu, padded) / (BANDWIDTH_SHARE * gpu.bandwidth * 1e9)
    arithmetic = 2 * shape.num_weights * rows / (gpu.tflops * 1e12)
    fixed_s = TOKEN_S + (ROW_S * shape.num_layers * rows if work.engine == "generate" else 0.0)
    # Unsloth has CUDA graphs for Llama and Qwen3 (Qwen2 has biases).
    by_unsloths = work.engine == "generate" and work.fused and shape.has_kernels and not shape.qkv_bias
    host = 0.0
    if work.has_graphs:
        fixed_s += GRAPH_LAYER_S * shape.num_layers
    elif work.enforce_eager if work.engine == "vllm" else not by_unsloths:
        host = LAUNCHES_PER_LAYER * shape.num_layers * LAUNCH_S
    return max(memory, arithmetic, host) + fixed_s


def token_step_bytes(work: Workload, rows: int, gpu: GpuSpeed, padded: bool = False) -> float:
    """Bytes that a token step moves: the weights once, and the keys and values of every row.

    An unpacked 4-bit matrix is read, written in 16 bit and read again, once for all rows. In padded batches Unsloth
    copies keys and values for every query head, and reads the copy.
    """
    shape = work.shape
    by_unsloth = work.fused and work.engine == "generate"
    fused_rows = UNSLOTH_FUSED_ROWS.get(gpu.capability, 1) if by_unsloth else BNB_FUSED_ROWS
    unpacked = 2 * shape.body_weights * work.compute_bytes if work.four_bit and rows > fused_rows else 0
    head = shape.vocab_size * shape.hidden_size * work.weight_bytes
    # Half of a row's final length; in `generate` finished rows stay until the longest ends.
    grown = work.completion_tokens * (1 if work.engine == "generate" else work.mean_share)
    copies = 1 + 2 * shape.num_heads / shape.num_kv_heads if padded and by_unsloth else 1
    context = (MEAN_SHARE * work.prompt_tokens + grown / 2) * copies
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

    whole = f"{steps} of them {written(steps * seconds)} (computed from their speed, timed just now)"
    return f"on {os.cpu_count() or 1} CPU cores a step takes about {written(seconds)}, {whole}"


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
