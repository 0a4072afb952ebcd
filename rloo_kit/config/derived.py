"""Defaults of a run that follow other keys: lengths, a thinking budget, the batch, the learning rate.

Only keys missing from the file are filled in, before it is checked; the resolved file shows them as numbers.
`config/schema.py` declares what they follow.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rloo_kit.config.batches import usual_batch
from rloo_kit.config.checks import CLOSE_TOKENS
from rloo_kit.config.schema import FULL_LEARNING_RATE, EvalSection, ModelSection
from rloo_kit.config.sft import FULL_SFT_RATE

Keys = dict[str, Any]  # keys of a section, as in the file

PROMPT_SHARE = 4  # a prompt gets 1 / PROMPT_SHARE of model.max_seq_length
LEAST_TO_THINK = 64  # tokens of a completion below which no thinking budget is proposed
ANSWER_SHARE, ANSWER = 4, 512  # a forced answer gets 1 / ANSWER_SHARE of a completion, at most ANSWER tokens
THINKING_LENGTH, EMBEDDED_LENGTH = 6144, 160  # model.max_seq_length by kind of model
# By the last part of a name, before there is a tokenizer: models that always think, and hybrid ones that think by
# default or only if asked to.
_ALWAYS = re.compile(
    r"(?<![a-z])(?<!no-)(?<!non-)(thinking|reasoning(?!.gym))|-think(-|$)|(deepseek-|open-?)r1(-|$)|r1-distill|"
    r"^qwq-\d+b(?!-preview)|openthinker|acereason|deepscaler|deepcoder|skywork-or1|exaone-deep|vibethinker",
    re.I,
)
_IF_ASKED = re.compile(r"^qwen3\.5-(0\.8|2)b(?!.*base)", re.I)
_BY_DEFAULT = re.compile(r"^(smollm3|qwen3(\.\d+)?)-(?!(0\.8|2)b)\d(?!.*(instruct|base))", re.I)


def fill_defaults(values: Any) -> Any:
    """A run's values with the missing keys that follow others filled in.

    A section given as an object has all its keys, so nothing is filled in. If a value is invalid, the keys that follow
    it keep their own defaults.
    """
    if not isinstance(values, dict) or not all(
        isinstance(values.get(name), dict) for name in ("model", "data", "rloo")
    ):
        return values
    values = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in values.items()}
    model, data, rloo = values["model"], values["data"], values["rloo"]
    if "lora" in model and model["lora"] is None:
        rloo.setdefault("learning_rate", FULL_LEARNING_RATE)
        if isinstance(values.setdefault("sft", {}), dict):
            values["sft"].setdefault("learning_rate", FULL_SFT_RATE)
    _try(lambda: rloo.setdefault("per_device_train_batch_size", usual_batch(_number(rloo, "num_generations"))))
    evaluated = values["eval"] if isinstance(values.get("eval"), dict) else {}
    _try(lambda: _fill_lengths(model, data, rloo, _evaluated_length(evaluated, rloo)))
    return values


def _try(fill: Callable[[], Any]) -> None:
    """Call `fill`; ignore an invalid number, which the key's own check refuses later."""
    try:
        fill()
    except (ValueError, TypeError, OverflowError):
        return


def _number(keys: Mapping[str, Any], name: str) -> int | None:
    """A whole number of at least 1, or None if not set; raises ValueError, TypeError or OverflowError otherwise."""
    value = keys.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or int(value) != float(value) or int(value) < 1:
        raise ValueError(name)
    return int(value)


def _fill_lengths(model: Keys, data: Keys, rloo: Keys, evaluated: int) -> None:
    """Prompt and completion within `model.max_seq_length`, and the thinking within the completion."""
    prompt, completion = _number(data, "max_prompt_length"), _number(rloo, "max_completion_length")
    needed = max(completion or _least_completion(rloo), evaluated)
    whole = _number(model, "max_seq_length")
    if whole is None:
        usual = _usual_length(model)
        share = usual // PROMPT_SHARE
        whole = max(usual, (prompt or share) + (needed if completion else max(needed, usual - share)))
        model.setdefault("max_seq_length", whole)
    if prompt is None:
        prompt = max(min(whole // PROMPT_SHARE, whole - needed), 1)
        data.setdefault("max_prompt_length", prompt)
    if completion is None:
        completion = max(whole - prompt, 1)
        rloo.setdefault("max_completion_length", completion)
    answer = _number(rloo, "answer_budget") or min(completion // ANSWER_SHARE, ANSWER)
    budget = completion - answer - _closing(rloo)
    short = _is_embedded(model) or completion < LEAST_TO_THINK  # no room to cut thinking short
    if thinks_by_keys(model) and not short and budget > 0:
        rloo.setdefault("thinking_budget", budget)


def _least_completion(rloo: Keys) -> int:
    """Tokens of a completion that the given budgets need."""
    thinking = _number(rloo, "thinking_budget")
    return (thinking + _closing(rloo) if thinking else 0) + (_number(rloo, "answer_budget") or 1)


def _evaluated_length(evaluated: Keys, rloo: Keys) -> int:
    """Tokens of the longest completion set for the evaluation; 0 if it uses training's length."""
    budgets = evaluated.get("thinking_budgets") or [0]
    answer = _number(evaluated, "answer_budget") or int(EvalSection.model_fields["answer_budget"].default)
    budget = max(int(one) for one in budgets)
    return max(_number(evaluated, "max_completion_length") or 0, budget + _closing(rloo) + answer if budget else 0)


def _closing(rloo: Keys) -> int:
    return CLOSE_TOKENS.get(str(rloo.get("thinking_close")), CLOSE_TOKENS["tag"])


def _is_embedded(model: Keys) -> bool:
    return str(model.get("name")).startswith("embedded/")


def _usual_length(model: Keys) -> int:
    if _is_embedded(model):
        return EMBEDDED_LENGTH
    return THINKING_LENGTH if thinks_by_keys(model) else int(ModelSection.model_fields["max_seq_length"].default)


def always_thinks(name: str) -> bool:
    """Whether a model thinks whatever its template says, according to its name.

    >>> always_thinks("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"), always_thinks("Qwen/Qwen3-0.6B")
    (True, False)
    """
    return any(_ALWAYS.search(part) for part in _names_in(name))


def thinks_if_asked(name: str) -> bool:
    """Whether a hybrid model thinks only with `enable_thinking: true`, according to its name."""
    return any(_IF_ASKED.search(part) for part in _names_in(name))


def thinks_by_keys(model: Mapping[str, Any]) -> bool:
    """Whether the model thinks according to the keys of `model:`: by its family, else by its name.

    >>> thinks_by_keys({"name": "Qwen/Qwen3-0.6B"}), thinks_by_keys({"name": "Qwen/Qwen3-4B-Instruct-2507"})
    (True, False)
    """
    family, switch, name = model.get("family", "auto"), model.get("enable_thinking"), str(model.get("name"))
    if family == "auto" and switch is None:
        return always_thinks(name) or any(_BY_DEFAULT.search(part) for part in _names_in(name))
    return family == "thinking" or (family in ("auto", "hybrid") and switch is not False)


def _names_in(name: str) -> list[str]:
    """What may name a model: the last part of a hub id, all parts of a folder's path, or those of an adapter's base."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return [name.rstrip("/").rpartition("/")[2]]
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
        return _names_in(str(base))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return list(folder.parts)
