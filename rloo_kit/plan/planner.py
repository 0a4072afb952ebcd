"""Plan whether a run fits a GPU: GiB by part from `config.json` and the run's keys, without torch, weights, network.

First the machine and the workload, then the engine that samples, then the plan with its margin and changes.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rloo_kit.config.checks import CLOSE_TOKENS
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan.parts import (
    UNMEASURED,
    Workload,
    asleep_bytes,
    body_bytes,
    find_factors,
    largest,
    largest_pass,
    least_pool_bytes,
    list_parts,
    pool_bytes,
    rollout_gib,
    rows_at_once,
    share_bytes,
    table_bytes,
    training_gib,
    unmeasured_gib,
    vllm_weight_bytes,
)
from rloo_kit.plan.shapes import DYNAMIC_ENDING, ModelShape, find_shape, shape_of_config
from rloo_kit.plan.speed import MEAN_SHARES, describe_step, find_gpu, run_time, step_completions, step_on_cpu_s
from rloo_kit.plan.vram_plan import EngineChoice, Machine, Margin, Remedy, VllmPlan, VramPlan
from rloo_kit.runs.find import read_adapter
from rloo_kit.sizes import TOKENS_PER_PASS
from rloo_kit.system.environment import BACKEND_VARIABLE
from rloo_kit.system.gpu import GIB, find_gpus
from rloo_kit.system.memory import available_gib
from rloo_kit.system.problems import Problem
from rloo_kit.system.processes import count_processes
from rloo_kit.system.versions import VLLM_INSTALL, in_range, installed_version, is_cpu_torch, is_importable

RESERVE_GIB = 0.8  # fragments of the allocator, and the desktop
CPU_RESERVE_GIB = 0.3
# Largest extra size of dynamic copies, as a share of the 4-bit model: Unsloth's blog "Dynamic 4-bit Quantization".
DYNAMIC_SHARE = 0.1
BITSANDBYTES_PLUGIN = "vllm_bnb_plugin"  # since vLLM 0.28 a separate package loads its 4-bit weights
ROWS = ("rollout.rows", "rollout.vllm.max_num_seqs")
STEP = 64  # tokens between proposed lengths of a completion, and of the shortest
# Shipped configs and the GB of the GPU that each is for, largest first. The wheel does not include them.
ON_GPU = (
    ("configs/qwen3_4b_thinking.yaml", 40),
    *((f"configs/evening_{size}gb.yaml", size) for size in (24, 16, 12, 8)),
)
MOST_WEIGHTS = 0.5e9  # on a CPU: 32 completions of 512 tokens, 200 times, take ten hours at 0.3 TFLOPS
MOST_HOURS = 24.0  # of a run without a GPU; a short test of two steps passes
ON_CPU = "configs/arithmetic_thinking.yaml"


def find_machine(gpu_gib: float | None = None) -> Machine:
    """This process's GPU, another one with `gpu_gib`, or the machine's memory; see `plan_vram`."""
    if gpu_gib is not None:
        if not 0 < gpu_gib < float("inf"):
            raise ConfigError(f"gpu_gib is {gpu_gib}; set a GPU's memory in GiB, above 0")
        return Machine(f"a GPU with {gpu_gib:.4g} GiB", gpu_gib, RESERVE_GIB, True, is_here=False)
    gpu = None if is_cpu_torch() else find_gpus().gpu
    if gpu is not None:
        return Machine(gpu.name, gpu.memory_gib, RESERVE_GIB, True, capability=gpu.capability)
    return Machine("the CPU", available_gib(), CPU_RESERVE_GIB, False)


def read_workload(
    run: RunConfig, machine: Machine, config: Mapping[str, Any] | None = None, engine: str | None = None
) -> Workload:
    """The inputs of the arithmetic for a run; see `plan_vram`. `engine` overrides `rollout.engine`; auto is read as the
    backend's engine without vLLM."""
    shape = find_shape(run) if config is None else shape_of_config(config, "the loaded model")
    fused = uses_unsloth(run, machine)
    work = Workload(
        shape=shape,
        fused=fused,
        on_cuda=machine.on_cuda,
        factors=find_factors(machine.on_cuda, fused),
        **_read_model(run, shape, machine, fused),
        **_read_rloo(run, machine),
        **_read_engine(run, shape, machine, fused, engine or run.rollout.engine),
    )
    # The checkpoint keeps layers in 16 bit, and the config.json that lists them is not on this machine.
    if shape.source.startswith("the published") and run.model.name.endswith(DYNAMIC_ENDING):
        return replace(work, unknown_bytes=int(DYNAMIC_SHARE * (body_bytes(work) + table_bytes(work))))
    return work


