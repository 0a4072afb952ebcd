"""A batch of notebook runs, read from a YAML file and checked before anything starts.

`grid` gives every combination of its values, `runs` single runs; both override the common `parameters`. Each is checked
against the parameters of its notebook.
"""

import ast
import hashlib
import itertools
import math
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rloo_kit.checks.cheap import find_faults
from rloo_kit.config.run import load_config
from rloo_kit.config.schema import Count
from rloo_kit.config.section import Section, explain_errors, suggest
from rloo_kit.config.yaml_files import Key, apply_override, dump_yaml, read_file
from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.notebook.parameters import KIT_ROOT, read_parameters
from rloo_kit.system.input_files import (
    expand_user,
    find_input,
    from_here,
    is_file,
    places_of,
    read_text,
    working_folder,
)
from rloo_kit.system.problems import errors_of

TAG = "parameters"  # papermill inserts its values after the first cell with this tag
MOST_BYTES = 2**30  # of a notebook with its outputs
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class _Metadata(BaseModel):
    tags: list[str] | None = None


class _Output(BaseModel):
    output_type: str
    ename: str = ""
    evalue: str = ""


class _Cell(BaseModel):
    cell_type: str
    source: str | list[str] = ""  # text, or a list of lines
    metadata: _Metadata = _Metadata()
    execution_count: int | None = None
    outputs: list[_Output] = []


class _File(BaseModel):
    """What is read of an .ipynb file."""

    nbformat: Literal[4]
    cells: list[_Cell]


@dataclass(frozen=True)
class Notebook:
    """A notebook's file.

    Attributes:
        path: absolute.
        cell: source of the cell tagged `parameters`; None without one.
        declared: each name that the cell assigns, with its value (None if that is not a literal).
        reads_parameters: whether it calls `read_parameters`, which accepts more names than the cell declares.
    """

    path: Path
    cell: str | None
    declared: dict[str, Any]
    reads_parameters: bool

    @property
    def trains(self) -> bool:
        """Whether it trains: it takes the folder of a training run, which must then exist for it to be done."""
        return {"run_name", "output_dir"} <= self.declared.keys()


def read_notebook(path: Path) -> Notebook:
    """The notebook at `path`. Raises ConfigError if it is not format 4, or its parameters cell is not plain Python."""
    try:
        cells = [
            cell for cell in _File.model_validate_json(read_text(path, MOST_BYTES)).cells if cell.cell_type == "code"
        ]
    except ValidationError as error:
        where, found = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise ConfigError(
            f"{path} is not a notebook of format 4 (.ipynb): {where}: {found}; save it again from Jupyter"
        ) from None
    sources = ["".join(cell.source) for cell in cells]
    tagged = (source for source, cell in zip(sources, cells, strict=True) if TAG in (cell.metadata.tags or ()))
    source = next(tagged, None)
    try:
        declared = _read_assignments(source or "")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # a NUL; nesting beyond the parser's depth
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise ConfigError(f"{path}: the cell tagged {TAG} is not plain Python: {why}") from None
    return Notebook(path, source, declared, any("read_parameters" in source for source in sources))


def _read_assignments(source: str) -> dict[str, Any]:
    """Each name that the code assigns, with its value; None if that is not a literal."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                value = None
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return found


def find_error(path: Path) -> str | None:
    """The error in an executed notebook: "cell [3]: ValueError: too small"; None without one, or if the file is
    unreadable (the kernel may have died while it was written)."""
    try:
        cells = _File.model_validate_json(path.read_bytes()).cells
    except (OSError, ValidationError):
        return None
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error" and output.evalue != "0":  # sys.exit(0) is no error
                where = f"cell [{cell.execution_count}]: " if cell.execution_count else ""
                return ANSI.sub("", where + ": ".join(filter(None, (output.ename, output.evalue)))) or None
    return None


GIVEN = ("run_name", "output_dir", "resume", "overwrite")  # parameters that the batch sets for each run
LONGEST_NAME = 100
MOST_RUNS = 1000  # all are checked before the first one starts
FILES = ("batch.yaml", "batch.json", "comparison.html", "comparison.csv")  # in a batch's folder


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,=+ -]*", name) or len(name) > LONGEST_NAME or name in FILES:
        raise ValueError(
            f"is {excerpt(name)}; it becomes a folder: letters, digits, spaces and _ . , = + - from the second "
            f"character on, at most {LONGEST_NAME}, and none of {', '.join(FILES)}"
        )
    return name


def _is_plain(value: Any) -> bool:
    """Whether a value survives JSON and papermill's YAML unchanged."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int) or isinstance(value, float) and math.isfinite(value)


Name = Annotated[str, AfterValidator(_check_name)]
File = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0)]


