"""Old names of TRL's RLOO (releases 0.9.6 to 0.26.2) and today's: one table for files, keywords and flags.

Each is renamed, converted, dropped with a warning (no effect) or refused with today's equivalent.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rloo_kit.config.batches import usual_batch
from rloo_kit.errors import ConfigError, excerpt

_OLD_CLIP = 10.0  # the old default of reward_clip_range, which only worked together with normalize_reward


@dataclass(frozen=True)
class OldName:
    """One old name: today's name, a note for the warning, and, if values need conversion, a function
    (values, processes) -> new values, which raises ConfigError to refuse."""

    kind: type
    new: str | None = None
    note: str = ""
    keep: bool = False  # kept as a plain attribute, because scripts read it back
    read: Callable[[dict[str, Any], int], dict[str, Any]] | None = None


@dataclass
class Translation:
    """Today's values, a message for each old name, and the old values that scripts read back."""

    values: dict[str, Any]
    messages: list[str] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)


def _read_size(values: Mapping[str, Any], *names: str, default: int) -> int:
    """The first of these sizes that is set and not 0; checked here, because the arithmetic runs before other checks."""
    for name in names:
        value = values.get(name)
        if value:
            _check_kind(name, value, int, "")
            return int(value)
    return default


def _read_mini_batches(values: dict[str, Any], processes: int) -> dict[str, Any]:
    passes = values["num_mini_batches"] * _read_size(values, "gradient_accumulation_steps", default=1)
    return {"steps_per_generation": passes} if values["num_mini_batches"] > 1 else {}


def _read_episodes(values: dict[str, Any], processes: int) -> dict[str, Any]:
    """Batches of the old loop times the optimizer steps of each; an episode was one completion."""
    accumulation = _read_size(values, "gradient_accumulation_steps", default=1)
    mini_batches = _read_size(values, "num_mini_batches", default=1)
    passes = _read_size(values, "steps_per_generation", default=accumulation * mini_batches)
    per_device = _read_size(values, "per_device_train_batch_size", default=8)
    completions = _read_size(values, "generation_batch_size", default=per_device * processes * passes)
    epochs = _read_size(values, "num_iterations", "num_ppo_epochs", default=1)
    batches = math.ceil(values["total_episodes"] / completions)
    return {"max_steps": math.ceil(batches * epochs * max(1, completions / (per_device * processes * accumulation)))}


def _read_normalize_reward(values: dict[str, Any], processes: int) -> dict[str, Any]:
    clip = values.get("reward_clip_range")
    new: dict[str, Any] = {"normalize_rewards": values["normalize_reward"]}
    if values["normalize_reward"] and clip is None:
        new["reward_clip_range"] = (-_OLD_CLIP, _OLD_CLIP)  # it clipped normalised rewards
    return new


def _read_stop_token(values: dict[str, Any], processes: int) -> dict[str, Any]:
    if values["stop_token"] != "eos":
        raise ConfigError(
            f"stop_token={values['stop_token']!r} has no equivalent: completions end at the tokenizer's end token. "
            "Set tokenizer.eos_token to the token that should end them"
        )
    return {}


def _read_stop_token_id(values: dict[str, Any], processes: int) -> dict[str, Any]:
    raise ConfigError(
        f"stop_token_id={values['stop_token_id']} no longer exists: completions end at the tokenizer's end token. "
        "Set tokenizer.eos_token (processing_class.eos_token_id) to it before the trainer is built"
    )


def _read_non_eos_penalty(values: dict[str, Any], processes: int) -> dict[str, Any]:
    if values["non_eos_penalty"]:
        raise ConfigError(
            "non_eos_penalty replaced the reward of a completion without an end token by penalty_reward_value. Today "
            "a fixed amount is subtracted instead: missing_eos_penalty=1.0 (a positive number), without the other two"
        )
    return {}


