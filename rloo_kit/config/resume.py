"""Keys of a configuration that may differ when a run is resumed; changes to others are refused."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rloo_kit.config.old_names import translate_file
from rloo_kit.config.run import RunConfig
from rloo_kit.config.yaml_files import read_yaml
from rloo_kit.errors import ConfigError

# Keys that change only what is written, or how and where the same gradient is computed.
FREE_ON_RESUME = (
    "rloo.logging_steps", "rloo.save_steps", "rloo.save_total_limit", "rloo.report_to", "rloo.memory",
    "rloo.tokens_per_pass", "rollout.engine", "rollout.rows",
    "rollout.server_url", "rollout.server_adapters", "rollout.vllm.gpu_memory_utilization",
    "rollout.vllm.max_num_seqs", "rollout.vllm.float8_kv_cache", "rollout.vllm.enforce_eager",
)  # fmt: skip
# The default before null, which adapts the same layers of the models that it fitted.
OLD_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAY_GROW_ON_RESUME = ("rloo.max_steps", "rloo.num_train_epochs")
COMPARED_ON_RESUME = ("model", "data", "rewards", "rloo", "rollout")


def changed_keys(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with the saved and the new value.

    >>> changed_keys({"rloo": {"beta": 0.0, "max_steps": 5}}, {"rloo": {"beta": 0.1, "max_steps": 5}})
    {'rloo.beta': (0.0, 0.1)}
    """
    left, right = _flatten(saved), _flatten(now)
    keys = [*left, *(key for key in right if key not in left)]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def refuse_changes(trained: str, resolved: str, folder: Path, by_content: Collection[str] = ()) -> None:
    """Raise ConfigError, listing old and new values, if resuming the run in `folder` would train differently.

    `run.*` except the seed and `eval.*` may differ, and so may the keys in FREE_ON_RESUME; those in MAY_GROW_ON_RESUME
    only upwards. In the sections `by_content`, whose files are compared later, a file may have moved.
    """
    saved, now = _fill_in(read_yaml(trained, f"the configuration of {folder}")[0], read_yaml(resolved)[0])
    refused = {
        key: pair
        for key, pair in changed_keys(saved, now).items()
        if (key == "run.seed" or key.partition(".")[0] in COMPARED_ON_RESUME)  # the seed orders the prompts
        and not (key in FREE_ON_RESUME or _moved(key, *pair, by_content))
        and not (key in MAY_GROW_ON_RESUME and (None in pair or pair[1] > pair[0]))
    }
    if refused:
        lines = [f"  {key}: {old!r} then, {new!r} now" for key, (old, new) in refused.items()]
        raise ConfigError(
            f"the run in {folder} cannot be resumed with a different configuration. These keys differ:\n"
            + "\n".join(lines)
            + "\nrestore them (max_steps may grow, other run.* may change), or start over: --overwrite or run.name=..."
        )


def _fill_in(saved: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both with defaults for keys newer than the saved run; unchanged if either is not a valid run."""
    try:
        for values in (saved, now):
            translate_file(values)
        filled = [RunConfig.model_validate(values).model_dump(mode="json") for values in (saved, now)]
    except (ValidationError, ConfigError):
        return saved, now
    lora, default = filled[0]["model"]["lora"], filled[1]["model"]["lora"]
    if lora and default and default["target_modules"] is None and lora["target_modules"] == OLD_TARGETS:
        lora["target_modules"] = None
    return filled[0], filled[1]


def _moved(key: str, old: Any, new: Any, sections: Collection[str]) -> bool:
    """Whether both are a file or folder of one name; a module may have its file's ending."""
    names = [Path(one).name.replace(".py:", ":") for one in (old, new) if isinstance(one, str)]
    return key.partition(".")[0] in sections and ".params" not in key and len(names) == 2 and names[0] == names[1]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        pairs = enumerate(value)
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in pairs:
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat
