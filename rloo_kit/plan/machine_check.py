"""Whether this machine can train a run at all, checked before anything is loaded."""

from dataclasses import dataclass

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan.planner import plan_vram
from rloo_kit.plan.without_gpu import fitting_config

MOST_HOURS = 24.0  # of a run without a GPU; a short test of two steps passes


@dataclass(frozen=True)
class MachineProblem:
    """The problem, and the key, config or command that fixes it; `is_fatal` if the run cannot fit or takes too long."""

    message: str
    fix: str
    is_fatal: bool


def find_machine_problem(run: RunConfig) -> MachineProblem | None:
    """A large model without a GPU, or too little memory; None if there is no problem or the model's shape is unknown.

    Takes a fraction of a second and does not load torch.
    """
    try:
        plan = plan_vram(run)
    except ConfigError:
        return None
    config = fitting_config(plan.machine)
    other = f"train {config}, which fits this machine" if config else "take a smaller model or a larger GPU"
    if plan.no_gpu is not None:
        fix = f"Take a machine with a GPU (`rloo-kit plan FILE --gpu-gib N` says what fits), or {other}"
        return MachineProblem(plan.no_gpu.found, fix, plan.headroom_gib < 0 or plan.no_gpu.hours > MOST_HOURS)
    if plan.headroom_gib >= 0:
        return None
    message = (
        f"{plan.model} does not fit: {plan.binds} takes {plan.peak_gib:.1f} GiB at full length, and "
        f"{plan.machine.name} has {plan.machine.usable_gib:.1f}."
    )
    changes = " ".join(change.override for change in plan.changes)
    if changes and plan.changes[-1].fits:
        return MachineProblem(message, f"Set {changes}", False)
    return MachineProblem(message, other[0].upper() + other[1:], True)