_SIZES = (
    "the old trainer computed it and overwrote what was passed; today the generation batch is "
    "per_device_train_batch_size x processes x steps_per_generation"
)
_PPO = "part of PPO's value function; RLOO never read it"
_TAKES = "of the trainer takes a name or folder"
_SCRIPT = "only the old example scripts read it; it stays readable on the config;"

CONFIG_NAMES: dict[str, OldName] = {
    # renamed
    "kl_coef": OldName(float, "beta"),
    "rloo_k": OldName(int, "num_generations"),
    "cliprange": OldName(float, "epsilon"),
    "num_ppo_epochs": OldName(int, "num_iterations"),
    "response_length": OldName(int, "max_completion_length"),
    "normalize_advantage": OldName(bool, "normalize_advantages"),
    "exp_name": OldName(str, "run_name", keep=True),
    "wandb_log_unique_prompts": OldName(bool, "log_unique_prompts"),
    "vllm_guided_decoding_regex": OldName(str, "vllm_structured_outputs_regex"),
    # converted
    "normalize_reward": OldName(
        bool,
        "normalize_rewards",
        f"with reward_clip_range, whose default was {_OLD_CLIP:g}",
        read=_read_normalize_reward,
    ),
    "total_episodes": OldName(
        int,
        "max_steps",
        "optimizer steps, total_episodes / generation batch x num_iterations x mini-batches, rounded up",
        read=_read_episodes,
    ),
    "num_mini_batches": OldName(
        int, "steps_per_generation", "num_mini_batches x gradient_accumulation_steps", read=_read_mini_batches
    ),
    # accepted without effect
    "token_level_kl": OldName(
        bool,
        None,
        "both of its forms summed the KL over the completion before the baseline. For a KL per token set "
        "kl_form='per_token' (in a run's file rloo.kl_form: per_token)",
    ),
    "whiten_rewards": OldName(
        bool, None, "RLOO never whitened anything; to do so, set normalize_rewards=True (or 'running')"
    ),
    "stop_token": OldName(str, None, "completions always end at the tokenizer's end token", read=_read_stop_token),
    "non_eos_penalty": OldName(
        bool, None, "false is today's behaviour; see missing_eos_penalty", read=_read_non_eos_penalty
    ),
    "penalty_reward_value": OldName(float, None, "it only had an effect with non_eos_penalty; see missing_eos_penalty"),
    "local_rollout_forward_batch_size": OldName(
        int, None, "scoring is batched by tokens, not completions: set tokens_per_pass"
    ),
    "num_sample_generations": OldName(int, None, "log_completions=True prints completions every logging_steps"),
    "dataset_num_proc": OldName(int, None, "RLOO never read it"),
    "max_prompt_length": OldName(
        int, None, "prompts are no longer truncated; drop longer ones first (in a run's file: data.max_prompt_length)"
    ),
    "sanity_check": OldName(bool, None, _SCRIPT + " max_steps makes a short run"),
    **{name: OldName(float, None, _PPO) for name in ("vf_coef", "cliprange_value", "gamma", "lam")},
    **{name: OldName(int, None, _SIZES) for name in ("batch_size", "local_batch_size", "micro_batch_size")},
    **{name: OldName(int, None, _SIZES) for name in ("mini_batch_size", "local_mini_batch_size", "num_total_batches")},
    **{name: OldName(int, None, _SIZES) for name in ("num_updates", "world_size")},
    "reward_model_path": OldName(str, None, f"{_SCRIPT} reward_funcs=... {_TAKES}", keep=True),
    "sft_model_path": OldName(str, None, f"{_SCRIPT} model=... {_TAKES}", keep=True),
    "base_model": OldName(str, None, f"{_SCRIPT} model=... {_TAKES}", keep=True),
    # refused
    "stop_token_id": OldName(int, None, read=_read_stop_token_id),
}

TRAINER_NAMES: dict[str, OldName] = {
    "config": OldName(object, "args"),
    "policy": OldName(object, "model"),
    "tokenizer": OldName(object, "processing_class"),
    "reward_model": OldName(object, "reward_funcs"),
    "ref_policy": OldName(
        object, None, "the reference is the policy at the start of training; leave it out (reference='start')"
    ),
    "data_collator": OldName(object, None, "prompts are tokenized in the loop; leave it out"),
}

