"""Old names of TRL's RLOO (releases 0.9.6 to 0.26.2) and today's: one table for files, keywords and flags.

Each is renamed, converted, dropped with a warning (no effect) or refused with today's equivalent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from rloo_kit.config.checks import HealthRule, usual_batch
from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.system.processes import count_processes


@dataclass(frozen=True)
class OldName:
    """The type of an old name, today's name (None: it has no effect) and a note for the warning."""

    kind: type
    new: str | None = None
    note: str = ""


_OLD_CLIP = 10.0  # the old default of reward_clip_range, which only worked together with normalize_reward
_SIZES = (
    "the old trainer computed it and overwrote what was passed; today the generation batch is "
    "per_device_train_batch_size x processes x steps_per_generation"
)
_SIZE_NAMES = ["batch_size", "local_batch_size", "micro_batch_size", "mini_batch_size", "local_mini_batch_size"]
_SIZE_NAMES += ["num_total_batches", "num_updates", "world_size"]
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
    "exp_name": OldName(str, "run_name"),
    "wandb_log_unique_prompts": OldName(bool, "log_unique_prompts"),
    "vllm_guided_decoding_regex": OldName(str, "vllm_structured_outputs_regex"),
    # converted, by `_convert`
    "normalize_reward": OldName(bool, "normalize_rewards", f"with reward_clip_range, whose default was {_OLD_CLIP:g}"),
    "total_episodes": OldName(
        int,
        "max_steps",
        "optimizer steps, total_episodes / generation batch x num_iterations x mini-batches, rounded up",
    ),
    "num_mini_batches": OldName(int, "steps_per_generation", "num_mini_batches x gradient_accumulation_steps"),
    # accepted without effect; `_convert` refuses some values
    "token_level_kl": OldName(
        bool,
        None,
        "both of its forms summed the KL over the completion before the baseline. For a KL per token set "
        "kl_form='per_token' (in a run's file rloo.kl_form: per_token)",
    ),
    "whiten_rewards": OldName(bool, None, "RLOO never whitened anything; to do so, set normalize_rewards=True"),
    "stop_token": OldName(str, None, "completions always end at the tokenizer's end token"),
    "non_eos_penalty": OldName(bool, None, "false is today's behaviour; see missing_eos_penalty"),
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
    **{name: OldName(int, None, _SIZES) for name in _SIZE_NAMES},
    "reward_model_path": OldName(str, None, f"{_SCRIPT} reward_funcs=... {_TAKES}"),
    "sft_model_path": OldName(str, None, f"{_SCRIPT} model=... {_TAKES}"),
    "base_model": OldName(str, None, f"{_SCRIPT} model=... {_TAKES}"),
    # refused
    "stop_token_id": OldName(int, None),
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

_REWARDS = ("reward_model", "reward_model_path", "reward_funcs")
# Keys of a run's file that are in another section today, are rewards, or have no effect.
_FILE_NAMES: dict[str, OldName] = {
    **{f"{place}{name}": OldName(object, "rewards") for place in ("", "rloo.") for name in _REWARDS},
    "rloo.exp_name": OldName(str, "run.name"),
    "rloo.run_name": OldName(str, "run.name"),
    "rloo.sft_model_path": OldName(str, "model.name"),
    "rloo.base_model": OldName(str, "model.name"),
    "rloo.policy": OldName(str, "model.name"),
    "rloo.max_prompt_length": OldName(int, "data.max_prompt_length"),
    "rloo.seed": OldName(int, "run.seed"),
    "rloo.output_dir": OldName(str, "run.output_dir"),
    "rloo.gradient_checkpointing": OldName(bool, "model.gradient_checkpointing"),
    "health.nothing_learnt": OldName(
        str, None, "the verdict says whether a run learnt, and eval.patience stops one that does not"
    ),
}


@dataclass(frozen=True)
class Gone:
    """A key that a file no longer has: its last default, and what to do in place of another value."""

    default: Any
    instead: str


