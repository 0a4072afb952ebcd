"""Builds reward functions from a config's `rewards:`: names, parameters, weights, and the tokenizer's ids."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from rloo_kit import rewards
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RewardSection
from rloo_kit.data.chat import family_of
from rloo_kit.errors import ConfigError, RewardError, TokenizerError
from rloo_kit.rewarding.guard import NamedAsyncReward, NamedReward, is_async, log_names, refuse_judges_name
from rloo_kit.rewarding.signature import PASSED, check_signature, nearest
from rloo_kit.rewarding.worker import WorkerReward
from rloo_kit.seams import REWARDS, part, resolve
from rloo_kit.system.input_files import find_input, find_target
from rloo_kit.system.processes import say
from rloo_kit.think_tags import THINK_END, bind_think_tags

REGISTRY: dict[str, Callable[..., Any] | str] = {  # by name: a class, or where it is
    "thinking_reward": rewards.ThinkingReward,
    "length_reward": rewards.LengthReward,
    "answer_reward": rewards.AnswerReward,
    "think_format_reward": rewards.ThinkFormatReward,
    "thinking_budget_reward": rewards.ThinkingBudgetReward,
    "relative_length_penalty": rewards.RelativeLengthPenalty,
    "soft_overlong_penalty": rewards.SoftOverlongPenalty,
    "repetition_penalty": rewards.RepetitionPenalty,
    "missing_eos_penalty": rewards.MissingEosPenalty,
    **REWARDS,
}
BOUND_ONLY = ("decode", "timeout_s", "folder", "run")  # parameters that come from the run, never from `params`
END_TOKENS = ("<|im_end|>", "<|endoftext|>")  # Qwen3 models stop at either
OWN = "a function of your own is module:function or path/to/file.py:function"


def build_rewards(run: RunConfig, tokenizer: Any) -> list[NamedReward]:
    """The reward functions of a run, in the order of its config; prints one line that lists them.

    Args:
        run: reads `rewards`, `model`, `rloo` and `source`. tokenizer: the policy's.

    Returns:
        Rewards for `train()` or for a bare TRL trainer, each with `__name__` and `.weight`.

    Raises:
        ConfigError: no reward, an unknown name or parameter, a value out of range, a module without the function, a
            function that cannot be called as a reward.
        TokenizerError: a reward decides by `</think>` and the tokenizer has none, or at another id.
    """
    built, end_id = make_rewards(run, tokenizer), bind_think_tags(tokenizer).end_id
    listed = ", ".join(f"{reward.__name__} x{float(reward.weight)}" for reward in built)
    say(f"rewards: {listed} ({THINK_END} = {'none' if end_id is None else end_id})")
    return built


def make_rewards(run: RunConfig, tokenizer: Any) -> list[NamedReward]:
    """`build_rewards` without the printed line."""
    extra = part("tools").own_rewards(run) if run.rloo.has_tools else []
    if not run.rewards and not extra:
        raise ConfigError("rewards is empty; a run needs at least one, for example - {name: answer_reward}")
    made = [build_reward(run, tokenizer, entry, f"rewards.{index}") for index, entry in enumerate(run.rewards)] + extra
    names = log_names([reward.__name__ for reward in made], made)
    weights = [entry.weight for entry in run.rewards] + [1.0] * len(extra)
    kinds = [NamedAsyncReward if is_async(reward) else NamedReward for reward in made]
    return [kind(*parts) for kind, *parts in zip(kinds, made, names, weights, strict=True)]


def build_reward(run: RunConfig, tokenizer: Any, entry: RewardSection, key: str = "rewards") -> Any:
    """One reward (an item of `run.rewards`, or another entry) with this tokenizer's ids bound, without its weight.

    `key` is its name in errors; raises like `build_rewards`."""
    if ":" in entry.name:
        return _build_worker(key, entry, run, tokenizer)
    check_reward_name(key, entry.name)
    if entry.env:
        raise ConfigError(f"{key}.env is for a module:function; {entry.name} reads no variables: leave env out")
    registered = REGISTRY[entry.name]
    factory = resolve(registered) if isinstance(registered, str) else registered  # a part's is loaded now
    accepted = inspect.signature(factory).parameters
    check_params(key, entry, [name for name in accepted if name not in BOUND_ONLY])
    vocab = tokenizer.get_vocab()
    end_ids = [tokenizer.eos_token_id, *(vocab.get(token) for token in END_TOKENS)]
    bound: dict[str, Any] = {
        "think_end_id": bind_think_tags(tokenizer).end_id,
        "eos_token_ids": tuple(dict.fromkeys(token for token in end_ids if token is not None)),
        "thinking": family_of(run, tokenizer)[1],
        "max_completion_length": run.rloo.max_completion_length,
        "decode": functools.partial(tokenizer.decode, skip_special_tokens=True),
        "timeout_s": entry.timeout_s,
        "folder": run.outputs,  # of a judge's cache
        "run": run.run.name or "",  # whose budget a judge spends
    }
    thinking = entry.params.get("thinking", bound["thinking"] if "thinking" in accepted else True)
    if "think_end_id" in accepted:
        _check_tag(key, entry, bound["think_end_id"], required=thinking is not False)
    values = {name: value for name, value in bound.items() if name in accepted and value is not None}
    return construct(run, key, entry.name, factory, values | entry.params)


def check_reward_name(key: str, name: str) -> None:
    """Refuse an unknown reward name; the error lists the nearest and all known names. `key` is the entry's."""
    if name not in REGISTRY:
        near = nearest(name, REGISTRY) or "."
        raise ConfigError(f"{key}.name: there is no reward '{name}'{near} Known: {', '.join(REGISTRY)}; {OWN}")


