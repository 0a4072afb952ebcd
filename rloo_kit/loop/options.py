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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import trl
from datasets import IterableDataset
from pydantic import ValidationError, create_model

from rloo_kit.config.batches import check_eval_batch, check_generation_batch, check_generation_batch_size
from rloo_kit.config.checks import (
    find_loop_problems,
    find_resample_problems,
    find_server_problems,
    find_temperature_problems,
)
from rloo_kit.config.messages import describe_field, explain_error, suggest
from rloo_kit.config.old_names import CONFIG_NAMES, translate_config
from rloo_kit.config.schema import OPTIONS, Option, RLOOSection, RolloutSection, RunSection
from rloo_kit.config.section import Section
from rloo_kit.errors import ConfigError, RlooKitError
from rloo_kit.models.policy import keep_values
from rloo_kit.system.processes import count_processes

# TRL's own class, below the one that Unsloth generates (and may call RLOOConfig too).
_STOCK = next(c for c in reversed(trl.RLOOConfig.__mro__) if c.__name__ == "RLOOConfig")
_STOCK_FIELDS = {f.name: f for f in dataclasses.fields(_STOCK) if f.init}


def _default_of(f: "dataclasses.Field[Any]") -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


# The options that TRL's class lacks, by name, and a model that checks their values as it checks a file's.
_OWN = {name: OPTIONS[name] for name in OPTIONS if name not in {f.name for f in dataclasses.fields(trl.RLOOConfig)}}
_CHECKED = _OWN | {name: OPTIONS[name] for name in ("temperature", "max_completion_length", "num_iterations", "beta")}
_OWN_DEFAULTS = {name: entry.default for name, entry in _OWN.items()}
_fields: dict[str, Any] = {name: (entry.field.annotation, entry.field) for name, entry in _CHECKED.items()}
_OwnOptions = create_model("_OwnOptions", __base__=Section, **_fields)


def option(args: Any, name: str) -> Any:
    """The kit's option `name` of `args`, an `RLOOConfig`; its default if `args` is TRL's own class."""
    return getattr(args, name, OPTIONS[name].default)


def _describe(entry: Option) -> str:
    """An option's description, type and bounds, with Python's word for null."""
    return re.sub(r"\bnull\b", "None", f"{entry.field.description} ({describe_field(entry.field)})")


def _add_fields(cls: type) -> type:
    """Add a field and a docstring line for each of the kit's options, and a field for each old name.

    An old name is None unless given; `HfArgumentParser` makes flags of both."""
    lines = [f"{name}: {_describe(entry)}. Default: {entry.default!r}." for name, entry in _OWN.items()]
    text = inspect.cleandoc(cls.__doc__ or "")  # which Python 3.13 does by itself
    cls.__doc__ = text.replace("(the options)", "\n    ".join(lines))
    for name, entry in _OWN.items():
        kind: Any = entry.type
        metadata: dict[str, Any] = {"help": _describe(entry)}
        if bool in get_args(kind):  # or a word: the flag without a value means true, as for a bool
            words = [word for part in get_args(kind) for word in get_args(part)]
            kind, metadata = Literal[(False, True, *words)], metadata | {"nargs": "?", "const": True}
        cls.__annotations__[name] = kind
        setattr(cls, name, field(default=entry.default, metadata=metadata))
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
        given = _name_positional(positional, keywords)
        _refuse_unknown(given)
        values, messages = translate_config(_drop_defaults(given), count_processes())
        for message in messages:
            warnings.warn(message, FutureWarning, stacklevel=2)
        values = _choose_device(values)
        _check_batch(values)
        for name, default in _OWN_DEFAULTS.items():  # before TRL's __init__, which ends in __post_init__
            setattr(self, name, values.pop(name, default))
        for name, entry in CONFIG_NAMES.items():  # scripts read back their names, folders and `sanity_check`
            if given.get(name) is not None and entry.kind in (str, bool) and entry.new in (None, "run_name"):
                setattr(self, name, given[name])
        whole = {name: _default_of(f) for name, f in _STOCK_FIELDS.items()} | values
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


_PARAMETERS = [
    inspect.Parameter(f.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=_default_of(f), annotation=f.type)
    for f in dataclasses.fields(RLOOConfig)
    if f.init and f.name not in CONFIG_NAMES
]
RLOOConfig.__signature__ = inspect.Signature(_PARAMETERS)  # what help() shows