_IN_PYTHON = "it stays an argument of RLOOConfig, for a trainer in Python"
_TOP_P = "rloo.top_p with rloo.accept_truncated_sampling cuts off a tail; a lower rloo.temperature is scored exactly"
_DTYPE = "the machine decides, and model.dtype: float16 trains in float16, float32 in float32 on a GPU without bfloat16"

# By dotted key; one in the items of a list is named without their number.
GONE_KEYS: dict[str, Gone] = {
    **{f"data.{place}curriculum_level": Gone(None, "set its values in options") for place in ("", "sources.")},
    "sft.signal_prompts": Gone(64, "the first 64 training prompts are sampled afterwards"),
    "sft.warmup_steps": Gone(0.05, "the learning rate rises over a twentieth of the run"),
    "sft.max_length": Gone(None, "rows of more than model.max_seq_length tokens are left out"),
    "reward_model.max_length": Gone(None, "pairs of more than model.max_seq_length tokens are left out"),
    "data.too_long": Gone("drop", "longer prompts are left out, and a printed line has their number"),
    "data.seed": Gone(0, "the split is the same in all runs, and run.seed orders the prompts"),
    "rollout.vllm.max_num_seqs": Gone(None, "set rollout.rows={value}"),
    "eval.answer_budget": Gone(32, "a forced answer has rloo.answer_budget tokens, else 32"),
    "eval.num_completions": Gone(10, "ten completions are shown, and the report has all"),
    "eval.save_best": Gone(True, "checkpoints/ has the last weights, adapter/ those of the best evaluation"),
    "health.no_signal_steps": Gone(5, "a fault is reported after five steps in a row"),
    **{f"health.{rule}": Gone("warn", f"set health.{{value}}=[{rule}]") for rule in get_args(HealthRule)},
    "health.all_none": Gone("warn", "set health.{value}=[reward_failures], which finds it"),
    "model.vocabulary": Gone("compact", "an embedded model has one vocabulary"),
    "model.build_seed": Gone(0, "an embedded model is always built from the same seed"),
    "model.lora.dropout": Gone(0.0, "adapters are trained without dropout"),
    "reward_model.lora.dropout": Gone(0.0, "adapters are trained without dropout"),
    "run.rollouts_gib": Gone(None, "delete the oldest files in the run's folder rollouts/ by hand"),
    "run.reward_failure_steps": Gone(3, "three failed steps in a row stop a run; see run.max_reward_failure_share"),
    "run.max_skipped_steps": Gone(3, "three steps in a row with NaN or infinity stop a run"),
    "rloo.adam_beta1": Gone(0.9, _IN_PYTHON),
    "rloo.adam_beta2": Gone(0.999, _IN_PYTHON),
    "rloo.adam_epsilon": Gone(1e-8, _IN_PYTHON),
    "rloo.delta": Gone(
        None, "rloo.epsilon and rloo.epsilon_high bound the ratio; fewer rloo.num_iterations keep it near 1"
    ),
    "rloo.baseline_includes_masked": Gone(True, "siblings are compared with a masked completion too, as in TRL"),
    "rloo.sampler_correction_cap": Gone(2.0, "the largest weight is 2; rloo.sampler_correction chooses its form"),
    "rloo.sampler_correction_floor": Gone(0.0, "a weight has no lower bound; rloo.sampler_correction chooses its form"),
    "rloo.min_p": Gone(None, _TOP_P),
    "rloo.repetition_penalty": Gone(1.0, "it would teach to repeat; the reward repetition_penalty teaches not to"),
    "rloo.thinking_budget_total": Gone(
        None, "rloo.thinking_budget is for each turn, rloo.max_turns and rloo.max_completion_length bound all of them"
    ),
    "rloo.max_tool_calls": Gone(8, "rloo.max_turns is the limit of calls too"),
    "rloo.disable_dropout": Gone(True, "dropout is always off, because the ratio compares two passes of one policy"),
    "rloo.shuffle_dataset": Gone(True, _IN_PYTHON),
    "rloo.bf16": Gone(None, _DTYPE),
    "rloo.fp16": Gone(None, _DTYPE),
    "rloo.logging_steps": Gone(1, "every step has its row of metrics.jsonl, which the health rules read"),
}


