"""Reading the notebooks for the tests: the cells of a pair, and where its two files say different things."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NAMES = ("arithmetic_thinking", "arithmetic_instruct", "qwen3_thinking_rloo", "qwen3_instruct_rloo")


@dataclass(frozen=True)
class Cell:
    """What the two files of a pair have to agree on."""

    kind: str  # markdown or code
    source: str
    tags: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        return self.source.split("\n")


def read_script(path: Path) -> list[Cell]:
    """The cells of a script in jupytext's percent format."""
    import jupytext

    return [_cell(cell) for cell in jupytext.read(path)["cells"]]


def read_notebook(path: Path) -> list[Cell]:
    """The cells of an .ipynb, read as plain JSON: what git shows is what is compared."""
    return [_cell(cell) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


@cache
def cells_of(name: str) -> list[Cell]:
    """The cells of a notebook's source."""
    return read_script(FOLDER / f"{name}.py")


def code_of(name: str) -> list[Cell]:
    return [cell for cell in cells_of(name) if cell.kind == "code"]


def find_drift(script: Path, notebook: Path) -> list[str]:
    """Where a pair differs in cell type, source or tags, whichever file was changed; empty where it agrees."""
    left, right = read_script(script), read_notebook(notebook)
    found = [
        f"cell {number}: {script.name} has {_short(one)}, {notebook.name} has {_short(other)}"
        for number, (one, other) in enumerate(zip(left, right, strict=False))
        if one != other
    ]
    if len(left) != len(right):
        found.append(f"{script.name} has {len(left)} cells, {notebook.name} {len(right)}")
    return found


def _cell(cell: dict) -> Cell:
    source = cell["source"]
    text = source if isinstance(source, str) else "".join(source)
    return Cell(cell["cell_type"], text, tuple(cell["metadata"].get("tags", ())))


def _short(cell: Cell) -> str:
    text = cell.lines[0]
    return f"{cell.kind} {list(cell.tags) or ''} {text[:60]!r} ({len(cell.lines)} lines)"
