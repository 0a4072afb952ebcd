"""`RLOOConfig`: the installed TRL's config plus the kit's options and the old names.

The kit's options are declared in `config/schema.py`, and their fields are generated from there. If Unsloth generated
the class, TRL's defaults override Unsloth's. Old names are dataclass fields, because `HfArgumentParser` makes its flags
from them; they stay None and are left out of `to_dict()`.
"""

import dataclasses
import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast, get_type_hints

import torch
import trl
from datasets import IterableDataset
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo
from transformers import PreTrainedConfig

from rloo_kit.completion import Tools
from rloo_kit.config.checks import WHY_REFUSED, find_batch_problems, find_option_problems
from rloo_kit.config.old_names import CONFIG_NAMES, TRAINER_NAMES, explain_gone, translate_config
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RLOOSection, RolloutSection, RunSection
from rloo_kit.config.section import Section, declared, explain_errors, suggest
from rloo_kit.data.chat import template_options
from rloo_kit.errors import ConfigError, RlooKitError
from rloo_kit.models.adapters import check_model, wrap_for_unsloth
from rloo_kit.models.backends import keep_values
from rloo_kit.models.policy import Policy
from rloo_kit.rewarding.guard import guard
from rloo_kit.rewarding.score import name_columns
from rloo_kit.rollout.choice import resolve_engine
from rloo_kit.seams import part
from rloo_kit.system import environment
from rloo_kit.system.processes import count_processes


class Option(NamedTuple):
    """A key that is an argument of `RLOOConfig`: `key` of `section`."""

    section: type[Section]
    key: str

    @property
    def field(self) -> FieldInfo:
        return self.section.model_fields[self.key]

    @property
    def default(self) -> Any:
        """The default in `RLOOConfig`: TRL's, if it differs from the kit's."""
        trl = declared(self.field, "trl")
        return self.field.default if trl is None else trl.value


# Keyed by the name in `RLOOConfig`.
OPTIONS = {
    name: Option(section, key)
    for section in (RLOOSection, RolloutSection, RunSection)
    for name, key in section.arguments().items()
}
# TRL's own class, below the one that Unsloth generates (and may call RLOOConfig too).
_STOCK = next(c for c in reversed(trl.RLOOConfig.__mro__) if c.__name__ == "RLOOConfig")
_STOCK_FIELDS = {f.name: f for f in dataclasses.fields(_STOCK) if f.init}


def default_of(f: "dataclasses.Field[Any]") -> Any:
    """The default of a dataclass's field, made if it has a factory."""
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


# The options that TRL's class lacks, by name, and a model that checks their values, and four of TRL's, as a file's are.
_OWN = {name: OPTIONS[name] for name in OPTIONS if name not in {f.name for f in dataclasses.fields(trl.RLOOConfig)}}
_DEFAULTS = {name: default_of(f) for name, f in _STOCK_FIELDS.items()} | {n: o.default for n, o in _OWN.items()}
_fields: dict[str, Any] = {
    name: (OPTIONS[name].field.annotation, OPTIONS[name].field)
    for name in (*_OWN, "temperature", "max_completion_length", "num_iterations", "beta")
}
_OwnOptions = create_model("_OwnOptions", __base__=Section, **_fields)

# The option that says what an entry of TRL's `generation_kwargs` says, which the kit's engines do not read.
_INSTEAD = {
    **{name: name for name in ("temperature", "top_p", "top_k", "seed")},
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("eos_token_id", "stop", "stop_strings", "stop_token_ids"), "tokenizer.eos_token"),
}  # fmt: skip


