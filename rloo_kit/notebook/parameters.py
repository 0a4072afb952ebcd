"""Reads a notebook's parameters from its variables, checks names and types, and converts them to overrides.

papermill only warns of unknown names and passes `true` and `1e-6` as text; both are handled here.
"""

import ast
import contextlib
import difflib
import numbers
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from rloo_kit.config.old_names import CONFIG_NAMES
from rloo_kit.config.run import RunConfig
from rloo_kit.config.section import Section, suggest
from rloo_kit.config.yaml_files import read_value, write_value
from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.system.input_files import find_input, find_unwritable, read_text

KIT_ROOT = Path(__file__).resolve().parents[2]
# Each parameter with the key that it sets, or in parentheses what it does instead.
KNOWN = {
    "config": "(the run's file)",
    "run_name": "run.name",
    "output_dir": "run.output_dir",
    "max_steps": "rloo.max_steps",
    "num_generations": "rloo.num_generations",
    "learning_rate": "rloo.learning_rate",
    "beta": "rloo.beta",
    "max_completion_length": "rloo.max_completion_length",
    "eval_prompts": "eval.num_prompts",
    "seed": "run.seed",
    "overrides": "(further keys)",
    "resume": "(resume from the last checkpoint)",
    "overwrite": "(delete a run in the folder)",
}
SECTIONS: dict[str, type[Section]] = {
    name: one.annotation
    for name, one in RunConfig.model_fields.items()
    if isinstance(one.annotation, type) and issubclass(one.annotation, Section)
}


@dataclass
class Parameters:
    """The result of `read_parameters`. Prints as a table."""

    config: Path  # the configuration's file, absolute
    overrides: list[str]  # `section.key=value`, for `load_config`
    resume: bool  # for `train`; False if the notebook does not declare it
    overwrite: bool
    values: dict[str, Any]  # the parameters that are set, by name, converted

    def __str__(self) -> str:
        rows = [("parameter", "value", "overrides in the file")]
        for name, value in self.values.items():
            rows.append((name, " ".join(value) if isinstance(value, list) else str(value), KNOWN[name]))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows)

    __repr__ = __str__


def read_parameters(namespace: Mapping[str, Any]) -> Parameters:
    """A notebook's parameters from its variables: call `read_parameters(globals())` in the cell after them.

    The parameter names come from the executed cells that start with `# Parameters` (the notebook's and papermill's), or
    from a script's file. Without such a cell every known name counts, and unknown ones go unnoticed. A parameter that
    is not declared, or is None, leaves the key to the file. `config` is looked up in the working folder (where
    papermill or Jupyter was started), in the notebook's, then in the kit's own.

    Raises ConfigError with all problems, one line per name: an unknown name (with the nearest known one), a wrong type,
    a missing file (with the places searched), `overrides` that cannot be parsed.
    """
    assigned = assigned_names(namespace)
    problems = [_refuse(name, place) for name, place in (assigned or {}).items() if name not in KNOWN]
    values: dict[str, Any] = {}
    for name in KNOWN:
        if name in namespace and (assigned is None or name in assigned):
            if namespace[name] is None and KNOWN[name][0] != "(":
                continue  # the file's value
            try:
                values[name] = _read(name, namespace[name])
            except ValueError as error:
                problems.append(f"{name}: is {excerpt(namespace[name], 80)}; {error}")
        elif name == "config":
            fix = "Run the cell that starts with '# Parameters' first"
            problems.append(f"config: not set; it names the run's file. {fix}")
    if problems:
        raise ConfigError("\n".join(problems))
    if not values.get("run_name"):
        values.pop("run_name", None)
    names = {KNOWN[name]: name for name in values if "." in KNOWN[name]}
    overrides = {key: f"{key}={write_value(values[name])}" for key, name in names.items()}
    extra = values.get("overrides", [])
    for item in extra:
        key = item.partition("=")[0].strip().lstrip("-")
        if key in overrides:
            name = names[key]
            raise ConfigError(
                f"overrides: has {item}, but the parameter {name} sets {overrides[key]}; set {name} instead"
            )
    resume, overwrite = values.get("resume", False), values.get("overwrite", False)
    return Parameters(Path(values["config"]), [*overrides.values(), *extra], resume, overwrite, values)


def _read(name: str, value: Any) -> Any:
    """A parameter's converted value; raises ValueError with what it takes."""
    if name == "overrides":
        return _split_overrides(value)
    if name in ("resume", "overwrite"):
        try:
            return TypeAdapter(bool).validate_python(value)
        except ValidationError:
            raise ValueError("it takes True or False") from None
    if name not in ("config", "run_name", "output_dir"):
        return _read_as_field(KNOWN[name], value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | str | os.PathLike):
        raise ValueError("it takes text (in quotes; papermill leaves the text of -r NAME VALUE as it is)")
    text = str(value)
    if problem := find_unwritable(text):
        raise ValueError(f"it takes text without {problem}")
    if name != "run_name" and not text.strip():
        raise ValueError("it takes a path, such as 'configs/arithmetic_thinking.yaml' or 'outputs'")
    return os.path.normpath(find_input(text, name, KIT_ROOT)) if name == "config" else text


