"""The order of the packages, read from the sources: imports only go down, and light packages load nothing heavy."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# fmt: off
# A module or package imports from what stands before it, and from its own package.
# The core needs no part: it asks for one by name (`seams`) once a run names it, or is given an object of a part.
CORE = [
    "errors", "sizes", "seams", "system", "config", "runs", "_stack", "collective", "think_tags", "completion",
    "rewards", "data", "rewarding", "models", "gradient", "rollout", "loop",
]
PARTS = [
    "images", "health", "plan", "tools", "tasks", "graders", "vllm", "demo", "results", "evals", "checks", "training",
    "preflight", "export", "notebook", "batch", "cli",
]
ORDER = CORE + PARTS
# The `__init__` of each calls load_stack(), so Unsloth, torch and TRL have come in the right order above any module.
HEAVY = ["models", "gradient", "rollout", "loop", "images", "vllm", "demo", "evals", "training", "preflight", "export"]
# Never torch: not at the top of a module, nor through another package. `LOADS_IN_FUNCTIONS` may in functions.
LIGHT = [name for name in ORDER if name not in (*HEAVY, "_stack", "rewards")]
# fmt: on

LOADS_IN_FUNCTIONS = {"tools", "data", "tasks", "graders", "rewarding", "collective"}
LIGHT_LIBRARIES = {"pydantic", "yaml", "dotenv", "pynvml", "packaging", "rich", "tqdm", "psutil"}
LIGHT_LIBRARIES |= {"httpx", "ruamel", "typer", "markupsafe", "numpy", "jinja2", "tokenizers"}
# Where a kernel runs, or papermill, they are loaded; inside functions only.
LIGHT_LIBRARIES |= {"jupyter_core", "jupyter_client", "nbclient", "papermill"}
MAY_IMPORT_UNSLOTH = {"rloo_kit/_stack.py", "rloo_kit/models/unsloth.py"}


@dataclass(frozen=True)
class Import:
    module: str  # dotted, absolute
    line: int
    in_function: bool


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def place_of(path: Path) -> str:
    """The entry of `ORDER` that a file of rloo_kit belongs to; "" for the package's own `__init__`."""
    part = path.relative_to(ROOT / "rloo_kit").parts[0].removesuffix(".py")
    return "" if part == "__init__" else part


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def is_import_call(node: ast.AST) -> bool:
    """import_module("name") or __import__("name"), with the name written out."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return False
    return ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")


def imports_of(path: Path, tree: ast.Module, typing: bool = False) -> Iterator[Import]:
    """Every import of a file at any depth, import_module and __import__ too; with `typing` those for checkers."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += [node.module] if node.module else []
            yield from (Import(".".join([*base, alias.name]), node.lineno, inside) for alias in node.names)
        elif is_import_call(node):
            yield Import(str(node.args[0].value), node.lineno, inside)
        for child in ast.iter_child_nodes(node):
            if typing or not is_type_checking(child):
                yield from visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from visit(tree, False)


def read(path: Path, typing: bool = False) -> list[Import]:
    return list(imports_of(path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path)), typing))


MODULES = [path for path in sorted((ROOT / "rloo_kit").rglob("*.py")) if "rewards" not in path.relative_to(ROOT).parts]


def test_every_package_has_its_place() -> None:
    """A package outside the lists would escape every check of this file; one that is gone would keep its place."""
    found = {path.name.removesuffix(".py") for path in (ROOT / "rloo_kit").iterdir() if path.name[:2] != "__"}
    assert found == set(ORDER) and len(ORDER) == len(found) and set(HEAVY) < found


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_only_go_down(path: Path) -> None:
    """A config that imports the trainer would load torch for `rloo-kit --help`, and close a circle."""
    here = place_of(path)
    for found in read(path):
        top, *rest = found.module.split(".")
        if top != "rloo_kit" or not rest or rest[0] not in ORDER or not here:
            continue  # a public name of the package itself resolves lazily
        where = f"{relative(path)}:{found.line} imports {found.module}"
        assert ORDER.index(rest[0]) <= ORDER.index(here), f"{where}, which stands above {here}"
        if here not in HEAVY and not found.in_function:
            assert rest[0] not in HEAVY, f"{where}: {here} is light, so it loads {rest[0]} inside a function"


@pytest.mark.parametrize("path", [path for path in MODULES if place_of(path) not in HEAVY], ids=relative)
def test_light_packages_never_import_a_heavy_library(path: Path) -> None:
    """`kernel` importing torch inside a function would load it for a notebook that only ends its kernel."""
    here = place_of(path)
    if here == "_stack":
        return
    for found in read(path):
        library = found.module.split(".")[0]
        if here in LOADS_IN_FUNCTIONS and found.in_function:
            continue
        allowed = library in LIGHT_LIBRARIES | {"rloo_kit"} or library in sys.stdlib_module_names
        assert allowed, f"{relative(path)}:{found.line} imports {found.module}, and {here or 'rloo_kit'} is light"


@pytest.mark.parametrize("package", HEAVY)
def test_heavy_packages_begin_with_the_stack(package: str) -> None:
    """`import trl` ahead of Unsloth loses Unsloth's patches without a word. The `__init__` runs above every module."""
    tree = ast.parse((ROOT / "rloo_kit" / package / "__init__.py").read_text(encoding="utf-8"))
    assert [ast.unparse(node) for node in tree.body[1:]] == ["from rloo_kit._stack import load_stack", "load_stack()"]


def test_the_page_has_this_order() -> None:
    """docs/design.md says that a module imports from those above it in the table, and had another order."""
    table = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("| package or module |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)/?`", table, re.MULTILINE) == ORDER


def test_light_packages_begin_with_nothing() -> None:
    """A name that a light package's `__init__` handed on would load its module for everybody."""
    for package in set(LIGHT) - {"cli"}:  # the top, which nothing imports
        path = ROOT / "rloo_kit" / package / "__init__.py"
        assert not path.exists() or len(ast.parse(path.read_text(encoding="utf-8")).body) == 1, package


def test_no_circle_of_modules() -> None:
    """Two modules that need each other are one, types included; which is imported first decides whether it works."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    graph = {
        name: {m for one in read(path, typing=True) for m in (one.module, one.module.rpartition(".")[0]) if m in names}
        - {name}
        for name, path in names.items()
    }
    while leaves := {name for name, needs in graph.items() if not needs}:
        graph = {name: needs - leaves for name, needs in graph.items() if name not in leaves}
    assert not graph, f"circles among {sorted(graph)}"


def test_only_two_files_import_unsloth() -> None:
    """A third place that imports Unsloth would be a second import order."""
    files = {relative(path) for path in MODULES for one in read(path) if one.module.split(".")[0][:7] == "unsloth"}
    assert files <= MAY_IMPORT_UNSLOTH, f"{sorted(files - MAY_IMPORT_UNSLOTH)} import unsloth"


def test_public_names_never_share_a_packages_name() -> None:
    """`rloo_kit.evaluate` as a function and a module at once would be whichever was imported last."""
    import rloo_kit

    assert not set(ORDER) & set(rloo_kit._EXPORTS), "public names that are packages too"
