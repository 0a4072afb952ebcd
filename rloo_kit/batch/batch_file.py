"""A batch of notebook runs, read from a YAML file and checked before anything starts.

`grid` gives every combination of its values, `runs` single runs; both override the common `parameters`.
"""

import ast
import hashlib
import itertools
import json
import math
import multiprocessing
import re
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from rloo_kit.checks.faults import find_faults
from rloo_kit.config.run import load_config
from rloo_kit.config.section import Section, apply_override, explain_errors, suggest
from rloo_kit.config.yaml_files import read_file
from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.notebook.parameters import KIT_ROOT, read_parameters
from rloo_kit.system.input_files import find_input, from_here, is_file, places_of, read_text
from rloo_kit.system.problems import errors_of

TAG = "parameters"  # papermill inserts its values after the first cell with this tag
GIVEN = ("run_name", "output_dir", "resume", "overwrite")  # parameters that the batch sets for each run
MOST_BYTES = 2**30  # of a notebook with its outputs
LONGEST_NAME = 100


@dataclass(frozen=True)
class Notebook:
    """A notebook's file; its `path` is absolute."""

    path: Path
    cell: str | None  # source of the cell tagged `parameters`
    declared: dict[str, Any]  # each name that the cell assigns, with its value (None if that is not a literal)
    reads_parameters: bool  # it calls `read_parameters`, which accepts more names than the cell declares


def read_notebook(path: Path) -> Notebook:
    """The notebook at `path`. Raises ConfigError if it is not format 4, or its parameters cell is not plain Python."""
    try:
        cells = [cell for cell in json.loads(read_text(path, MOST_BYTES))["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
        tagged = [TAG in list(cell.get("metadata", {}).get("tags") or ()) for cell in cells]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a notebook of format 4 (.ipynb): {type(error).__name__}: {excerpt(str(error))}; save it "
            "again from Jupyter"
        ) from None
    cell = sources[tagged.index(True)] if any(tagged) else None
    try:
        declared = _read_assignments(cell or "")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # a NUL; nesting beyond the parser's depth
        raise ConfigError(f"{path}: the cell tagged {TAG} is not plain Python: {error}") from None
    return Notebook(path, cell, declared, any("read_parameters" in source for source in sources))


def _read_assignments(source: str) -> dict[str, Any]:
    """Each name that the code assigns, with its value; None if that is not a literal."""
    assigned: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = None
        with suppress(ValueError, TypeError, RecursionError, MemoryError):
            value = ast.literal_eval(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                assigned[target.id] = value
    return assigned


def _check_value(value: Any) -> Any:
    """A parameter's value, which must survive JSON and the code of a cell unchanged."""
    if isinstance(value, list):
        return list(map(_check_value, value))
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"is {excerpt(value)}; it takes text, finite numbers, true, false, null and lists of these")


File = Annotated[str, Field(min_length=1)]
Value = Annotated[Any, AfterValidator(_check_value)]


class BatchFile(Section):
    """The keys of a batch file; docs/batch.md explains them."""

    model_config = ConfigDict(coerce_numbers_to_str=True)
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,=+ -]*$", max_length=LONGEST_NAME)] | None = None
    output_dir: File = "outputs"
    notebook: File
    parameters: dict[str, Value] = {}
    grid: dict[str, Annotated[list[Value], Field(min_length=1)]] = {}
    runs: list[dict[str, Value]] = []


@dataclass
class Batch:
    """A checked batch: its folder (absolute), and the parameters of each run by the run's name."""

    name: str
    folder: Path
    notebook: Notebook
    runs: dict[str, dict[str, Any]]


