"""The cells of `step_cuda.py`, each run in a process of its own: what is measured, and how.

- training: steps with canned completions, less rollout and rewards, as in `rloo_step.py`, behind a rollout of 16 tokens
  and a step that are discarded; seconds, memory, and how many completions a micro-batch had (halved until it fits,
  where a side's memory depends on that).
- whole: real rollouts with imposed lengths. The first rollout of a process is slow, and at 2048 tokens dear: it is
  discarded in a short form, of 16 tokens at most, behind a step with canned completions of full length.
- profile: where a training part and the decoding spend the GPU's time, by kind of kernel.
- ceilings: what this GPU does of matrix products and of copies, which is what the floors are made of.

A figure is reported once it is there: a cell that runs out of time keeps the steps it has. Left out: several GPUs; and
what compiling costs, since these completions are compiled for once, and those of a run differ from step to step.
"""

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import cells
import step_cuda_models as models
from step_cuda_models import Kind
from step_workload import completion_lengths

START_VARIABLE = "RLOO_KIT_STEP_STARTED"  # when the cell began, imports and micro-batches that did not fit included
BUDGET_S = cells.LIMIT_S - 60  # no step is begun that would not end by then
FULL_MEMORY = 3  # exit code of a process whose GPU was too small
SHORT_TOKENS = 16
DECODED_TOKENS, DECODED_PROMPT = 48, 1024  # of the profile of decoding


def measure_training(kind: Kind, length: str, beta: float, rows: int | None, repeats: int) -> None:
    """The training part of some steps of one side, and the most memory that it took."""
    memory, workload = models.find_memory(), models.make_workload(length, rows, beta)
    with _head():
        side = models.build_side(kind, workload)
        _roll_out_briefly(side)
        discarded = side.step(canned=True)
        _report_setting(kind, workload, side)
        cells.report(discarded_s=round(discarded.training_s, 4))
        _take_steps(side, memory, repeats, canned=True)


def measure_whole(kind: Kind, length: str, beta: float, rows: int | None, repeats: int) -> None:
    """Whole steps of one side with the lengths of its completions imposed, and the most memory that they took."""
    memory, workload = models.find_memory(), models.make_workload(length, rows, beta)
    with _head(), _engine_options(kind, workload) as options:
        side = models.build_side(kind, workload, **options)
        side.step(canned=True)  # compiles what the gradient of this length needs
        _roll_out_briefly(side)
        _report_setting(kind, workload, side)
        _take_steps(side, memory, repeats, canned=False)
    if sorted(side.completion_lengths) != sorted(side.targets):  # on a server, rows of a group start in any order
        raise AssertionError(f"{kind.name} generated other lengths than imposed: {side.completion_lengths}")


def _roll_out_briefly(side: Any) -> None:
    """A step with a real rollout of few tokens. Under Unsloth a training part is another one before it: its forward
    drops the mask of padded rows until the model has generated, which spares stock what it computes in a run."""
    full = side.targets
    side.targets = [min(tokens, SHORT_TOKENS) for tokens in full]
    side.step(canned=False)
    side.targets = full


@contextmanager
def _engine_options(kind: Kind, workload: Any) -> Iterator[dict[str, Any]]:
    """What the config of a rollout engine needs beside its name; its server, where it has one, runs inside."""
    if kind.engine == "vllm":
        share = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.35}
        yield share | {"vllm_max_model_length": models.max_tokens(workload)}
    elif kind.engine == "server":
        import step_cuda_server

        with step_cuda_server.serving(workload) as url:
            yield {"rollout_server_url": url}
    else:
        yield {"rollout_cache": kind.cache} if kind.cache != "plain" else {}


def _head() -> AbstractContextManager[Any]:
    """TRL's Triton head, which needs a GPU; rehearsed without one, its stand-in."""
    from rloo_kit._stack import load_stack

    if not cells.rehearsing() or load_stack().unsloth is not None:  # the interpreter runs Triton
        return nullcontext()
    import trl_head

    return trl_head.installed()


def _report_setting(kind: Kind, workload: Any, side: Any) -> None:
    micro_batch = side.trainer.args.per_device_train_batch_size
    if micro_batch != workload.micro_batch:
        raise AssertionError(f"{kind.name} made a micro-batch of {micro_batch} out of {workload.micro_batch}")
    engine = getattr(side.trainer, "_engine", None)
    scorer = getattr(side.trainer, "_scorer", None)
    cells.report(
        side=kind.name, backend=kind.backend, engine=engine.name if engine is not None else kind.engine,
        layout=getattr(scorer, "layout", None), settings=asdict(workload), tokens=sum(completion_lengths(workload)),
        steps=[],
    )  # fmt: skip


def _take_steps(side: Any, memory: Any, repeats: int, canned: bool) -> None:
    """At least one step, then more while there is time; each is reported when it is done."""
    steps: list[dict[str, float]] = []
    while len(steps) < repeats and (not steps or _elapsed() + 1.2 * steps[-1]["whole_s"] < BUDGET_S):
        memory.settle()
        held = round(memory.held_gib, 3)
        with memory.measure() as taken:
            step = side.step(canned=canned)
        found = {name: getattr(step, f"{name}_s") for name in ("whole", "generation", "training")}
        steps.append({f"{name}_s": round(value, 4) for name, value in found.items()})
        steps[-1] |= {"held_gib": held} | {name: taken[name] for name in ("peak_gib", "peak_reserved_gib")}
        cells.report(steps=steps)