def _add_fields(cls: type) -> type:
    """Add a field and a docstring line for each of the kit's options, and a field for each old name."""
    lines = []
    for name, entry in _OWN.items():
        described = re.sub(r"\bnull\b", "None", str(entry.field.description))
        lines.append(f"{name}: {described}. Default: {entry.default!r}.")
        kind: Any = get_type_hints(entry.section)[entry.key]  # without bounds
        cls.__annotations__[name] = kind
        default, is_list = entry.default, isinstance(entry.default, list)
        made = {"default_factory": default.copy} if is_list else {"default": default}
        setattr(cls, name, field(**made, metadata={"help": described}))
    text = inspect.cleandoc(cls.__doc__ or "")  # which Python 3.13 does by itself
    cls.__doc__ = text.replace("(the options)", "\n    ".join(lines))
    for name, old in CONFIG_NAMES.items():
        if name in _STOCK_FIELDS or hasattr(cls, name):  # `world_size` is a property of TrainingArguments
            continue
        cls.__annotations__[name] = old.kind | None
        setattr(cls, name, field(default=None, metadata={"help": f"Old TRL name: {old.new or old.note}"}))
    return cls


@dataclass(init=False)
@_add_fields
class RLOOConfig(trl.RLOOConfig):
    """Drop-in for `trl.RLOOConfig`: the same fields and defaults, plus these.

    Args:
        (the options)

    Old keywords (`kl_coef`, `rloo_k`, `total_episodes`, ...) are translated with a warning each: see `old_names`.
    Without an accelerator, `use_cpu=True` and `bf16=False` are the defaults.

    Raises:
        ConfigError: a value out of bounds, an unknown keyword, or an old one without an equivalent.
    """

    is_from_file = False  # made from a run's file, whose keys messages then name

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        named = inspect.signature(_STOCK).bind_partial(*positional).arguments
        if twice := [name for name in named if name in keywords]:
            raise TypeError(f"RLOOConfig() got {', '.join(twice)} twice, by position and by name")
        given = named | keywords
        if unknown := [name for name in given if name not in _PARAMETERS and name not in CONFIG_NAMES]:
            reasons = {name: explain_gone(name) or suggest(name, _PARAMETERS) for name in unknown}
            text = "\n".join(f"RLOOConfig has no '{name}'{why}" for name, why in reasons.items())
            raise ConfigError(name_settings(text, self))
        # a parser passes every field, and only a value that is not the default can contradict an old name
        typed = {name: value for name, value in given.items() if name not in _DEFAULTS or _DEFAULTS[name] != value}
        values, messages = translate_config(typed, count_processes())
        for message in messages:
            warnings.warn(message, FutureWarning, stacklevel=2)
        values = _choose_device(values)
        if problems := find_batch_problems(_DEFAULTS | values):  # before TRL's check, and before Unsloth changes it
            raise ConfigError("\n".join(problems))
        for name in _OWN:  # before TRL's __init__, which ends in __post_init__
            setattr(self, name, values.pop(name, _DEFAULTS[name]))
        for name, entry in CONFIG_NAMES.items():  # scripts read back their names, folders and `sanity_check`
            if given.get(name) is not None and entry.kind in (str, bool) and entry.new in (None, "run_name"):
                setattr(self, name, given[name])
        whole = {name: default_of(f) for name, f in _STOCK_FIELDS.items()} | values
        asked = {name: dict(value) if isinstance(value, dict) else value for name, value in whole.items()}
        super().__init__(**whole)  # Unsloth's changes dicts in place
        keep_values(self, _STOCK, asked)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self)

    def to_dict(self) -> dict[str, Any]:
        """TRL's, without the old names."""
        values: dict[str, Any] = super().to_dict()
        return {name: value for name, value in values.items() if name not in CONFIG_NAMES}


_PARAMETERS = {
    f.name: inspect.Parameter(f.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default_of(f), annotation=f.type)
    for f in dataclasses.fields(RLOOConfig)
    if f.init and f.name not in CONFIG_NAMES
}
RLOOConfig.__signature__ = inspect.Signature(list(_PARAMETERS.values()))  # what help() shows


