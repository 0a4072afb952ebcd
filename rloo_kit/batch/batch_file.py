"""A batch of notebook runs, read from a YAML file and checked before anything starts.

`grid` gives every combination of its values, `runs` single runs; both override the common `parameters`. Each is checked
against the parameters of its notebook.
"""

import ast
import hashlib
import itertools
import json
import math
import multiprocessing
import re
import warnings
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from rloo_kit.checks.faults import find_faults
from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.config.section import Section, apply_override, explain_errors, suggest
from rloo_kit.config.yaml_files import read_file
from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.notebook.parameters import KIT_ROOT, read_parameters
from rloo_kit.system.input_files import find_input, from_here, is_file, places_of, read_text
from rloo_kit.system.problems import errors_of

TAG = "parameters"  # papermill inserts its values after the first cell with this tag
MOST_BYTES = 2**30  # of a notebook with its outputs


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
        content = json.loads(read_text(path, MOST_BYTES))
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
        tagged = ["".join(cell["source"]) for cell in cells if TAG in list(cell.get("metadata", {}).get("tags") or ())]
        if content["nbformat"] != 4:
            raise ValueError(f"nbformat is {content['nbformat']}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a notebook of format 4 (.ipynb): {type(error).__name__}: {excerpt(str(error))}; save it "
            "again from Jupyter"
        ) from None
    source = tagged[0] if tagged else None
    try:
        declared = _read_assignments(source or "")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # a NUL; nesting beyond the parser's depth
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise ConfigError(f"{path}: the cell tagged {TAG} is not plain Python: {why}") from None
    return Notebook(path, source, declared, any("read_parameters" in source for source in sources))


def _read_assignments(source: str) -> dict[str, Any]:
    """Each name that the code assigns, with its value; None if that is not a literal."""
    assigned: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                value = None
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return assigned


GIVEN = ("run_name", "output_dir", "resume", "overwrite")  # parameters that the batch sets for each run
LONGEST_NAME = 100
MOST_RUNS = 1000  # all are checked before the first one starts
NO_JOBS = (
    "jobs: there are no runs side by side any more; they go one after the other: remove it. To use two GPUs, split the "
    "file and start each half in a terminal of its own with another name=... and CUDA_VISIBLE_DEVICES=0 or 1"
)


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,=+ -]*", name) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"is {excerpt(name)}; it becomes a folder: letters, digits, spaces and _ . , = + - from the second "
            f"character on, at most {LONGEST_NAME}"
        )
    return name