def _read_as_field(key: str, value: Any) -> Any:
    """A value as the configuration's field reads it; numbers and null may be text."""
    section, _, last = key.partition(".")
    model, info = SECTIONS[section], SECTIONS[section].model_fields[last]
    given = read_value("null" if value.lower() == "none" else value) if isinstance(value, str) else value
    field_type: Any = Annotated[info.annotation, info]
    try:
        read = TypeAdapter(field_type, config=model.model_config).validate_python(given)
    except ValidationError as error:
        rule = error.errors()[0]["msg"]
        raise ValueError(rule[0].lower() + rule[1:]) from None
    if isinstance(given, bool) and not isinstance(read, bool):
        raise ValueError("input should be a number")
    return read


def _split_overrides(value: Any) -> list[str]:
    try:
        if isinstance(value, str):
            lexer = shlex.shlex(value, posix=True)
            lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""  # a backslash is itself
            value = lexer
        items = list(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f'it takes text such as "rloo.temperature=0.9 eval.num_samples=4" ({error})') from None
    for item in items:
        if not isinstance(item, str) or "=" not in item:
            raise ValueError(
                f"{excerpt(item)} in it is not section.key=value; quote an item that has spaces, "
                "as in \"'eval.thinking_budgets=[16, 32]'\""
            )
    return items


def _refuse(name: str, place: str) -> str:
    """An unknown name, with what it may mean and how a notebook sets that."""
    problem = f"{name}: unknown parameter ({place})"
    keys = [key for model in SECTIONS.values() for key in model.model_fields]
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
    old = CONFIG_NAMES.get(name)
    if old is not None and old.new is not None:
        problem += f"; it is an old TRL name of {old.new}:"
        name = old.new
    elif name in keys:
        problem += ";"
    elif near and not difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.6):
        problem += f"; did you mean {near[0]}?"
        name = near[0]
    else:
        return problem + suggest(name, list(KNOWN))
    if name in KNOWN:
        return f"{problem} set {name}"
    dotted = (f"{section}.{name}" for section, model in SECTIONS.items() if name in model.model_fields)
    ways = " or ".join(f'overrides = "{key}=..."' for key in dotted)
    return f"{problem} it is a key of the configuration, so it goes into overrides: {ways}"


def assigned_names(namespace: Mapping[str, Any]) -> dict[str, str] | None:
    """Names that the parameter cells assign, with their place ("In[2]", a script's name); None without such a cell. The
    cells are those of IPython's `In`, or of a script's file (`__file__`)."""
    inputs, file = namespace.get("In"), namespace.get("__file__")  # anything, if the user assigned it
    cells = enumerate(inputs) if isinstance(inputs, list) else ()
    current = _current_cells([(f"In[{number}]", cell) for number, cell in cells if isinstance(cell, str)])
    if not current and isinstance(file, str) and file.endswith(".py"):  # a script in percent format
        with contextlib.suppress(FileNotFoundError, ConfigError):
            texts = re.split(r"^# ?%%.*$", read_text(Path(file)), flags=re.MULTILINE)
            current = _current_cells([(Path(file).name, text) for text in texts])
    names: dict[str, str] = {}
    for place, tree in current:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not node.id.startswith("PAPERMILL_"):
                names[node.id] = place  # papermill --inject-paths adds PAPERMILL_INPUT_PATH and _OUTPUT_PATH
    return names if current else None


def _current_cells(executed: list[tuple[str, str]]) -> list[tuple[str, ast.Module]]:
    """The parameter cells that count among all that have run.

    A cell that runs again replaces its earlier run, so a corrected cell takes effect without a new kernel. The
    notebook's cell counts as it last ran, and papermill's (its first line is bare) if it last ran after that. If the
    notebook's is bare too, the last consecutive cells count.
    """
    cells: list[tuple[str, ast.Module]] = []
    own = False  # whether `cells` starts with one whose first line is longer than papermill's
    before = -1  # number of the previous parameter cell
    for number, (place, cell) in enumerate(executed):
        head = re.fullmatch(r"#\s*Parameters\s*(:.*)?", cell.strip().partition("\n")[0].strip())
        if head is None:
            continue
        try:
            tree = ast.parse(cell.strip())
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # it has not run either
            continue
        if head[0] != "# Parameters":
            cells, own = [(place, tree)], True
        elif own:
            cells = [cells[0], (place, tree)]
        else:
            cells = [*(cells if before == number - 1 else []), (place, tree)]
        before = number
    return cells