def _choose_device(values: dict[str, Any]) -> dict[str, Any]:
    """Without an accelerator, ask for the CPU, as TRL requires; else set the precision that the set-up chose."""
    if any(values.get(name) is not None for name in ("bf16", "fp16", "use_cpu")):
        return values
    if not torch.accelerator.is_available():
        return values | {"use_cpu": True, "bf16": False}
    chosen = os.environ.get("ACCELERATE_MIXED_PRECISION")
    return values | {"bf16": chosen == "bf16", "fp16": chosen == "fp16"} if chosen else values


def check_options(args: Any) -> None:
    """Check an `RLOOConfig` (the kit's or TRL's) and give it all options, typed; the ConfigError names each fix."""
    values = _DEFAULTS | vars(args)
    try:
        checked = dict(_OwnOptions.model_validate({name: values[name] for name in _OwnOptions.model_fields}))
    except ValidationError as error:
        raise ConfigError(explain_errors(error, _OwnOptions)) from None
    if problems := find_option_problems(values | checked) + _find_generation_problems(values | checked):
        raise ConfigError(name_settings("\n".join(problems), args))
    vars(args).update(checked)


def _find_generation_problems(values: Mapping[str, Any]) -> list[str]:
    """What TRL passes to its samplers, and the kit's engines do not read."""
    problems = []
    if regex := values.get("vllm_structured_outputs_regex"):
        problems.append(f"vllm_structured_outputs_regex is {regex!r}: {WHY_REFUSED}. Remove it, and reward the format")
    given = values.get("generation_kwargs") or {}
    if not isinstance(given, Mapping):
        return [*problems, f"generation_kwargs is {given!r}; it is a dict of names and values, or None"]
    for name, value in given.items():
        instead = _INSTEAD.get(name)
        if value is None or (instead is not None and values.get(instead) == value):
            continue
        filters = ", with accept_truncated_sampling=True" if instead in ("top_p", "top_k") else ""
        fix = "Remove it" if instead is None else f"Set {instead}={value!r} instead{filters}"
        problems.append(f"generation_kwargs has {name}={value!r}, which the kit's engines do not read. {fix}")
    return problems


_FILE_KEYS = {f"{option.section.prefix}{option.key}": name for name, option in OPTIONS.items()}
_FILE_KEYS |= {"model.lora": "peft_config", "model.max_seq_length": "vllm_max_model_length"}


def name_settings(text: str, args: Any) -> str:
    """A message with the names of `RLOOConfig` in place of a file's keys, unless `args` come from a run's file."""
    if getattr(args, "is_from_file", False):
        return text
    return re.sub(r"\b(rloo|rollout|run|model)\.\w+", lambda match: _FILE_KEYS.get(match[0], match[0]), text)


@contextmanager
def naming_settings(args: Any) -> Iterator[None]:
    """A block whose errors name settings as `name_settings` does."""
    try:
        yield
    except RlooKitError as error:
        error.args = tuple(name_settings(part, args) if isinstance(part, str) else part for part in error.args)
        raise