def _elapsed() -> float:
    """Seconds since the cell began."""
    return time.time() - float(os.environ.get(START_VARIABLE, time.time()))


# ------------------------------------------------------------------------------------------------------- profiles

GROUPS = {  # of kernels and operators, by their names; the first that matches
    "unpacking 4-bit weights": r"dequant|4bit|nf4",
    "attention": r"flash|fmha|attention|sdpa|flex",
    "log-probabilities": r"logprob|logsumexp|log_softmax|cross_entropy|_chunked",
    "matrix products": r"gemm|gemv|cutlass|xmma|matmul|::mm|addmm|::bmm|linear|nvjet",
    "optimizer": r"adam|multi_tensor|_foreach",
    "copies": r"memcpy|memset|copy_|::cat|index_copy|Memcpy|Memset",
    "norms, rotary, activations": r"norm|rope|rotary|silu|swiglu|geglu",
}


def group_of(name: str) -> str:
    """The kind of work that a kernel's name tells of.

    >>> group_of("void cutlass::Kernel2<cutlass_80_tensorop_bf16>"), group_of("kDequantizeBlockwise<bf16>")
    ('matrix products', 'unpacking 4-bit weights')
    """
    return next((kind for kind, pattern in GROUPS.items() if re.search(pattern, name, re.I)), "everything else")


def profile_training(kind: Kind, length: str, rows: int | None) -> None:
    """Where a step with canned completions spends its time."""
    workload = models.make_workload(length, rows)
    with _head():
        side = models.build_side(kind, workload)
        _roll_out_briefly(side)
        side.step(canned=True)
        _report_setting(kind, workload, side)
        _profile(lambda: side.step(canned=True))


def profile_decoding(kind: Kind) -> None:
    """Where decoding spends its time: some tokens behind long prompts, by the kit's own engine."""
    from rloo_kit.rollout.types import Limits

    workload = models.make_workload("2k")
    prompt, tokens = (16, 4) if cells.rehearsing() else (DECODED_PROMPT, DECODED_TOKENS)
    with _head():
        side = models.build_side(kind, workload)
        trainer = side.trainer
        prompts = [[token % 250 for token in range(group, group + prompt)] for group in range(workload.groups)]
        rows = [ids for ids in prompts for _ in range(workload.num_generations)]
        _report_setting(kind, workload, side)

        def decode() -> None:
            with trainer.accelerator.autocast():
                trainer._engine.sample(rows, Limits(tokens))

        decode()
        cells.report(tokens=tokens * len(rows), prompt_tokens=prompt, decoded_tokens=tokens, rows=len(rows))
        _profile(decode)


def _profile(work: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    memory, on_gpu = models.find_memory(), not cells.rehearsing()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    memory.settle()
    started = time.perf_counter()
    work()
    memory.cuda.synchronize()
    plain_s = time.perf_counter() - started
    cells.report(plain_s=plain_s)  # a profiler that fails or takes too long leaves this
    with profile(activities=activities) as found:
        started = time.perf_counter()
        work()
        memory.cuda.synchronize()
        wall_s = time.perf_counter() - started
    shares: dict[str, float] = {}
    top = []
    for name, seconds, calls in _kernels(found, on_gpu):
        shares[group_of(name)] = shares.get(group_of(name), 0.0) + seconds
        top.append({"name": name[:120], "seconds": round(seconds, 5), "calls": calls})
    busy = sum(shares.values())
    top.sort(key=lambda row: -row["seconds"])
    cells.report(
        profiled_s=wall_s, busy_s=busy, idle_share=max(0.0, 1 - busy / wall_s),
        launches=sum(row["calls"] for row in top), seconds_by_kind={k: round(v, 5) for k, v in shares.items()},
        top=top[:20],
    )  # fmt: skip


def _kernels(found: Any, on_gpu: bool) -> Iterator[tuple[str, float, int]]:
    """Name, seconds and calls of what ran on the GPU; rehearsed, of the operators on the CPU."""
    for event in found.key_averages():
        if on_gpu and ("CUDA" not in str(event.device_type) or event.is_user_annotation):
            continue  # an operator, or a named region, has the time of its kernels once more
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        if seconds > 0:
            yield event.key, seconds, event.count


# ------------------------------------------------------------------------------------------------------- ceilings


def measure_ceilings() -> None:
    """Matrix products on random data (TFLOP/s), and copies within the GPU (GB/s, bytes read and written)."""
    import torch

    from rloo_kit.system import environment

    memory = models.find_memory()
    side, length = (64, 2**16) if cells.rehearsing() else (8192, 2**30)
    device, dtype = memory.device, getattr(torch, environment.current().dtype_name)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(length, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    product = _median_seconds(lambda: left @ right, memory)
    copy = _median_seconds(lambda: target.copy_(source), memory)
    cells.report(tflops=2 * side**3 / product / 1e12, gb_per_s=2 * length / copy / 1e9, dtype=str(dtype))


def _median_seconds(work: Callable[[], Any], memory: Any, batches: int = 5, times: int = 10) -> float:
    for _ in range(3):
        work()
    found = []
    for _ in range(batches):
        memory.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            work()
        memory.cuda.synchronize()
        found.append((time.perf_counter() - started) / times)
    return statistics.median(found)
