"""The parameters that a notebook may have: the key of the configuration that each sets, and how its value is read.

A reader returns the value as it is meant, or raises a ValueError that says what is wanted.
"""

import math
import numbers
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.system.env_file import find_root

KIT_ROOT = Path(__file__).resolve().parents[2]
_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _read_text(value: Any) -> str:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise ValueError("it takes text (in quotes; papermill leaves the text of -r NAME VALUE as it is)")


def _read_run_name(value: Any) -> str:
    return "" if value is None else _read_text(value)


def _read_int(value: Any) -> int:
    number = _number(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int):
        raise ValueError("it takes a whole number")
    return number


def _read_int_or_none(value: Any) -> int | None:
    if value is None or isinstance(value, str) and value.lower() in ("none", "null"):
        return None
    try:
        return _read_int(value)
    except ValueError as error:
        raise ValueError(f"{error}, or None") from None


def _read_float(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise ValueError("it takes a finite number")
    return float(number)


def _number(value: Any) -> int | float | None:
    """A finite number, given as one or as text; None for anything else, True and False included."""
    if isinstance(value, bool):
        return None
    try:
        if isinstance(value, numbers.Integral):
            return int(value) if math.isfinite(value) else None  # too large for a float: OverflowError
        number = int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() else float(value)
        return number if math.isfinite(number) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _read_bool(value: Any) -> bool:
    known = _SWITCHES.get(str(value).strip().lower())
    if known is None:
        raise ValueError("it takes True or False")
    return known


def _read_overrides(value: Any) -> list[str]:
    try:
        items = shlex.split(value) if isinstance(value, str) else list(value)
    except (TypeError, ValueError) as error:
        reason = f" ({error})" if isinstance(value, str) else ""
        raise ValueError(f'it takes text such as "rloo.temperature=0.9 eval.num_samples=4"{reason}') from None
    for item in items:
        if not isinstance(item, str) or "=" not in item:
            raise ValueError(
                f"{item!r} in it is not section.key=value; quote an item that has spaces, "
                "as in \"'eval.thinking_budgets=[16, 32]'\""
            )
    return items


def _read_output_dir(value: Any) -> str:
    text = _read_text(value)
    if not text.strip():
        raise ValueError("it takes the folder that runs are written into, such as 'outputs'")
    return str((find_root() or Path.cwd()) / Path(text).expanduser())


def _read_config(value: Any) -> str:
    text = _read_text(value)
    if not text.strip():
        raise ValueError("it takes a file, such as 'configs/arithmetic_thinking.yaml'")
    path = Path(text).expanduser()
    places = [path] if path.is_absolute() else [(root / path) for root in (find_root(), Path.cwd(), KIT_ROOT) if root]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        looked = ", ".join(dict.fromkeys(os.path.normpath(place) for place in places))
        raise ValueError(f"there is no such file; looked at {looked}")
    return os.path.normpath(found)


@dataclass(frozen=True)
class Known:
    """A parameter: the key that it sets (None: not one of the configuration), how it is read, what it does without."""

    key: str | None
    read: Callable[[Any], Any]
    without: str = ""


KNOWN: dict[str, Known] = {
    "config": Known(None, _read_config, "the run's file"),
    "run_name": Known("run.name", _read_run_name, "the file's name"),
    "output_dir": Known("run.output_dir", _read_output_dir),
    "max_steps": Known("rloo.max_steps", _read_int_or_none),
    "num_generations": Known("rloo.num_generations", _read_int),
    "learning_rate": Known("rloo.learning_rate", _read_float),
    "beta": Known("rloo.beta", _read_float),
    "max_completion_length": Known("rloo.max_completion_length", _read_int),
    "eval_prompts": Known("eval.num_prompts", _read_int_or_none),
    "seed": Known("run.seed", _read_int),
    "overrides": Known(None, _read_overrides, "further keys"),
    "resume": Known(None, _read_bool, "go on from the last checkpoint"),
    "overwrite": Known(None, _read_bool, "delete a run in the folder"),
}
