"""The floors: who may import whom, read from the sources, so that a rare path counts as much as a common one."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    1: "errors thresholds tokens config config_batch config_checks config_errors config_sections config_yaml old_names "
    "chat env_file finite_guard environment nvml progress doctor versions run_dir resume_rules health intervals "
    "measurement leave_one_out kernel kernel_end kernel_server process_memory runner saves pass_rate_cache "
    "reward_failures parameters parameter_cells parameter_values samples text_bars text_tables "
    "vram vram_parts vram_plan vram_shapes batch_notebook batch_file batch_status "
    "rollout_types rollout_cache thinking_budget vllm_client vllm_answers processes launcher",
    2: "_stack backends data data_sources arithmetic cold_start tiny_tokenizer tiny_model reward_registry reward_guard "
    "reward_models reward_worker reward_process rollout rollout_native rollout_generate "
    "rollout_continuous decoders fused_decoder slot_cache slot_cache_kinds token_draw logprobs adapters "
    "advantages loop_metrics "
    "rloo_config "
    "objective kl_report "
    "old_trainer trainer callbacks sample_table "
    "resample thinking_metrics answer_judge "
    "packing packed_attention scoring policy_pass streamed_pass "
    "trainer_rollout trainer_log trainer_setup trainer_files collective parallel "
    "memory_peak full_caches rollout_server adapter_handover",
    3: "training vram_measure random_checkpoint difficulty evaluation report report_figures report_style "
    "notebook_display notebook_figures "
    "completion_cards batch batch_process batch_progress batch_report batch_figures",
    4: "cli __main__",
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}
LIGHT = {"pydantic", "pydantic_core", "yaml", "dotenv", "pynvml", "packaging", "rich", "tqdm", "psutil", "httpx"}
LIGHT |= {"jupyter_core", "jupyter_client"}  # where a kernel runs they are loaded; inside functions only
HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes", "unsloth", "unsloth_zoo"}
# torch alone may come before Unsloth: tensor arithmetic needs no stack. What Unsloth rewrites may not.
ORDERED = HEAVY - {"torch"}
MAY_IMPORT_UNSLOTH = {"rloo_kit/_stack.py", "rloo_kit/backends/unsloth.py"}


@dataclass(frozen=True)
class Import:
    module: str  # dotted, absolute
    line: int
    scope: ast.AST  # the outermost function or class around it, or the module itself


def sources(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def floor_of(path: Path) -> int:
    """The floor of a module of rloo_kit; the package's own __init__ counts as floor 1."""
    part = path.relative_to(ROOT / "rloo_kit").parts[0].removesuffix(".py")
    return 1 if part == "__init__" else FLOOR_OF[part]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def is_import_call(node: ast.AST) -> bool:
    """import_module("name") or __import__("name"), with the name written out."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return False
    return ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")


def imports_of(path: Path, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file: statements at any depth, and import_module or __import__ called with a name."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])

    def visit(node: ast.AST, scope: ast.AST) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, scope) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            yield from (Import(f"{base}.{alias.name}", node.lineno, scope) for alias in node.names)
        elif is_import_call(node):
            yield Import(str(node.args[0].value), node.lineno, scope)
        for child in ast.iter_child_nodes(node):
            if is_type_checking(child):
                continue
            inner = isinstance(node, ast.Module) and isinstance(child, ast.FunctionDef | ast.ClassDef)
            yield from visit(child, child if inner else scope)

    yield from visit(tree, tree)


def read(path: Path) -> tuple[ast.Module, list[Import]]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return tree, list(imports_of(path, tree))


def lines_of_load_stack(scope: ast.AST) -> list[int]:
    """Lines where load_stack is called; for a module only its own statements, not what lies in its functions."""
    body = (
        [node for node in scope.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
        if isinstance(scope, ast.Module)
        else [scope]
    )
    return [
        call.lineno
        for statement in body
        for call in ast.walk(statement)
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "load_stack"
    ]


@pytest.mark.parametrize("path", sources("rewards"), ids=relative)
def test_floor_0_is_standard_library_only(path: Path) -> None:
    """A reward that imported torch (or rloo_kit) could not be copied into a bare TRL script."""
    allowed = sys.stdlib_module_names | {"rewards"}
    bad = [(found.module, found.line) for found in read(path)[1] if found.module.split(".")[0] not in allowed]
    assert not bad, f"{relative(path)} imports {bad}; rewards may import the standard library only"


@pytest.mark.parametrize("path", sources("rloo_kit"), ids=relative)
def test_every_module_stands_on_a_floor(path: Path) -> None:
    """A new module outside the list would escape every check of this file."""
    part = path.relative_to(ROOT / "rloo_kit").parts[0].removesuffix(".py")
    assert part == "__init__" or part in FLOOR_OF, f"say in FLOORS on which floor rloo_kit/{part} stands"


@pytest.mark.parametrize("path", sources("rloo_kit"), ids=relative)
def test_imports_only_go_down(path: Path) -> None:
    """A config that imports the trainer would load torch for `rloo-kit --help`, and close a circle."""
    floor = floor_of(path)
    for found in read(path)[1]:
        top, *rest = found.module.split(".")
        if top == "rloo_kit" and rest:
            target = FLOOR_OF.get(rest[0], 1)  # a public name of the package itself resolves lazily
            assert target <= floor, (
                f"{relative(path)}:{found.line} stands on floor {floor} and imports {found.module} from floor {target}"
            )


@pytest.mark.parametrize("path", sources("rloo_kit"), ids=relative)
def test_floor_1_and_4_never_import_a_heavy_library(path: Path) -> None:
    """`kernel` importing torch inside a function would load it for a notebook that only ends its kernel."""
    floor = floor_of(path)
    if floor not in (1, 4):
        return
    light = LIGHT | {"rloo_kit", "rewards"} | ({"typer", "click"} if floor == 4 else set()) | sys.stdlib_module_names
    bad = [(found.module, found.line) for found in read(path)[1] if found.module.split(".")[0] not in light]
    assert not bad, (
        f"{relative(path)} (floor {floor}) imports {bad}; it may import {sorted(LIGHT)} and the floors below"
    )


@pytest.mark.parametrize("path", sources("rloo_kit"), ids=relative)
def test_heavy_libraries_come_through_the_stack(path: Path) -> None:
    """`import trl` ahead of Unsloth loses Unsloth's patches without a word: load_stack() comes first in the scope."""
    if floor_of(path) not in (2, 3) or relative(path) in MAY_IMPORT_UNSLOTH:
        return
    tree, imports = read(path)
    module_calls = lines_of_load_stack(tree)
    for found in imports:
        if found.module.split(".")[0] in ORDERED:
            calls = module_calls + (lines_of_load_stack(found.scope) if found.scope is not tree else [])
            assert any(line < found.line for line in calls), (
                f"{relative(path)}:{found.line} imports {found.module} with no load_stack() above it; call "
                "rloo_kit._stack.load_stack() first (at module level, or in the same function)"
            )


