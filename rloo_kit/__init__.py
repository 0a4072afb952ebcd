"""RLOO for Qwen3-Thinking models on one GPU.

Importing the package loads no heavy library: each public name is resolved on first use, so that `setup_environment()`
can run before torch, transformers or trl is imported. `_EXPORTS` is the whole public surface.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "setup_environment": "_stack",
    "check_installation": "doctor",
    "load_config": "config",
    "plan_vram": "vram",
    "load_policy": "backends",
    "save_adapter": "backends",
    "load_data": "data",
    "build_rewards": "reward_registry",
    "generate_completions": "rollout",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "train": "training",
    "write_report": "report",
    "plot_training": "notebook_display",
    "show_completions": "notebook_display",
    "release_memory": "kernel",
    "bind_think_tags": "tokens",
    "split_thinking": "tokens",
    "read_parameters": "parameters",
    "RLOOConfig": "rloo_config",
    "shutdown_kernel": "kernel",
    "RLOOTrainer": "trainer",
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
