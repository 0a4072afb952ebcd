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
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import torch
import trl
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from rloo_kit.config.checks import SAMPLING_FILTERS, WHY_REFUSED, find_batch_problems, find_option_problems
from rloo_kit.config.old_names import CONFIG_NAMES, translate_config
from rloo_kit.config.schema import RLOOSection, RolloutSection, RunSection
from rloo_kit.config.section import Section, declared, describe_field, explain_errors, suggest
from rloo_kit.errors import ConfigError, RlooKitError
from rloo_kit.models.policy import keep_values
from rloo_kit.system.processes import count_processes


class Option(NamedTuple):
    """A key that is an argument of `RLOOConfig`: `key` of `section`."""

    section: type[Section]
    key: str

    @property
    def field(self) -> FieldInfo:
        """The declaration: annotation with bounds, default, description."""
        return self.section.model_fields[self.key]

    @property
    def type(self) -> Any:
        """The annotation without bounds: `int | None`."""
        return get_type_hints(self.section)[self.key]

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

# Entries of TRL's `generation_kwargs`, which the kit's engines do not read: values that leave the distribution as it
# is, names that concern neither the sampled tokens nor the end of a completion, and options that say the same.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "n", "num_return_sequences"), (1,)),
    **dict.fromkeys(("min_p", "no_repeat_ngram_size", "min_length", "min_new_tokens", "min_tokens"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("bad_words_ids", "bad_words", "suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("sequence_bias", "logit_bias"), ({},)),
    "top_k": (0, -1), "do_sample": (True,), "remove_invalid_values": (False,), "logits_processors": ([],),
}  # fmt: skip
_HARMLESS = (
    "use_cache", "disable_compile", "compile_config", "low_memory", "return_dict_in_generate", "output_scores",
    "output_logits", "output_attentions", "output_hidden_states", "pad_token_id", "bos_token_id", "renormalize_logits",
    "length_penalty", "early_stopping",
)  # fmt: skip
_INSTEAD = {
    "temperature": "temperature", "seed": "seed", "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length", "n": "num_generations", "num_return_sequences": "num_generations",
    **dict.fromkeys(("eos_token_id", "stop", "stop_strings", "stop_token_ids"), "tokenizer.eos_token"),
}  # fmt: skip


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
        if unknown := [name for name in given if name not in _PARAMETERS and name not in CONFIG_NAMES]:
            raise ConfigError("\n".join(f"RLOOConfig has no '{name}'{suggest(name, _PARAMETERS)}" for name in unknown))
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


def _name_positional(positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments under the names that TRL's own class gives them."""
    named = inspect.signature(_STOCK).bind_partial(*positional).arguments
    if twice := [name for name in named if name in keywords]:
        raise TypeError(f"RLOOConfig() got {', '.join(twice)} twice, by position and by name")
    return named | keywords


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
        says_the_same = instead is not None and values.get(instead) == value
        if value is None or name in _HARMLESS or says_the_same or value in _NEUTRAL.get(name, ()):
            continue
        fix = "Remove it" if instead is None else f"Set {instead}={value!r} instead"
        if name in SAMPLING_FILTERS:
            fix = f"Remove it, or set {name}={value!r} with accept_truncated_sampling=True"
        problems.append(f"generation_kwargs has {name}={value!r}, which the kit's engines do not read. {fix}")
    return problems


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
