"""The words that an option of the loop accepts, by its name in `RLOOConfig`."""

from typing import Literal, get_args, get_origin, get_type_hints

from rloo_kit.config.schema import RLOOSection, RolloutSection, RunSection

_ANNOTATIONS = {
    name: get_type_hints(section)[key]
    for section in (RLOOSection, RolloutSection, RunSection)
    for name, key in section.arguments().items()
}


def choices(name: str) -> tuple[str, ...]:
    annotation = _ANNOTATIONS[name]
    parts = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    return tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
