"""The arguments of `RLOOConfig` for a run, from the config file, the machine, the backend and the memory plan."""

import os
from pathlib import Path
from typing import Any

from rloo_kit.collective import gather_objects
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.models.policy import Policy
from rloo_kit.plan.planner import TOKENS_PER_PASS, plan_vram
from rloo_kit.rollout.engine import choose_engine
from rloo_kit.rollout.types import FOREIGN
from rloo_kit.system import environment
from rloo_kit.system.processes import say


def training_arguments(run: RunConfig, policy: Policy, folder: Path) -> dict[str, Any]:
    """Keyword arguments of `RLOOConfig`: from the file, the machine and the backend, with checkpoints in `folder`."""
    on_cpu = policy.model.device.type == "cpu"
    shared = run.rollout.server_adapters  # by several runs; each deletes its leftovers, so each gets a folder
    own_folder = {} if shared is None else {"rollout_server_adapters": str(Path(shared) / run.name)}
    return (
        {"output_dir": str(folder), "disable_tqdm": True, "use_cpu": on_cpu, "dataloader_pin_memory": not on_cpu}
        | run.to_arguments()
        | own_folder
        | planned_limits(run, policy)
        | mixed_precision(run)
        | policy.config_arguments
    )


def planned_limits(run: RunConfig, policy: Policy) -> dict[str, int]:
    """`rollout_rows`, and `tokens_per_pass` if memory allows fewer than usual: the file's values, else the minimum of
    `plan_vram` over all processes. A model that cannot be planned is left to the out-of-memory handling."""
    found = gather_objects(_own_limits(run, policy))
    return {name: min(limits[name] for limits in found if name in limits) for name in set().union(*found)}


def loaded_engine(run: RunConfig, policy: Policy) -> str:
    """The engine that samples; for auto, the one the policy was loaded with, whatever fits next to it now."""
    wanted = str(run.rollout.engine)
    return choose_engine(wanted, policy.backend, policy.model)[0] if wanted == "auto" else wanted


def _own_limits(run: RunConfig, policy: Policy) -> dict[str, int]:
    try:
        plan = plan_vram(run, config=policy.model.config.to_dict(), engine=loaded_engine(run, policy))
    except ConfigError as error:
        say(f"memory: {error}")
        return {}
    limits = {} if plan.engine.name in FOREIGN else {"rollout_rows": plan.rows}  # those bound their rows themselves
    if run.rloo.tokens_per_pass is None and plan.tokens_per_pass < TOKENS_PER_PASS[not plan.machine.on_cuda]:
        limits["tokens_per_pass"] = plan.tokens_per_pass
    if not plan.fits:
        say(f"memory: {plan}")
    elif plan.verdict == "tight":
        say(f"memory: {plan.sentence}")
    if plan.fits and "rollout_rows" in limits and plan.rows < plan.completions and run.rollout.rows is None:
        say(
            f"memory: {plan.rows} of the {plan.completions} completions of a rollout are generated at once, as many as "
            f"fit {plan.machine.name} (computed; rollout.rows sets it by hand)"
        )
    return limits


def mixed_precision(run: RunConfig) -> dict[str, bool]:
    """`bf16` and `fp16`: the file's, else the machine's.

    ACCELERATE_MIXED_PRECISION, which overrides `bf16=False`, is set to match."""
    chosen = environment.current().precision
    bf16, fp16 = run.rloo.bf16, run.rloo.fp16
    bf16 = (chosen == "bf16" and not fp16) if bf16 is None else bf16
    fp16 = (chosen == "fp16" and not bf16) if fp16 is None else fp16
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if bf16 else "fp16" if fp16 else "no"
    return {"bf16": bf16, "fp16": fp16}