class RunEntry(Section):
    """An entry of `runs`: a single run and what it changes; null: as the batch's. Without a name it is named after its
    parameters."""

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
    jobs: Count = 1

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
        runs = len(self.runs) + (math.prod(map(len, self.grid.values())) if self.grid else 0)
        if not runs:
            raise ValueError("there is nothing to run; give a grid or runs")
        if runs > MOST_RUNS:
            raise ValueError(f"grid and runs give {runs:,} runs; a batch has at most {MOST_RUNS:,}: split it")
        if self.notebook is None and (self.grid or any(entry.notebook is None for entry in self.runs)):
            raise ValueError("notebook: missing, but the grid and runs without one of their own need it; add it")
        return self


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
    runs: list[BatchRun]
    jobs: int

    def varying(self) -> list[str]:
        """The parameters that differ between runs, in order of appearance."""
        names = dict.fromkeys(name for run in self.runs for name in run.parameters)
        return [name for name in names if len({repr(run.resolved.get(name)) for run in self.runs}) > 1]

    def to_yaml(self) -> str:
        """The batch with every run written out; `load_batch` restores the same runs from it."""
        runs = [asdict(run) | {"notebook": str(run.notebook.path)} for run in self.runs]
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
    if values.get("name") is None:
        values["name"] = path.stem
    try:
        file = BatchFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, BatchFile, file=path, lines=lines, changed=changed)) from None
    output_dir = working_folder() / expand_user(file.output_dir, f"{path}: output_dir")
    runs, problems = _list_runs(file, path.parent)
    problems += _find_duplicates(runs)
    problems = problems or _find_parameter_problems(runs)
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in dict.fromkeys(problems)))
    return Batch(file.name, output_dir.absolute() / file.name, runs, file.jobs)


def _list_runs(file: BatchFile, next_to: Path) -> tuple[list[BatchRun], list[str]]:
    """The runs of the grid, then the single ones; and what is wrong with their notebooks. `next_to`: the file's
    folder."""
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
    names: set[str] = set()
    contents: dict[str, str] = {}
    for run in runs:
        content = repr((run.notebook.path, sorted(run.resolved.items())))
        if content in contents:
            given = ", ".join(f"{name}={excerpt(value)}" for name, value in run.parameters.items()) or "no parameters"
            same = f"{contents[content]} and {run.name} are the same run"
            problems.append(f"{same} ({run.notebook.path.name} with {given}); remove one of them")
        elif run.name.casefold() in names:
            problems.append(f"two runs are called {run.name}; give one another name (runs.N.name)")
        contents.setdefault(content, run.name)
        names.add(run.name.casefold())
    return problems


def _find_parameter_problems(runs: list[BatchRun]) -> list[str]:
    """Faults of the parameters, each once, with the first run that has it."""
    having: dict[str, list[str]] = {}
    looked: dict[str, list[str]] = {}
    for run in runs:
        for problem in _check_parameters(run, looked):
            having.setdefault(problem, []).append(run.name)
    more = {problem: f" (and {len(names) - 1} more)" if len(names) > 1 else "" for problem, names in having.items()}
    return [f"{names[0]}{more[problem]}: {problem}" for problem, names in having.items()]


def _check_parameters(run: BatchRun, looked: dict[str, list[str]]) -> list[str]:
    """Faults of a run's parameters, found without running it: names that the notebook's cell does not know; if it calls
    `read_parameters`, also values that it or the configuration refuses, and faults of model, data and rewards. `looked`
    caches these by the sections that determine them."""
    notebook = run.notebook
    if run.parameters and notebook.cell is None:
        return [f"{notebook.path} has no cell tagged {TAG}, so it takes no parameters"]
    if given := [name for name in GIVEN if name in run.parameters]:
        return [
            f"{name} is set by the batch, which gives each run its folder and resumes it; remove it" for name in given
        ]
    if not notebook.reads_parameters:
        unknown = [name for name in run.parameters if name not in notebook.declared]
        known = list(notebook.declared)
        return [f"{name}: {notebook.path.name} has no such parameter{suggest(name, known)}" for name in unknown]
    added = "\n".join(["# Parameters", *(f"{name} = {value!r}" for name, value in run.parameters.items())])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the run itself warns, in its notebook
            parameters = read_parameters({**run.resolved, "In": ["", notebook.cell or "", added]})
            found = load_config(parameters.config, *parameters.overrides)
            key = repr([found.model, found.data, found.rewards])
            if key not in looked:
                looked[key] = [str(fault) for fault in errors_of(find_faults(found))]
            return looked[key]
    except ConfigError as error:
        return re.sub(r" \(In\[\d\]\)", "", str(error)).splitlines()