def _read_model(run: RunConfig, shape: ModelShape, machine: Machine, fused: bool) -> dict[str, Any]:
    """Precisions, what is trained, and what that keeps in memory."""
    model, by_machine = run.model, "bfloat16" if machine.on_cuda and run.model.lora else "float32"
    is_wide = (by_machine if model.dtype == "auto" else model.dtype) == "float32"
    rank: int | None = None  # every parameter is trained
    targets: Iterable[str] = ()
    reference = "model"
    if model.lora is not None:
        every = {name.rpartition(".")[2]: None for _, matrices in shape.matrices for name in matrices}
        rank, targets, is_continued = model.lora.r, model.lora.target_modules or every, model.adapter is not None
        settings = read_adapter(model.adapter or model.name)
        if isinstance(settings.get("r"), int) and isinstance(settings.get("target_modules"), list):
            rank, targets, is_continued = settings["r"], settings["target_modules"], True
        reference = "adapter" if is_continued and run.rloo.reference == "start" else "none"
    checkpointing = "on" if model.gradient_checkpointing else "off"
    return {
        "four_bit": model.load_in_4bit or shape.is_quantised,
        "weight_bytes": 4 if is_wide else 2,
        "compute_bytes": 4 if is_wide and not (machine.on_cuda and model.lora is None) else 2,
        "lora_rank": rank,
        "lora_targets": tuple(targets),
        "checkpointing": "offloaded" if fused and model.gradient_checkpointing == "unsloth" else checkpointing,
        "reference": reference if run.rloo.beta > 0 else "none",
        "max_length": model.max_seq_length,
    }


def _read_rloo(run: RunConfig, machine: Machine) -> dict[str, Any]:
    """Lengths, and the sizes of a rollout and of a pass."""
    rloo, processes, longest = run.rloo, count_processes(), run.rloo.max_completion_length
    if rloo.thinking_budget is not None and rloo.answer_budget is not None and not rloo.has_tools:
        budgets = rloo.thinking_budget + CLOSE_TOKENS.get(rloo.thinking_close, 1) + rloo.answer_budget
        longest = min(budgets, longest)
    return {
        "optim": rloo.optim,
        "tokens_per_pass": 1 if rloo.memory == "low" else rloo.tokens_per_pass or TOKENS_PER_PASS[not machine.on_cuda],
        "whole_groups": rloo.memory == "fast" and rloo.beta > 0,
        "prompt_tokens": run.data.max_prompt_length,
        "completion_tokens": int(longest),
        "mean_share": MEAN_SHARES[rloo.thinking_budget is not None],
        "num_generations": rloo.num_generations,
        "completions": rloo.generation_batch_size // processes,
        "keeps_gradients": rloo.generation_batch_size < step_completions(run) * processes,
    }


def _read_engine(run: RunConfig, shape: ModelShape, machine: Machine, fused: bool, engine: str) -> dict[str, Any]:
    """The engine, and the keys of vLLM."""
    if engine == "auto":
        engine = "generate" if shape.delta or (fused and not shape.has_kernels) else "native"
    vllm, share = run.rollout.vllm, run.rollout.vllm.gpu_memory_utilization
    return {
        "engine": engine,
        "float8_cache": engine == "vllm" and vllm.float8_kv_cache,
        "enforce_eager": vllm.enforce_eager,
        "vllm_bytes": None if share is None else int(share * machine.total_gib * GIB),
    }


def wanted_rows(run: RunConfig, work: Workload) -> int | None:
    """Completions at once, as set in the file; with vLLM `rollout.rows` is another name for `max_num_seqs`."""
    wanted = run.rollout.vllm.max_num_seqs if work.engine == "vllm" else None
    return run.rollout.rows if wanted is None else wanted


def uses_unsloth(run: RunConfig, machine: Machine) -> bool:
    """Whether the Unsloth backend would run it; on a GPU elsewhere it is assumed to be installed."""
    if not machine.on_cuda or run.model.lora is None or run.model.backend == "transformers":
        return False
    if run.model.backend == "auto" and os.environ.get(BACKEND_VARIABLE, "").strip().lower() == "transformers":
        return False
    return not machine.is_here or is_importable("unsloth")


# ------------------------------------------------------------------------------------------ the engine


