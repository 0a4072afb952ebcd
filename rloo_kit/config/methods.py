"""RLOO's relatives by name: the `rloo:` keys of each, and the name for given keys."""

from collections.abc import Mapping
from typing import Any

# The keys that define a method, apart from penalty, clip range and learning rate. Defaults are RLOO's.
DEFAULTS: dict[str, Any] = {
    "baseline": "leave_one_out",
    "scale_rewards": "none",
    "normalize_advantages": False,
    "token_mean": "none",
    "ratio_form": None,
}
METHODS: dict[str, dict[str, Any]] = {
    "RLOO": {},
    "GRPO": {"baseline": "group_mean", "scale_rewards": "group", "token_mean": "completion"},
    "Dr. GRPO": {"baseline": "group_mean", "ratio_form": "per_token"},
    "DAPO": {"baseline": "group_mean", "scale_rewards": "group", "token_mean": "batch", "epsilon_high": 0.28},
    "REINFORCE++": {"baseline": "none", "normalize_advantages": True, "kl_form": "per_token"},
    "REINFORCE++-baseline": {"baseline": "group_mean", "normalize_advantages": True, "kl_form": "per_token"},
    "REINFORCE": {"baseline": "none"},
    "GSPO": {
        "baseline": "group_mean", "scale_rewards": "group", "ratio_form": "length_normalized",
        "epsilon": 3e-4, "epsilon_high": 4e-4,
    },
}  # fmt: skip


def name_method(rloo: Mapping[str, Any]) -> str | None:
    """The method of the `rloo:` keys, regardless of penalty and clip range; None if it has no name.

    `ratio_form` decides if two names fit (group mean alone: Dr. GRPO only with a ratio for each token).

    >>> name_method({"baseline": "group_mean", "scale_rewards": "group", "token_mean": "completion"})
    'GRPO'
    >>> name_method({"beta": 0.05}), name_method({"scale_rewards": "group"})
    ('RLOO', None)
    >>> name_method({"baseline": "group_mean"}), name_method({"baseline": "group_mean", "kl_form": "per_token"})
    (None, 'Dr. GRPO')
    """
    found = {name: rloo.get(name, default) for name, default in DEFAULTS.items()}
    if found["ratio_form"] is None and rloo.get("kl_form") == "per_token":  # each token has its own ratio then
        found["ratio_form"] = "per_token"
    for method, keys in METHODS.items():
        wanted = {name: keys.get(name, default) for name, default in DEFAULTS.items()}
        if wanted["ratio_form"] is None:  # any ratio form, unless the method requires one
            wanted["ratio_form"] = found["ratio_form"]
        if found == wanted:
            return method
    return None


def describe_method(rloo: Mapping[str, Any]) -> str:
    """The method in words: its name, if it has one, and how its advantage is computed.

    >>> describe_method({})
    'RLOO (reward minus the mean reward of the other completions of the prompt)'
    >>> describe_method({"scale_rewards": "group"})[:23]
    'a policy gradient (rewa'
    """
    found = {name: rloo.get(name, default) for name, default in DEFAULTS.items()}
    words = ["reward" + {
        "leave_one_out": " minus the mean reward of the other completions of the prompt",
        "group_mean": " minus the mean reward of the prompt's completions",
        "none": " without a baseline",
    }[found["baseline"]]]  # fmt: skip
    if found["scale_rewards"] == "group":
        words.append("divided by the deviation of its group")
    if found["normalize_advantages"]:
        words.append("standardized over the batch")
    if found["token_mean"] != "none":
        whose = {"completion": "each completion's tokens", "batch": "all tokens of a step"}[found["token_mean"]]
        words.append(f"loss a mean over {whose}")
    return f"{name_method(rloo) or 'a policy gradient'} ({', '.join(words)})"
