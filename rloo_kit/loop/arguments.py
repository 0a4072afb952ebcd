"""Prepares the arguments of `RLOOTrainer` for TRL's constructor: old names, guarded rewards, weights, vLLM."""

import warnings
from typing import Any

import torch

from rloo_kit.config.old_names import TRAINER_NAMES
from rloo_kit.errors import ConfigError
from rloo_kit.loop.options import RLOOConfig, check_options, option
from rloo_kit.models.adapters import check_model, wrap_for_unsloth
from rloo_kit.rewarding.guard import guard

# TRL's arguments after eval_dataset, in its order, for code that passes them by position
FURTHER_ARGUMENTS = (
    "processing_class", "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config",
)  # fmt: skip


def prepare_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords for TRL's constructor; raises ConfigError for arguments that cannot work."""
    arguments = rename_arguments(given)
    rewards = arguments["reward_funcs"]
    rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    are_old = given.get("reward_model") is not None and all(hasattr(reward, "named_parameters") for reward in rewards)
    if are_old and arguments.get("reward_processing_classes") is None:  # old TRL scored with the policy's tokenizer
        arguments["reward_processing_classes"] = [arguments.get("processing_class")] * len(rewards)
    args = _with_reward_weights(arguments.get("args") or _default_config(arguments["model"]), rewards)
    arguments["args"] = args
    for name in ("train_dataset", "eval_dataset"):
        found = arguments.get(name)
        for dataset in found.values() if isinstance(found, dict) else [found]:
            columns = getattr(dataset, "column_names", None) or ()
            if "prompt" not in columns and "input_ids" in columns:
                raise ConfigError(
                    f"{name} has input_ids and no prompt, as old TRL wanted it: give it a column prompt with the text, "
                    "which the trainer tokenizes"
                )
    columns = _columns(arguments.get("train_dataset"), args)
    arguments["reward_funcs"] = [guard(reward, columns) for reward in rewards]
    check_model(arguments)
    _take_vllm(args)
    check_options(args)
    return wrap_for_unsloth(arguments)


def rename_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Today's keywords for the arguments of TRL's trainer up to 0.21, with a warning for each old one that is given."""
    if hasattr(given.get("model"), "per_device_train_batch_size"):
        raise ConfigError(
            "RLOOTrainer's first argument is a config, as it was in old TRL; the order is now model, reward_funcs, "
            "args. Name the arguments: RLOOTrainer(model=..., reward_funcs=..., args=..., train_dataset=...)"
        )
    values = {name: value for name, value in given.items() if name not in TRAINER_NAMES}
    for old, entry in TRAINER_NAMES.items():
        value = given.get(old)
        if value is None:
            continue
        if entry.new is None:
            message = f"RLOOTrainer's {old} is an old TRL argument and has no effect: {entry.note}"
        elif values.get(entry.new) is not None:
            raise ConfigError(f"RLOOTrainer got {old}= and {entry.new}=, which are the same; keep {entry.new}=")
        else:
            values[entry.new] = value
            message = f"RLOOTrainer's {old}= is the old TRL name of {entry.new}="
        warnings.warn(message, FutureWarning, stacklevel=4)
    for name, hint in (("model", "a model or its name"), ("reward_funcs", "a reward function, or a list of them")):
        if values.get(name) is None or (isinstance(values[name], (list, tuple)) and not values[name]):
            raise ConfigError(f"RLOOTrainer needs {name}=: {hint}")
    reference = given.get("ref_policy")
    if reference is not None and not _is_same_model(values["model"], reference):
        raise ConfigError(
            "ref_policy has other weights than policy. The reference is now the policy at the start of training "
            "(reference='start'), or its base model without the adapter (reference='base'). Load the weights of "
            "ref_policy as the model and train an adapter on it, or leave ref_policy out"
        )
    return values


def _is_same_model(policy: Any, reference: Any) -> bool:
    """Whether both are one name, or have equal weights under the names that they share."""
    if isinstance(policy, str) or isinstance(reference, str):
        return bool(policy == reference)
    own = dict(policy.named_parameters())
    return all(
        own[name].shape == other.shape and torch.equal(own[name].detach().cpu(), other.detach().cpu())
        for name, other in reference.named_parameters()
        if name in own
    )


def _take_vllm(args: Any) -> None:
    """TRL's `use_vllm` becomes the kit's engine `vllm`, or `server`. TRL's own path merges the adapter into the base
    and unmerges it at each sync, which re-quantises a 4-bit base each time."""
    if not args.use_vllm:
        return
    if args.vllm_structured_outputs_regex is not None:
        raise ConfigError(
            f"vllm_structured_outputs_regex is {args.vllm_structured_outputs_regex!r}, which restricts the "
            "sampled distribution, while the trainer scores the whole one: leave it out, and reward the format"
        )
    if args.vllm_mode != "server" and args.vllm_tensor_parallel_size != 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size is {args.vllm_tensor_parallel_size}, and vLLM in the trainer's process has "
            "one GPU: set it to 1, or start a server and set rollout_engine='server', rollout_server_url=..."
        )
    args.use_vllm = False
    args.rollout_engine = "vllm"
    if args.vllm_mode == "server":
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        args.rollout_engine, args.rollout_server_url = "server", option(args, "rollout_server_url") or url


def _columns(dataset: Any, args: Any) -> list[str] | None:
    """The dataset's columns that rewards get by name; None if it does not declare them."""
    names = getattr(dataset, "column_names", None)
    if names is None:
        return None
    return [*names, *(["thinking_forced"] if option(args, "thinking_budget") is not None else [])]


def _default_config(model: Any) -> RLOOConfig:
    """TRL's default `args`, as the kit's own class: TRL's refuses to run without an accelerator."""
    name = model if isinstance(model, str) else model.config.name_or_path
    return RLOOConfig(output_dir=f"{name.rstrip('/').split('/')[-1]}-RLOO")


def _with_reward_weights(args: Any, rewards: list[Any]) -> Any:
    """The weights that rewards from `build_rewards` carry, unless the config has others than an earlier trainer's."""
    if args.reward_weights is None or args.reward_weights is getattr(args, "_carried", None):
        weights = [getattr(reward, "weight", 1.0) for reward in rewards]
        args._carried = args.reward_weights = [float(w) if isinstance(w, (int, float)) else 1.0 for w in weights]
    if not any(args.reward_weights):
        raise ConfigError("the weights of all rewards (reward_weights) are 0, so nothing would be learnt: raise one")
    return args
