"""What `code_reward` reads and never runs: the code of an answer, and a row's tests in each of their forms."""

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
from typing import Any, ClassVar

from rloo_kit.errors import RewardError, excerpt

FORMS = (
    "texts of Python (asserts, test_ functions, unittest classes), {assert_case}, {input, output} of texts or lists, "
    "{inputs, outputs, fn_name}, {stdin, expected_output}, and lists of {input, output, testtype} or {type, fn_name}"
)
INSTALLED = {"numpy"} if importlib.util.find_spec("numpy") else set()
JUDGES = {"abs", "all", "any", "bool", "isinstance", "round"}  # builtins that tests compare with
PLAIN = {name for kind in (str, bytes, int, float, complex, list, tuple, dict, set) for name in dir(kind)}
LACKS = "they use {}, which the jail's pytest has not"
_OWN = re.compile("solution|main|answer|submission|candidate|your_module|your_code")  # what tests import the code as
_NAMES = ("fn_name", "func_name", "entry_point")
TEST_COLUMNS = (*_NAMES, "metadata", "starter_code")  # of a row, next to its tests
_KEYS = {"inputs": "input", "stdin": "input", "outputs": "output", "expected_output": "output", "type": "testtype"}
_KINDS = {None: None, "stdin": False, "stdin_stdout": False, "functional": True, "function_call": True}
# Calls the function, or the last one if none is named, wherever the code has it. JSON has no tuples, and text as keys.
_CALL = """import json as _json_, solution
def _holds_{0}_(given, wanted, wrapped):
    owner = getattr(solution, 'Solution', solution)
    names = [one for one in vars(owner) if one[0] != '_' and callable(getattr(owner, one))]
    name = '{0}' or names[-1]
    owner = owner() if owner is not solution and hasattr(owner, name) else solution
    found = getattr(owner, name)(*_json_.loads(given))
    found, wanted = _json_.loads(_json_.dumps(found, default=lambda one: one.item())), _json_.loads(wanted)
    return found == wanted or wrapped and [found] == wanted"""

