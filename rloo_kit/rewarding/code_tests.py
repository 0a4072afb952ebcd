"""What `code_reward` reads and never runs: the code of an answer, and a row's tests in each of their forms.

Function tests of APPS, PRIME and LiveCodeBench, pytest functions and unittest classes all become statements of Python
with assertions, which `jailed` runs one by one.
"""

import ast
import builtins
import functools
import importlib.util
import json
import re
import symtable
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from rloo_kit.errors import RewardError, excerpt

FORMS = (
    "texts of Python with asserts, test_ functions or unittest classes; {input, output}, {inputs, outputs, fn_name} or "
    "a list of {input, output, testtype}, {stdin, expected_output}, {type, fn_name, input, output}, {assert_case}"
)
OWN_MODULES = {
    "solution",
    "main",
    "answer",
    "submission",
    "candidate",
    "your_module",
    "your_code",
}  # the code, imported
INSTALLED = {"numpy"} if importlib.util.find_spec("numpy") else set()
JUDGES = {"abs", "all", "any", "bool", "isinstance", "round"}  # builtins that tests compare with
PLAIN = {name for kind in (str, bytes, int, float, complex, list, tuple, dict, set) for name in dir(kind)}
PYTEST = {"raises", "approx", "fail", "param", "mark", "fixture"}  # what there is of it in the jail
# What looks into the code, replaces a part of it or catches what it prints: modules, fixtures, and methods' beginnings.
UNCROSSED = ("unittest.mock", "asyncio", "subprocess", "multiprocessing", "tempfile", "inspect", "importlib", "mock")
WATCHED = ("redirect_std", "catch_warnings", "assertWarns", "assertLogs", "assertNoLogs", "IsolatedAsyncio")
FIXTURES = {"monkeypatch", "mocker", "capsys", "capfd", "caplog", "recwarn"}
CROSSES = "they use {}, and the code and its tests are two processes"
LACKS = "they use {}, which the jail's pytest has not"
_NAMES = ("fn_name", "func_name", "entry_point")
_KEYS = {"inputs": "input", "stdin": "input", "outputs": "output", "expected_output": "output", "type": "testtype"}
_KINDS = {None: None, "stdin": False, "stdin_stdout": False, "functional": True, "function_call": True}
# Calls the function wherever the code has it. JSON has no tuples, and keys are texts.
_CALL = """from solution import Solution, {0}
import json as _json_
def _holds_{0}_(given, wanted, wrapped):
    try:
        function = Solution().{0}
    except (NameError, AttributeError):
        function = {0}
    found = function(*_json_.loads(given))
    found, wanted = _json_.loads(_json_.dumps(found, default=lambda one: one.item())), _json_.loads(wanted)
    return found == wanted or wrapped and [found] == wanted"""

_OPEN = re.compile(r"^(?:(?!```|~~~).)*(`{3,}|~{3,})([^`\n]*)$", re.MULTILINE)
_PYTHON = re.compile(r"\{?\.?\b(?:i?py(?:thon)?[\d.]*|pycon)\b", re.IGNORECASE)
_APART = re.compile(r"^[ \t]*(?:`{3,}|~{3,}).*$|</?(?:answer|code)>", re.MULTILINE)
_BARE = re.compile(r"^(?:(?:async )?def |class |import |from |@).*?(?=^[A-Z][\w']* [a-z]|\Z)", re.MULTILINE | re.DOTALL)
_filters = threading.Lock()  # of warnings, which are the process's


class TestsError(RewardError):
    """A row's tests cannot be used, whatever the code is."""

    __test__: ClassVar[bool] = False


class UncrossedError(TestsError):
    """The tests need what cannot cross between the two processes of the jail."""


def find_code(answer: str) -> str:
    r"""The last block of Python in an answer that compiles and is no output or example of use; "" without one.

    >>> find_code("So:\n```python\nf = len\n```\nIt prints:\n```\n1\n```"), find_code("x = 1")
    ('f = len\n', 'x = 1')
    """
    answer = answer.replace("\r\n", "\n")
    blocks, place = list[str](), 0
    while place < len(answer) and (opened := _OPEN.search(answer, place)):
        start, fence = min(opened.end() + 1, len(answer)), f"{opened[1][0]}{{{len(opened[1])},}}"
        ends = list(re.compile(rf"^[ \t]*{fence}|{fence}[ \t]*$", re.MULTILINE).finditer(answer, start))
        place = len(answer)
        # The first that leaves a whole program: a text in the code may have fences of its own.
        for index, end in enumerate([*ends[:9], None]):
            text = answer[start : end.start() if end else None]
            is_whole = (not opened[2].strip() or _PYTHON.search(opened[2])) and _parse(text) is not None
            if is_whole:
                blocks.append(text)
            if end and (is_whole or index == 0):
                is_next = _PYTHON.match(answer, end.end())  # the next block, where this one was never closed
                place = end.start() if is_next else end.end() + len(answer[end.end() :].partition("\n")[0])
            if is_whole:
                break
    rank, code = _choose(blocks)
    if rank < 2:
        for piece in _APART.split(answer):
            found = [piece] if _parse(piece) else _BARE.findall(piece)
            rank, code = max((rank, code), _choose(found), key=lambda one: one[0])
    return code


