"""A notebook's parameters: read from its variables, checked by name and type, and turned into overrides.

papermill puts values in place by running one more cell after the one tagged `parameters`. A name that the notebook does
not know is only a warning to it, `-p flag true` arrives as the text 'true', and of a YAML file `learning_rate: 1e-6` as
a text and `run_name: no` as False. Here an unknown name and a value of the wrong type are refused by name, and
numbers and switches are understood as text too. Bounds are left to `load_config`, which knows them.

Left out: parameters of one's own. A key of the configuration that has no parameter goes through `overrides`.
"""

import difflib
import json
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_kit.config.messages import suggest
from rloo_kit.config.old_names import CONFIG_NAMES
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import Section
from rloo_kit.config.yaml_files import read_value
from rloo_kit.errors import ConfigError
from rloo_kit.notebook.parameter_cells import assigned_names
from rloo_kit.notebook.parameter_values import KNOWN


@dataclass
class Parameters:
    """What `read_parameters` found. Prints as a table.

    Attributes:
        config: the configuration's file, absolute.
        overrides: `section.key=value`, for `load_config`.
        resume, overwrite: for `train`; False where the notebook does not have them.
        values: every parameter by its name, as it was understood; paths are absolute.
    """

    config: Path
    overrides: list[str]
    resume: bool = False
    overwrite: bool = False
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("parameter", "value", "sets")]
        for name, value in self.values.items():
            key = KNOWN[name].key
            target = f"({KNOWN[name].without})" if key is None or value in ("", None) and name == "run_name" else key
            rows.append((name, " ".join(value) if isinstance(value, list) else str(value), target))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows)

    __repr__ = __str__


def read_parameters(namespace: Mapping[str, Any]) -> Parameters:
    """The parameters of the notebook whose variables these are: `read_parameters(globals())`, in the cell after them.

    Which names were meant as parameters is read from the cells that have run and start with `# Parameters`: the
    notebook's own and the one that papermill adds; in a plain script from the script's file. Where there is neither,
    every known name counts and an unknown one cannot be told. What a notebook does not declare is not overridden.

    Args:
        namespace: `globals()`. Relative paths: `output_dir` lies in the project's folder, which is the nearest one at
            or above the working directory with a pyproject.toml, .git, configs/ or .env, else the kit's own. `config`
            is looked for there, then in the working directory, then in the kit's own folder.

    Raises:
        ConfigError: everything that is wrong, one line for each name: unknown (with the nearest known name), of the
            wrong type, a file that is not there (with the places), `overrides` that cannot be read.
    """
    assigned = assigned_names(namespace)
    names = [name for name in (KNOWN if assigned is None else assigned) if name in KNOWN and name in namespace]
    problems = [_refuse(name, place) for name, place in (assigned or {}).items() if name not in KNOWN]
    values: dict[str, Any] = {}
    for name in sorted(names, key=list(KNOWN).index):
        try:
            values[name] = KNOWN[name].read(namespace[name])
        except ValueError as error:
            problems.append(f"{name}: is {_show(namespace[name])}; {error}")
    if "config" not in names:
        problems.append("config: not set; it names the run's file. Run the cell that starts with '# Parameters' first")
    if problems:
        raise ConfigError("\n".join(problems))
    return _collect(values)


def _collect(values: dict[str, Any]) -> Parameters:
    """The parameters once each value has its type: what holds between them, and the overrides."""
    overrides = []
    for name, value in values.items():
        key = KNOWN[name].key
        if key is not None and not (name == "run_name" and not value):
            overrides.append(f"{key}={_override_text(value)}")
    given = {override.partition("=")[0]: override for override in overrides}
    for item in values.get("overrides", ()):
        key = item.partition("=")[0].strip().lstrip("-")
        if key in given:
            name = next(name for name, one in KNOWN.items() if one.key == key)
            raise ConfigError(f"overrides: has {item}, and the parameter {name} sets {given[key]}; set {name} instead")
    return Parameters(
        config=Path(values["config"]),
        overrides=[*overrides, *values.get("overrides", ())],
        resume=values.get("resume", False),
        overwrite=values.get("overwrite", False),
        values=values,
    )


def _override_text(value: Any) -> str:
    """A value as an override writes it; text that YAML would read as something else goes into quotes."""
    if value is None:
        return "null"
    if not isinstance(value, str):
        return repr(value)
    return value if read_value(value.strip()) == value else json.dumps(value, ensure_ascii=False)


def _refuse(name: str, place: str) -> str:
    """An unknown name with what it may have been meant for."""
    found = f"{name}: unknown parameter ({place})"
    old = CONFIG_NAMES.get(name)
    if old is not None and old.new is not None:
        return f"{found}; it is an old TRL name of {old.new}: {_way_to(old.new)}"
    if _keys_of(name):
        return f"{found}; {_way_to(name)}"
    if difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.6):
        return found + suggest(name, list(KNOWN))
    near = difflib.get_close_matches(name, _all_keys(), n=1, cutoff=0.75)
    return f"{found}; did you mean {near[0]}? {_way_to(near[0])}" if near else found + suggest(name, list(KNOWN))


def _way_to(name: str) -> str:
    """How a name that the configuration knows is given to a notebook."""
    if name in KNOWN:
        return f"set {name}"
    ways = " or ".join(f'overrides = "{key}=..."' for key in _keys_of(name))
    return f"it is a key of the configuration, so it goes into overrides: {ways}"


def _keys_of(name: str) -> list[str]:
    """The dotted keys of the configuration that end in `name`."""
    return [f"{section}.{name}" for section, model in _sections().items() if name in model.model_fields]


def _all_keys() -> list[str]:
    return [name for model in _sections().values() for name in model.model_fields]


def _sections() -> dict[str, type[Section]]:
    annotations = {section: one.annotation for section, one in RunConfig.model_fields.items()}
    return {
        section: model
        for section, model in annotations.items()
        if isinstance(model, type) and issubclass(model, Section)
    }


def _show(value: Any) -> str:
    """What was found, short enough for a line; an object that a later cell put under the name by its type alone."""
    plain = isinstance(value, str | numbers.Number | list | tuple | dict | os.PathLike) or value is None
    text = repr(value) if plain else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
