"""A strict section of a configuration: keys that map to arguments of `RLOOConfig`, and messages about wrong ones."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from rloo_kit.config.old_names import CONFIG_NAMES
from rloo_kit.config.yaml_files import Lines, read_value, unquote
from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.system.console import hide_secrets
from rloo_kit.system.input_files import Key, find_unwritable


class TrlDefault(NamedTuple):
    """TRL's default if it differs from the kit's, and why. `RLOOConfig`, a drop-in, keeps TRL's."""

    value: Any
    reason: str


def key(
    default: Any,
    description: str,
    *,
    argument: str | None = None,
    trl: TrlDefault | None = None,
    follows: str | None = None,
    resume: Literal["free", "may grow"] | None = None,
    **bounds: Any,
) -> Any:
    """A key with a default.

    Args:
        argument: its name in `RLOOConfig`; keys of `rloo:` have the same name there.
        trl: the default in `RLOOConfig`, if it differs.
        follows: the default in words, if other keys decide it (`fill_defaults` in `config/run.py`).
        resume: how it may change when a run is resumed: "free", if it changes only what is written, or how and where
            the same gradient is computed.
        bounds: those of pydantic's `Field`.
    """
    extra: dict[str, Any] = {"argument": argument, "trl": trl, "follows": follows, "resume": resume}
    return Field(default=default, description=description, json_schema_extra=extra, **bounds)


def declared(field: FieldInfo, name: str) -> Any:
    """`argument`, `trl`, `follows` or `resume` of a key; None if it has none."""
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