def _parse(text: str) -> tuple[str, ast.Module] | None:
    """A program without its indentation, and its tree; None if it does not compile."""
    for spaced in dict.fromkeys((text, text.replace("\u00a0", " "))):
        with _filters, warnings.catch_warnings(), suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            warnings.simplefilter("ignore")
            tree = ast.parse(found := textwrap.dedent(spaced))
            compile(tree, "answer", "exec")
            return found, tree
    return None


def _choose(texts: Iterable[str]) -> tuple[int, str]:
    """The last of those most likely the answer's program, and how likely: 3 for one that defines or reads something and
    uses nothing of an earlier one, 2 for other assignments, 1 for calls, 0 for output, -1 for none."""
    best, earlier = (-1, ""), set[str]()
    for code, tree in filter(None, map(_parse, texts)):
        nodes, (used, bound) = list(ast.walk(tree)), _globals(code)
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        reads = {"input", "stdin", "open"} & (used | {node.attr for node in nodes if isinstance(node, ast.Attribute)})
        rank = int(any(isinstance(node, ast.Call) for node in nodes))
        if not earlier & (used - bound) and _roots(nodes) <= sys.stdlib_module_names | INSTALLED:
            is_program = defined or reads or any(isinstance(node, ast.Lambda) for node in nodes)
            rank = 3 if is_program else 2 if bound else rank
        if code.strip() and rank >= best[0]:
            best = rank, code
        earlier |= defined
    return best


def _globals(text: str) -> tuple[set[str], set[str]]:
    """The global names that a program uses, and those that it binds."""
    top = symtable.symtable(text, "tests", "exec")
    tables, used, bound = [top], set[str](), set[str]()
    for table in tables:
        tables += table.get_children()
        for one in table.get_symbols():
            if (table is top or one.is_global()) and one.is_referenced():
                used.add(one.get_name())
            if (table is top or one.is_declared_global()) and (one.is_assigned() or one.is_imported()):
                bound.add(one.get_name())
    return used, bound


