"""What is wrong with a configuration, in plain words.

pydantic finds the faults; this module says for each the dotted key, what was found, what the limit is and, for an
unknown key, the nearest known one.
"""

import difflib
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel


def accepts_bool(annotation: Any) -> bool:
    """True if a field so annotated may hold true or false."""
    if annotation is bool or annotation is Any:
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return any(isinstance(argument, bool) for argument in arguments)
    if origin in (Union, UnionType, Annotated):
        return any(accepts_bool(argument) for argument in arguments)
    return False


def suggest(word: str, known: list[str]) -> str:
    """`; did you mean ...?` for the known name nearest to `word`, or the list of them if it is short enough to help."""
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if nearest:
        return f"; did you mean '{nearest[0]}'?"
    return f"; known here: {', '.join(sorted(known))}" if len(known) <= 60 else ""


def describe_type(annotation: Any) -> str:
    """A field's type in plain words."""
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
    return {list: "a list", tuple: "a list", dict: "a mapping"}.get(origin or annotation, "a mapping")


def explain_error(entry: Any, model: type[BaseModel], prefix: str = "") -> str:
    """One of pydantic's errors in plain words: dotted key, what was found, what the limit is.

    Args:
        entry: an item of `ValidationError.errors()`.
        model: the model that was validated.
        prefix: dotted path of that model in the file, with a trailing dot.
    """
    path = [part for part in entry["loc"] if not (isinstance(part, str) and part.startswith(("function-", "literal[")))]
    fields, annotation, where = model.model_fields, None, ""
    for part in path:
        if isinstance(part, int):
            where += f"[{part}]"
            continue
        if annotation is not None and not fields:
            continue  # the branch of a union that pydantic names in its path
        where += f".{part}" if where else str(part)
        annotation = fields[part].annotation if part in fields else None
        fields = _fields_below(annotation)
    key = prefix + where
    found, context = entry.get("input"), entry.get("ctx", {})
    kind = entry["type"]
    if kind == "extra_forbidden":
        parent = model
        for part in path[:-1]:
            if isinstance(part, str) and part in parent.model_fields:
                parent = _model_below(parent.model_fields[part].annotation) or parent
        return f"{key}: unknown key{suggest(str(path[-1]), list(parent.model_fields))}"
    if kind == "missing":
        return f"{key}: required, and not there; add it to the file or to the command line as {key}=..."
    if kind == "value_error":
        return f"{key}: {context['error']}" if key else str(context["error"])
    bounds = {
        "greater_than_equal": "at least {ge}", "greater_than": "above {gt}",
        "less_than_equal": "at most {le}", "less_than": "below {lt}",
    }  # fmt: skip
    if kind in bounds:
        return f"{key}: is {found}; it must be {bounds[kind].format(**context)}"
    if kind == "literal_error":
        return f"{key}: is {found!r}; it must be {context['expected']}"
    if kind == "finite_number":
        return f"{key}: is {found}; it must be a finite number"
    if kind in ("string_too_short", "too_short"):
        return f"{key}: is empty; it needs at least {context.get('min_length', 1)}"
    return f"{key}: is {found!r}; it takes {describe_type(annotation)}"


def _model_below(annotation: Any) -> type[BaseModel] | None:
    """The section that a field's annotation holds, alone, in a list or beside null."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_below(part)) is not None), None)


def _fields_below(annotation: Any) -> dict[str, Any]:
    model = _model_below(annotation)
    return model.model_fields if model is not None else {}
