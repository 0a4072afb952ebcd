"""Choose the engine that samples a run's completions, and divide the GPU between vLLM and training."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.plan import vllm_memory
from rloo_kit.plan.load import find_machine, read_load, uses_unsloth, wanted_rows
from rloo_kit.plan.parts import Load
from rloo_kit.plan.peaks import rollout_gib, rows_at_once, training_gib
from rloo_kit.plan.result import EngineChoice, Machine, VllmPlan
from rloo_kit.system.gpu import GIB
from rloo_kit.system.versions import VLLM_INSTALL, in_range, installed_version, is_importable

FLOAT8_CAPABILITY = (8, 0)
BITSANDBYTES_PLUGIN = "vllm_bnb_plugin"  # since vLLM 0.28 a separate package loads its 4-bit weights


def plan_vllm(run: RunConfig, machine: Machine | None = None, config: Mapping[str, Any] | None = None) -> VllmPlan:
    """Divide the GPU between vLLM and training.

    Args:
        machine: what the run has to fit (`find_machine`); None: this machine.
        config: the content of the model's `config.json`; None looks for it.

    Returns:
        The plan, also if there is an obstacle. Keys of `rollout.vllm` and `rollout.rows` that are set are kept.

    Raises:
        ConfigError: the model's shape is unknown.
    """
    machine = machine or find_machine()
    load = read_load(run, machine, config, engine="vllm")
    rows = rows_at_once(load, machine.usable_gib, wanted_rows(run, load))
    return VllmPlan(
        shared=vllm_memory.is_shared(load),
        gpu_memory_utilization=min(vllm_memory.share_bytes(load, rows) / GIB / machine.total_gib, 1.0),
        max_num_seqs=rows,
        pool_gib=vllm_memory.pool_bytes(load, rows) / GIB,
        weights_gib=vllm_memory.weight_bytes(load) / GIB,
        asleep_gib=vllm_memory.asleep_bytes(load, rows) / GIB,
        obstacle=_find_obstacle(run, load, rows, machine),
    )


def _find_obstacle(run: RunConfig, load: Load, rows: int, machine: Machine) -> str | None:
    """Why vLLM cannot sample this run on this machine, or does not fit next to training, and the fix; None if training
    does not fit without vLLM either."""
    if machine.is_here and not is_importable("vllm"):
        return f"vLLM is not installed: {VLLM_INSTALL}"
    if problems := run.find_vllm_problems("vllm"):
        return problems[0]
    if load.float8_cache and machine.capability is not None and machine.capability < FLOAT8_CAPABILITY:
        found = ".".join(map(str, machine.capability))
        return (
            f"rollout.vllm.float8_kv_cache is true, which needs compute capability 8.0, and {machine.name} has "
            f"{found}: set rollout.vllm.float8_kv_cache=false"
        )
    version = installed_version("vllm") if load.four_bit and machine.is_here else None
    if version is not None and in_range(version, ">=0.28") and not is_importable(BITSANDBYTES_PLUGIN):
        return (
            f"vLLM {version} reads 4-bit weights through {BITSANDBYTES_PLUGIN}, which is not "
            f"installed: {VLLM_INSTALL}, or set model.load_in_4bit=false"
        )
    limit, least = machine.usable_gib, vllm_memory.least_pool_bytes(load)
    pool = vllm_memory.pool_bytes(load, rows)
    smaller = "" if load.float8_cache else "rollout.vllm.float8_kv_cache=true, "
    if pool < least:
        return (
            f"rollout.vllm.gpu_memory_utilization is {run.rollout.vllm.gpu_memory_utilization}, which leaves "
            f"{pool / GIB:.2f} GiB for the KV cache, and one row of {load.max_length} tokens takes "
            f"{least / GIB:.2f}: raise it, or set {smaller}or rollout.vllm.gpu_memory_utilization=null"
        )
    if (needed := rollout_gib(load, 1)) > limit:
        change = "a lower rollout.vllm.gpu_memory_utilization, " if load.vllm_bytes is not None else ""
        change += "" if load.four_bit else "model.load_in_4bit=true, "
        return (
            f"vLLM with one row takes {needed:.2f} GiB together with what training keeps, more than the {limit:.2f} "
            f"of {machine.name}: set {change}{smaller}or rollout.engine=auto"
        )
    if run.rloo.tokens_per_pass is None:  # the plan makes the pass as small as needed
        load = replace(load, tokens_per_pass=1)
    alone = replace(load, engine="generate")
    if training_gib(load, rows) > limit >= training_gib(alone):
        return (
            f"training takes {training_gib(load, rows):.2f} GiB while vLLM is asleep, more than the {limit:.2f} of "
            f"{machine.name}: set rollout.vllm.enforce_eager=true, rloo.memory=low, or rollout.engine=auto"
        )
    return None


def choose_engine(
    run: RunConfig, machine: Machine | None = None, config: Mapping[str, Any] | None = None
) -> EngineChoice:
    """The engine of `rollout.engine`; auto takes vLLM on a CUDA GPU if it is installed and fits.

    A GPU elsewhere (`machine.is_here` is False) is assumed to have what `make setup` installs: Unsloth, not vLLM.

    Arguments and errors as in `plan_vllm`. An explicit `vllm` is returned even if `VllmPlan.obstacle` is set.
    """
    if run.rollout.engine != "auto":
        return EngineChoice(run.rollout.engine, f"rollout.engine is {run.rollout.engine}")
    machine = machine or find_machine()
    fused, name = uses_unsloth(run, machine), read_load(run, machine, config).engine
    if not machine.on_cuda:
        return EngineChoice(name, "without a CUDA GPU")
    plan = plan_vllm(run, machine, config)
    obstacle = plan.obstacle
    if obstacle is None and not machine.is_here:
        obstacle = "assumed not installed on another machine, rollout.engine=vllm plans for it"
    if obstacle is None:
        return EngineChoice("vllm", f"installed, and {plan.max_num_seqs} completions at once fit")
    return EngineChoice(name, f"{'Unsloth' if fused else 'transformers'}; not vLLM: {obstacle.partition('; set ')[0]}")