def _roots(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that are imported."""
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def read_tests(tests: Any, row: Mapping[str, Any]) -> list[str] | list[tuple[str, str]]:
    r"""A row's tests: texts of Python, or pairs of what a program reads and what it has to print; [] without tests.

    `row`: its columns; `fn_name`, `func_name`, `entry_point`, `metadata` or `starter_code` names the function that tests
    without a name call. Raises TestsError with what was found.

    >>> read_tests('{"input": ["2"], "output": [["4", "5"]]}', {}), read_tests("assert f(2) == 4", {})
    ([('2', '4\n5')], ['assert f(2) == 4'])
    """
    found: list[Any] = []
    for one in _listed(tests):
        read = [one] if isinstance(one, str) else _read_test(one, row)
        found += [part for part in read if part not in found[:1]]  # `_CALL` once
    if len({type(one) for one in found}) > 1:
        raise _unread("texts and pairs in one row")
    return found


def _unread(found: str) -> TestsError:
    return TestsError(f"they are {found}, and code_reward does not read these; it reads {FORMS}")


def _listed(tests: Any) -> list[Any]:
    """Texts, and dicts of one test each with the keys of LiveCodeBench."""
    if isinstance(tests, str):
        if re.fullmatch(r"eJ[\w+/=\s]{18,}", tests):
            raise _unread("packed (base64 and zlib, as LiveCodeBench has its private tests)")
        with suppress(ValueError, RecursionError):
            return _listed(json.loads(tests))
        return [tests] if tests.strip() else []
    if isinstance(tests, list | tuple):
        if nested := [one for one in tests if not isinstance(one, str | dict | None)]:
            raise _unread(f"a list that holds {excerpt(nested[0], 60)} of type {type(nested[0]).__name__}")
        read = [_listed(one) if isinstance(one, dict) or str(one)[:1] == "{" else [one] for one in tests if one]
        return [one for some in read for one in some]
    if tests is None or tests != tests:
        return []
    if not isinstance(tests, dict):
        raise _unread(f"of type {type(tests).__name__}: {excerpt(tests, 60)}")
    test = {_KEYS.get(key, key): value for key, value in tests.items() if value is not None}
    given, wanted = test.get("input"), test.get("output")
    if not (isinstance(given, list) and isinstance(wanted, list)) or isinstance(test.get("testtype"), str):
        return [test] if test else []
    if len(given) != len(wanted):
        raise _unread(f"{len(given)} inputs and {len(wanted)} outputs")
    several = {key for key, value in test.items() if isinstance(value, list) and len(value) == len(given)}
    rows = [{key: one[index] if key in several else one for key, one in test.items()} for index in range(len(given))]
    return [{key: one for key, one in row.items() if one is not None} for row in rows]


def _read_test(test: dict[str, Any], row: Mapping[str, Any]) -> list[Any]:
    if asserts := test.get("assert_case") or test.get("assert"):
        return _listed(asserts)
    if not {"input", "output"} <= test.keys():
        raise _unread(f"dicts with the keys {', '.join(map(str, test)) or 'none'}")
    given, wanted, kind = test["input"], test["output"], test.get("testtype")
    if kind not in _KINDS:
        raise _unread(f"of the type {excerpt(kind, 60)}")
    if not (_KINDS[kind] or (kind is None and any(one.get(key) for one in (test, row) for key in _NAMES[:2]))):
        return [(_lines(given), _lines(wanted))]
    name, is_text = _function(test, row), isinstance(given, str)
    if not name.isidentifier():
        raise _unread("calls of a function that no fn_name, func_name, entry_point, metadata or starter_code names")
    try:
        if is_text:
            given, wanted = [json.loads(line) for line in given.splitlines() if line.strip()], json.loads(wanted)
        values = json.dumps(given), json.dumps(wanted)
    except (TypeError, ValueError, RecursionError):
        raise _unread(f"calls whose input and output are no JSON, a value a line: {excerpt(given, 60)}") from None
    if not isinstance(given, list):
        raise _unread(f"calls whose input is of type {type(given).__name__}, no list: {excerpt(given, 60)}")
    return [_CALL.format(name), f"assert _holds_{name}_({values[0]!r}, {values[1]!r}, {not is_text})"]


def _function(test: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The function that a test calls, by the test itself or by the row's columns; "" if neither names one."""
    for source in (test, row):
        metadata = source.get("metadata")
        if isinstance(metadata, str):
            with suppress(ValueError):
                metadata = json.loads(metadata)
        for one in (source, metadata if isinstance(metadata, dict) else {}):
            for name in (one.get(key) for key in _NAMES):
                if isinstance(name, str) and name:
                    return re.findall(r"\w+|$", name.rstrip("() "))[-2]
        if starters := re.findall(r"\bdef\s+(\w+)", str(source.get("starter_code"))):
            return str(starters[-1])
    return ""


def _lines(value: Any) -> str:
    """What a program reads or prints: text, or a list of lines."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, list | dict) for one in value)):
        raise _unread(f"values of a call without a function's name (fn_name): {excerpt(value, 60)}")
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


class Marks(ast.NodeTransformer):
    """Turns each assertion into a mark, which counts and goes on, and imports of the code into its names."""

    def __init__(self) -> None:
        self.count, self.is_caught, self.imported = 0, False, set[str]()

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return self._mark([], node.test)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        return self._mark([node], None) if _asserts(node.value) else node

    def visit_With(self, node: ast.With) -> Any:
        if any(_asserts(item.context_expr) for item in node.items):  # an assert in it may be what has to raise
            return self._mark([node], None)
        return self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> ast.Try:
        before, self.is_caught = self.is_caught, self.is_caught or bool(node.handlers)
        node.body = [one for some in map(self.visit, node.body) for one in (some if isinstance(some, list) else [some])]
        self.is_caught, body, node.body = before, node.body, []
        self.generic_visit(node)
        node.body = body
        return node

    def _mark(self, before: list[ast.stmt], test: ast.expr | None) -> list[ast.stmt]:
        self.count += 1
        made: Any = ast.parse("try:\n    _mark_()\nexcept Exception:\n    _mark_(False)").body[0]
        if test is not None:
            made.body[0].value.args.append(test)
        made.body[:0] = before
        return made.body if self.is_caught else [made]  # its own handlers may wait for what it raises

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        own = [one for one in node.names if one.name in OWN_MODULES]
        self.imported |= {"solution" for _ in own}
        node.names = [one for one in node.names if one not in own]
        names = [one.asname or one.name for one in own]
        return [*([node] if node.names else []), *_statements(*(f"{name} = solution" for name in names))]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
        if node.module == "pytest":
            node.names = [one for one in node.names if one.name != "fixture"]
        elif node.level or node.module in OWN_MODULES:
            self.imported |= {one.name for one in node.names} - {"*"}
            node, names = ast.ImportFrom(names=[]), [one for one in node.names if one.asname]
            return _statements("pass", *(f"{one.asname} = {one.name}" for one in names))
        return node if node.names else _statements("pass")


def _statements(*texts: str) -> list[ast.stmt]:
    return ast.parse("\n".join(texts)).body


def _last(node: ast.AST) -> str:
    """The last name of `a.b(...)`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _asserts(node: ast.AST) -> bool:
    """Whether it is a call like self.assertEqual, np.testing.assert_allclose or pytest.raises."""
    return isinstance(node, ast.Call) and (_last(node) == "raises" or _last(node).startswith("assert"))


@functools.lru_cache(maxsize=1024)
def compile_tests(texts: tuple[str, ...], entry: str) -> dict[str, Any]:
    """What `jailed` needs of a row's tests: `statements` with marks, how many `asserts` are in them, the `names` that
    the code has to define, those of them that are surely `classes`, and whether `pytest` is used.

    `entry`: the function that `check` (HumanEval) is called with. Raises TestsError for tests that are no Python,
    assert nothing or use what the jail lacks, UncrossedError for those that reach into the code."""
    try:
        compile("\n".join(texts), "tests", "exec")
        tree, marks = ast.parse("\n".join(texts)), Marks()
        tree.body = [one for node in tree.body for one in _unwrapped(node)]
        tree = marks.visit(tree)
        nodes, (used, bound) = list(ast.walk(tree)), _globals(ast.unparse(tree))
        statements = _collect(tree, used)
    except (SyntaxError, ValueError) as error:
        raise TestsError(f"they are no Python: {getattr(error, 'msg', error)}") from None
    except RecursionError:
        raise TestsError("they are nested too deeply") from None
    bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules = used & bases & sys.stdlib_module_names - vars(builtins).keys() - bound - marks.imported
    wanted, tested = used - bound - modules - {"_mark_"}, set(re.findall(r"\w+", entry)[:1]) | marks.imported
    # Builtins are the tests' own, unless there is nothing else to test (a task to write `sum`).
    names = (wanted - vars(builtins).keys() - {"__file__"} or wanted - JUDGES) | tested
    _refuse(nodes, names, used)
    if not marks.count:
        raise TestsError("there is no assert in them")
    if "check" in bound - used:
        if not entry:
            raise TestsError("they define check() and never call it: the rows need a column entry_point")
        statements.append(f"check({entry})")
    return {
        "statements": [*(f"import {name}" for name in sorted(modules)), *statements],
        "asserts": marks.count,
        "names": sorted(names),
        "classes": sorted(names & _classes(nodes)),
        "pytest": "pytest" in _roots(nodes),
    }


def _unwrapped(node: ast.stmt) -> list[ast.stmt]:
    """A statement of the tests' module without what starts a test runner."""
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
        return [one for inner in node.body for one in _unwrapped(inner)]
    is_kept = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
    runs = not is_kept and re.search(
        r"\b(?:unittest|pytest)\.main\(|TestLoader|TestSuite|TextTestRunner", ast.unparse(node)
    )
    return [] if runs else [node]


def _collect(tree: ast.Module, used: set[str]) -> list[str]:
    """The statements of a module, then one for each test that a test runner would call."""
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    fixtures = _fixtures(tree.body, "")
    runs: list[str] = []
    for name, node in own.items():
        if isinstance(node, ast.FunctionDef):
            if name.startswith("test") and name not in used and name not in fixtures:
                runs.append(_run(node, "", [], [], fixtures))
            continue
        line = _line_of(node, own)
        methods = {one.name: one for kind in line for one in kind.body if isinstance(one, ast.FunctionDef)}
        tests = [one for one in methods.values() if one.name.startswith("test") and not _is_skipped(node, one)]
        if any(ast.unparse(base).endswith("TestCase") for kind in line for base in kind.bases):
            around = [[f"{name}.{each}()"] * (each in methods) for each in ("setUpClass", "tearDownClass")]
            runs += [*around[0], *(f"{name}('{one.name}').debug()" for one in tests), *around[1]]
        elif name.startswith("Test"):
            made = [f"_one_ = {name}()"]
            inner = fixtures | {each: one for kind in line for each, one in _fixtures(kind.body, "_one_.").items()}
            before, after = (
                [
                    f"_one_.{each}({'None' if len(methods[each].args.args) > 1 else ''})"
                    for each in names
                    if each in methods
                ]
                for names in (("setup_class", "setup_method", "setup"), ("teardown_method", "teardown"))
            )
            runs += [_run(one, "_one_.", made + before, after, inner) for one in tests if one.name not in inner]
    return [*map(ast.unparse, tree.body), *filter(None, runs)]


def _line_of(node: ast.ClassDef, own: Mapping[str, ast.stmt]) -> list[ast.ClassDef]:
    """A class of the tests behind its bases among them."""
    bases = [base for one in node.bases if isinstance(base := own.get(ast.unparse(one)), ast.ClassDef)]
    return [*(one for base in bases if base is not node for one in _line_of(base, own)), node]


class Fixture(NamedTuple):
    call: str
    needs: list[str]
    is_everywhere: bool


def _fixtures(body: list[ast.stmt], owner: str) -> dict[str, Fixture]:
    """The fixtures that tests define, which become plain functions."""
    found = {}
    for node in body:
        marks = [one for one in getattr(node, "decorator_list", []) if _last(one) == "fixture"]
        if isinstance(node, ast.FunctionDef) and marks:
            mark = ast.unparse(marks[0])
            if "params=" in mark or "name=" in mark:
                raise TestsError(LACKS.format(mark))
            node.decorator_list = []
            yields = any(isinstance(one, ast.Yield) for one in ast.walk(node))
            call = f"next({owner}{node.name}({{}}))" if yields else f"{owner}{node.name}({{}})"
            found[node.name] = Fixture(call, _needs(node, owner), "autouse=True" in mark)
    return found


def _needs(node: ast.FunctionDef, owner: str) -> list[str]:
    """The parameters without a default, without self."""
    names = [one.arg for one in node.args.args]
    return names[bool(owner) : len(names) - len(node.args.defaults)]


def _run(test: ast.FunctionDef, owner: str, before: list[str], after: list[str], fixtures: dict[str, Fixture]) -> str:
    """A statement that calls a test with its fixtures; a case of `parametrize` has fresh ones."""
    if _is_skipped(test):
        return ""
    marks, test.decorator_list = test.decorator_list, []
    cases = [ast.unparse(one.args[0]) for one in marks if isinstance(one, ast.Call) and one.args]
    needs = [name for name in _needs(test, owner) if name not in re.findall(r"\w+", " ".join(cases))]
    before = before + [_given(name, fixtures) for name, one in fixtures.items() if one.is_everywhere]
    given = ", ".join([*(f"{name}={_given(name, fixtures)}" for name in needs), "**given"])
    lines = [
        *before,
        "try:",
        f"    {owner}{test.name}({given})",
        "finally:",
        *(f"    {one}" for one in after or ["pass"]),
    ]
    marked = "".join(f"@{ast.unparse(one)}\n" for one in marks)
    return f"{marked}def _case_(**given):\n{textwrap.indent(chr(10).join(lines), '    ')}\n_case_()"


def _given(name: str, fixtures: dict[str, Fixture]) -> str:
    if name in FIXTURES:
        raise UncrossedError(CROSSES.format(f"pytest's fixture {name}"))
    if name not in fixtures:
        raise TestsError(LACKS.format(f"pytest's fixture {name}"))
    return fixtures[name].call.format(", ".join(f"{one}={_given(one, fixtures)}" for one in fixtures[name].needs))


def _is_skipped(*nodes: ast.FunctionDef | ast.ClassDef) -> bool:
    marks = " ".join(ast.unparse(mark) for node in nodes for mark in node.decorator_list)
    return bool(re.search(r"skip|xfail|expectedFailure", marks))


def _refuse(nodes: list[ast.AST], names: set[str], used: set[str]) -> None:
    """Raise for what the jail lacks, and for what reaches into the code."""
    if missing := _roots(nodes) - sys.stdlib_module_names - INSTALLED - {"pytest"}:
        there = ", ".join(["the standard library", *sorted(INSTALLED), "and a part of pytest"])
        raise TestsError(f"they import {', '.join(sorted(missing))}; the jail has {there}")
    parts = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    paths = [f"{getattr(node, 'module', '')}.{one.name}".lstrip(".") for node in imports for one in node.names]
    for path in [*paths, *map(ast.unparse, parts)]:
        if path.startswith("pytest.") and path.split(".")[1] not in PYTEST:
            raise (UncrossedError if path == "pytest.warns" else TestsError)(LACKS.format(path))
    if marks := {"indirect", "usefixtures"} & (
        {one.attr for one in parts} | {getattr(one, "arg", None) for one in nodes}
    ):
        raise TestsError(LACKS.format(f"pytest's {marks.pop()}"))
    modules = {(one.asname or one.name).partition(".")[0] for node in imports for one in node.names} | {"builtins"}
    reaching = [path for path in paths if path.startswith(UNCROSSED)]
    reaching += ["open"] * ("open" in used - names) + ["async functions"] * any(
        isinstance(one, ast.Await) for one in nodes
    )
    reaching += [one.attr for one in parts if one.attr.startswith(WATCHED)]
    reaching += [
        f"{ast.unparse(one)} = ..." for one in parts if isinstance(one.ctx, ast.Store) and one.value.id in modules
    ]
    bases = {base for node in nodes if isinstance(node, ast.ClassDef) for base in map(ast.unparse, node.bases)}
    reaching += [f"a subclass of {base}, which is the code's" for base in bases if base.partition(".")[0] in names]
    if {one.attr for one in parts if ast.unparse(one.value).endswith("random")} == {"seed"}:
        reaching.append("random.seed for the code")
    if reaching:
        raise UncrossedError(CROSSES.format(reaching[0]))


def _classes(nodes: list[ast.AST]) -> set[str]:
    """Names that tests treat as classes: what a call of one makes has attributes or operators that no value of Python's
    own has, or it is where only a class can be. MBPP has functions with such names, too."""
    made: dict[str, str] = {}  # what holds an object: the class that was called for it
    shown, called = (
        set[str](),
        {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)},
    )

    def kind(node: ast.AST | None) -> str:
        return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""

    for node in nodes:
        for one in node.targets if isinstance(node, ast.Assign) else ():
            made[ast.unparse(one)] = kind(node.value)
        if isinstance(node, ast.withitem) and node.optional_vars:
            made[ast.unparse(node.optional_vars)] = kind(node.context_expr)
        for one in ast.walk(node) if isinstance(node, ast.FunctionDef) else ():  # fixtures, and functions that make one
            if isinstance(one, ast.Return | ast.Yield):
                made[node.name] = made[f"{node.name}()"] = made[f"self.{node.name}()"] = kind(one.value)
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in PLAIN:
            shown |= {kind(node.value), made.get(ast.unparse(node.value), ""), ast.unparse(node.value)}
        elif isinstance(node, ast.BinOp):
            shown |= {kind(node.left)} & {kind(node.right)}
        elif isinstance(node, ast.Compare):
            shown |= {kind(node.left)} & set(map(kind, node.comparators))
        elif isinstance(node, ast.ExceptHandler) and node.type:
            shown |= {one.id for one in ast.walk(node.type) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.Call) and _last(node) in ("isinstance", "issubclass", "assertIsInstance"):
            shown |= {one.id for one in ast.walk(node.args[-1]) if isinstance(one, ast.Name)}
        elif _asserts(node) and re.search("[rR]aises", _last(node)):
            shown |= {one.id for one in ast.walk(node.args[0]) if isinstance(one, ast.Name)}
    return {name for name in shown & called if name[:1].isupper()}


class RowFault(NamedTuple):
    """A reason why tests cannot be used, how many rows have it, and the first; `is_unread`: it is their form."""

    reason: str
    rows: int
    first: int
    is_unread: bool


def find_row_faults(rows: Iterable[tuple[int, Any, Mapping[str, Any]]]) -> list[RowFault]:
    """What keeps rows from being scored, by reason; `rows`: the number of each, its tests, its further columns."""
    found: dict[str, RowFault] = {}
    for number, tests, row in rows:
        is_unread = True
        try:
            texts, is_unread = read_tests(tests, row), False
            if texts and isinstance(texts[0], str):
                compile_tests(tuple(map(str, texts)), str(row.get("entry_point") or ""))
        except TestsError as error:
            before = found.get(str(error), RowFault(str(error), 0, number, is_unread))
            found[str(error)] = before._replace(rows=before.rows + 1)
    return list(found.values())