def _name_positional(positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments under the names that TRL's own class gives them."""
    if len(positional) > len(_STOCK_FIELDS):
        raise TypeError(f"RLOOConfig() takes {len(_STOCK_FIELDS)} positional arguments, {len(positional)} were given")
    named = dict(zip(_STOCK_FIELDS, positional, strict=False))
    twice = [name for name in named if name in keywords]
    if twice:
        raise TypeError(f"RLOOConfig() got {', '.join(twice)} twice, by position and by name")
    return named | keywords


def _refuse_unknown(given: dict[str, Any]) -> None:
    known = sorted({f.name for f in dataclasses.fields(trl.RLOOConfig)} | set(_OWN))
    unknown = [name for name in given if name not in known and name not in CONFIG_NAMES]
    if unknown:
        raise ConfigError("\n".join(f"RLOOConfig has no '{name}'{suggest(name, known)}" for name in unknown))


def _drop_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Values that are not the default: a parser passes every field, and only typed ones can contradict an old name."""
    defaults = {name: _default_of(f) for name, f in _STOCK_FIELDS.items()} | _OWN_DEFAULTS
    return {name: value for name, value in given.items() if name not in defaults or defaults[name] != value}


def _choose_device(values: dict[str, Any]) -> dict[str, Any]:
    """Without an accelerator, ask for the CPU, as TRL requires; else set the precision that the set-up chose."""
    if any(values.get(name) is not None for name in ("bf16", "fp16", "use_cpu")):
        return values
    if not torch.accelerator.is_available():
        return values | {"use_cpu": True, "bf16": False}
    chosen = os.environ.get("ACCELERATE_MIXED_PRECISION")
    return values | {"bf16": chosen == "bf16", "fp16": chosen == "fp16"} if chosen else values


def _check_batch(given: dict[str, Any]) -> None:
    """Check the batch before TRL does, with a clearer message, and before Unsloth silently changes it."""
    values = {name: _default_of(f) for name, f in _STOCK_FIELDS.items()} | given
    per_device, generations = values["per_device_train_batch_size"], values["num_generations"]
    if generations < 2:
        raise ConfigError(
            f"num_generations is {generations}; it must be at least 2, because a completion's baseline is the mean "
            "reward of its siblings"
        )
    passes, size = values["steps_per_generation"], values["generation_batch_size"]
    if size is None:
        passes_key = "steps_per_generation" if passes else "gradient_accumulation_steps"
        check_generation_batch(per_device, passes or values["gradient_accumulation_steps"], generations, passes_key)
    elif passes is None:  # TRL refuses both
        check_generation_batch_size(size, per_device, generations)
    if values["eval_strategy"] != "no":
        check_eval_batch(values["per_device_eval_batch_size"], values["num_generations_eval"] or generations)


def check_stream(dataset: Any, args: Any) -> None:
    """Refuse options that need a training set's length or rows by index if it is a stream."""
    if not isinstance(dataset, IterableDataset):
        return
    problems = []
    if args.max_steps <= 0:
        problems.append("max_steps is not set, and train_dataset is a stream without a length: set max_steps=...")
    if rounds := option(args, "resample_rounds"):
        problems.append(
            f"resample_rounds is {rounds}, which draws prompts by index, and train_dataset is a stream: "
            "set resample_rounds=0, or load the data whole (a datasets.Dataset)"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def check_options(args: Any) -> None:
    """Check an `RLOOConfig` (the kit's or TRL's) and give its options their types; the ConfigError names each fix."""
    values = _OWN_DEFAULTS | vars(args)
    try:
        checked = _OwnOptions.model_validate({name: values[name] for name in _CHECKED})
    except ValidationError as error:  # a union reports a fault once for each of its branches: a dict keeps one
        faults = {explain_error(entry, _OwnOptions).replace(": is ", " is ", 1): None for entry in error.errors()}
        raise ConfigError("\n".join(faults)) from None
    server = values["rollout_engine"], values["rollout_server_url"], "rollout_engine", "rollout_server_url"
    heat = {"temperature": values["temperature"]}
    problems = find_loop_problems(values | dict(checked)) + find_server_problems(*server)
    problems += find_temperature_problems(values["rollout_engine"], heat, "rollout_engine")
    problems += find_resample_problems(values["resample_rounds"], values["baseline"], "resample_rounds", "baseline")
    if problems:
        raise ConfigError("\n".join(problems))
    vars(args).update(dict(checked))


_FILE_KEYS = {
    f"{section.prefix}{key}": name
    for section in (RLOOSection, RolloutSection, RunSection)
    for name, key in section.arguments().items()
} | {"model.lora": "peft_config", "model.max_seq_length": "vllm_max_model_length"}


def name_settings(text: str, args: Any) -> str:
    """A message with the names of `RLOOConfig` in place of a file's keys, unless `args` come from a run's file."""
    if getattr(args, "is_from_file", False):
        return text
    return re.sub(r"\b(rloo|rollout|run|model)\.\w+", lambda found: _FILE_KEYS.get(found[0], found[0]), text)


@contextmanager
def naming_settings(args: Any) -> Iterator[None]:
    """A block whose errors name settings as `name_settings` does."""
    try:
        yield
    except RlooKitError as error:
        error.args = tuple(name_settings(part, args) if isinstance(part, str) else part for part in error.args)
        raise
