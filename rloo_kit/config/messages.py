"""Error messages of a configuration: the dotted key, what was found, the limit, the nearest known key."""

import difflib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rloo_kit.config.old_names import CONFIG_NAMES
from rloo_kit.config.yaml_files import Key, Lines
from rloo_kit.errors import excerpt
from rloo_kit.system.console import hide_secrets


def accepts_bool(annotation: Any) -> bool:
    """True if a field with this annotation accepts true or false."""
    if annotation is bool or annotation is Any:
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return any(isinstance(argument, bool) for argument in arguments)
    if origin in (Union, UnionType, Annotated):
        return any(accepts_bool(argument) for argument in arguments)
    return False


def suggest(word: str, known: list[str], above: str = "") -> str:
    """`; did you mean ...?` with the nearest known name, else a list of all, if there are at most 60.

    >>> suggest("bta", ["beta", "top_p"], "rloo.")
    '; did you mean rloo.beta?'
    """
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if nearest:
        return f"; did you mean {above}{nearest[0]}?"
    return f"; known here: {', '.join(sorted(known))}" if len(known) <= 60 else ""


def describe_type(annotation: Any) -> str:
    """A field's type in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if annotation in words:
        return words[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(arguments[0])
    if origin is Literal:
        return ", ".join(repr(argument) for argument in arguments)
    if origin in (Union, UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is tuple:
        return f"a list of {len(arguments)} ({', '.join(describe_type(argument) for argument in arguments)})"
    return "a list" if origin is list else "a mapping"


def describe_field(field: FieldInfo) -> str:
    """A field's type and bounds in words: "a whole number or null, at least 1"; bounds of 2**31 and more are left
    out."""
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    metadata = list(field.metadata)
    if get_origin(field.annotation) in (Union, UnionType):  # Annotated[int, Field(ge=1)] | None
        parts = [get_args(part)[1:] for part in get_args(field.annotation) if get_origin(part) is Annotated]
        metadata += [item for inner in parts for info in inner for item in info.metadata]
    found = [
        f"{word} {value:g}"
        for item in metadata
        for sign, word in signs.items()
        if (value := getattr(item, sign, None)) is not None and value < 2**31
    ]
    return describe_type(field.annotation) + (f", {' and '.join(found)}" if found else "")


def explain_error(entry: Any, model: type[BaseModel], prefix: str = "") -> str:
    """One of pydantic's errors (an item of `ValidationError.errors()` of `model`) as a message: key, found, limit.
    `prefix` is the dotted path of `model` in the file, with a trailing dot."""
    path = [part for part in entry["loc"] if not (isinstance(part, str) and part.startswith(("function-", "literal[")))]
    kind, found = entry["type"], entry.get("input")
    if kind == "missing" and isinstance(path[-1], int):  # an item of a fixed-length list: report the list
        path.pop()
    known, annotation = _follow(path, model)
    key = (prefix + ".".join(map(str, known))).rstrip(".")
    context = {name: _whole(value) for name, value in entry.get("ctx", {}).items()}
    if kind == "extra_forbidden":
        parent = model
        for part in known[:-1]:
            if part in parent.model_fields:
                parent = _model_below(parent.model_fields[str(part)].annotation) or parent
        return f"{key}: unknown key{_suggest_key(str(known[-1]), key, parent, model)}"
    if kind == "missing" and isinstance(entry["loc"][-1], str):
        return f"{key}: required but missing; add it to the file, or to the command line as {key}=..."
    if kind == "value_error":
        return f"{key}: {context['error']}" if key else str(context["error"])
    limits = {
        "greater_than_equal": "at least {ge}",
        "greater_than": "above {gt}",
        "less_than_equal": "at most {le}",
        "less_than": "below {lt}",
        "finite_number": "a finite number",
    }
    if kind in limits:
        return f"{key}: is {_show(found)}; it must be {limits[kind].format(**context)}"
    if kind in ("string_too_short", "too_short"):
        return f"{key}: is empty; it needs at least {context['min_length']}"
    quote = " (put it in quotes)" if kind == "string_type" and isinstance(found, (int, float)) else ""
    return f"{key}: is {_show(found)}; it takes {describe_type(annotation)}{quote}"


def explain_errors(
    error: ValidationError, model: type[BaseModel], path: Path, lines: Lines, changed: dict[Key, str]
) -> str:
    """All errors of a file, one per line, each with its place; `changed` maps the keys set by overrides to the
    overrides."""
    messages: dict[str, None] = {}  # a dict, because a union reports the same error once per branch
    for entry in error.errors():
        place = _place(tuple(entry["loc"]), path, lines, changed)
        messages |= {f"{place}: {message}": None for message in explain_error(entry, model).split("\n")}
    return hide_secrets("\n".join(messages))


def _place(where: Key, path: Path, lines: Lines, changed: dict[Key, str]) -> str:
    """The override or the line of an error; for a whole section, its line and the overrides in it."""
    for key, override in changed.items():
        if where[: len(key)] == key:
            return f"override {override}"
    line = next((lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in lines), None)
    within = [override for key, override in changed.items() if key[: len(where)] == where]
    place = f"{path}:{line}" if line else str(path)
    return f"{place} with {', '.join(within)}" if within else place


def _whole(value: Any) -> Any:
    """1 for 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _show(value: Any) -> str:
    """A value as the file writes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return excerpt(value, 300)


def _follow(path: list[str | int], model: type[BaseModel]) -> tuple[list[str | int], Any]:
    """The keys of `path`, without pydantic's names of union branches, and the last key's annotation."""
    fields: dict[str, Any] = dict(model.model_fields)
    annotation: Any = None
    known: list[str | int] = []
    for part in path:
        if isinstance(part, int):
            known.append(part)
            annotation = _item_of(annotation, part)
        elif annotation is None or fields:
            known.append(part)
            annotation = fields[part].annotation if part in fields else None
            fields = _fields_below(annotation)
    return known, annotation


def _item_of(annotation: Any, index: int) -> Any:
    """The annotation of a list's item (`list[int]`, `tuple[float, float]`), alone or in a union with null."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list:
        return arguments[0]
    if origin is tuple:
        return arguments[index] if index < len(arguments) else annotation
    if origin in (Union, UnionType, Annotated):
        inner = [_item_of(argument, index) for argument in arguments]
        return next((item for item, outer in zip(inner, arguments, strict=True) if item is not outer), annotation)
    return annotation


def _suggest_key(name: str, key: str, parent: type[BaseModel], root: type[BaseModel]) -> str:
    """The same name (or today's for an old one) in another section, else the nearest in this section; dotted."""
    above, dot, _ = key.rpartition(".")
    old = CONFIG_NAMES.get(name)
    new = (old and old.new) or name
    for section, field in root.model_fields.items():
        if new in _fields_below(field.annotation):
            return f"; did you mean {section}.{new}?"
    return suggest(name, list(parent.model_fields), above + dot)


def _model_below(annotation: Any) -> type[BaseModel] | None:
    """The section class in a field's annotation, alone, in a list or in a union with null."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_below(part)) is not None), None)


def _fields_below(annotation: Any) -> dict[str, Any]:
    model = _model_below(annotation)
    return model.model_fields if model is not None else {}
