"""The notebooks' form: the .py and .ipynb files are what the one source generates, with plain, short cells."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebooks.notebook_cells import FOLDER, NAMES, ROOT, cells_of, code_of

each_notebook = pytest.mark.parametrize("name", NAMES)


def test_every_notebook_is_a_pair() -> None:
    """An .ipynb without its .py is edited by hand from then on; a fifth notebook would escape the lists here."""
    for ending in ("py", "ipynb"):
        assert sorted(path.stem for path in FOLDER.glob(f"*.{ending}")) == sorted(NAMES), ending


@pytest.mark.slow
def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    """An edit that the source lacks is lost at the next `make notebooks`; cell ids must not change."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    steps = ("python notebooks/source/generate.py", "jupytext --to ipynb --update notebooks/*.py")
    assert "".join(f"\t$(BIN)/{step}\n" for step in steps) in makefile
    for name in NAMES:
        shutil.copy(FOLDER / f"{name}.ipynb", tmp_path)
    command = [sys.executable, str(FOLDER / "source" / "generate.py"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    command = [sys.executable, "-m", "jupytext", "--to", "ipynb", "--update", *sorted(tmp_path.glob("*.py"))]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert len(list(tmp_path.iterdir())) == 2 * len(NAMES)
    for again in tmp_path.iterdir():
        assert again.read_bytes() == (FOLDER / again.name).read_bytes(), f"{again.name}: run `make notebooks`"


@each_notebook
def test_the_parameters_are_one_cell_of_plain_literals(name: str) -> None:
    """What is computed in the cell keeps the old values; a parameter that one notebook lacks breaks batches."""
    from papermill import inspect_notebook

    from rloo_kit.notebook.parameters import KNOWN

    (cell,) = [cell for cell in cells_of(name) if "parameters" in cell.tags]
    assert cell.kind == "code" and cell.tags == ("parameters",) and cell.lines[0].startswith("# Parameters")
    names = []
    for statement in ast.parse(cell.source).body:
        assert isinstance(statement, ast.Assign) and len(statement.targets) == 1, ast.unparse(statement)
        names.append(ast.unparse(statement.targets[0]))
        value = ast.literal_eval(statement.value)
        assert value is None or isinstance(value, str | int | float | bool), ast.unparse(statement)
    assert names == list(KNOWN)
    # papermill cannot parse a line with a second '=' in its comment, and then calls the parameter unknown.
    assert list(inspect_notebook(FOLDER / f"{name}.ipynb")) == list(KNOWN)


@each_notebook
def test_the_file_alone_decides_until_a_parameter_is_set(name: str) -> None:
    """A cell with numbers of its own trained another run than the command line does."""
    from rloo_kit.notebook.parameters import read_parameters

    namespace: dict = {}
    (cell,) = [cell.source for cell in cells_of(name) if "parameters" in cell.tags]
    exec(cell, namespace)
    assert read_parameters(namespace | {"In": ["", cell]}).overrides == []
    assert (ROOT / namespace["config"]).is_file()
    its = "evening_" if name == "qwen3_thinking_rloo" else name.removesuffix("_rloo").replace("qwen3_", "qwen3_4b_")
    assert Path(namespace["config"]).stem.startswith(its)
    assert namespace["overwrite"] is name.startswith("arithmetic")  # a run of hours is not deleted by Run All


@each_notebook
def test_every_code_cell_compiles_and_imports_little(name: str) -> None:
    """Logic in cells needs a second test suite; and `import torch` before the set-up loses Unsloth's patches."""
    for number, cell in enumerate(code_of(name)):
        tree = ast.parse(cell.source, filename=f"{name} code cell {number}")
        compile(tree, f"{name} code cell {number}", "exec")
        for node in ast.walk(tree):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ImportFrom), ast.unparse(node)
            if isinstance(node, ast.Import):
                assert number == 0, "imports are in the first cell"
                modules = {alias.name for alias in node.names}
                assert modules <= sys.stdlib_module_names | {"rloo_kit"}, modules
