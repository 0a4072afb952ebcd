"""Reads notebook files: the parameters of one to run, and the error of one that has run."""

import ast
import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError

TAG = "parameters"  # papermill inserts its values after the first cell with this tag
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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
    """The notebook at `path`. Raises ConfigError if it is not format 4, a cell is malformed or its parameters cell is
    not plain Python."""
    content = _read(path)
    cells = content.get("cells") if content is not None and content.get("nbformat") == 4 else None
    if not isinstance(cells, list):
        raise ConfigError(f"{path} is not a notebook of format 4 (.ipynb)")
    sources, tags = [], []
    for number, cell in enumerate(cells, 1):
        if problem := _find_cell_problem(cell):
            raise ConfigError(f"{path}, cell {number}: {problem}; save the notebook again from Jupyter")
        if cell["cell_type"] == "code":
            sources.append("".join(cell.get("source", "")))  # text, or a list of lines
            tags.append(cell.get("metadata", {}).get("tags") or ())
    cell = next((source for source, has in zip(sources, tags, strict=True) if TAG in has), None)
    try:
        declared = _assignments(cell or "")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # a NUL; nesting beyond the parser's depth
        why = error.msg if isinstance(error, SyntaxError) else error or "nested too deeply"
        raise ConfigError(f"{path}: the cell tagged {TAG} is not plain Python: {why}") from None
    return Notebook(path, cell, declared, any("read_parameters" in source for source in sources))


def find_error(path: Path) -> str | None:
    """The error in an executed notebook: "cell [3]: ValueError: too small"; None without one, or if the file is
    unreadable (the kernel may have died while it was written)."""
    for cell in _dicts((_read(path) or {}).get("cells")):
        for output in _dicts(cell.get("outputs")):
            if output.get("output_type") == "error" and output.get("evalue") != "0":
                count = cell.get("execution_count")
                where = f"cell [{count}]: " if isinstance(count, int) and count else ""
                texts = [str(value) for key in ("ename", "evalue") if isinstance(value := output.get(key), str)]
                return ANSI.sub("", where + ": ".join(filter(None, texts))) or None
    return None


def _read(path: Path) -> dict[str, Any] | None:
    """The mapping in a JSON file; None without one."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # missing, not JSON, nested too deeply
        return None
    return content if isinstance(content, dict) else None


def _dicts(items: Any) -> list[dict[str, Any]]:
    """The mappings in a list; empty if it is not a list."""
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _find_cell_problem(cell: Any) -> str | None:
    """What makes a cell unreadable; None if it is fine."""
    if not isinstance(cell, dict) or not isinstance(cell.get("cell_type"), str):
        return "it is not a mapping with a cell_type"
    source = cell.get("source", "")
    if not isinstance(source, str) and not (isinstance(source, list) and all(isinstance(part, str) for part in source)):
        return "its source is neither text nor a list of lines"
    metadata = cell.get("metadata", {})
    tags = metadata.get("tags") if isinstance(metadata, dict) else ...
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        return "its metadata is not a mapping" if tags is ... else "its metadata.tags is not a list of strings"
    return None


def _assignments(source: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            value = None
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return found