def construct(run: RunConfig, key: str, name: str, factory: Callable[..., Any], values: dict[str, Any]) -> Any:
    """A reward or a judge of the run; raises ConfigError for a parameter that it refuses. `key` names the entry."""
    if values.get("template") is not None:
        near = run.source and run.source.parent
        values["template"] = str(find_input(str(values["template"]), f"{key}.params.template", near))
    try:
        return factory(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.params: {name} cannot be built: {error}") from None


def check_params(key: str, entry: RewardSection, takes: list[str]) -> None:
    """Refuse parameters of an entry that are not in `takes`."""
    for name in entry.params:
        if name not in takes:
            offered = f"It takes {', '.join(takes)}" if takes else "It takes none"
            hint = "; set timeout_s next to params." if name == "timeout_s" else nearest(name, takes) or "."
            raise ConfigError(f"{key}.params.{name}: {entry.name} has no parameter of that name{hint} {offered}")


def _check_tag(key: str, entry: RewardSection, end_id: int | None, *, required: bool) -> None:
    if end_id is None:
        if required:
            raise TokenizerError(
                f"{key}: {entry.name} decides by the token {THINK_END}, and the tokenizer has none. Use a model that "
                "has it, a reward that does not need it, or judge whole completions: model.enable_thinking: false for "
                "a hybrid template, model.family: instruct for one that opens no thinking"
            )
    elif entry.params.get("think_end_id", end_id) != end_id:
        problem = f"{key}.params.think_end_id is {entry.params['think_end_id']}"
        fix = "leave the parameter out, it is bound from the tokenizer"
        raise TokenizerError(f"{problem}, but the tokenizer has {THINK_END} at {end_id}; {fix}")


def _build_worker(key: str, entry: RewardSection, run: RunConfig, tokenizer: Any) -> WorkerReward:
    module, _, function = entry.name.rpartition(":")
    if not module or not function:
        raise ConfigError(f"{key}.name is '{entry.name}'; {OWN}")
    for name in entry.env:
        if name not in os.environ:
            raise ConfigError(f"{key}.env names {name!r}, and there is no such variable: set it in .env, or remove it")
    target, folders = find_target(entry.name, f"{key}.name", run.source and run.source.parent)
    reward = WorkerReward(target, params=dict(entry.params), folders=folders, timeout_s=entry.timeout_s, env=entry.env)
    try:
        accepted = reward.load()
        if not accepted.anything:
            check_params(key, entry, [name for name in accepted.names if name not in PASSED])
        if "think_end_id" in accepted.names and tokenizer is not None:
            end_id, is_given = bind_think_tags(tokenizer).end_id, "think_end_id" in entry.params
            _check_tag(key, entry, end_id, required="think_end_id" in accepted.required and not is_given)
            reward.params |= {} if end_id is None else {"think_end_id": end_id}
        check_signature(reward.__name__, reward.signature)
        refuse_judges_name(reward.__name__)
    except RewardError as error:
        reward.worker.close()
        raise ConfigError(f"{key}.name '{entry.name}': {error}") from None
    return reward