_OPEN = re.compile(r"^(?:(?!```|~~~).)*(`{3,}|~{3,})([^`\n]*)$", re.MULTILINE)
_PYTHON = re.compile(r"\{?\.?\b(?:i?py(?:thon)?[\d.]*|pycon)\b", re.IGNORECASE)
_APART = re.compile(r"^[ \t]*(?:`{3,}|~{3,}).*$|</?(?:answer|code|solution)>", re.MULTILINE)
_SPACES = {0xA0: " ", 0x200B: None, 0xFEFF: None}
_FENCED = re.compile("```|~~~")
_BARE = re.compile(r"^(?:(?:async )?def |class |import |from |@).*?(?=^[A-Z][\w']* [a-z]|\Z)", re.MULTILINE | re.DOTALL)
_RUNNER = re.compile(r"\b(?:unittest|pytest)\.main\(|TestLoader|TestSuite|TextTestRunner")
_STRING = re.compile(r"""(?s)\#[^\n]*|("{3}|'{3}|["'])(?:\\.|(?!\1).)*+\1""")  # and comments
_FIXTURE = re.compile(r"pytest\.fixture(?:\((?:scope='\w*')?\))?")  # one that is a plain function
_LACKING = re.compile(
    r"\bpytest\.(?!raises|approx|fail|param|mark|main|warns|fixture(?:\(\)|\(scope=''\))?\s*\n)\w+|\busefixtures\b"
    r"|import .*\bfixture\b|\bindirect="
)
# What looks into the code, replaces a part of it, or catches what it warns or logs.
_UNCROSSED = re.compile(
    r"""^[ ]*(?:import|from)[ ].*\b(mock|asyncio|threading|concurrent|subprocess|multiprocessing|tempfile|sqlite3)\b
    |^[ ]*(?:import|from)[ ].*\b(inspect|importlib|shutil)\b
    |\b(monkeypatch|mocker|cap(?:sys|fd|log)|recwarn|redirect_stderr|catch_warnings|warns|assertWarns|assertLogs|await)\b
    |\b((?:read|write)_(?:text|bytes)|os\.(?:environ|chdir|mkdir|makedirs|remove)|setrecursionlimit)\b
    |(?<![\w.])(?<!def[ ])(open\(|(?!sys\.stdout)(?:sys|builtins|os|time|random|datetime)\.\w+[ ]*=(?!=))
    |\A(?!(?s:.*)random\.(?!seed))(?s:.*)\b(random\.seed)\b""",
    re.MULTILINE | re.VERBOSE,
)
Program = tuple[str, ast.Module, set[str], set[str]]  # a text that compiles, and the global names it uses and binds
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
    answer = re.sub(r"\r\n?", "\n", answer)
    fences = [fence.start() for fence in _FENCED.finditer(answer)]
    answer = answer[fences[-60] :] if len(fences) > 60 else answer
    blocks, place = list[Program](), 0
    while place < len(answer) and (opened := _OPEN.search(answer, place)):
        start, fence = min(opened.end() + 1, len(answer)), f"{opened[1][0]}{{{len(opened[1])},}}"
        ends = list(re.compile(rf"^[ \t>]*{fence}|{fence}[ \t]*$", re.MULTILINE).finditer(answer, start))
        is_python, place = not opened[2].strip() or _PYTHON.search(opened[2]), len(answer)
        # The first that leaves a whole program: a text in the code may have fences of its own.
        for index, end in enumerate([*ends[:9], None]):
            block = _parse(answer[start : end.start() if end else None]) if is_python else None
            if end and (block or index == 0):
                is_next = _PYTHON.match(answer, end.end())  # the next block, where this one was never closed
                place = end.start() if is_next else end.end() + len(answer[end.end() :].partition("\n")[0])
            if block:
                blocks.append(block)
                break
    rank, code = _choose(blocks)
    if rank < 2:
        pieces = _APART.split(answer) if _FENCED.search(answer) else [*_APART.split(answer), *_BARE.findall(answer)]
        code = max((rank, code), _choose(filter(None, map(_parse, pieces))), key=lambda ranked: ranked[0])[1]
    return code


def _compile(text: str) -> Program:
    used, bound = set[str](), set[str]()
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree, top = ast.parse(text), symtable.symtable(text, "tests", "exec")
    tables = [top]
    for table in tables:  # which grows
        tables += table.get_children()
        for symbol in table.get_symbols():
            if (table is top or symbol.is_global()) and symbol.is_referenced():
                used.add(symbol.get_name())
            if (table is top or symbol.is_declared_global()) and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
    return text, tree, used, bound


def _parse(text: str) -> Program | None:
    """The program of an indented or quoted text; None if it does not compile."""
    for spaced in dict.fromkeys((text, re.sub("(?m)^> ?", "", text).translate(_SPACES))):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return _compile(textwrap.dedent(spaced))
    return None


def _choose(programs: Iterable[Program]) -> tuple[int, str]:
    """The last of those most likely the answer's program, and how likely: 3 for one that defines or reads something and
    uses nothing of an earlier one, 2 for other assignments, 1 for calls, 0 for output, -1 for none."""
    best, earlier = (-1, ""), set[str]()
    for code, tree, used, bound in programs:
        nodes = list(ast.walk(tree))
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


def refuse_hidden_import(code: str) -> None:
    """Raise UncrossedError for code that imports a package that only the jail is without."""
    with suppress(SyntaxError, ValueError):
        for name in _roots(ast.walk(ast.parse(code))) - sys.stdlib_module_names - INSTALLED - {"", "rloo_kit"}:
            spec = importlib.util.find_spec(name)
            if spec is not None and "site-packages" in str(spec.origin):
                raise UncrossedError(f"the code imports {name}, which is installed here, and not in the jail")


