"""`RLOOConfig`: TRL's, whatever it is today, with the kit's own options and with the old names understood.

Where Unsloth generated the class, its own defaults are overruled by TRL's. The old names are dataclass fields, because
`HfArgumentParser` makes its flags from them; they stay None and are left out of `to_dict()`.
"""

import dataclasses
import inspect
import os
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import trl

from rloo_kit.config.checks import (
    BASELINES,
    CACHES,
    ENGINES,
    KL_FORMS,
    MEMORY_MODES,
    RATIO_FORMS,
    REFERENCES,
    SAMPLER_CORRECTIONS,
    THINKING_CLOSES,
    check_generation_batch,
    find_loop_problems,
    find_sampling_problems,
    find_server_problems,
)
from rloo_kit.config.messages import suggest
from rloo_kit.config.old_names import CONFIG_NAMES, translate_config
from rloo_kit.errors import ConfigError
from rloo_kit.models.policy import keep_values
from rloo_kit.system.processes import count_processes

# `--normalize_rewards` alone is true, as a flag of a bool is; HfArgumentParser hands these to argparse.
_BARE_FLAG: dict[str, Any] = {"nargs": "?", "const": True}

# TRL's own class, below the one that Unsloth generates (and may call RLOOConfig too).
_STOCK = next(c for c in reversed(trl.RLOOConfig.__mro__) if c.__name__ == "RLOOConfig")
_STOCK_FIELDS = {f.name: f for f in dataclasses.fields(_STOCK) if f.init}


def _default_of(f: "dataclasses.Field[Any]") -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _old_fields(cls: type) -> type:
    """Add every old name as a field that is None unless given, for `HfArgumentParser`."""
    for name, entry in CONFIG_NAMES.items():
        if name in _STOCK_FIELDS or hasattr(cls, name):  # `world_size` is a property of TrainingArguments
            continue
        cls.__annotations__[name] = entry.kind | None
        setattr(cls, name, field(default=None, metadata={"help": f"Old TRL name: {entry.new or entry.note}"}))
    return cls


