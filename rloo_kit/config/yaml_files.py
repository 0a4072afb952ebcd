"""YAML 1.2 files (`5e-6` is a number, `no` is text) and overrides, with the line of every key for error messages."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml.representer import SafeRepresenter

from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.system.input_files import (
    Key,
    TooManyNodes,
    collect_lines,
    find_unwritable,
    make_reader,
    parse_yaml,
    read_text,
)

Lines = dict[Key, int]


class _Representer(SafeRepresenter):
    """Lists of plain values on one line; 1.0e-05 rather than 1e-05, which YAML 1.1 readers read as text."""

    def represent_list(self, data: list[Any]) -> Any:
        plain = not any(isinstance(item, (list, dict)) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=plain)

    def represent_float(self, data: float) -> Any:
        node = super().represent_float(data)
        if "." not in node.value:
            node.value = node.value.replace("e", ".0e")
        return node


_Representer.add_representer(list, _Representer.represent_list)
_Representer.add_representer(float, _Representer.represent_float)


def read_yaml(text: str, source: str = "the configuration") -> tuple[dict[str, Any], Lines]:
    """A YAML mapping and the line of each of its keys; `source` is its name in errors.

    >>> read_yaml("rloo:\\n  learning_rate: 5e-6\\n")
    ({'rloo': {'learning_rate': 5e-06}}, {('rloo',): 1, ('rloo', 'learning_rate'): 2})

    Raises:
        ConfigError: the text is not YAML, not a mapping, or gives a key twice; with the line.
    """
    values, node = parse_yaml(text, source)
    values = {} if node is None else values
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source}: contains a {type(values).__name__}; it needs a mapping of sections (model:, rloo:, ...)"
        )
    return values, collect_lines(node)


def read_value(text: str) -> Any:
    """A single value from the command line: 0.0, null, true, [1, 2], {r: 8}; anything else is text.

    >>> read_value("5e-6"), read_value("[64, 128]"), read_value("null"), read_value("a: b: c")
    (5e-06, [64, 128], None, 'a: b: c')

    Raises:
        ConfigError: its aliases expand to more values than a file may have.
    """
    try:
        return parse_yaml(text, "the value")[0]
    except TooManyNodes:
        raise
    except ConfigError:
        return text


def write_value(value: Any) -> str:
    """A single value in the form of an override, which `read_value` reads back to the same value; text that YAML would
    read as another type is quoted.

    >>> write_value(None), write_value(True), write_value("outputs/sums"), write_value("outputs #1")
    ('null', 'true', 'outputs/sums', '"outputs #1"')
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str):
        return repr(value)
    return value if read_value(value.strip()) == value else json.dumps(value, ensure_ascii=False)


def read_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """`read_yaml` of the file at `path`. Raises ConfigError if it is missing, not UTF-8, not a regular
    file or not a YAML mapping."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        there = f"; there are {', '.join(near)}" if near else ""
        raise ConfigError(f"no configuration file at {path}{there}") from None
    return read_yaml(text, str(path))


def apply_override(values: dict[str, Any], override: str) -> Key:
    """Set one `section.key=value` in `values`, in place, and return its path; list items are addressed by index.
    Raises ConfigError if there is no `=`, if a key is empty, or if a path goes through a value without keys."""
    key, equals, text = override.partition("=")
    words = key.strip().lstrip("-").split(".")  # an index has ASCII digits (unlike `²` and `٣`), at most 9
    parts: list[str | int] = [int(p) if p.isascii() and p.isdecimal() and len(p) <= 9 else p for p in words]
    if problem := find_unwritable(override):
        raise ConfigError(f"the override '{override}' contains {problem}")
    if not equals or "" in parts:
        raise ConfigError(f"the override '{override}' is not of the form section.key=value, for example rloo.beta=0.0")
    place: Any = values
    for depth, part in enumerate(parts):
        start = f"the override '{override}': "
        above, here = (".".join(map(str, parts[:end])) for end in (depth, depth + 1))
        if isinstance(place, list):
            if not isinstance(part, int) or part >= len(place):
                raise ConfigError(f"{start}{above} is a list of {len(place)}; use an index below that")
        elif not isinstance(place, dict):
            raise ConfigError(f"{start}{above} is {excerpt(place)}, which has no keys below it")
        if depth == len(parts) - 1:
            place[part] = read_value(text.strip())
        elif isinstance(place, dict) and place.get(part) is None:
            if isinstance(parts[depth + 1], int):
                raise ConfigError(f"{start}{here} is not a list in the file; set {here}=[...]")
            place[part] = {}
        place = place[part]
    return tuple(parts)


def merge(values: dict[str, Any], section: str, changes: Any) -> None:
    """Merge keyword sections of `load_config` into the file's: mappings by key, other values replace."""
    if isinstance(changes, dict) and isinstance(values.get(section), dict):
        for key, value in changes.items():
            merge(values[section], key, value)
    else:
        values[section] = changes


def dump_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML that `read_yaml` reads back to the same values."""
    stream = StringIO()
    yaml = make_reader()
    yaml.Representer = _Representer
    yaml.default_flow_style, yaml.width = False, 120
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(values, stream)
    return stream.getvalue()
