"""Hours of a run on a GPU before it starts, from the bytes that a token moves.

Computed, not measured: `rloo-kit preflight` measures. docs/plan.md compares the formula with an H100.
"""

import re
from dataclasses import dataclass, replace

from rloo_kit.config.run import RunConfig
from rloo_kit.plan.parts import Workload, body_bytes, cache_bytes_per_token
from rloo_kit.system.gpu import GIB
from rloo_kit.system.processes import count_processes

PROMPT_SHARE = 0.4  # mean length of prompts over the longest
MEAN_SHARES = (0.4, 0.9)  # the same of completions, without and with a thinking budget, which most of them reach
BANDWIDTH_SHARE = 0.89  # of the data sheet's that copies reached (H100, results/gpu/part1.jsonl)
TOKEN_S = 3e-3  # of each token step, whatever it moves: scheduler, sampler, gaps between kernels (H100)
ROW_S = 12.5e-6  # of a row and layer in Unsloth's `generate`: the slope from 8 to 128 rows (H100)
FUSED_ROWS = 32  # above which bitsandbytes unpacks a 4-bit matrix; Unsloth's `generate` does above one row
TRAINING_FLOPS = 6  # per weight and token: forward, forward again (checkpointing), backward through frozen weights
TRAINING_SHARE = 0.18  # of the GPU's rate: an H100 in passes of 26,000 tokens, and 0.10 in passes of 9,000
CPU_FLOPS = 8  # per weight and token of a whole step: 2 sample it, 6 train on it
CPU_SPEED = 2e11  # operations a second of a few cores in float32


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
class RunTime:
    """Seconds of an optimizer step and of all evaluations on the assumed GPU; `steps` of the run, if set."""

    gpu: str
    step_s: float
    evaluation_s: float
    steps: int | None

    @property
    def hours(self) -> float | None:
        """Of all steps and evaluations, without start-up; None without `steps`."""
        return None if self.steps is None else (self.steps * self.step_s + self.evaluation_s) / 3600

    def __str__(self) -> str:
        step = f"{self.step_s:.0f} s" if self.step_s < 120 else f"{self.step_s / 60:.0f} min"
        share = f"{self.evaluation_s / 3600:.1f} of them evaluations"
        whole = "" if self.hours is None else f", {self.steps} steps {self.hours:.3g} h ({share})"
        return f"Estimate for {self.gpu} (computed, not measured): a step takes {step}{whole}"


def find_gpu(name: str, total_gib: float) -> GpuSpeed | None:
    """The GPU of that name and memory; for `--gpu-gib`, the first GPU of that size."""
    near = [gpu for gpu in GPUS if abs(gpu.memory_gb * 1e9 / GIB / total_gib - 1) < 0.12]
    if name.startswith("a GPU with"):
        return near[0] if near else None
    return next((gpu for gpu in near if re.search(rf"\b{gpu.name}\b(?! Ti| SUPER| Laptop)", name, re.I)), None)


def run_time(run: RunConfig, work: Workload, rows: int, gpu: GpuSpeed) -> RunTime:
    """The time of a run in this process, `rows` of a rollout sampled at once by the local engine of `work`."""
    completions, share = step_completions(run), MEAN_SHARES[run.rloo.thinking_budget is not None]
    of_each = min(work.completions, completions)
    rollout_s = completions / of_each * sampling_s(work, of_each, rows, share, gpu)
    tokens = completions * (share * work.completion_tokens + PROMPT_SHARE * work.prompt_tokens)
    longest = replace(work, completion_tokens=run.eval.max_completion_length or work.completion_tokens)
    evaluation_s = sampling_s(longest, count_evaluated(run), run.eval.batch_size, share, gpu)
    return RunTime(gpu.name, rollout_s + training_s(work, tokens, gpu), evaluation_s, run.rloo.max_steps)


def count_evaluated(run: RunConfig, held_out: int | None = None, max_steps: int | None = None) -> int:
    """Completions of all of a run's evaluations, in this process. `held_out`: prompts; None: `data.test_size`, for a
    share `eval.num_prompts`, else 100."""
    asked, steps = run.eval, max_steps or run.rloo.max_steps or 1
    held_out = held_out or int(run.data.test_size) or asked.num_prompts or 100
    is_greedy = asked.greedy and asked.temperature != 0
    of_a_prompt = asked.num_samples + is_greedy + len(asked.thinking_budgets)
    ends = 2 * run.run.evaluate * min(asked.num_prompts or held_out, held_out) * of_a_prompt
    times = 1 + -(-steps // asked.every_steps) if asked.every_steps else 0  # at the start too
    return -(-(ends + times * min(asked.every_prompts, held_out) * asked.num_samples) // count_processes())


def sampling_s(work: Workload, completions: int, rows: int, share: float, gpu: GpuSpeed) -> float:
    """Seconds to sample `completions`, `rows` at once; `share`: their mean length over the longest."""
    rows = max(min(rows, completions), 1)
    if work.engine == "generate":  # a batch runs until its longest completion ends
        token_steps: float = -(-completions // rows) * work.completion_tokens
    else:  # a finished row is refilled
        token_steps = max(completions * share * work.completion_tokens / rows, work.completion_tokens)
    return token_steps * token_step_s(work, rows, share, gpu)


def token_step_s(work: Workload, rows: int, share: float, gpu: GpuSpeed) -> float:
    """Seconds of one token step: the weights move once, keys and values for every row, at the GPU's bandwidth."""
    shape, is_generate = work.shape, work.engine == "generate"
    moved: float = body_bytes(work) + shape.vocab_size * shape.hidden_size * work.weight_bytes
    if work.four_bit and rows > (1 if is_generate and work.fused else FUSED_ROWS):
        moved += 2 * shape.body_weights * work.compute_bytes  # unpacked: written in 16 bit and read again
    # Half of a row's final length; in `generate` finished rows stay until the longest ends.
    context = PROMPT_SHARE * work.prompt_tokens + work.completion_tokens * (1 if is_generate else share) / 2
    moved += rows * context * cache_bytes_per_token(work)
    fixed_s = TOKEN_S + (ROW_S * shape.num_layers * rows if is_generate else 0.0)
    return moved / (BANDWIDTH_SHARE * gpu.bandwidth * 1e9) + fixed_s


def training_s(work: Workload, tokens: float, gpu: GpuSpeed) -> float:
    """Seconds to train on so many tokens; a reference scores each once more."""
    flops = TRAINING_FLOPS + (0 if work.reference == "none" else 2)
    return flops * work.shape.num_weights * tokens / (TRAINING_SHARE * gpu.tflops * 1e12)


def step_completions(run: RunConfig) -> int:
    """Completions per optimizer step in this process."""
    return run.rloo.per_device_train_batch_size * run.rloo.gradient_accumulation_steps


def hours_on_cpu(run: RunConfig, work: Workload) -> float:
    """Hours of all steps on a CPU of usual speed, at full length; a prompt is computed once for its group."""
    tokens = step_completions(run) * (work.completion_tokens + work.prompt_tokens / work.num_generations)
    return (run.rloo.max_steps or 1) * CPU_FLOPS * work.shape.num_weights * tokens / CPU_SPEED / 3600