class Section(BaseModel):
    """A strict group of keys: unknown keys, booleans for numbers, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=())
    prefix: ClassVar[str] = ""  # of its keys, for errors on assignment
    all_are_arguments: ClassVar[bool] = False  # of `RLOOConfig`, under their own names

    @classmethod
    def arguments(cls) -> dict[str, str]:
        """The keys that are arguments of `RLOOConfig`, by their names there."""
        named = {key: declared(field, "argument") for key, field in cls.model_fields.items()}
        return {name or key: key for key, name in named.items() if name or cls.all_are_arguments}

    def to_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `RLOOConfig` from the keys that are set in this section and its subsections."""
        found = {name: value for name, key in self.arguments().items() if (value := getattr(self, key)) is not None}
        for _, value in self:
            found |= value.to_arguments() if isinstance(value, Section) else {}
        return found

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, read: Any) -> Any:
        """pydantic reads `num_iterations: true` as 1."""
        found = read(value)
        if isinstance(value, bool) and not isinstance(found, bool):
            raise ValueError(f"is {str(value).lower()}; input should be a number")
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign `value` to the key `name` after the checks of a file; raises ConfigError and keeps the old value."""
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        try:
            checked = type(self).model_validate({**dict(self), name: value})
        except ValidationError as error:
            raise ConfigError(explain_errors(error, type(self), self.prefix)) from None
        super().__setattr__(name, getattr(checked, name))


# ------------------------------------------------------------------------------------------------ overrides


def apply_override(values: dict[str, Any], override: str, model: type[BaseModel]) -> Key:
    """Set one `section.key=value` in `values`, the keys of `model`, in place, and return its path; list items are
    addressed by index. A key whose type is text keeps what is written, but null and nothing are None and quotes around
    the whole are removed; others are read by `read_value`.

    Raises ConfigError if there is no `=`, if a key is empty, or if a path goes through a value without keys.
    """
    if problem := find_unwritable(override):
        raise ConfigError(f"the override '{override}' contains {problem}")
    key, equals, text = re.fullmatch(r"([^=]*?)(\s+=\s+|=|$)(.*)", override, re.DOTALL).groups()  # type: ignore
    words = key.strip().lstrip("-").split(".")  # an index has ASCII digits (unlike `²` and `٣`), at most 9
    parts: list[str | int] = [int(p) if p.isascii() and p.isdecimal() and len(p) <= 9 else p for p in words]
    if not equals or "" in parts:
        raise ConfigError(f"the override '{override}' is not of the form section.key=value, for example rloo.beta=0.0")
    place: Any = values
    kinds: list[Any] = [model]
    for depth, part in enumerate(parts):
        start = f"the override '{override}': "
        above, here = (".".join(map(str, parts[:end])) for end in (depth, depth + 1))
        if isinstance(place, list):
            if not isinstance(part, int) or part >= len(place):
                raise ConfigError(f"{start}{above} is a list of {len(place)}; use an index below that")
        elif not isinstance(place, dict):
            raise ConfigError(f"{start}{above} is {excerpt(place)}, which has no keys below it")
        kinds = _kinds_below(kinds, part)
        if depth == len(parts) - 1:
            place[part] = _read_as(text, kinds)
        elif isinstance(place, dict) and place.get(part) is None:
            if kinds and isinstance(parts[depth + 1], int):
                raise ConfigError(f"{start}{here} is not a list in the file; set {here}=[...]")
            place[part] = {}
        place = place[part]
    return tuple(parts)


def _read_as(text: str, kinds: list[Any]) -> Any:
    """The value of an override, for a key of these types."""
    words = (kind for kind in kinds if get_origin(kind) is Literal)
    texts = {str, type(None), *(kind for kind in words if all(isinstance(word, str) for word in get_args(kind)))}
    if not kinds or not texts.issuperset(kinds) or text == "" or text.strip() == "null":
        return read_value(text)
    return text if (quoted := unquote(text)) is None else quoted


def _kinds_of(annotation: Any) -> list[Any]:
    """The types in an annotation, without unions and metadata."""
    if get_origin(annotation) is Annotated:
        return _kinds_of(get_args(annotation)[0])
    is_union = get_origin(annotation) in (Union, UnionType)
    return [kind for part in get_args(annotation) for kind in _kinds_of(part)] if is_union else [annotation]


def _kinds_below(kinds: list[Any], part: str | int) -> list[Any]:
    """The types of the key or item `part` of values of `kinds`; none for an unknown key."""
    found: list[Any] = []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += _kinds_of(kind.model_fields[part].annotation) if part in kind.model_fields else []
        else:  # list[item], tuple[item, item], dict[str, value]
            found += _kinds_of((get_args(kind) or [Any])[-1])
    return found


# ------------------------------------------------------------------------------------------------ messages


def explain_errors(
    error: ValidationError,
    model: type[BaseModel],
    prefix: str = "",
    file: Path | None = None,
    lines: Lines | None = None,
    changed: dict[Key, str] | None = None,
) -> str:
    """All errors of `model`, one per line: the dotted key, what was found, pydantic's rule or the nearest key.
    `prefix`: the dotted path of `model` in its file, with a trailing dot. The place of each error is its line in the
    `file`, or the override that set the key (`changed`)."""
    found: dict[str, None] = {}  # a dict, because a union reports the same error once per branch
    for entry in error.errors():
        place = "" if file is None else f"{_find_place(entry['loc'], file, lines or {}, changed or {})}: "
        found |= {f"{place}{message}": None for message in _explain(entry, model, prefix).split("\n")}
    return hide_secrets("\n".join(found))


def _explain(entry: Any, model: Any, prefix: str) -> str:
    keys: list[str | int] = []
    parent, kinds = model, [model]  # the section of the last key, and the types of what stands at it
    for part in entry["loc"]:
        parent = next((kind for kind in kinds if hasattr(kind, "model_fields")), parent)
        if isinstance(part, str) and not any(kind is parent or get_origin(kind) is dict for kind in kinds):
            break  # pydantic's name of a union's branch
        kinds = _kinds_below(kinds, part)
        keys.append(part)
    kind, rule = entry["type"], entry["msg"]
    if kind == "missing" and isinstance(keys[-1], int):  # in a list of fixed length
        rule = f"item {keys.pop()} is missing"
    key = (prefix + ".".join(map(str, keys))).rstrip(".")
    if kind == "extra_forbidden":
        above, dot, name = key.rpartition(".")
        old = CONFIG_NAMES.get(name)
        new = (old and old.new) or name  # the same name, or today's for an old one, in another section
        for section, field in model.model_fields.items():
            if any(new in getattr(kind, "model_fields", ()) for kind in _kinds_of(field.annotation)):
                return f"{key}: unknown key; did you mean {section}.{new}?"
        return f"{key}: unknown key{suggest(name, parent.model_fields, above + dot)}"
    if kind == "missing" and entry["loc"][-1] == keys[-1]:
        return f"{key}: required but missing; add it to the file, or to the command line as {key}=..."
    if kind == "value_error":
        return f"{key}: {entry['ctx']['error']}" if key else str(entry["ctx"]["error"])
    value = entry["input"]
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else excerpt(value, 300)
    quote = " (put it in quotes)" if kind == "string_type" and isinstance(value, (int, float)) else ""
    if isinstance(value, str) and kind.startswith(("list", "dict", "model", "tuple")):
        quote = "; in YAML a # or a 007 in it needs quotes, and a key is given once"
    return f"{key}: is {shown}; {rule[0].lower()}{rule[1:]}{quote}"


def suggest(word: str, known: Iterable[str], above: str = "") -> str:
    """`; did you mean ...?` with the nearest known name, else a list of all, if there are at most 60.

    >>> suggest("bta", ["beta", "top_p"], "rloo.")
    '; did you mean rloo.beta?'
    """
    nearest = difflib.get_close_matches(word, known := sorted(known), n=1, cutoff=0.6)
    if nearest:
        return f"; did you mean {above}{nearest[0]}?"
    return f"; known here: {', '.join(known)}" if len(known) <= 60 else ""


def _find_place(where: Key, file: Path, lines: Lines, changed: dict[Key, str]) -> str:
    """The override or the line of an error; for a whole section, its line and the overrides in it."""
    for key, override in changed.items():
        if where[: len(key)] == key:
            return f"override {override}"
    line = next((lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in lines), None)
    within = [override for key, override in changed.items() if key[: len(where)] == where]
    place = f"{file}:{line}" if line else str(file)
    return f"{place} with {', '.join(within)}" if within else place