def translate_config(
    given: Mapping[str, Any], processes: int = 1, prefix: str = "", usual: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Today's keywords for a config with old ones, and a message for each old one; None counts as not given.

    >>> translate_config({"kl_coef": 0.1, "rloo_k": 4})[0]
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
    messages = []
    for old, value in given.items():
        entry = CONFIG_NAMES.get(old)
        if entry is None or value is None:
            continue
        if entry.kind is int:
            _check_count(prefix + old, value)
        new = _convert(old, {**(usual or {}), **given}, processes)
        for name, converted in new.items():
            _set_once(values, name, converted, prefix + old, prefix + name)
        if entry.new is None:
            messages.append(f"{prefix}{old} is an old TRL name and has no effect: {entry.note}")
        else:
            reading = ", ".join(f"{prefix}{name}={converted}" for name, converted in new.items())
            note = f" ({entry.note})" if entry.note else ""
            means = f"read as {reading}{note}" if new else "its value is today's default"
            messages.append(f"{prefix}{old} is an old TRL name of {prefix}{entry.new}; {means}")
    clip = values.get("reward_clip_range")
    if isinstance(clip, (int, float)) and not isinstance(clip, bool):  # the old one: a number
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
    return values, messages


def _convert(old: str, values: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Today's options for the old one's value; `values`: all that is given. Raises ConfigError if it has none."""
    value = values[old]

    def size(*names: str, default: int) -> int:
        """The first of these that is set and not 0."""
        name = next((name for name in names if values.get(name)), None)
        return default if name is None else _check_count(name, values[name])

    match old:
        case "normalize_reward" if value and values.get("reward_clip_range") is None:
            return {"normalize_rewards": value, "reward_clip_range": (-_OLD_CLIP, _OLD_CLIP)}
        case "num_mini_batches":
            accumulation = size("gradient_accumulation_steps", default=1)
            return {"steps_per_generation": value * accumulation} if value > 1 else {}
        case "total_episodes":  # an episode was one completion; each batch of them was used for several steps
            accumulation = size("gradient_accumulation_steps", default=1)
            passes = size("steps_per_generation", default=accumulation * size("num_mini_batches", default=1))
            a_pass = size("per_device_train_batch_size", default=8) * processes
            completions = size("generation_batch_size", default=a_pass * passes)
            epochs = size("num_iterations", "num_ppo_epochs", default=1)
            batches = math.ceil(value / completions)
            return {"max_steps": math.ceil(batches * epochs * max(1, completions / (a_pass * accumulation)))}
        case "stop_token" if value != "eos":
            raise ConfigError(
                f"stop_token={value!r} has no equivalent: completions end at the tokenizer's end token. "
                "Set tokenizer.eos_token to the token that should end them"
            )
        case "stop_token_id":
            raise ConfigError(
                f"stop_token_id={value} no longer exists: completions end at the tokenizer's end token. "
                "Set tokenizer.eos_token (processing_class.eos_token_id) to it before the trainer is built"
            )
        case "non_eos_penalty" if value:
            raise ConfigError(
                "non_eos_penalty replaced the reward of a completion without an end token by penalty_reward_value. "
                "Today a fixed amount is subtracted instead: missing_eos_penalty=1.0 (a positive number), without the "
                "other two"
            )
    new = CONFIG_NAMES[old].new
    return {} if new is None else {new: value}


def _check_count(name: str, value: Any) -> int:
    """Counts are used in arithmetic before any other check."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ConfigError(f"{name} is {excerpt(value)}; it takes a whole number, 0 or more and below 2**31")
    return value


def _set_once(values: dict[str, Any], name: str, value: Any, old: str, new: str) -> None:
    """Set `name`; `old` and `new` are both full names for the message."""
    given = values.get(name)
    if given is not None and given != value:
        raise ConfigError(f"{old} means {new}={value}, but {new}={given} is given too; keep {new} and remove {old}")
    values[name] = value


def explain_gone(argument: str) -> str:
    """Why `RLOOConfig` no longer has an argument, as the end of a sentence; "" for one that it never had."""
    names = (f"{section}.{argument}" for section in ("rloo", "run", "rollout"))
    return next((f" any more: {GONE_KEYS[name].instead}" for name in names if name in GONE_KEYS), "")


def _drop_gone(values: dict[str, Any]) -> list[str]:
    """Remove the keys of `GONE_KEYS`, in place; a message if there are any. Raises ConfigError for other values than
    their defaults."""
    usual, problems = [], []
    for name, gone in GONE_KEYS.items():
        for key, value in _take(values, name.split(".")):
            if value == gone.default and isinstance(value, bool) == isinstance(gone.default, bool):
                usual.append(key)
            else:
                instead = gone.instead.format(value=value)
                problems.append(f"{key} is {excerpt(value)}, but there is no such key any more: {instead}")
    if problems:
        raise ConfigError("\n".join(problems))
    return [f"no longer keys, and set to their last defaults: {', '.join(usual)}; remove them"] if usual else []


def _take(place: Any, path: list[str], above: str = "") -> list[tuple[str, Any]]:
    """The key at `path` below `place`, in each item of a list, with its value; it is removed."""
    if isinstance(place, list):
        return [taken for number, item in enumerate(place) for taken in _take(item, path, f"{above}{number}.")]
    if not isinstance(place, dict) or path[0] not in place:
        return []
    if path[1:]:
        return _take(place[path[0]], path[1:], f"{above}{path[0]}.")
    return [(above + path[0], place.pop(path[0]))]


def translate_file(values: dict[str, Any]) -> list[str]:
    """Translate the old names in a run's file, in place; a message for each; null counts as not given. Raises
    ConfigError as `translate_config`, and for a key that is gone."""
    messages = _drop_gone(values)
    if isinstance(health := values.get("health"), dict) and "all_none" in _listed(health.get("stop")):
        raise ConfigError("health.stop=[all_none] is gone: set health.stop=[reward_failures], which finds it")
    for old, entry in _FILE_NAMES.items():
        above, _, key = old.rpartition(".")
        place = values.get(above) if above else values
        is_section = entry.new == "rewards" and isinstance(place, dict) and isinstance(place.get(key), dict | None)
        if not isinstance(place, dict) or key not in place or is_section:  # a mapping is today's section reward_model
            continue
        value = place.pop(key)
        if entry.new is None:
            messages.append(f"{old} has no effect any more: {entry.note}")
        elif entry.new == "rewards":
            items = [{"name": "reward_model", "params": {"model": name}} for name in _listed(value)]
            values["rewards"] = [*_listed(values.get("rewards") or []), *items]
            messages.append(f"{old} is an item of rewards today; read as rewards: {items}")
        elif value is not None:
            section, _, target = entry.new.partition(".")
            values[section] = {} if values.get(section) is None else values[section]  # an empty section is None
            if isinstance(values[section], dict):  # anything else is refused with the rest of the file
                _set_once(values[section], target, value, old, entry.new)
                messages.append(f"{old} belongs to {entry.new}; read as {entry.new}={value}")
    rloo = values.get("rloo")
    if not isinstance(rloo, dict):
        return messages
    given = {str(key): value for key, value in rloo.items()}
    if given.get("normalize_rewards") == "running":
        raise ConfigError("rloo.normalize_rewards=running is gone: set true, or bound it by rloo.reward_clip_range")
    usual = {}
    if "total_episodes" in given:
        name = "num_generations" if given.get("num_generations") else "rloo_k"
        usual = {"per_device_train_batch_size": usual_batch(_check_count(f"rloo.{name}", given.get(name) or 0))}
    values["rloo"], translated = translate_config(given, count_processes(), "rloo.", usual)
    return messages + translated


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
