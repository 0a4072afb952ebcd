"""Translates the arguments and datasets of TRL's RLOOTrainer up to 0.21 for the current trainer.

`old_names.TRAINER_NAMES` maps each argument; this module handles those that need more than a new name.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rloo_kit.config.old_names import TRAINER_NAMES
from rloo_kit.errors import ConfigError
from rloo_kit.rewarding.signature import CONVENTION


def translate_trainer_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Current keywords for `RLOOTrainer`, with one warning for each old one.

    Args:
        given: keywords, old or new; an old one that is None is silently left out.

    Raises:
        ConfigError: an old and a new name are both given, no reward or model is given, the arguments came in the old
            positional order, or a reference was given that differs from the policy.
    """
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
        warnings.warn(message, FutureWarning, stacklevel=3)
    for name, hint in (("model", "a model or its name"), ("reward_funcs", "a reward function, or a list of them")):
        if values.get(name) is None or (isinstance(values[name], (list, tuple)) and not values[name]):
            raise ConfigError(f"RLOOTrainer needs {name}=: {hint}")
    if given.get("ref_policy") is not None:
        _refuse_other_reference(values["model"], given["ref_policy"])
    if given.get("reward_model") is not None:
        _adapt_reward_model(values)
    return values


def _refuse_other_reference(policy: Any, reference: Any) -> None:
    """Refuse a reference whose weights differ from the policy's, because that would change the result.

    Weights under other names (an adapter around the policy) are not compared."""
    if isinstance(policy, str) or isinstance(reference, str):
        same = policy == reference
    else:
        own, other = dict(policy.named_parameters()), dict(reference.named_parameters())
        shared = [name for name in other if name in own]
        same = all(
            own[name].shape == other[name].shape and torch.equal(own[name].detach().cpu(), other[name].detach().cpu())
            for name in shared
        )
    if not same:
        raise ConfigError(
            "ref_policy has other weights than policy. The reference is now the policy at the start of training "
            "(reference='start'), or its base model without the adapter (reference='base'). Load the weights of "
            "ref_policy as the model and train an adapter on it, or leave ref_policy out"
        )


def _adapt_reward_model(values: dict[str, Any]) -> None:
    """Turn an old reward_model= into a list of current rewards.

    A checkpoint scores with the policy's tokenizer, a function of texts gets prompt and completion joined."""
    rewards = values["reward_funcs"]
    rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    tokenizer = values.get("processing_class")
    columns = _column_names(values.get("train_dataset"))
    values["reward_funcs"] = [
        _take_texts(reward, tokenizer) if _wants_texts(reward, columns) else reward for reward in rewards
    ]
    if all(_is_module(reward) for reward in rewards):
        values.setdefault("reward_processing_classes", [tokenizer] * len(rewards))


def _is_module(value: Any) -> bool:
    return hasattr(value, "named_parameters")


def _column_names(dataset: Any) -> set[str]:
    """Columns of a dataset or a dict of them; empty if not known."""
    if isinstance(dataset, dict):
        return set().union(*map(_column_names, dataset.values()))
    return set(getattr(dataset, "column_names", None) or ())


def _wants_texts(reward: Any, columns: set[str]) -> bool:
    """True for a function with one required argument that is neither one of TRL's current names nor a column."""
    if _is_module(reward) or isinstance(reward, type) or not callable(reward):
        return False
    try:
        parameters = list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError):
        return False
    if not parameters or any(p.kind is p.VAR_KEYWORD or p.name in CONVENTION for p in parameters):
        return False
    first, *others = parameters
    needed = [p for p in others if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    return first.kind is not first.KEYWORD_ONLY and first.name not in columns and not needed


def _take_texts(reward: Callable[[list[str]], Any], tokenizer: Any) -> Callable[..., Any]:
    """Wrap a function of texts in the current convention; its texts have no special tokens."""

    def score(prompts: list[Any], completions: list[Any], **columns: Any) -> Any:
        plain = [
            _text_of(prompt, tokenizer) + _text_of(c, None) for prompt, c in zip(prompts, completions, strict=True)
        ]
        return reward(plain)

    score.__name__ = str(getattr(reward, "__name__", type(reward).__name__))
    return score


def _text_of(part: Any, tokenizer: Any) -> str:
    """A prompt's or completion's text; of a conversation, its messages' contents."""
    if not isinstance(part, str):
        return "\n".join(str(message["content"]) for message in part)
    if tokenizer is None:
        return part
    return str(tokenizer.decode(tokenizer.encode(part, add_special_tokens=False), skip_special_tokens=True))


def prepare_old_dataset(dataset: Any, tokenizer: Any) -> Any:
    """Add a `prompt` column of decoded text to a dataset with `input_ids` and no `prompt`, with a warning.

    Args:
        dataset: a `datasets.Dataset`, or a dict of them; one with a `prompt` column is returned unchanged.
        tokenizer: what the ids were made with.

    Raises:
        ConfigError: there are ids to decode and no tokenizer.
    """
    if isinstance(dataset, dict):
        return {name: prepare_old_dataset(part, tokenizer) for name, part in dataset.items()}
    columns = getattr(dataset, "column_names", None) or []
    if "prompt" in columns or "input_ids" not in columns:
        return dataset
    if tokenizer is None:
        raise ConfigError(
            "the dataset has input_ids and no prompt; to decode them RLOOTrainer needs processing_class= (the "
            "tokenizer that made them), or give it a dataset with a prompt column"
        )
    warnings.warn(
        "the dataset has input_ids and no prompt, as old TRL wanted it; they are decoded. Current TRL wants a "
        "column prompt with the text, which the trainer tokenizes",
        FutureWarning,
        stacklevel=3,
    )
    padding = getattr(tokenizer, "pad_token_id", None)

    def decode(row: dict[str, Any]) -> dict[str, str]:
        mask = row.get("attention_mask") or [int(token != padding) for token in row["input_ids"]]
        kept = [token for token, keep in zip(row["input_ids"], mask, strict=True) if keep]
        return {"prompt": tokenizer.decode(kept, skip_special_tokens=False)}

    unused = [name for name in ("input_ids", "attention_mask", "lengths") if name in columns]
    return dataset.map(decode, remove_columns=unused)
