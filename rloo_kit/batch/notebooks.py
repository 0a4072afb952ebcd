"""Reads notebook files: the parameters of one to run, and the error of one that has run."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from rloo_kit.errors import ConfigError
from rloo_kit.system.input_files import read_text

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
