"""The words that an option of the loop accepts, by its name in `RLOOConfig`."""

from typing import Literal, get_args, get_origin

from rloo_kit.config.schema import OPTIONS


def choices(name: str) -> tuple[str, ...]:
    annotation = OPTIONS[name].type
    parts = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    return tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
