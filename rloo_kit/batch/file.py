"""A batch of notebook runs, read from a YAML file and checked before anything starts.

`grid` gives every combination of its values, `runs` single runs; both override the common `parameters`.
"""

import hashlib
import itertools
import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, model_validator

from rloo_kit.batch.notebooks import TAG, Notebook, read_notebook
from rloo_kit.config.messages import explain_errors, suggest
from rloo_kit.config.run import load_config
from rloo_kit.config.schema import Count
from rloo_kit.config.section import Section
from rloo_kit.config.yaml_files import Key, apply_override, dump_yaml, read_file
from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.notebook.parameters import KIT_ROOT, read_parameters
from rloo_kit.preflight.cheap import find_faults
from rloo_kit.system.input_files import expand_user, find_input, from_here, is_file, places_of, working_folder
from rloo_kit.system.problems import errors_of

GIVEN = {
    "run_name": "each run's training folder is <batch>/<run>/run",
    "output_dir": "each run's training folder is <batch>/<run>/run",
    "resume": "rloo-kit batch --resume sets it for each run",
    "overwrite": "rloo-kit batch sets it for each run",
}
LONGEST_NAME = 100
MOST_RUNS = 1000  # all are checked before the first one starts
FILES = ("batch.yaml", "batch.json", "comparison.html", "comparison.csv")  # in a batch's folder
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+ -]*")
Seconds = Annotated[float, Field(gt=0)]


class RunEntry(Section):
    """An entry of `runs`: a single run and what it changes."""

    model_config = ConfigDict(coerce_numbers_to_str=True)
    name: str | None = Field(default=None, min_length=1, description="its folder; null: named after its parameters")
    notebook: str | None = Field(default=None, min_length=1, description="null: the batch's")
    parameters: dict[str, Any] = Field(default_factory=dict, description="override the common ones")
    timeout_s: Seconds | None = Field(default=None, description="null: the batch's")