def _roots(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that are imported."""
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def read_tests(tests: Any, row: Mapping[str, Any]) -> list[str] | list[tuple[str, str]]:
    r"""A row's tests: texts of Python, or pairs of what a program reads and what it has to print; [] without tests.

    `row`: its columns, of which one of `TEST_COLUMNS` names the function that tests without a name call, if any does:
    else that is the last one of the code. Raises TestsError with what was found.

    >>> read_tests('{"input": ["2"], "output": [["4", "5"]]}', {}), read_tests("assert f(2) == 4", {})
    ([('2', '4\n5')], ['assert f(2) == 4'])
    """
    parsed: list[Any] = []
    for test in _listed(tests):
        read = [test] if isinstance(test, str) else _read_test(test, row)
        parsed += [part for part in read if part not in parsed[:1]]  # `_CALL` once
    if len({type(part) for part in parsed}) > 1:
        raise _unread("texts and pairs in one row")
    return parsed


def _unread(form: str) -> TestsError:
    return TestsError(f"they are {form}, and code_reward does not read these; it reads {FORMS}")


def _listed(tests: Any) -> list[Any]:
    """Texts, and dicts of one test each with the keys of LiveCodeBench."""
    if isinstance(tests, str):
        if re.fullmatch(r"eJ[\w+/=\s]{18,}", tests):
            raise _unread("packed (base64 and zlib, as LiveCodeBench has its private tests)")
        for parse in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return _listed(parse(tests))
        return [tests] if tests.strip() else []
    if isinstance(tests, list | tuple):
        if nested := [item for item in tests if not isinstance(item, str | dict | None)]:
            raise _unread(f"a list that holds {excerpt(nested[0], 60)} of type {type(nested[0]).__name__}")
        read = [_listed(item) if isinstance(item, dict) or str(item)[:1] == "{" else [item] for item in tests if item]
        return [test for listed in read for test in listed]
    if tests is None or tests != tests:
        return []
    if not isinstance(tests, dict):
        raise _unread(f"of type {type(tests).__name__}: {excerpt(tests, 60)}")
    test = {_KEYS.get(key, key): value for key, value in tests.items() if value is not None}
    given, wanted = test.get("input"), test.get("output")
    is_one = isinstance(test.get("testtype"), str) or (given == [] and "assert_case" in test)
    if is_one or not (isinstance(given, list) and isinstance(wanted, list)):
        return [test] if test else []
    if len(given) != len(wanted):
        raise _unread(f"{len(given)} inputs and {len(wanted)} outputs")
    several = {key for key, value in test.items() if isinstance(value, list) and len(value) == len(given)}
    rows = [{key: item[index] if key in several else item for key, item in test.items()} for index in range(len(given))]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def _read_test(test: dict[str, Any], row: Mapping[str, Any]) -> list[Any]:
    if asserts := test.get("assert_case") or test.get("assert"):
        return _listed(asserts)
    if not {"input", "output"} <= test.keys():
        raise _unread(f"dicts with the keys {', '.join(map(str, test)) or 'none'}")
    given, wanted, kind = test["input"], test["output"], test.get("testtype")
    if isinstance(kind, list | dict) or kind not in _KINDS:
        raise _unread(f"of the type {excerpt(kind, 60)}")
    if not (_KINDS[kind] or (kind is None and any(source.get(key) for source in (test, row) for key in _NAMES[:2]))):
        return [(_lines(given), _lines(wanted))]
    name, is_text = _function(test, row), isinstance(given, str)
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
        for mapping in (source, metadata if isinstance(metadata, dict) else {}):
            for name in (mapping.get(key) for key in _NAMES):
                if words := re.findall(r"\w+", str(name)) if isinstance(name, str | list) else []:
                    return str(words[-1])
        if starters := re.findall(r"\bdef\s+(\w+)", str(source.get("starter_code"))):
            return str(starters[-1])
    return ""


def _lines(value: Any) -> str:
    """What a program reads or prints: text, or a list of lines."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(line, list | dict) for line in value)):
        raise _unread(f"values of a call without a function's name (fn_name): {excerpt(value, 60)}")
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


class Marks(ast.NodeTransformer):
    """Turns each assertion into a mark, which counts and goes on, and imports of the code into its names."""

    def __init__(self) -> None:
        self.count, self.is_tried = 0, False
        self.imported, self.fixtures = set[str](), dict[str, ast.FunctionDef]()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        others = [mark for mark in node.decorator_list if not _FIXTURE.fullmatch(ast.unparse(mark))]
        if others != node.decorator_list:
            self.fixtures[node.name], node.decorator_list = node, others
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return self._count(_mark(node.test))

    def visit_Expr(self, node: ast.Expr) -> Any:
        return self._count(node, _mark()) if _asserts(node.value) else node

    def visit_With(self, node: ast.With) -> Any:
        # An assert in `raises` may be what has to raise.
        is_check = any(_asserts(item.context_expr) for item in node.items)
        return self._count(node, _mark()) if is_check else self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        before, self.is_tried = self.is_tried, True
        self.generic_visit(node)
        self.is_tried = before
        return node

    def _count(self, *check: ast.stmt) -> list[ast.stmt]:
        self.count += 1
        failed = ast.ExceptHandler(ast.Name("Exception"), None, [_mark(ast.Constant(False))])
        # The handlers of the tests' own `try` may wait for what it raises.
        return list(check) if self.is_tried else [ast.Try(list(check), [failed], [], [])]

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        solutions = [alias for alias in node.names if _OWN.fullmatch(alias.name)]
        self.imported |= {"solution" for _ in solutions}
        node.names = [alias for alias in node.names if alias not in solutions]
        bound = ast.parse("\n".join(f"{alias.asname or alias.name} = solution" for alias in solutions)).body
        return [node, *bound] if node.names else bound

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if not (node.level or _OWN.fullmatch(str(node.module))):
            return node
        self.imported |= {alias.name for alias in node.names} - {"*"}
        renamed = [f"{alias.asname} = {alias.name}" for alias in node.names if alias.asname]
        return ast.parse("\n".join(["pass", *renamed])).body


def _mark(*holds: ast.expr) -> ast.Expr:
    return ast.Expr(ast.Call(ast.Name("_mark_"), list(holds), []))


def _last(node: ast.AST | None) -> str:
    """The last name of `a.b(...)`."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def _asserts(node: ast.AST) -> bool:
    """Whether it is a call like self.assertEqual, np.testing.assert_allclose or pytest.raises."""
    return isinstance(node, ast.Call) and (_last(node) == "raises" or _last(node).startswith("assert"))


@functools.lru_cache(maxsize=1024)
def compile_tests(texts: tuple[str, ...], entry: str) -> dict[str, Any]:
    """What `jailed` needs of a row's tests: `statements` with marks, how many `asserts` are in them, the `names` that
    the code has to define, and those of them that are surely `classes`.

    `entry`: the function that `check` (HumanEval) is called with. Raises TestsError, or UncrossedError for tests that
    reach into the code."""
    source, marks = "\n".join(texts), Marks()
    try:
        _, tree, used, bound = _compile(source)
        compile(tree, "tests", "exec")  # never an answer's code, which can be made to need any memory
        tree.body = [statement for node in tree.body for statement in _without_runner(node)]
        nodes = list(ast.walk(tree := marks.visit(tree)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestsError(f"they are no Python: {getattr(error, 'msg', error)}") from None
    parts = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    bases = {node.id for node in parts if isinstance(node, ast.Name)} & sys.stdlib_module_names
    modules = used & bases - vars(builtins).keys() - bound - marks.imported
    # Builtins are the tests' own, unless there is nothing else to test (a task to write `sum`).
    names, named = used - bound - modules, marks.imported | set(re.findall(r"\w+", entry)[:1])
    names = (names - vars(builtins).keys()) | named or names - JUDGES
    _refuse(nodes, _STRING.sub("''", source), names)
    runs = _find_runs(tree, used, marks.fixtures)
    if not marks.count:
        raise TestsError("they assert nothing")
    if "check" in bound - used:
        if not entry:
            raise TestsError("they define check() and never call it: the rows need a column entry_point")
        runs.append(f"check({entry})")
    nodes = list(ast.walk(tree))  # some are without their decorators now
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    classes = [name for name in sorted(names & called) if name[0].isupper() and _are_of_objects(nodes, names)]
    statements = [f"import {name}" for name in sorted(modules)]
    statements += [ast.unparse(node) for node in tree.body if not isinstance(node, ast.Pass)]
    return {"statements": statements + runs, "asserts": marks.count, "names": sorted(names), "classes": classes}


def _without_runner(node: ast.stmt) -> list[ast.stmt]:
    """A statement of the tests' module, which is run by itself as a script, without the start of a test runner."""
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
        return [statement for inner in node.body for statement in _without_runner(inner)]
    is_kept = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assert)
    return [] if not is_kept and _RUNNER.search(ast.unparse(node)) else [node]


