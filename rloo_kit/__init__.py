"""RLOO for Qwen3-Thinking models on one GPU.

The core (system, config, runs, rewards, data, rewarding, models, gradient, rollout, loop) trains a run and imports no
part. The parts (images, health, plan, tools, tasks, graders, vllm, demo, results, evals, checks, training, preflight,
export, notebook, batch, cli) stand above it and enter through `seams`, `Engine`, `Dialogue` and callbacks:
docs/design.md.

Importing the package loads no heavy library: each public name is resolved on first use, so that `setup_environment()`
can run before torch, transformers or trl is imported. `_EXPORTS` is the whole public surface.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "setup_environment": "_stack",
    "check_installation": "system.doctor",
    "load_config": "config.run",
    "plan_vram": "plan.planner",
    "check": "checks.faults",
    "load_policy": "models.policy",
    "load_trained": "models.policy",
    "save_adapter": "models.policy",
    "load_data": "data.load",
    "build_rewards": "rewarding.registry",
    "check_preflight": "preflight.preflight",
    "generate_completions": "rollout.completions",
    "make_budget_limits": "rollout.thinking_budget",
    "evaluate": "evals.evaluate",
    "ask": "evals.ask",
    "compare": "results.changes",
    "train": "training.rloo",
    "fine_tune": "training.sft",
    "train_reward_model": "training.reward_model",
    "measure_signal": "evals.difficulty",
    "read_rollouts": "runs.rollouts",
    "judge_run": "results.verdict",
    "describe_run": "results.overview",
    "compare_runs": "results.versus",
    "write_report": "results.report",
    "export_model": "export.export",
    "plot_training": "notebook.display",
    "show_completions": "notebook.display",
    "release_memory": "notebook.kernel",
    "bind_think_tags": "think_tags",
    "split_thinking": "think_tags",
    "read_parameters": "notebook.parameters",
    "RLOOConfig": "loop.options",
    "shutdown_kernel": "notebook.kernel",
    "RLOOTrainer": "loop.trainer",
    "RlooKitError": "errors",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'rloo_kit' has no attribute '{name}'; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"rloo_kit.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