class BatchFile(Section):
    """The keys of a batch file."""

    model_config = ConfigDict(coerce_numbers_to_str=True)
    name: str | None = Field(default=None, min_length=1, description="the batch's name; null: the file's stem")
    output_dir: str = Field(default="outputs", min_length=1, description="the batch's folder is output_dir/name")
    notebook: str | None = Field(default=None, min_length=1, description="of every run that does not name one")
    parameters: dict[str, Any] = Field(default_factory=dict, description="of every run")
    grid: dict[str, Any] = Field(default_factory=dict, description="parameter -> values; every combination is a run")
    runs: list[RunEntry] = Field(default_factory=list, description="single runs")
    timeout_s: Seconds | None = Field(default=None, description="a run that takes longer is killed; null: no limit")
    jobs: Count = Field(default=1, description="concurrent runs")

    @model_validator(mode="after")
    def _check_runs(self) -> "BatchFile":
        problems = [
            f"grid.{name}: is {excerpt(values)}; it takes a list with at least one value"
            for name, values in self.grid.items()
            if not isinstance(values, list) or not values
        ]
        groups = {"parameters": self.parameters, "grid": self.grid}
        groups |= {f"runs.{index}.parameters": entry.parameters for index, entry in enumerate(self.runs)}
        problems += [
            f"{group}.{name}: is {excerpt(value)}; it takes text, finite numbers, true, false, null and lists of these"
            for group, values in groups.items()
            for name, value in values.items()
            if not _is_plain(value)
        ]
        if self.notebook is None:
            problems += ["notebook: required by grid, but missing; add it to the file"] if self.grid else []
            problems += [
                f"runs.{index}.notebook: required, but missing; add it, or a notebook for the whole batch"
                for index, entry in enumerate(self.runs)
                if entry.notebook is None
            ]
        if not self.grid and not self.runs:
            problems.append("there is nothing to run; give a grid or runs")
        runs = len(self.runs)
        if self.grid and not problems:
            runs += math.prod(len(values) for values in self.grid.values())
        if runs > MOST_RUNS:
            problems.append(f"grid and runs give {runs:,} runs; a batch has at most {MOST_RUNS:,}: split it")
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _is_plain(value: Any) -> bool:
    """Whether a value survives JSON and papermill's YAML unchanged."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int) or isinstance(value, float) and math.isfinite(value)


@dataclass(frozen=True)
class BatchRun:
    """One run: `parameters` are those of the file; `timeout_s` None: no limit."""

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
    """A checked batch.

    Attributes:
        folder: the batch's folder; absolute.
    """

    name: str
    folder: Path
    runs: list[BatchRun] = field(default_factory=list)
    jobs: int = 1

    def varying(self) -> list[str]:
        """The parameters that differ between runs, in order of appearance."""
        names = dict.fromkeys(name for run in self.runs for name in run.parameters)
        return [name for name in names if len({repr(run.resolved.get(name)) for run in self.runs}) > 1]

    def to_yaml(self) -> str:
        """The batch with every run written out; `load_batch` restores the same runs from it."""
        runs = [
            {"name": run.name, "notebook": str(run.notebook.path), "parameters": run.parameters}
            | ({"timeout_s": run.timeout_s} if run.timeout_s else {})
            for run in self.runs
        ]
        return dump_yaml({"name": self.name, "output_dir": str(self.folder.parent), "jobs": self.jobs, "runs": runs})


def load_batch(path: str | Path, *overrides: str) -> Batch:
    """The batch that a YAML file describes.

    Args:
        path: the file. Relative notebooks, and the parameter `config`, are looked up in the working folder, then next
            to the file, then in the kit's own folder.
        overrides: `key=value`, as on the command line: "jobs=2", "parameters.max_steps=20", "grid.seed=[0, 1]".

    Raises:
        ConfigError: everything that is wrong with it: keys, missing notebooks, parameters that a notebook does not
            know or whose values its configuration refuses, duplicate runs.
    """
    path = from_here(path)
    values, lines = read_file(path)
    if {"model", "rloo"} <= values.keys():
        raise ConfigError(
            f"{path} is the config of a single run, not a batch; use rloo-kit train {path}, or name a notebook that "
            "reads it in a batch file such as configs/batch_arithmetic.yaml"
        )
    changed: dict[Key, str] = {apply_override(values, override): override for override in overrides}
    try:
        file = BatchFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, BatchFile, path, lines, changed)) from None
    name = file.name or path.stem
    output_dir = working_folder() / expand_user(file.output_dir, f"{path}: output_dir")
    batch = Batch(name, output_dir.absolute() / name, jobs=file.jobs)
    problems = [] if _NAME.fullmatch(name) else [_refuse_name("name", name)]
    batch.runs = _list_runs(file, path.parent, problems)
    problems += _find_duplicates(batch.runs)
    if not problems:
        problems = _find_parameter_problems(batch.runs)
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in dict.fromkeys(problems)))
    return batch


def _list_runs(file: BatchFile, next_to: Path, problems: list[str]) -> list[BatchRun]:
    """The runs of the grid, then the single ones; appends faults to `problems`. `next_to`: the file's folder."""
    combinations = itertools.product(*file.grid.values()) if file.grid else ()
    entries = [RunEntry(parameters=dict(zip(file.grid, values, strict=True))) for values in combinations]
    runs: list[BatchRun] = []
    notebooks: dict[str, Notebook] = {}
    for index, entry in enumerate([*entries, *file.runs], start=-len(entries)):
        wanted = str(entry.notebook or file.notebook)
        try:
            if wanted not in notebooks:
                notebooks[wanted] = read_notebook(find_input(wanted, "notebook", next_to, KIT_ROOT).resolve())
        except ConfigError as error:
            problems.append(f"runs.{index}.notebook: {error}" if entry.notebook else f"notebook: {error}")
            continue
        name = entry.name or make_name(notebooks[wanted].path.stem, entry.parameters)
        if entry.name and (not _NAME.fullmatch(name) or name in FILES or len(name) > LONGEST_NAME):
            problems.append(_refuse_name(f"runs.{index}.name", name))
        parameters = {**file.parameters, **entry.parameters}
        config = parameters.get("config")
        if isinstance(config, str) and not any(map(is_file, places_of(config, "config"))) and is_file(next_to / config):
            parameters["config"] = str((next_to / config).absolute())
        runs.append(BatchRun(name, notebooks[wanted], parameters, entry.timeout_s or file.timeout_s))
    return runs