def _find_runs(tree: ast.Module, used: set[str], fixtures: dict[str, ast.FunctionDef]) -> list[str]:
    """A statement for each test that a test runner would call; those of pytest lose their decorators to it."""
    nodes: dict[str, Any] = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    runs = []
    for name, node in nodes.items():
        if isinstance(node, ast.FunctionDef):
            if _is_test(node) and name not in used:
                runs.append(_run(node, [], "", [], fixtures))
            continue
        methods, bases = _inherited(node, nodes)
        tests = [method for method in methods.values() if _is_test(method, node)]
        if any(base.endswith("TestCase") for base in bases):
            debug = [f"{name}('{test.name}').debug()" for test in tests]
            runs += [*_hooks(methods, name, "setUpClass"), *debug, *_hooks(methods, name, "tearDownClass")]
        elif name.startswith("Test"):
            before = [f"_one_ = {name}()", *_hooks(methods, "_one_", "setup_class", "setup_method", "setup")]
            after = _hooks(methods, "_one_", "teardown_method", "teardown")
            runs += [_run(test, before, "_one_.", after, fixtures) for test in tests]
    return runs


def _hooks(methods: Mapping[str, ast.FunctionDef], owner: str, *names: str) -> list[str]:
    hooks = [methods[name] for name in names if name in methods]
    return [f"{owner}.{hook.name}({'None' if len(hook.args.args) > 1 else ''})" for hook in hooks]


