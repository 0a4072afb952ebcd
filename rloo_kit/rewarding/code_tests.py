import ast, builtins, functools, json, re, sys, textwrap
from contextlib import suppress
from typing import Any
from rloo_kit.errors import RewardError, excerpt
class TestsError(RewardError): pass
class UncrossedError(TestsError): pass
JailError=TestsError
JUDGES = {"abs", "all", "any", "bool", "isinstance", "round"}
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
class Marks(ast.NodeTransformer):
    """Turns each `assert` into a mark, which counts and goes on."""

    count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        self.count += 1
        made: Any = ast.parse("try:\n    _mark_()\nexcept Exception:\n    _mark_(False)").body[0]
        made.body[0].value.args.append(node.test)
        return made


@functools.lru_cache(maxsize=1024)
def compile_tests(texts: tuple[str, ...], entry: str) -> dict[str, Any]:
    """What `jailed.judge` needs of a row's tests: their statements, with marks, how many asserts there are, and the
    names that the code has to define. Raises JailError for tests that are no Python, or assert nothing."""
    try:
        compile("\n".join(texts), "tests", "exec")
        tree, tested = ast.parse("\n".join(texts)), set(re.findall(r"\w+", entry)[:1])
    except (SyntaxError, ValueError) as error:
        raise JailError(f"they are no Python: {error}") from None
    nodes = list(ast.walk(tree))
    imports = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imports += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    if missing := {name.partition(".")[0] for name in imports} - sys.stdlib_module_names:
        raise JailError(f"they import {', '.join(sorted(missing))}; the jail has the standard library only")
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = {node.id for node in names} - own - {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bases = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    modules = used & bases & sys.stdlib_module_names - vars(builtins).keys()
    # Builtins are the tests' own, unless there is nothing else to test (a task to write `sum`).
    wanted = (used - vars(builtins).keys() or used - JUDGES) - modules | tested
    marks = Marks()
    statements = [f"import {name}" for name in modules] + [ast.unparse(marks.visit(one)) for one in tree.body]
    if not marks.count:
        raise JailError("there is no assert in them")
    if "check" in own - {node.id for node in names}:
        if not entry:
            raise JailError("they define check() and never call it: the rows need a column entry_point")
        statements.append(f"check({entry})")
    return {"statements": statements, "asserts": marks.count, "names": sorted(wanted), "pytest": False, "classes": [w for w in sorted(wanted) if w[0].isupper()]}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def find_code(answer: str) -> str:
    r"""The last block of Python in an answer; without a fence all of it.

    >>> find_code("So:\n```python\nx = 1\n```\nIt prints:\n```text\n1\n```"), find_code("x = 1")
    ('x = 1\n', 'x = 1')
    """
    blocks = _FENCE.findall(answer) or [("", answer)]
    found = [text for language, text in blocks if language.lower() in ("", "py", "python", "python3")]
    return textwrap.dedent(found[-1]) if found and found[-1].strip() else ""


def read_tests(tests: Any, row=None) -> list[Any]:
    """A row's tests: texts with asserts, or pairs of what a program reads and what it has to print.

    >>> read_tests('[{"input": "2", "output": ["4", "5"]}]'), read_tests("assert f(2) == 4"), read_tests(None)
    ([('2', '4\\n5')], ['assert f(2) == 4'], [])
    """
    if isinstance(tests, str):
        with suppress(ValueError):
            tests = json.loads(tests)
    if isinstance(tests, dict) and "inputs" in tests and not tests.get("fn_name"):  # as APPS has them
        tests = [{"input": one, "output": two} for one, two in zip(tests["inputs"], tests["outputs"], strict=True)]
    if tests is None or tests != tests or isinstance(tests, str):
        return [tests] if isinstance(tests, str) and tests.strip() else []
    found = [one for one in ([tests] if isinstance(tests, dict) else tests) if one is not None]
    if all(isinstance(one, str) for one in found):
        return found
    if all(isinstance(one, dict) and None not in (one.get("input"), one.get("output")) for one in found):
        return [(_joined(one["input"]), _joined(one["output"])) for one in found]
    raise JailError(f"tests are texts with asserts, or a list of {{input, output}}; found {excerpt(tests)}")


def _joined(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