# Old names whose value belongs to another section of a run's file.
_SECTION_KEYS = {
    "exp_name": ("run", "name"),
    "run_name": ("run", "name"),
    "sft_model_path": ("model", "name"),
    "base_model": ("model", "name"),
    "policy": ("model", "name"),
    "max_prompt_length": ("data", "max_prompt_length"),
    "seed": ("run", "seed"),
    "output_dir": ("run", "output_dir"),
    "gradient_checkpointing": ("model", "gradient_checkpointing"),
}


def translate_config(
    given: Mapping[str, Any], processes: int = 1, prefix: str = "", usual: Mapping[str, Any] | None = None
) -> Translation:
    """Today's keywords for a config with old ones; None counts as not given.

    >>> translate_config({"kl_coef": 0.1, "rloo_k": 4}).values
    {'beta': 0.1, 'num_generations': 4}

    Args:
        given: keywords of `RLOOConfig`, old or new.
        processes: processes of the run, which total_episodes needs.
        prefix: of a name in messages, "rloo." for a file.
        usual: defaults to compute sizes with, if they differ from TRL's.

    Raises:
        ConfigError: an old name has no equivalent, or an old and a new name disagree.
    """
    values = {name: value for name, value in given.items() if name not in CONFIG_NAMES}
    result = Translation(values)
    for old, value in given.items():
        entry = CONFIG_NAMES.get(old)
        if entry is None or value is None:
            continue
        if entry.keep:
            result.kept[old] = value
        _check_kind(old, value, entry.kind, prefix)
        new = (
            entry.read({**(usual or {}), **given}, processes) if entry.read else {entry.new: value} if entry.new else {}
        )
        for name, converted in new.items():
            _set_once(values, name, converted, prefix + old, prefix + name)
        result.messages.append(_describe(old, entry, new, prefix))
    _pair_clip_range(values, given, result.messages, prefix)
    return result


def _check_kind(old: str, value: Any, kind: type, prefix: str) -> None:
    """Check counts early: they are used in arithmetic before any other check."""
    if kind is int and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31):
        raise ConfigError(f"{prefix}{old} is {excerpt(value)}; it takes a whole number, 0 or more and below 2**31")


def _set_once(values: dict[str, Any], name: str, value: Any, old: str, new: str) -> None:
    """Set `name`; `old` and `new` are both full names for the message."""
    found = values.get(name)
    if found is not None and found != value:
        raise ConfigError(f"{old} means {new}={value}, but {new}={found} is given too; keep {new} and remove {old}")
    values[name] = value


def _describe(old: str, entry: OldName, new: Mapping[str, Any], prefix: str) -> str:
    if entry.new and entry.new in new:
        reading = ", ".join(f"{prefix}{name}={value}" for name, value in new.items())
        note = f" ({entry.note})" if entry.note else ""
        return f"{prefix}{old} is an old TRL name of {prefix}{entry.new}; read as {reading}{note}"
    if entry.new:
        return f"{prefix}{old} is an old TRL name of {prefix}{entry.new}; its value is today's default"
    return f"{prefix}{old} is an old TRL name and has no effect: {entry.note}"


def _pair_clip_range(values: dict[str, Any], given: Mapping[str, Any], messages: list[str], prefix: str) -> None:
    """The old reward_clip_range was one number, and it only counted with normalize_reward."""
    clip = values.get("reward_clip_range")
    if not isinstance(clip, (int, float)) or isinstance(clip, bool):
        return
    key, pair = f"{prefix}reward_clip_range", (-float(clip), float(clip))
    if given.get("normalize_reward") or given.get("normalize_rewards"):
        values["reward_clip_range"] = pair
        messages.append(f"{key} was one number in old TRL and is a pair today; read as {key}={pair}")
    else:
        values["reward_clip_range"] = None
        messages.append(
            f"{key} was one number in old TRL and had no effect without normalize_reward; it is left out. "
            f"Today it is a pair that always takes effect: {key}={pair}"
        )


