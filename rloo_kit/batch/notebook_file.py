"""What a batch has to know of a notebook: the parameters that it declares, and the error that ended it.

Read from the file as JSON, so that a batch is checked before a kernel is started.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError
from rloo_kit.runs.run_dir import read_json

TAG = "parameters"  # papermill puts its values behind the first cell that has it
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Notebook:
    """A notebook as it lies there.

    Attributes:
        path: the file, absolute.
        cell: source of the cell tagged `parameters`; None without one.
        declared: each name that the cell assigns, with its value (None where that is no literal).
        reads_parameters: whether it hands them to `read_parameters`, which knows more names than it declares.
    """

    path: Path
    cell: str | None
    declared: dict[str, Any]
    reads_parameters: bool

    @property
    def trains(self) -> bool:
        """Whether it says where its training run goes, so that a run without one is not done."""
        return {"run_name", "output_dir"} <= self.declared.keys()


def read_notebook(path: Path) -> Notebook:
    """The notebook at `path`.

    Raises:
        ConfigError: it is no notebook of format 4, or its parameters cell is not plain Python.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("nbformat") != 4 or not isinstance(content.get("cells"), list):
        raise ConfigError(f"{path} is not a notebook of format 4 (.ipynb)")
    code = [cell for cell in content["cells"] if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    tagged = [_source(cell) for cell in code if TAG in (cell.get("metadata", {}).get("tags") or ())]
    try:
        declared = _assignments(tagged[0]) if tagged else {}
    except SyntaxError as error:
        raise ConfigError(f"{path}: the cell tagged {TAG} is not plain Python: {error.msg}") from None
    reads = any("read_parameters" in _source(cell) for cell in code)
    return Notebook(path, tagged[0] if tagged else None, declared, reads)


def find_error(path: Path) -> str | None:
    """What the executed notebook at `path` broke on: "cell 3: ValueError: too small"; None if nothing is written."""
    content = read_json(path)
    cells = content.get("cells", ()) if isinstance(content, dict) else ()
    for cell in cells:
        for output in cell.get("outputs", ()):
            if output.get("output_type") == "error" and output.get("evalue") != "0":
                count = cell.get("execution_count")
                where = f"cell [{count}]: " if count else ""
                text = f"{where}{output.get('ename')}: {output.get('evalue')}".removesuffix(": ")
                return ANSI.sub("", text)
    return None


def last_line(log: Path, start: int = 0) -> str | None:
    """The last line of a log that says something, from byte `start` on; None where there is none."""
    try:
        with open(log, "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - 20_000))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    said = [ANSI.sub("", line).strip() for line in lines]
    return next((line for line in reversed(said) if line), None)


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def _assignments(source: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                found[target.id] = _literal(node.value)  # type: ignore[attr-defined]
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
