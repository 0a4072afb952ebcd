"""The arguments of `RLOOConfig` for a run, and those of `RLOOTrainer` for TRL's constructor."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset

from rloo_kit.collective import gather_objects
from rloo_kit.config.old_names import TRAINER_NAMES
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.loop.options import RLOOConfig, check_options
from rloo_kit.models.adapters import check_model, wrap_for_unsloth
from rloo_kit.models.policy import Policy
from rloo_kit.plan.planner import TOKENS_PER_PASS, plan_vram
from rloo_kit.rewarding.guard import guard
from rloo_kit.rollout.engine import choose_engine
from rloo_kit.rollout.types import FOREIGN
from rloo_kit.system import environment
from rloo_kit.system.processes import say

# TRL's arguments after eval_dataset, in its order, for code that passes them by position
FURTHER_ARGUMENTS = (
    "processing_class", "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ of a run


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


# ------------------------------------------------------------------------------------------------ of the trainer


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
    if isinstance(arguments.get("train_dataset"), IterableDataset):
        problems = []
        if args.max_steps <= 0:
            problems.append("max_steps is not set, and train_dataset is a stream without a length: set max_steps=...")
        if args.resample_rounds:
            problems.append(
                f"resample_rounds is {args.resample_rounds}, which draws prompts by index, and train_dataset is a "
                "stream: set resample_rounds=0, or load the data whole (a datasets.Dataset)"
            )
        if problems:
            raise ConfigError("\n".join(problems))
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
    if args.vllm_mode != "server" and args.vllm_tensor_parallel_size != 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size is {args.vllm_tensor_parallel_size}, and vLLM in the trainer's process has "
            "one GPU: set it to 1, or start a server and set rollout_engine='server', rollout_server_url=..."
        )
    args.use_vllm = False
    args.rollout_engine = "vllm"
    if args.vllm_mode == "server":
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        args.rollout_engine, args.rollout_server_url = "server", getattr(args, "rollout_server_url", None) or url


def _columns(dataset: Any, args: Any) -> list[str] | None:
    """The dataset's columns that rewards get by name; None if it does not declare them."""
    names = getattr(dataset, "column_names", None)
    if names is None:
        return None
    return [*names, *(["thinking_forced"] if getattr(args, "thinking_budget", None) is not None else [])]


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