def translate_file(values: dict[str, Any], processes: int = 1) -> list[str]:
    """Translate the old names in a run's file, in place; a message for each. Raises as `translate_config`."""
    section = values.get("rloo")
    messages = _move_reward_model(values) + _move_no_signal(values) + _drop_cache(values)
    if not isinstance(section, dict):
        return messages
    for old, (other, key) in _SECTION_KEYS.items():
        if section.get(old) is None:
            continue
        target = values.setdefault(other, {})
        if isinstance(target, dict):
            _set_once(target, key, section.pop(old), f"rloo.{old}", f"{other}.{key}")
            messages.append(f"rloo.{old} belongs to {other}.{key}; read as {other}.{key}={target[key]}")
    given = {str(key): value for key, value in section.items()}
    usual = {}
    if "total_episodes" in given:
        generations = _read_size(given, "num_generations", "rloo_k", default=0)
        usual = {"per_device_train_batch_size": usual_batch(generations)}
    translation = translate_config(given, processes, "rloo.", usual)
    values["rloo"] = translation.values
    return messages + translation.messages


def _move_no_signal(values: dict[str, Any]) -> list[str]:
    """`run.stop_when_no_signal` and `run.no_signal_steps` are keys of `health:` today."""
    run, messages = values.get("run"), []
    for old, key in (("stop_when_no_signal", "no_signal"), ("no_signal_steps", "no_signal_steps")):
        if not isinstance(run, dict) or old not in run:
            continue
        value = run.pop(old)
        target = values.setdefault("health", {})
        if value is None or not isinstance(target, dict):
            continue
        if key == "no_signal" and not isinstance(value, bool):
            raise ConfigError(f"run.{old} is {excerpt(value)}; it took true or false, and is health.no_signal today")
        value = value if key != "no_signal" else "stop" if value else None
        if value is not None:
            _set_once(target, key, value, f"run.{old}", f"health.{key}")
        read = f"health.{key}={'warn' if value is None else value}"
        messages.append(f"run.{old} is a key of health: today; read as {read}")
    return messages


def _drop_cache(values: dict[str, Any]) -> list[str]:
    """`rollout.cache` went: its `plain` is what every run has; other values are refused, and stay in `values`."""
    rollout = values.get("rollout")
    if not isinstance(rollout, dict) or "cache" not in rollout:
        return []
    if rollout["cache"] != "plain":
        raise ConfigError(
            f"rollout.cache is {excerpt(rollout['cache'])}, but 8-bit and offloaded KV caches were removed: remove the "
            "key, and set a lower rollout.rows, or rollout.vllm.float8_kv_cache=true with rollout.engine=vllm"
        )
    del rollout["cache"]
    return ["rollout.cache was removed: the KV cache is always plain; remove the key"]


def forget_overruled(section: dict[str, Any], changed: set[str]) -> None:
    """Drop today's name from the file's `rloo:` if an override uses its old name, so that the override wins."""
    for old in changed & set(CONFIG_NAMES):
        new = CONFIG_NAMES[old].new
        if new is not None and new not in changed:
            section.pop(new, None)


def _move_reward_model(values: dict[str, Any]) -> list[str]:
    """`reward_model: NAME` is an item of `rewards:` today."""
    messages = []
    for place, where in ((values, ""), (values.get("rloo"), "rloo.")):
        for old in ("reward_model", "reward_model_path", "reward_funcs"):
            if not isinstance(place, dict) or place.get(old) is None:
                continue
            names = place.pop(old)
            items = [{"name": "reward_model", "params": {"model": name}} for name in _listed(names)]
            values["rewards"] = [*_listed(values.get("rewards") or []), *items]
            messages.append(f"{where}{old} is an item of rewards today; read as rewards: {items}")
    return messages


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