@dataclass(init=False)
@_old_fields
class RLOOConfig(trl.RLOOConfig):
    """Drop-in for `trl.RLOOConfig`: the same fields and defaults, and these.

    Args:
        missing_eos_penalty: subtracted from the reward of a completion that was cut off; above 0, None for none.
        kl_form: "sum" over the completion (TRL's), "length_normalized" (its mean a token) or "per_token".
        reference: what the KL is measured against: the policy at the "start" of training, or the "base" model.
        ratio_form: ratio of the policy to the one that sampled: "sum" over the completion (TRL's), "length_normalized"
            (its mean token's, GSPO) or "per_token"; None for "per_token" where `kl_form` is, else "sum".
        delta: bound on the ratio where the advantage is negative, above 1 + epsilon_high; None for none (TRL's).
        baseline: what a reward is compared with: "leave_one_out", "group_mean" or "none".
        baseline_includes_masked: whether completions masked by `mask_truncated_completions` count in the baseline.
        normalize_rewards: to mean 0 and deviation 1 before `reward_clip_range`: True over a generation batch,
            "running" over all of them so far.
        sampler_correction: "sequence" or "token" weigh by the trainer's over the sampler's probability, "none" not.
        sampler_correction_cap: where such a weight is cut off, 1 or more.
        memory: "fast" keeps the graphs of a pass, "balanced" takes log-probabilities first, "low" one sequence a pass.
        tokens_per_pass: tokens in one forward and backward pass; None by the machine.
        thinking_budget: tokens of thinking after which it is closed by force; None for never.
        answer_budget: tokens for the answer after that; None for what is left of `max_completion_length`.
        thinking_close: what closes it: the "tag" alone or a closing "sentence" before it.
        rollout_engine: "auto", "native", "generate", "vllm" or "server".
        rollout_rows: completions generated at once; None: planned by the memory.
        rollout_cache: keys and values of a rollout: "plain", "int8" (8 bits) or "offloaded" (the machine's memory).
        rollout_server_url: http://host:port of a vLLM server, for "server" and "vllm".
        rollout_server_adapters: folder of this run alone, seen by that server too; None for one in `output_dir`.
        resample_rounds: times that a rollout's groups without a learning signal get fresh prompts; 0 for never.
        max_reward_failure_share: share of samples with a failed reward, 0 to 1, above which a batch counts as failed.
        reward_failure_steps: failed batches in a row, 1 or more, after which training saves and stops.
        max_skipped_steps: steps in a row skipped for NaN or infinity, 1 or more, after which it saves and stops.

    Old keywords (`kl_coef`, `rloo_k`, `total_episodes`, ...) are translated with a warning each: see `old_names`.
    Without an accelerator, `use_cpu=True` and `bf16=False` are the defaults.

    Raises:
        ConfigError: a value out of bounds, an unknown keyword, or an old one without an equivalent.
    """

    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the reward of a truncated completion; above 0."}
    )
    kl_form: str = field(default="sum", metadata={"help": "KL in the reward: sum, length_normalized or per_token."})
    reference: str = field(default="start", metadata={"help": "KL against the start of training or the base model."})
    ratio_form: str | None = field(
        default=None, metadata={"help": "Ratio: sum, length_normalized or per_token; unset: as kl_form needs."}
    )
    delta: float | None = field(
        default=None, metadata={"help": "Bound on the ratio where the advantage is negative; above 1 + epsilon_high."}
    )
    baseline: str = field(default="leave_one_out", metadata={"help": "leave_one_out, group_mean or none."})
    baseline_includes_masked: bool = field(
        default=True, metadata={"help": "Whether masked completions count in their siblings' baseline."}
    )
    normalize_rewards: Literal[False, True, "running"] = field(
        default=False,
        metadata={"help": "Rewards to mean 0 and deviation 1: True a batch, running over all.", **_BARE_FLAG},
    )
    sampler_correction: str = field(
        default="none", metadata={"help": "Trainer over sampler probability as a weight: none, sequence or token."}
    )
    sampler_correction_cap: float = field(default=2.0, metadata={"help": "Where such a weight is cut off; 1 or more."})
    memory: str = field(default="fast", metadata={"help": "fast, balanced or low."})
    tokens_per_pass: int | None = field(
        default=None, metadata={"help": "Tokens in one forward and backward pass; unset: by the machine."}
    )
    thinking_budget: int | None = field(
        default=None, metadata={"help": "Tokens of thinking after which it is closed by force."}
    )
    answer_budget: int | None = field(default=None, metadata={"help": "Tokens for the answer after a forced close."})
    thinking_close: str = field(default="tag", metadata={"help": "What closes a thought by force: tag or sentence."})
    rollout_engine: str = field(
        default="auto", metadata={"help": "What samples: auto, native, generate, vllm or server."}
    )
    rollout_rows: int | None = field(
        default=None, metadata={"help": "Completions generated at once; unset: planned by the memory."}
    )
    rollout_server_url: str | None = field(
        default=None, metadata={"help": "http://host:port of a vLLM server, for the engines server and vllm."}
    )
    rollout_server_adapters: str | None = field(
        default=None, metadata={"help": "Folder that the trainer and that server both see; unset: in output_dir."}
    )
    rollout_cache: str = field(
        default="plain", metadata={"help": "Keys and values of a rollout: plain, int8 or offloaded."}
    )
    resample_rounds: int = field(
        default=0, metadata={"help": "Times that a rollout's groups without a learning signal get fresh prompts."}
    )
    max_reward_failure_share: float = field(
        default=0.5, metadata={"help": "Share of samples with a failed reward above which a batch counts as failed."}
    )
    reward_failure_steps: int = field(
        default=3, metadata={"help": "Failed batches in a row after which training saves and stops."}
    )
    max_skipped_steps: int = field(
        default=3, metadata={"help": "Steps in a row skipped for NaN or infinity after which training saves and stops."}
    )

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        given = _name_positional(positional, keywords)
        own = dict(_OWN_DEFAULTS)
        _refuse_unknown(given, own)
        translation = translate_config(_drop_defaults(given, own), count_processes())
        for message in translation.messages:
            warnings.warn(message, FutureWarning, stacklevel=2)
        values = _choose_device(translation.values)
        _check_batch(values)
        for name, default in own.items():  # before TRL's __init__, which ends in __post_init__
            setattr(self, name, values.pop(name, default))
        for name, value in translation.kept.items():
            setattr(self, name, value)
        whole = {name: _default_of(f) for name, f in _STOCK_FIELDS.items()} | values
        asked = {name: dict(value) if isinstance(value, dict) else value for name, value in whole.items()}
        super().__init__(**whole)  # Unsloth's changes what is in such a dict
        keep_values(self, _STOCK, asked, {*given, *values})

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_own_fields(self)

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

_OWN_DEFAULTS = {
    f.name: f.default
    for f in dataclasses.fields(RLOOConfig)
    if f.name not in CONFIG_NAMES and f.name not in {inherited.name for inherited in dataclasses.fields(trl.RLOOConfig)}
}