def test_floors_0_and_1_are_type_checked() -> None:
    """A light module that mypy is not told of would slowly lose its types."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    expected = {f"rloo_kit.{path.stem}" for path in (ROOT / "rloo_kit").glob("*.py") if floor_of(path) == 1}
    assert settings["packages"] == ["rewards"]
    assert set(settings["modules"]) == {name.replace(".__init__", "") for name in expected}


def test_only_two_files_import_unsloth() -> None:
    """A third place that imports Unsloth would be a second import order."""
    files = {
        relative(path)
        for package in ("rloo_kit", "rewards")
        for path in sources(package)
        if any(found.module.split(".")[0] in ("unsloth", "unsloth_zoo") for found in read(path)[1])
    }
    assert files <= MAY_IMPORT_UNSLOTH, f"{sorted(files - MAY_IMPORT_UNSLOTH)} import unsloth"


def test_public_names_exist_and_never_share_a_modules_name() -> None:
    """`rloo_kit.evaluate` as a function and a module at once would be whichever was imported last."""
    import rloo_kit

    modules = {path.stem for path in (ROOT / "rloo_kit").iterdir()}
    assert not modules & set(rloo_kit._EXPORTS), "public names that are modules too"
    for name, module in rloo_kit._EXPORTS.items():
        path = ROOT / "rloo_kit" / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert path.exists(), f"rloo_kit.{name} is announced in rloo_kit.{module}, which does not exist"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = {getattr(node, "name", None) for node in tree.body} | {
            alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        assert name in defined, f"{relative(path)} does not define {name}"


@pytest.mark.parametrize(
    ("source", "line", "module"),
    [
        ("def f():\n    import torch\n", 2, "torch"),
        ("from importlib import import_module\nimport_module('trl')\n", 2, "trl"),
        ("try:\n    from peft import LoraConfig\nexcept ImportError:\n    pass\n", 2, "peft.LoraConfig"),
        ("class A:\n    def f(self):\n        from .errors import X\n", 3, "rloo_kit.errors.X"),
    ],
)
def test_the_reader_sees_hidden_imports(source: str, line: int, module: str) -> None:
    """The checks above are worth what their reader finds: imports in functions, in try blocks, by name, relative."""
    found = list(imports_of(ROOT / "rloo_kit" / "example.py", ast.parse(source)))
    assert (module, line) in [(one.module, one.line) for one in found]


def test_the_reader_skips_type_checking() -> None:
    """Imports for type checkers only never run."""
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    found = imports_of(ROOT / "rloo_kit" / "example.py", ast.parse(source))
    assert [one.module for one in found] == ["typing.TYPE_CHECKING"]


def test_the_reader_tells_an_import_above_load_stack() -> None:
    """A call below the import, or inside a function that nobody has called yet, does not count."""
    tree = ast.parse("import trl\nload_stack()\ndef f():\n    load_stack()\n")
    assert lines_of_load_stack(tree) == [2]
