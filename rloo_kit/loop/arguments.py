"""What `RLOOTrainer` is given, as TRL's constructor takes it: old names, rewards behind guards, weights, vLLM."""

from typing import Any

from rloo_kit.loop.build import backend_name
from rloo_kit.loop.old_trainer import prepare_old_dataset, translate_trainer_arguments
from rloo_kit.loop.options import RLOOConfig, option
from rloo_kit.models.adapters import check_reference, wrap_for_unsloth
from rloo_kit.rewarding.guard import guard
from rloo_kit.rollout.engine import choose_engine

# TRL's arguments behind eval_dataset, in its order, for code that gives them by position
FURTHER_ARGUMENTS = (
    "processing_class", "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config",
)  # fmt: skip


def prepare_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords for TRL's constructor; what cannot work is refused here, in plain words."""
    arguments = translate_trainer_arguments(given)
    rewards = arguments.get("reward_funcs")
    rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    args = _with_reward_weights(arguments.get("args") or _default_config(arguments["model"]), rewards)
    arguments["args"] = args
    for name in ("train_dataset", "eval_dataset"):
        if arguments.get(name) is not None:
            arguments[name] = prepare_old_dataset(arguments[name], arguments.get("processing_class"))
    columns = _columns(arguments.get("train_dataset"), args)
    arguments["reward_funcs"] = [guard(reward, columns) for reward in rewards]
    arguments = wrap_for_unsloth(arguments)
    check_reference(arguments)
    if option(args, "rollout_engine") == "vllm":
        choose_engine("vllm", backend_name(), arguments.get("model"))  # names what to install before TRL looks
        args.use_vllm = True
        if url := option(args, "rollout_server_url"):
            args.vllm_mode, args.vllm_server_base_url = "server", url
    return arguments


def _columns(dataset: Any, args: Any) -> list[str] | None:
    """What rewards get of the data set by name; None where it does not say."""
    names = getattr(dataset, "column_names", None)
    if names is None:
        return None
    return [*names, *(["thinking_forced"] if option(args, "thinking_budget") is not None else [])]


def _default_config(model: Any) -> RLOOConfig:
    """What TRL makes where no `args` are given, as the kit's own: TRL's refuses to run without an accelerator."""
    name = model if isinstance(model, str) else model.config.name_or_path
    return RLOOConfig(output_dir=f"{name.rstrip('/').split('/')[-1]}-RLOO")


def _with_reward_weights(args: Any, rewards: list[Any]) -> Any:
    """Rewards that `build_rewards` made carry their weights; `reward_weights` of the config goes before them."""
    weights = [getattr(reward, "weight", 1.0) for reward in rewards]
    if args.reward_weights is None:
        args.reward_weights = [float(weight) if isinstance(weight, (int, float)) else 1.0 for weight in weights]
    return args