def _name_positional(positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments under the names that TRL's own class gives them."""
    if len(positional) > len(_STOCK_FIELDS):
        raise TypeError(f"RLOOConfig() takes {len(_STOCK_FIELDS)} positional arguments, {len(positional)} were given")
    named = dict(zip(_STOCK_FIELDS, positional, strict=False))
    twice = [name for name in named if name in keywords]
    if twice:
        raise TypeError(f"RLOOConfig() got {', '.join(twice)} twice, by position and by name")
    return named | keywords


def _refuse_unknown(given: dict[str, Any], own: dict[str, Any]) -> None:
    known = sorted({f.name for f in dataclasses.fields(trl.RLOOConfig)} | set(own))
    unknown = [name for name in given if name not in known and name not in CONFIG_NAMES]
    if unknown:
        raise ConfigError("\n".join(f"RLOOConfig has no '{name}'{suggest(name, known)}" for name in unknown))


def _drop_defaults(given: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What is not the default: a parser passes every field, and only what was typed can contradict an old name."""
    defaults = {name: _default_of(f) for name, f in _STOCK_FIELDS.items()} | own
    return {name: value for name, value in given.items() if name not in defaults or defaults[name] != value}


def _choose_device(values: dict[str, Any]) -> dict[str, Any]:
    """The CPU, which TRL has to be given by name, where there is nothing else; else the precision that set-up chose."""
    if any(values.get(name) is not None for name in ("bf16", "fp16", "use_cpu")):
        return values
    if not torch.accelerator.is_available():
        return values | {"use_cpu": True, "bf16": False}
    chosen = os.environ.get("ACCELERATE_MIXED_PRECISION")
    return values | {"bf16": chosen == "bf16", "fp16": chosen == "fp16"} if chosen else values


def _check_batch(values: dict[str, Any]) -> None:
    """Before TRL does, in plain words; and before Unsloth quietly changes the batch."""
    generations = values.get("num_generations", _STOCK_FIELDS["num_generations"].default)
    if generations < 2:
        raise ConfigError(
            f"num_generations is {generations}; it must be at least 2, because a completion's baseline is the mean "
            "reward of its siblings"
        )
    if values.get("generation_batch_size") is not None:
        return
    accumulation = values.get("gradient_accumulation_steps", 1)
    passes = values.get("steps_per_generation")
    check_generation_batch(
        values.get("per_device_train_batch_size", _STOCK_FIELDS["per_device_train_batch_size"].default),
        passes or accumulation,
        generations,
        passes_key="steps_per_generation" if passes else "gradient_accumulation_steps",
    )


_CHOICES: dict[str, tuple[Any, ...]] = {
    "kl_form": KL_FORMS,
    "reference": REFERENCES,
    "ratio_form": (None, *RATIO_FORMS),
    "baseline": BASELINES,
    "normalize_rewards": (False, True, "running"),
    "sampler_correction": SAMPLER_CORRECTIONS,
    "memory": MEMORY_MODES,
    "thinking_close": THINKING_CLOSES,
    "rollout_engine": ENGINES,
    "rollout_cache": CACHES,
}
_AT_LEAST = {
    "reward_failure_steps": 1,
    "max_skipped_steps": 1,
    "sampler_correction_cap": 1,
    "resample_rounds": 0,
    "tokens_per_pass": 1,
    "thinking_budget": 1,
    "answer_budget": 1,
    "rollout_rows": 1,
}
_MAY_BE_NONE = ("tokens_per_pass", "thinking_budget", "answer_budget", "rollout_rows")


def refuse_sampling_filters(args: Any) -> None:
    """Refuse an `RLOOConfig` (the kit's or TRL's) that samples from another distribution than the one that is scored;
    the ConfigError names each setting and what to set instead."""
    problems = find_sampling_problems(vars(args))
    if problems:
        raise ConfigError("\n".join(problems))


def _check_own_fields(config: RLOOConfig) -> None:
    problems = []
    if config.missing_eos_penalty is not None and not config.missing_eos_penalty > 0:
        problems.append(
            f"missing_eos_penalty is {config.missing_eos_penalty}; it is subtracted, so it must be above 0 "
            "(None for none)"
        )
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            known = ", ".join(map(str, choices))
            problems.append(f"{name} is {getattr(config, name)!r}; it must be one of {known}")
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        if not (value is None and name in _MAY_BE_NONE) and not (value is not None and value >= least):
            problems.append(f"{name} is {value}; it must be at least {least}")
    if not 0 <= config.max_reward_failure_share <= 1:
        problems.append(f"max_reward_failure_share is {config.max_reward_failure_share}; it must be from 0 to 1")
    problems += find_loop_problems(vars(config))
    problems += find_server_problems(
        config.rollout_engine, config.rollout_server_url, "rollout_engine", "rollout_server_url"
    )
    if problems:
        raise ConfigError("\n".join(problems))
