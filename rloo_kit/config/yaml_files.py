"""Reading a configuration file and the overrides of a command line into plain values.

YAML as most people think it is: `5e-6` is a number, `no` and `on` are text until a key that takes true or false reads
them, a date is text, and a key given twice is an error (PyYAML keeps the last one, silently). The line of every key is
kept, so that an error can point at it.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from rloo_kit.errors import ConfigError

Key = tuple[str | int, ...]
Lines = dict[Key, int]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2 and without duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As read, before `<<` is filled in: a key that overrides a merged one is not given twice."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key_node.value}' is given twice; keep one", key_node.start_mark
                    )
                seen.add(key_node.value)
        return node

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """An alias of the node that it stands in would be a run without an end."""
        event = self.peek_event()
        open_node = self.anchors.get(event.anchor) if isinstance(event, yaml.AliasEvent) else None
        if isinstance(open_node, yaml.CollectionNode) and open_node.end_mark is None:
            raise yaml.composer.ComposerError(
                None, None, f"the alias '*{event.anchor}' stands within what it names", event.start_mark
            )
        return super().compose_node(parent, index)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    digits = loader.construct_scalar(node).replace("_", "")
    try:
        return int(digits, 0 if "x" in digits else 10)
    except ValueError:  # Python reads no more than 4300 digits
        raise yaml.constructor.ConstructorError(
            None, None, f"a number of {len(digits)} digits", node.start_mark
        ) from None


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", loader.construct_scalar(node).replace("_", "").lower()))


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.yaml_implicit_resolvers.setdefault("", []).append(("tag:yaml.org,2002:null", re.compile("^$")))
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def read_yaml(text: str, source: str = "the configuration") -> tuple[dict[str, Any], Lines]:
    """A YAML mapping and the line of each of its keys.

    >>> read_yaml("rloo:\\n  learning_rate: 5e-6\\n")
    ({'rloo': {'learning_rate': 5e-06}}, {('rloo',): 1, ('rloo', 'learning_rate'): 2})

    Args:
        text: the file's text.
        source: how errors call it.

    Raises:
        ConfigError: the text is not YAML, not a mapping, or gives a key twice; says the line.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        values = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source}{f':{mark.line + 1}' if mark else ''}: not readable as YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not readable as YAML: brackets or keys within each other, too deep") from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source}: holds a {type(values).__name__}; a mapping of sections (model:, rloo:, ...) is needed"
        )
    lines: Lines = {}
    _collect_lines(node, (), lines)
    return values, lines


def _collect_lines(node: yaml.Node | None, path: Key, lines: Lines) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            lines[(*path, key_node.value)] = key_node.start_mark.line + 1
            _collect_lines(value_node, (*path, key_node.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _collect_lines(item, (*path, index), lines)


def read_value(text: str) -> Any:
    """A single value as the command line gives it: 0.0, null, true, [1, 2], {r: 8}; anything else is text.

    >>> read_value("5e-6"), read_value("[64, 128]"), read_value("null"), read_value("a: b: c")
    (5e-06, [64, 128], None, 'a: b: c')
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError):
        return text


def read_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """The values and the lines of the YAML file at `path`.

    Raises:
        ConfigError: there is no such file, it is not UTF-8 text, or it is not a YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        there = f"; there are {', '.join(near)}" if near else ""
        raise ConfigError(f"no configuration file at {path}{there}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    return read_yaml(text, str(path))


def apply_override(values: dict[str, Any], override: str) -> Key:
    """Set one `section.key=value` in `values`, in place; a list's items are reached by their index.

    Returns:
        the path that was set.

    Raises:
        ConfigError: no `=`, an empty key, or a path through something that has no keys.
    """
    key, equals, text = override.partition("=")
    parts: list[str | int] = [int(p) if p.isdigit() else p for p in key.strip().lstrip("-").split(".")]
    if not equals or "" in parts:
        raise ConfigError(f"the override '{override}' is not of the form section.key=value, for example rloo.beta=0.0")
    place: Any = values
    for depth, part in enumerate(parts):
        if isinstance(place, list):
            if not isinstance(part, int) or part >= len(place):
                above = ".".join(map(str, parts[:depth]))
                raise ConfigError(
                    f"the override '{override}': {above} is a list of {len(place)}; use an index below that"
                )
        elif not isinstance(place, dict):
            above = ".".join(map(str, parts[:depth]))
            raise ConfigError(f"the override '{override}': {above} is {place!r}, which has no keys below it")
        if depth == len(parts) - 1:
            place[part] = read_value(text.strip())
        else:
            if isinstance(place, dict) and place.get(part) is None:
                if isinstance(parts[depth + 1], int):
                    above = ".".join(map(str, parts[: depth + 1]))
                    raise ConfigError(
                        f"the override '{override}': there is no {above} to take an item of; set {above}=[...]"
                    )
                place[part] = {}
            place = place[part]
    return tuple(parts)


def merge(values: dict[str, Any], section: str, changes: Any) -> None:
    """Lay keyword sections of `load_config` over the file's: mappings by key, everything else replaces."""
    if isinstance(changes, dict) and isinstance(values.get(section), dict):
        for key, value in changes.items():
            merge(values[section], key, value)
    else:
        values[section] = changes


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would read as something else; lists of plain values go on one line."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    plain = not any(isinstance(item, (list, dict)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=plain)


_Dumper.add_representer(list, _represent_list)


def dump_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML that `read_yaml` reads back to the same values."""

    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)