def _inherited(node: ast.ClassDef, nodes: Mapping[str, Any]) -> tuple[dict[str, ast.FunctionDef], list[str]]:
    """The methods of a class of the tests, and all its bases, those among the tests included."""
    methods: dict[str, ast.FunctionDef] = {}
    bases = list(map(ast.unparse, node.bases))
    for base in filter(None, map(nodes.get, bases)):
        inner = _inherited(base, nodes)
        methods, bases = inner[0] | methods, bases + inner[1]
    return methods | {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}, bases


def _is_test(test: ast.FunctionDef, *around: ast.ClassDef) -> bool:
    decorators = [*test.decorator_list, *(decorator for node in around for decorator in node.decorator_list)]
    marks = " ".join(map(ast.unparse, decorators))
    return test.name.startswith("test") and not re.search("skip|xfail|expectedFailure", marks)


def _run(test: ast.FunctionDef, before: list[str], owner: str, after: list[str], fixtures: dict[str, Any]) -> str:
    """A statement that calls a test; each case of `parametrize` has an object and fixtures of its own."""
    marks, test.decorator_list = list(map(ast.unparse, test.decorator_list)), []
    cases = re.findall(r"\w+", " ".join(mark.partition("[")[0] for mark in marks if "parametrize" in mark))
    call = f"{owner}{test.name}({_arguments(test, ['self', *cases], fixtures)}**given)"
    lines = [*before, "try:", f"    {call}", "finally:", *(f"    {line}" for line in after or ["pass"])]
    case = [*(f"@{mark}" for mark in marks), "def _case_(**given):", *(f"    {line}" for line in lines), "_case_()"]
    return "\n".join(case)