def plan_vllm(run: RunConfig, machine: Machine | None = None, config: Mapping[str, Any] | None = None) -> VllmPlan:
    """Divide the GPU between vLLM and training; a plan also if there is an obstacle. Keys of `rollout.vllm` and
    `rollout.rows` that are set are kept.

    Args:
        machine: what the run has to fit; None: this machine. config: see `plan_vram`, also for what is raised.
    """
    machine = machine or find_machine()
    work = read_workload(run, machine, config, engine="vllm")
    rows = rows_at_once(work, machine.usable_gib, wanted_rows(run, work))
    return VllmPlan(
        shared=work.fused,
        gpu_memory_utilization=min(share_bytes(work, rows) / GIB / machine.total_gib, 1.0),
        max_num_seqs=rows,
        pool_gib=pool_bytes(work, rows) / GIB,
        weights_gib=vllm_weight_bytes(work) / GIB,
        asleep_gib=asleep_bytes(work, rows) / GIB,
        obstacle=_find_obstacle(run, work, rows, machine),
    )


def _find_obstacle(run: RunConfig, work: Workload, rows: int, machine: Machine) -> str | None:
    """Why vLLM cannot sample this run on this machine, or does not fit next to training, and the fix; None if training
    does not fit without vLLM either."""
    if machine.is_here and not is_importable("vllm"):
        return f"vLLM is not installed: {VLLM_INSTALL}"
    if problems := run.find_vllm_problems("vllm"):
        return problems[0]
    if work.float8_cache and machine.capability is not None and machine.capability < (8, 0):
        capability = ".".join(map(str, machine.capability))
        return (
            f"rollout.vllm.float8_kv_cache is true, which needs compute capability 8.0, and {machine.name} has "
            f"{capability}: set rollout.vllm.float8_kv_cache=false"
        )
    version = installed_version("vllm") if work.four_bit and machine.is_here else None
    if version is not None and in_range(version, ">=0.28") and not is_importable(BITSANDBYTES_PLUGIN):
        return (
            f"vLLM {version} reads 4-bit weights through {BITSANDBYTES_PLUGIN}, which is not "
            f"installed: {VLLM_INSTALL}, or set model.load_in_4bit=false"
        )
    limit, least, pool = machine.usable_gib, least_pool_bytes(work), pool_bytes(work, rows)
    smaller = "" if work.float8_cache else "rollout.vllm.float8_kv_cache=true, "
    if pool < least:
        return (
            f"rollout.vllm.gpu_memory_utilization is {run.rollout.vllm.gpu_memory_utilization}, which leaves "
            f"{pool / GIB:.2f} GiB for the KV cache, and one row of {work.max_length} tokens takes "
            f"{least / GIB:.2f}: raise it, or set {smaller}or rollout.vllm.gpu_memory_utilization=null"
        )
    if (needed := rollout_gib(work, 1)) > limit:
        change = "a lower rollout.vllm.gpu_memory_utilization, " if work.vllm_bytes is not None else ""
        change += "" if work.four_bit else "model.load_in_4bit=true, "
        return (
            f"vLLM with one row takes {needed:.2f} GiB together with what training keeps, more than the {limit:.2f} "
            f"of {machine.name}: set {change}{smaller}or rollout.engine=auto"
        )
    if run.rloo.tokens_per_pass is None:  # the plan makes the pass as small as needed
        work = replace(work, tokens_per_pass=1)
    alone = replace(work, engine="generate")
    if training_gib(work, rows) > limit >= training_gib(alone):
        return (
            f"training takes {training_gib(work, rows):.2f} GiB while vLLM is asleep, more than the {limit:.2f} of "
            f"{machine.name}: set rollout.vllm.enforce_eager=true, rloo.memory=low, or rollout.engine=auto"
        )
    return None


def plan_engine(
    run: RunConfig, machine: Machine | None = None, config: Mapping[str, Any] | None = None
) -> EngineChoice:
    """The engine of `rollout.engine`; auto takes vLLM on a CUDA GPU if it is installed and fits.

    A GPU elsewhere (`machine.is_here` is False) is assumed to have what `make setup` installs: Unsloth, not vLLM.

    Arguments and errors as in `plan_vllm`. An explicit `vllm` is returned even if `VllmPlan.obstacle` is set.
    """
    if run.rollout.engine != "auto":
        return EngineChoice(run.rollout.engine, f"rollout.engine is {run.rollout.engine}")
    machine = machine or find_machine()
    name = read_workload(run, machine, config).engine
    if not machine.on_cuda:
        return EngineChoice(name, "without a CUDA GPU")
    plan = plan_vllm(run, machine, config)
    elsewhere = "assumed not installed on another machine, rollout.engine=vllm plans for it"
    obstacle = plan.obstacle or ("" if machine.is_here else elsewhere)
    if not obstacle:
        return EngineChoice("vllm", f"installed, and {plan.max_num_seqs} completions at once fit")
    backend = "Unsloth" if uses_unsloth(run, machine) else "transformers"
    return EngineChoice(name, f"{backend}; not vLLM: {obstacle.partition('; set ')[0]}")