def _is_plain(value: Any) -> bool:
    """Whether a value survives JSON and the code of a cell unchanged."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int) or isinstance(value, float) and math.isfinite(value)


Name = Annotated[str, AfterValidator(_check_name)]
File = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0)]


class RunEntry(Section):
    """An entry of `runs`: what a single run changes; without a name it is named after its parameters."""

    model_config = ConfigDict(coerce_numbers_to_str=True)
    name: Name | None = None
    notebook: File | None = None
    parameters: dict[str, Any] = {}
    timeout_s: Seconds | None = None


class BatchFile(Section):
    """The keys of a batch file; docs/batch.md explains them."""

    model_config = ConfigDict(coerce_numbers_to_str=True)
    name: Name
    output_dir: File = "outputs"
    notebook: File | None = None
    parameters: dict[str, Any] = {}
    grid: dict[str, Any] = {}
    runs: list[RunEntry] = []
    timeout_s: Seconds | None = None

    @model_validator(mode="after")
    def _check_runs(self) -> "BatchFile":
        for name, values in self.grid.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"grid.{name}: is {excerpt(values)}; it takes a list with at least one value")
        given = {"parameters": self.parameters, "grid": self.grid}
        given |= {f"runs.{index}.parameters": entry.parameters for index, entry in enumerate(self.runs)}
        for key, parameters in given.items():
            for name, value in parameters.items():
                if not _is_plain(value):
                    plain = "text, finite numbers, true, false, null and lists of these"
                    raise ValueError(f"{key}.{name}: is {excerpt(value)}; it takes {plain}")
        if not self.runs and not self.grid:
            raise ValueError("there is nothing to run; give a grid or runs")
        count = len(self.runs) + (math.prod(map(len, self.grid.values())) if self.grid else 0)
        if count > MOST_RUNS:
            raise ValueError(f"grid and runs give {count:,} runs; a batch has at most {MOST_RUNS:,}: split it")
        if self.notebook is None and (self.grid or any(entry.notebook is None for entry in self.runs)):
            raise ValueError("notebook: missing, but the grid and runs without one of their own need it; add it")
        return self


@dataclass(frozen=True)
class BatchRun:
    """One run: `parameters` are those of the file; `timeout_s` in seconds, None: no limit."""

    name: str
    notebook: Notebook
    parameters: dict[str, Any]
    timeout_s: float | None = None

    @property
    def resolved(self) -> dict[str, Any]:
        """Every parameter of the notebook, with its value in this run."""
        return {**self.notebook.declared, **self.parameters}


@dataclass
class Batch:
    """A checked batch, and its folder (absolute)."""

    name: str
    folder: Path
    runs: list[BatchRun]


def load_batch(path: str | Path, *overrides: str) -> Batch:
    """The batch that a YAML file describes, with `overrides` such as "name=short" or "grid.seed=[0, 1]".

    Relative notebooks, and the parameter `config`, are looked up in the working folder, then next to the file, then in
    the kit's own folder. Raises ConfigError with everything that is wrong: keys, missing notebooks, parameters that a
    notebook does not know or whose values its configuration refuses, duplicate runs.
    """
    path = from_here(path)
    values, lines = read_file(path)
    if {"model", "rloo"} <= values.keys():
        raise ConfigError(
            f"{path} is the config of a single run, not a batch; use rloo-kit train {path}, or name a notebook that "
            "reads it in a batch file such as configs/batch_arithmetic.yaml"
        )
    changed = {apply_override(values, override, BatchFile): override for override in overrides}
    if "jobs" in values:
        raise ConfigError(f"{path}: {NO_JOBS}")
    if values.get("name") is None:
        values["name"] = path.stem
    try:
        file = BatchFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, BatchFile, file=path, lines=lines, changed=changed)) from None
    output_dir = places_of(file.output_dir, f"{path}: output_dir")[0]
    runs, problems = _list_runs(file, path.parent)
    problems += _find_duplicates(runs)
    having: dict[str, str] = {}  # each fault of the parameters, with the first run that has it
    looked: dict[str, list[str]] = {}
    # The checks load torch, which the batch itself must not hold for hours.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as checker:
        for run in [] if problems else runs:
            for problem in _check_parameters(run, checker, looked):
                having.setdefault(problem, run.name)
    problems += [f"{name}: {problem}" for problem, name in having.items()]
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in dict.fromkeys(problems)))
    return Batch(file.name, output_dir / file.name, runs)


def _list_runs(file: BatchFile, next_to: Path) -> tuple[list[BatchRun], list[str]]:
    """The runs of the grid, then the single ones, and what is wrong with their notebooks; the file is in `next_to`."""
    combinations = itertools.product(*file.grid.values()) if file.grid else ()
    entries = [RunEntry(parameters=dict(zip(file.grid, values, strict=True))) for values in combinations]
    runs: list[BatchRun] = []
    problems: list[str] = []
    notebooks: dict[str, Notebook] = {}
    for index, entry in enumerate([*entries, *file.runs], start=-len(entries)):
        wanted = str(entry.notebook or file.notebook)
        try:
            if wanted not in notebooks:
                notebooks[wanted] = read_notebook(find_input(wanted, "notebook", next_to, KIT_ROOT).resolve())
        except ConfigError as error:
            problems.append(f"runs.{index}.notebook: {error}" if entry.notebook else f"notebook: {error}")
            continue
        parameters = {**file.parameters, **entry.parameters}
        config = parameters.get("config")
        if isinstance(config, str) and not any(map(is_file, places_of(config, "config"))) and is_file(next_to / config):
            parameters["config"] = str((next_to / config).absolute())
        name = entry.name or make_name(notebooks[wanted].path.stem, entry.parameters)
        runs.append(BatchRun(name, notebooks[wanted], parameters, entry.timeout_s or file.timeout_s))
    return runs, problems


def make_name(stem: str, parameters: dict[str, Any]) -> str:
    """A run's folder name from its parameters, safe on every file system.

    >>> make_name("arithmetic", {"num_generations": 4, "seed": 0})
    'arithmetic-num_generations=4-seed=0'
    """

    def plain(value: Any) -> str:  # 0.002, true, none, 64,128
        if isinstance(value, list):
            return ",".join(map(plain, value))
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    parts = [stem, *(f"{name}={plain(value)}" for name, value in parameters.items())]
    name = "-".join(re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", part) for part in parts).lstrip(".-")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _find_duplicates(runs: list[BatchRun]) -> list[str]:
    """Runs with the same name, and runs with the same effect."""
    problems = []
    seen: dict[str, str] = {}
    for run in runs:
        content, name = repr((run.notebook.path, sorted(run.resolved.items()))), run.name.casefold()
        if content in seen:
            problems.append(f"{seen[content]} and {run.name} are the same run; remove one of them")
        elif name in seen:
            problems.append(f"two runs are called {run.name}; give one another name (runs.N.name)")
        seen |= {content: run.name, name: run.name}
    return problems


def _find_errors(config: RunConfig) -> list[str]:
    return [str(fault) for fault in errors_of(find_faults(config))]


def _check_parameters(run: BatchRun, checker: Executor, looked: dict[str, list[str]]) -> list[str]:
    """Faults of a run's parameters: names that the notebook's cell does not know; if it calls `read_parameters`, also
    values that it or the configuration refuses, and faults of model, data and rewards, found by the process `checker`
    and cached in `looked`."""
    notebook = run.notebook
    if run.parameters and notebook.cell is None:
        return [f"{notebook.path} has no cell tagged {TAG}, so it takes no parameters"]
    if given := [name for name in GIVEN if name in run.parameters]:
        why = "is set by the batch, as it gives each run its folder and resumes it; remove it"
        return [f"{name} {why}" for name in given]
    if not notebook.reads_parameters:
        unknown = [name for name in run.parameters if name not in notebook.declared]
        known = list(notebook.declared)
        return [f"{name}: {notebook.path.name} has no such parameter{suggest(name, known)}" for name in unknown]
    added = "\n".join(["# Parameters", *(f"{name} = {value!r}" for name, value in run.parameters.items())])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the run itself warns, in its notebook
            parameters = read_parameters({**run.resolved, "In": ["", notebook.cell or "", added]})
            config = load_config(parameters.config, *parameters.overrides)
            key = repr([config.model, config.data, config.rewards])
            if key not in looked:
                looked[key] = checker.submit(_find_errors, config).result()
            return looked[key]
    except ConfigError as error:
        return re.sub(r" \(In\[\d\]\)", "", str(error)).splitlines()
