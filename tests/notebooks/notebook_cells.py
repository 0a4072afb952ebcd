"""Reading the notebooks' sources for the tests."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NAMES = ("arithmetic_thinking", "arithmetic_instruct", "qwen3_thinking_rloo", "qwen3_instruct_rloo")


@dataclass(frozen=True)
class Cell:
    kind: str  # markdown or code
    source: str
    tags: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        return self.source.split("\n")


@cache
def cells_of(name: str) -> list[Cell]:
    """The cells of a notebook's source, a script in jupytext's percent format."""
    import jupytext

    cells = jupytext.read(FOLDER / f"{name}.py")["cells"]
    return [Cell(cell["cell_type"], cell["source"], tuple(cell["metadata"].get("tags", ()))) for cell in cells]


def code_of(name: str) -> list[Cell]:
    return [cell for cell in cells_of(name) if cell.kind == "code"]
