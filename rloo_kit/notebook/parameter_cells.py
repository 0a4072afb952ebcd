"""Which names a notebook meant as parameters, read from the cells that have run.

A notebook's variables alone do not tell a misspelt parameter from any other variable, and the tag of a cell does not
reach the kernel. Its text does: IPython keeps what has run in `In`, and papermill's added cell begins `# Parameters`.
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BARE = "# Parameters"  # the first line of the cell that papermill adds
OF_PAPERMILL = ("PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH")  # papermill --inject-paths puts them there
_FIRST_LINE = re.compile(r"#\s*Parameters\s*(:.*)?")
_CELL_MARK = re.compile(r"^# ?%%.*$", re.MULTILINE)


def assigned_names(namespace: Mapping[str, Any]) -> dict[str, str] | None:
    """Each name that the parameter cells assign, with the place: "In[2]" or a script's name.

    Args:
        namespace: the notebook's variables, with IPython's `In`; a script's, with `__file__`.

    Returns:
        names in order; None where no parameter cell is to be found.
    """
    history = namespace.get("In")
    executed = [(f"In[{number}]", str(cell)) for number, cell in enumerate(history)] if history else []
    current = current_cells(executed) or current_cells(_script_cells(namespace.get("__file__")))
    if not current:
        return None
    names: dict[str, str] = {}
    for place, cell in current:
        names |= dict.fromkeys(_stored(cell), place)
    return names


def current_cells(executed: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The parameter cells that count, of all that have run.

    A cell that ran again replaces what it was, so that a misspelt name can be mended without a new kernel: the
    notebook's own cell counts as it last ran, and papermill's (its first line is bare) if it last ran after that one.
    Where the notebook's own is bare too, the last cells that ran one after the other count.
    """
    kinds = [_kind(cell) for _, cell in executed]
    if "own" in kinds:
        own = max(index for index, kind in enumerate(kinds) if kind == "own")
        added = [index for index, kind in enumerate(kinds) if kind == "bare" and index > own]
        return [executed[index] for index in (own, *added[-1:])]
    last = max((index for index, kind in enumerate(kinds) if kind == "bare"), default=-1)
    first = last
    while first > 0 and kinds[first - 1] == "bare":
        first -= 1
    return executed[first : last + 1] if last >= 0 else []


def _kind(cell: str) -> str:
    """ "bare" for a cell that starts as papermill's, "own" for one whose first line says more; else empty."""
    line = cell.strip().partition("\n")[0].strip()
    if _FIRST_LINE.fullmatch(line) is None or _parsed(cell) is None:
        return ""
    return "bare" if line == BARE else "own"


def _parsed(cell: str) -> ast.Module | None:
    try:
        return ast.parse(cell.strip())
    except SyntaxError:  # it has not run either
        return None


def _stored(cell: str) -> list[str]:
    tree = _parsed(cell)
    nodes = ast.walk(tree) if tree is not None else ()
    stored = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return [name for name in stored if name not in OF_PAPERMILL]


def _script_cells(file: Any) -> list[tuple[str, str]]:
    """The cells of a script in the percent format; none where it cannot be read."""
    if not isinstance(file, str) or not file.endswith(".py"):
        return []
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return [(Path(file).name, cell) for cell in _CELL_MARK.split(text)]