def load_batch(path: str | Path, *overrides: str) -> Batch:
    """The batch that a YAML file describes, with `overrides` such as "name=short" or "grid.seed=[0, 1]".

    A relative notebook, and the parameter `config`, are looked up in the working folder, then next to the file, then in
    the kit's own folder. Raises ConfigError with what is wrong: keys, a missing notebook, equal runs, parameters that
    the notebook does not know or whose values its configuration refuses.
    """
    path = from_here(path)
    values, lines = read_file(path)
    if {"model", "rloo"} <= values.keys():
        raise ConfigError(
            f"{path} is the config of a single run, not a batch; use rloo-kit train {path}, or name a notebook that "
            "reads it in a batch file such as configs/batch_arithmetic.yaml"
        )
    changed = {apply_override(values, override, BatchFile): override for override in overrides}
    try:
        file = BatchFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, BatchFile, file=path, lines=lines, changed=changed)) from None
    if not file.runs and not file.grid:
        raise ConfigError(f"{path}: there is nothing to run; give a grid or runs")
    name = file.name or path.stem
    folder = places_of(file.output_dir, f"{path}: output_dir")[0] / name
    try:
        found = find_input(file.notebook, "notebook", path.parent, KIT_ROOT)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    notebook = read_notebook(found.resolve())
    combinations = itertools.product(*file.grid.values()) if file.grid else ()
    runs: dict[str, dict[str, Any]] = {}
    equal: dict[str, str] = {}  # the run with these values of all of the notebook's parameters
    for own in [*(dict(zip(file.grid, values, strict=True)) for values in combinations), *file.runs]:
        run_name = make_name(notebook.path.stem, own)
        if run_name in runs:
            raise ConfigError(f"{path}: two runs are {run_name}; remove one")
        parameters = runs[run_name] = {**file.parameters, **own}
        if isinstance(config := parameters.get("config"), str):
            places = places_of(config, f"{path}: config")
            if not any(map(is_file, places)) and is_file(path.parent / config):
                parameters["config"] = str((path.parent / config).absolute())
        other = equal.setdefault(repr(sorted({**notebook.declared, **parameters}.items())), run_name)
        if other != run_name:
            raise ConfigError(f"{path}: {other} and {run_name} are the same run; remove one")
    # The checks load torch, which the batch itself must not hold for hours.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as checker:
        faults = checker.submit(_find_faults, notebook, runs).result()
    if faults:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))
    return Batch(name, folder, notebook, runs)


def make_name(stem: str, parameters: dict[str, Any]) -> str:
    """A run's folder name from its parameters, safe on every file system.

    >>> make_name("arithmetic", {"num_generations": 4, "seed": 0})
    'arithmetic-num_generations=4-seed=0'
    """
    parts = [stem, *(f"{name}={_write(value)}" for name, value in parameters.items())]
    name = "-".join(re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", part) for part in parts).lstrip(".-")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _write(value: Any) -> str:
    """A value in a name: 0.002, true, none, 64,128."""
    if isinstance(value, list):
        return ",".join(map(_write, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _find_faults(notebook: Notebook, runs: dict[str, dict[str, Any]]) -> list[str]:
    """The faults of all parameters, each with the first run that has it."""
    having: dict[str, str] = {}
    known: dict[str, list[str]] = {}
    for name, parameters in runs.items():
        try:
            faults = _check_parameters(notebook, parameters, known)
        except ConfigError as error:
            faults = re.sub(r" \(In\[\d\]\)", "", str(error)).splitlines()
        for fault in faults:
            having.setdefault(fault, name)
    return [f"{name}: {fault}" for fault, name in having.items()]


def _check_parameters(notebook: Notebook, given: dict[str, Any], known: dict[str, list[str]]) -> list[str]:
    """Faults of a run's parameters: names that the notebook's cell does not know; if it calls `read_parameters`, also
    values that it or the configuration refuses, and faults of model, data and rewards, which `known` caches."""
    if given and notebook.cell is None:
        return [f"{notebook.path} has no cell tagged {TAG}, so it takes no parameters"]
    if own := [name for name in GIVEN if name in given]:
        why = "is set by the batch, as it gives each run its folder and resumes it; remove it"
        return [f"{name} {why}" for name in own]
    declared, file = notebook.declared, notebook.path.name
    if not notebook.reads_parameters:
        unknown = [name for name in given if name not in declared]
        return [f"{name}: {file} has no such parameter{suggest(name, list(declared))}" for name in unknown]
    added = "\n".join(["# Parameters", *(f"{name} = {value!r}" for name, value in given.items())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the run itself warns, in its notebook
        parameters = read_parameters({**declared, **given, "In": ["", notebook.cell or "", added]})
        config = load_config(parameters.config, *parameters.overrides)
        key = repr([config.model, config.data, config.rewards])
        if key not in known:
            known[key] = [str(fault) for fault in errors_of(find_faults(config))]
        return known[key]