# TRL's arguments after eval_dataset, in its order, for code that passes them by position
FURTHER_ARGUMENTS = (
    "processing_class", "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ of a run


def training_arguments(run: RunConfig, policy: Policy, folder: Path) -> dict[str, Any]:
    """Keyword arguments of `RLOOConfig`: from the file, the machine and the backend, with checkpoints in `folder`;
    without `planned_limits`, those by the memory plan."""
    on_cpu = policy.model.device.type == "cpu"
    has_schemas = run.rloo.has_tools and part("tools").tool_schemas(run)
    return (
        {"output_dir": str(folder), "disable_tqdm": True, "use_cpu": on_cpu, "dataloader_pin_memory": not on_cpu}
        | {"disable_dropout": True, "logging_steps": 1}  # policy and reference score alike; health rules read each step
        | run.to_arguments()
        | precision_flags(run)
        | policy.config_arguments
        | ({"chat_template_kwargs": template_options(run)} if has_schemas else {})
    )


def loaded_engine(run: RunConfig, policy: Policy) -> str:
    """The engine that samples; for auto, the one the policy was loaded with, whatever fits next to it now."""
    wanted = str(run.rollout.engine)
    return resolve_engine(wanted, policy.backend, policy.model)[0] if wanted == "auto" else wanted


def precision_flags(run: RunConfig) -> dict[str, bool]:
    """`bf16` and `fp16`; ACCELERATE_MIXED_PRECISION, which beats both, is set to them."""
    chosen = os.environ["ACCELERATE_MIXED_PRECISION"] = environment.mixed_precision(run.model.dtype)
    return {"bf16": chosen == "bf16", "fp16": chosen == "fp16"}


# ------------------------------------------------------------------------------------------------ of the trainer


def prepare_arguments(given: dict[str, Any], toolbox: Tools | None = None) -> dict[str, Any]:
    """Keywords for TRL's constructor; raises ConfigError for arguments that cannot work."""
    arguments = rename_arguments(given)
    rewards = arguments["reward_funcs"]
    rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    are_old = given.get("reward_model") is not None and all(hasattr(reward, "named_parameters") for reward in rewards)
    if are_old and arguments.get("reward_processing_classes") is None:  # old TRL scored with the policy's tokenizer
        arguments["reward_processing_classes"] = [arguments.get("processing_class")] * len(rewards)
    args, model = arguments.get("args"), arguments["model"]
    if not args:  # TRL's default refuses to run without an accelerator
        name = model if isinstance(model, str) else model.config.name_or_path
        args = RLOOConfig(output_dir=f"{name.rstrip('/').split('/')[-1]}-RLOO")
    if args.reward_weights is None or args.reward_weights is getattr(args, "_carried", None):
        weights = [getattr(reward, "weight", 1.0) for reward in rewards]  # which rewards from `build_rewards` carry
        args._carried = args.reward_weights = [float(w) if isinstance(w, (int, float)) else 1.0 for w in weights]
    if not any(args.reward_weights):
        raise ConfigError("the weights of all rewards (reward_weights) are 0, so nothing would be learnt: raise one")
    arguments["args"] = args
    for name in ("train_dataset", "eval_dataset"):
        value = arguments.get(name)
        datasets = value.values() if isinstance(value, dict) else [value]
        for dataset in datasets:
            columns = getattr(dataset, "column_names", None) or ()
            if "prompt" not in columns and "input_ids" in columns:
                raise ConfigError(
                    f"{name} has input_ids and no prompt, as old TRL wanted it: give it a column prompt with the text, "
                    "which the trainer tokenizes"
                )
    columns = getattr(arguments.get("train_dataset"), "column_names", None)  # that rewards get by name
    if columns is not None:
        columns = name_columns(columns, getattr(args, "thinking_budget", None) is not None, toolbox)
    arguments["reward_funcs"] = [guard(reward, columns) for reward in rewards]
    check_model(arguments)
    config = PreTrainedConfig.get_config_dict(model)[0] if isinstance(model, str) else vars(model.config)
    if "vision_config" in config:
        given = arguments.get("processing_class")
        arguments["processing_class"] = part("images").adopt(model, given, args)
    _take_vllm(args)
    check_options(args)
    if isinstance(arguments.get("train_dataset"), IterableDataset):
        raise ConfigError(
            "train_dataset is a stream, without a length and a place to resume at: load the data whole (a "
            "datasets.Dataset; load_dataset without streaming=True)"
        )
    return wrap_for_unsloth(arguments)


def make_toolbox(tools: Any, factory: Any, named: dict[str, Any]) -> Tools | None:
    """The tools of a trainer; None without any. The own reward of a class of environments is added to `named`."""
    args = named["args"]
    if not (tools or factory or (isinstance(args, RLOOConfig) and (args.tools or args.environment))):
        return None
    return cast(Tools, part("tools").make_toolbox(tools, factory, named))


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
    parameters = dict(policy.named_parameters())
    return all(
        parameters[name].shape == other.shape and torch.equal(parameters[name].detach().cpu(), other.detach().cpu())
        for name, other in reference.named_parameters()
        if name in parameters
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