# ------------------------------------------------------------------------------------------ the plan


def plan_vram(
    run: RunConfig, gpu_gib: float | None = None, config: Mapping[str, Any] | None = None, engine: str | None = None
) -> VramPlan:
    """Plan a run's memory.

    Args:
        gpu_gib: memory in GiB of another NVIDIA GPU to plan for; None takes this machine's GPU (its whole memory) or,
            without one, the memory that this process may use.
        config: the content of the model's `config.json`; None looks for it (`find_shape`).
        engine: of a policy that is already loaded; None takes `rollout.engine`, where auto chooses by what fits.

    Returns:
        The plan, which prints as a table.

    Raises:
        ConfigError: the model's shape is unknown, or gpu_gib is not above 0.
    """
    machine = find_machine(gpu_gib)
    choice = EngineChoice(engine, "the loaded model's") if engine else plan_engine(run, machine, config)
    work = read_workload(run, machine, config, choice.name)
    limit = machine.usable_gib
    rows = rows_at_once(work, limit, wanted_rows(run, work))
    if run.rloo.tokens_per_pass is None:
        work = replace(work, tokens_per_pass=largest_pass(work, limit, rows))
    rollout, training = rollout_gib(work, rows), training_gib(work, rows)
    fits = max(rollout, training) <= limit
    no_gpu = None
    if not machine.on_cuda and work.shape.num_weights > MOST_WEIGHTS:
        hours = (run.rloo.max_steps or 1) * step_on_cpu_s(run, work) / 3600
        no_gpu = Problem(
            "machine",
            f"No GPU: {run.model.name} has {work.shape.size}, and {describe_step(run, work)}",
            f"`rloo-kit plan FILE --gpu-gib N` plans for a GPU with N GiB; {ON_CPU} fits this machine",
            level="error" if hours > MOST_HOURS else "warning",
        )
    gpu = find_gpu(machine.name, machine.total_gib) if machine.on_cuda and work.engine != "server" else None
    return VramPlan(
        run=run.run.name or "a run without a name",
        model=f"{run.model.name}, {work.shape.size} in {4 if work.four_bit else 8 * work.weight_bytes}-bit",
        machine=machine,
        engine=choice,
        vllm=plan_vllm(run, machine, config) if choice.name == "vllm" else None,
        step=None if gpu is None else run_time(run, work, rows, gpu),
        parts=tuple(list_parts(work, rows)),
        rollout_gib=rollout,
        training_gib=training,
        rows=rows,
        completions=work.completions,
        tokens_per_pass=work.pass_tokens,
        margins=tuple(_find_margins(run, work, machine, rollout, training)),
        no_gpu=no_gpu,
        changes=() if fits else tuple(find_remedies(run, work, rows, limit)),
    )


def find_machine_problem(run: RunConfig) -> Problem | None:
    """A large model without a GPU, or too little memory; None if there is no problem or the model's shape is unknown.

    An error if the run cannot fit, whatever is changed, or takes too long. Takes a fraction of a second, without torch.
    """
    try:
        plan = plan_vram(run)
    except ConfigError:
        return None
    config = fitting_config(plan.machine)
    other = f"train {config}, which fits this machine" if config else "take a smaller model or a larger GPU"
    if plan.no_gpu is not None:
        fix = f"take a machine with a GPU (`rloo-kit plan FILE --gpu-gib N` says what fits), or {other}"
        return replace(plan.no_gpu, fix=fix, level="error" if plan.headroom_gib < 0 else plan.no_gpu.level)
    if plan.headroom_gib >= 0:
        return None
    takes = f"{plan.model} does not fit: {plan.binds} takes {plan.peak_gib:.1f} GiB at full length, and "
    found = f"{takes}{plan.machine.name} has {plan.machine.usable_gib:.1f}"
    if plan.changes and plan.changes[-1].fits:
        changes = " ".join(change.override for change in plan.changes)
        return Problem("machine", found, f"set {changes}", level="warning")
    return Problem("machine", found, other)