def make_name(stem: str, parameters: dict[str, Any]) -> str:
    """A run's folder name from its parameters, safe on every file system.

    >>> make_name("arithmetic", {"num_generations": 4, "seed": 0})
    'arithmetic-num_generations=4-seed=0'
    """
    parts = [stem, *(f"{name}={_plain(value)}" for name, value in parameters.items())]
    name = "-".join(re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", part) for part in parts).lstrip(".-")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _plain(value: Any) -> str:
    """A value as part of a name: 0.002, true, none, 64,128."""
    if isinstance(value, list):
        return ",".join(map(_plain, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _refuse_name(key: str, name: str) -> str:
    return (
        f"{key}: is {excerpt(name)}; it becomes a folder: letters, digits, spaces and _ . , = + - from the second "
        f"character on, at most {LONGEST_NAME}, and none of {', '.join(FILES)}"
    )


def _find_duplicates(runs: list[BatchRun]) -> list[str]:
    """Runs with the same name, and runs with the same effect."""
    problems = []
    names: set[str] = set()
    contents: dict[str, BatchRun] = {}
    for run in runs:
        content = repr((run.notebook.path, sorted((name, repr(value)) for name, value in run.resolved.items())))
        if content in contents:
            given = ", ".join(f"{name}={excerpt(value)}" for name, value in run.parameters.items()) or "no parameters"
            problems.append(
                f"{contents[content].name} and {run.name} are the same run ({run.notebook.path.name} with {given}); "
                "remove one of them"
            )
        elif run.name.casefold() in names:
            problems.append(f"two runs are called {run.name}; give one another name (runs.N.name)")
        contents.setdefault(content, run)
        names.add(run.name.casefold())
    return problems


def _find_parameter_problems(runs: list[BatchRun]) -> list[str]:
    """Faults of the parameters, each once, with the first run that has it."""
    having: dict[str, list[str]] = {}
    looked: dict[str, list[str]] = {}
    for run in runs:
        for problem in _check_parameters(run, looked):
            having.setdefault(problem, []).append(run.name)
    return [
        f"{names[0]}{f' (and {len(names) - 1} more)' if len(names) > 1 else ''}: {problem}"
        for problem, names in having.items()
    ]


def _check_parameters(run: BatchRun, looked: dict[str, list[str]]) -> list[str]:
    """Faults of a run's parameters, found without running it: names that the notebook's cell does not know; if it calls
    `read_parameters`, also values that it or the configuration refuses, and faults of model, data and rewards. `looked`
    caches these by the sections that determine them."""
    notebook = run.notebook
    problems = [f"{name} is set by the batch: {GIVEN[name]}; remove it" for name in GIVEN if name in run.parameters]
    if run.parameters and notebook.cell is None:
        return [*problems, f"{notebook.path} has no cell tagged {TAG}, so it takes no parameters"]
    if problems:
        return problems
    if not notebook.reads_parameters:
        return [
            f"{name}: {notebook.path.name} has no such parameter{suggest(name, list(notebook.declared))}"
            for name in run.parameters
            if name not in notebook.declared
        ]
    added = "\n".join(["# Parameters", *(f"{name} = {value!r}" for name, value in run.parameters.items())])
    namespace = {**run.resolved, "In": ["", notebook.cell or "", added]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the run itself warns, in its notebook
            parameters = read_parameters(namespace)
            found = load_config(parameters.config, *parameters.overrides)
            key = repr([found.model, found.data, found.rewards])
            if key not in looked:
                looked[key] = [str(fault) for fault in errors_of(find_faults(found))]
            return looked[key]
    except ConfigError as error:
        return re.sub(r" \(In\[\d\]\)", "", str(error)).splitlines()
    return []