def _arguments(test: ast.FunctionDef, given: list[str], fixtures: dict[str, Any]) -> str:
    """The fixtures of the tests' own that a test or a fixture is called with, a fresh one each time."""
    text, names = "", [argument.arg for argument in test.args.args]
    for name in names[: len(names) - len(test.args.defaults)]:
        if name not in (*given, *fixtures):
            raise TestsError(LACKS.format(f"pytest's fixture {name}"))
        if name not in given:
            call = f"{name}({_arguments(fixtures[name], ['self'], fixtures)})"
            yields = any(isinstance(node, ast.Yield) for node in ast.walk(fixtures[name]))
            text += f"{name}=next({call}), " if yields else f"{name}={call}, "
    return text


def _refuse(nodes: list[ast.AST], text: str, names: set[str]) -> None:
    """Raise for what the jail lacks, and for what needs the code and its tests in one process."""
    if missing := _roots(nodes) - sys.stdlib_module_names - INSTALLED - {"pytest"}:
        offered = ", ".join(["the standard library", *sorted(INSTALLED), "a part of pytest"])
        raise TestsError(f"they import {', '.join(sorted(missing))}; the jail has {offered}")
    bases = {ast.unparse(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
    uses = [f"a subclass of the code's {base}" for base in bases if base.partition(".")[0] in names]
    uses += [word for match in _UNCROSSED.findall(text) for word in match if word]
    if uses:
        raise UncrossedError(f"they use {uses[0].rstrip('( =')}, and the code is in a process of its own")
    if lacking := _LACKING.search(text):
        raise TestsError(LACKS.format(lacking[0].rstrip("=")))


def _are_of_objects(nodes: list[ast.AST], names: set[str]) -> bool:
    """Whether tests show that names like `Money` are classes: by an attribute that no value of Python's own has, a test
    of a type, or one operator on two of them. MBPP has functions with such names, too."""
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    for node in nodes:
        whole = node.args[-1] if isinstance(node, ast.Call) and node.args else node
        inner = [] if isinstance(whole, ast.Module | ast.stmt) else list(ast.walk(whole))
        used = [part.id for part in inner if isinstance(part, ast.Name) and part.id in names and part.id[0].isupper()]
        if isinstance(node, ast.Attribute) and node.attr not in PLAIN:
            base = ast.unparse(node.value)
            is_shown = base != "self" and base.partition(".")[0] not in modules
        elif isinstance(node, ast.Call):
            is_shown = bool(used) and bool(re.search("sinstance|subclass", _last(node)))
        else:
            is_shown = len(used) > len(set(used))
        if is_shown:
            return True
    return False


def find_row_faults(rows: Iterable[tuple[int, Any, Mapping[str, Any]]]) -> dict[tuple[bool, str], list[int]]:
    """Rows (number, tests, its columns) that cannot be scored, by whether their form is not read, and the reason."""
    faults: dict[tuple[bool, str], list[int]] = {}
    for number, tests, row in rows:
        is_unread = True
        try:
            texts, is_unread = read_tests(tests, row), False
            if texts and isinstance(texts[0], str):
                compile_tests(tuple(map(str, texts)), str(row.get("entry_point") or ""))
        except TestsError as error:
            faults.setdefault((is_unread, str(error)), []).append(number)
    return faults
