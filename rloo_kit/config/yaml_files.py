"""YAML 1.2 files (`5e-6` is a number, `no` is text) and overrides, with the line of every key for error messages."""

import json
import re
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from ruamel.yaml.representer import SafeRepresenter

from rloo_kit.errors import ConfigError
from rloo_kit.system.input_files import (
    Key,
    collect_lines,
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
    """A single value from the command line: 0.0, null, true, [1, 2], {r: 8}. Anything else is text, also what YAML
    would drop or change in part; quotes around the whole are removed.

    >>> read_value("5e-6"), read_value("[64, 128]"), read_value("null"), read_value("a: 1 to 5"), read_value("a # b")
    (5e-06, [64, 128], None, 'a: 1 to 5', 'a # b')
    """
    if (quoted := unquote(text)) is not None:
        return quoted
    try:
        value = parse_yaml(text, "the value")[0]
        tokens = [(token.start_mark.index, token.end_mark.index, token.id) for token in make_reader().scan(text)]
    except ConfigError:
        return text
    between = "".join(text[before[1] : after[0]] for before, after in pairwise(tokens))
    is_changed = "#" in between or any(kind in _DROPPED or _CHANGED.fullmatch(text[a:b]) for a, b, kind in tokens)
    is_set = ":" not in text and "{" in re.sub(r"\{\s*\}", "", text)  # {a, b}
    is_block = isinstance(value, dict | list) and text.strip()[0] not in "[{"
    return text if isinstance(value, str) or is_changed or is_set or is_block else value


_DROPPED = ("<alias>", "<anchor>", "<directive>", "<document end>", "<document start>", "<tag>")
_CHANGED = re.compile(r"[-+]?(0\d|\d+_)[\d_.]*")  # 007, 1_000: numbers to YAML
_QUOTED = re.compile(r"""'((?:[^']|'')*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)


def unquote(text: str) -> str | None:
    """`text` without the quotes around the whole of it, or None; inside, '' and \\" stand for quotes, as in YAML.

    >>> unquote(' "####" '), unquote("'it''s'"), unquote('"a" and "b"')
    ('####', "it's", None)
    """
    if (found := _QUOTED.fullmatch(text.strip())) is None:
        return None
    return found[1].replace("''", "'") if found[2] is None else found[2].replace('\\"', '"')


def write_value(value: Any) -> str:
    """A single value in the form of an override that gives it back: text that would be read as another type is quoted.

    >>> write_value(None), write_value([True, "a"]), write_value("outputs #1"), write_value("5")
    ('null', '[true, "a"]', 'outputs #1', '"5"')
    """
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if read_value(value) == value:
        return value
    return f'"{value}"' if not {'"', "\\"} & set(value) else "'" + value.replace("'", "''") + "'"


def read_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """`read_yaml` of the file at `path`; ConfigError as `read_text`, and if it is missing or not a YAML mapping."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        there = f"; there are {', '.join(near)}" if near else ""
        raise ConfigError(f"no configuration file at {path}{there}") from None
    return read_yaml(text, str(path))


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