def _find_margins(
    run: RunConfig, work: Workload, machine: Machine, rollout: float, training: float
) -> Iterator[Margin]:
    """What the peaks do not count; docs/plan.md has the source of each figure."""
    if work.unknown_bytes:
        kept = "layers that this dynamic 4-bit model keeps in 16 bit"
        yield Margin(work.unknown_bytes / GIB, f"{kept}: at most 10% of the weights, according to Unsloth")
    if run.eval.batch_size > work.completions and work.engine in ("native", "generate"):
        tokens = run.eval.max_completion_length or work.completion_tokens
        batch = replace(work, completions=run.eval.batch_size, completion_tokens=tokens)
        more = rollout_gib(batch, run.eval.batch_size) - max(rollout, training)
        if more > 0:
            yield Margin(more, f"the evaluation, with eval.batch_size = {run.eval.batch_size} completions at once")
    part = "training" if training > rollout else "rollout"
    here = "on this machine" if machine.is_here else "on that GPU"
    unmeasured = unmeasured_gib(work, max(rollout, training), part)
    yield Margin(unmeasured, f"not measured {here}: {UNMEASURED:.0%} of the computed peak")


# ------------------------------------------------------------------------------------------ what to change


def find_remedies(run: RunConfig, work: Workload, rows: int, limit: float) -> Iterator[Remedy]:
    """Changes that bring the run below the limit, cheapest first, until it fits; without those that do not help."""
    wanted = wanted_rows(run, work)  # from the file; None is planned again after each change
    rollout, training = rollout_gib(work, rows), training_gib(work, rows)
    for key, value, changed in _candidates(run, work, limit):
        if key in ROWS:
            wanted = None
            value = rows_at_once(changed, limit)
        rows = rows_at_once(changed, limit, wanted)
        after = rollout_gib(changed, rows), training_gib(changed, rows)
        if (rollout > limit and after[0] < rollout) or (training > limit and after[1] < training):
            rollout, training = after
            yield Remedy(key, value, rollout, training, max(after) <= limit)
            if max(after) <= limit:
                return


def _candidates(run: RunConfig, work: Workload, limit: float) -> Iterator[tuple[str, Any, Workload]]:
    """(key, value, work with this and all earlier changes), cheapest first: time, precision, then what is learnt."""
    if work.engine == "vllm" and work.vllm_bytes is not None:
        work = replace(work, vllm_bytes=None)
        yield "rollout.vllm.gpu_memory_utilization", None, work
    if wanted_rows(run, work) is not None:
        yield ROWS[run.rollout.rows is None], 1, work
    if run.rloo.memory != "low":
        work = replace(work, tokens_per_pass=1, whole_groups=False)
        yield "rloo.memory", "low", work
    if work.checkpointing == "off" or (work.checkpointing == "on" and work.fused):
        work = replace(work, checkpointing="offloaded" if work.fused else "on")
        yield "model.gradient_checkpointing", "unsloth", work
    if "8bit" not in work.optim and work.optim.startswith(("adamw", "paged")) and work.on_cuda:
        work = replace(work, optim="adamw_8bit")
        yield "rloo.optim", "adamw_8bit", work
    if work.engine == "vllm" and not work.float8_cache:
        work = replace(work, float8_cache=True)
        yield "rollout.vllm.float8_kv_cache", True, work
    if not work.four_bit and work.lora_rank is not None:
        work = replace(work, four_bit=True)
        yield "model.load_in_4bit", True, work

    def fits(steps: int, whole: Workload = work) -> bool:
        """Whether a completion of so many STEPs fits, one row at a time."""
        cut = replace(whole, completion_tokens=steps * STEP)
        return max(rollout_gib(cut, 1), training_gib(cut)) <= limit

    tokens = largest(1, max(work.completion_tokens // STEP, 1), fits) * STEP
    if tokens < work.completion_tokens:
        ends_early = run.rloo.answer_budget is not None and not run.rloo.has_tools
        thinking = run.rloo.thinking_budget if ends_early else None
        less = 0 if thinking is None else thinking - (work.completion_tokens - tokens)
        work = replace(work, completion_tokens=tokens)
        yield ("rloo.thinking_budget", less, work) if less > 0 else ("rloo.max_completion_length", tokens, work)


def fitting_config(machine: Machine) -> str | None:
    """The shipped config for this machine: the largest that fits its GPU; without a GPU the embedded model's."""
    if not machine.on_cuda:
        return ON_CPU
    return next((file for file, size in ON_GPU if size * 1e9 / GIB <= 1.01 * machine.total_gib), None)
