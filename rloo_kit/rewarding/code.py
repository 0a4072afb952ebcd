"""`code_reward`: the code of a completion against the tests of its row, in a jail.

A jail is bubblewrap, else the kernel's namespaces through util-linux; without either no code is run. `jailed` is what
runs inside, and what locks it.
"""

import ast
import builtins
import functools
import json
import marshal
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rloo_kit.errors import RewardError, WholeBatchError, excerpt, shorten
from rloo_kit.rewarding.verifiers import Verifier
from rloo_kit.rewards._binding import check_int, check_positive
from rloo_kit.system.processes import say

NO_JAIL = (
    "code_reward runs code in a jail only, and none works here:\n{}\nInstall bubblewrap (apt install bubblewrap). A "
    "container has to allow user namespaces: docker run --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined, or --cap-add SYS_ADMIN; a host too: sysctl user.max_user_namespaces above 0, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0"
)
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))  # of no virtual environment
JUDGES = {"abs", "all", "any", "bool", "isinstance", "round"}  # builtins that tests compare with
OUTSIDE = [__file__, "/etc/passwd"]  # must not be seen
LIMITS = {"memory_mb": 512, "cpu_s": 60}
BUBBLEWRAP = "--unshare-all --die-with-parent --new-session --hostname jail --cap-drop ALL"
NAMESPACES = "--user --map-root-user --mount --net --pid --ipc --uts --fork --kill-child"
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "py", "python", "python3")
_say_once = functools.cache(say)


class JailError(RewardError):
    """The jail or a row's tests cannot be used, whatever the code is."""


@dataclass(frozen=True)
class Jail:
    """A command that runs `jailed` with nothing but the interpreter's folders to see.

    Attributes:
        command: what stands before the interpreter. root: the folders that `jailed` itself makes a root of, if any.
    """

    command: tuple[str, ...]
    root: dict[str, Any]

    @contextmanager
    def start(self, role: str, stdin: Any, stdout: Any, fds: Sequence[int] = (), **settings: Any) -> Iterator[Any]:
        """The process of a role, locked already; killed at the end. Raises JailError if it could not be locked."""
        given = json.dumps(LIMITS | self.root | settings | {"role": role, "null": _null(), "link": fds})
        command = (*self.command, PYTHON, "-I", "-S", "-X", "utf8", "-c", _text(), given)
        ends: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": subprocess.PIPE}
        process: Any = subprocess.Popen(command, env={}, cwd="/", pass_fds=(_null(), *fds), **ends)
        with process:
            try:
                if (first := process.stderr.readline()) != b"ready\n":
                    lines = (first + process.stderr.read()).decode(errors="replace").strip().splitlines()
                    raise JailError(shorten(lines[-1] if lines else "it ended without a word", 300))
                yield process
            finally:
                process.kill()


@functools.cache
def _text() -> str:
    source = Path(__file__).with_name("jailed.py").read_text(encoding="utf-8")
    compiled = marshal.dumps(compile(source, "jailed.py", "exec"))  # by the same interpreter, and once
    return f"exec(__import__('marshal').loads(bytes.fromhex('{compiled.hex()}')))"


@functools.cache
def _null() -> int:
    return os.open(os.devnull, os.O_RDWR)  # the jail has no /dev


@functools.cache
def find_jail() -> Jail:
    """The first jail that works, tried out. Raises RewardError with the reason of each that does not."""
    reasons = []
    for make in (bubblewrap, namespaces):
        try:
            jail = make()
            with jail.start("probe", subprocess.DEVNULL, subprocess.DEVNULL, outside=OUTSIDE):
                return jail
        except (RewardError, OSError) as error:
            reasons.append(f"{make.__name__}: {error}")
    raise RewardError(NO_JAIL.format("\n".join(reasons)))


def bubblewrap() -> Jail:
    """A jail of `bwrap`."""
    root, options = _root(), [*BUBBLEWRAP.split(), "--ro-bind", PYTHON, PYTHON]
    for path in root["binds"]:
        options += ["--ro-bind", path, path]
    for path, target in root["links"].items():
        options += ["--symlink", target, path]
    for path in root["hidden"]:
        options += ["--tmpfs", path, "--remount-ro", path]
    return Jail((_find("bwrap"), *options, "--remount-ro", "/", "--chdir", "/"), {"binds": []})


def namespaces() -> Jail:
    """A jail of the kernel's namespaces, which `unshare` makes and `jailed` furnishes."""
    return Jail((_find("setpriv"), "--pdeathsig", "KILL", _find("unshare"), *NAMESPACES.split()), _root())


def _find(program: str) -> str:
    if found := shutil.which(program):
        return found
    raise RewardError(f"there is no {program} on PATH")


def _root() -> dict[str, Any]:
    """What Python needs to run: folders to show, links to make, and folders in them to hide (installed packages)."""
    libraries = [f"{top}/{name}" for top in ("", "/usr") for name in ("lib", "lib32", "lib64", "libx32")]
    own, stdlib = (os.path.realpath(path) for path in (f"{sys.base_prefix}/lib", sysconfig.get_path("stdlib")))
    packages = (f"{stdlib}/site-packages", "/usr/lib/python3/dist-packages")
    shown = [path for path in (*libraries, own, "/etc/ld.so.cache") if os.path.exists(path)]
    return {
        "binds": [path for path in dict.fromkeys(shown) if not os.path.islink(path)],
        "links": {path: os.readlink(path) for path in shown if os.path.islink(path)},
        "hidden": [path for path in packages if os.path.isdir(path)],
    }


@dataclass
class CodeReward(Verifier):
    """The share of the row's tests that the completion's code passes, 0.0 to 1.0, run in a jail (`find_jail`).

    0.0 without code or if the thinking was never closed; None for a row without tests; failed (NaN, which the guard
    reports) if the tests are broken or the jail is. The code is the last fenced block of the answer, else all of it.

    Args:
        think_end_id, thinking, decode: as for `rewards.AnswerReward`.
        tests_column: the column with the tests: a list of texts with asserts (MBPP), one text (HumanEval, whose column
            `entry_point` is read), a list of {input, output} for a program that reads standard input; or JSON of these.
        memory_mb: limit of a process. test_timeout_s: limit of one call or one run of a program.
        answer_timeout_s: limit for all tests of one completion.
        workers: completions that run at a time; None: one for each CPU.

    Raises:
        ValueError: a limit out of range, or no jail works on this machine.
    """

    __name__: ClassVar[str] = "code_reward"

    answer_timeout_s: float = 10.0
    timeout_s: float = field(default=math.inf, init=False, repr=False)  # each answer has its own
    tests_column: str = "tests"
    memory_mb: int = 512
    test_timeout_s: float = 2.0
    workers: int | None = None

    def __post_init__(self) -> None:
        check_positive("answer_timeout_s", self.answer_timeout_s)
        check_positive("test_timeout_s", self.test_timeout_s)
        check_int("memory_mb", self.memory_mb, 64)
        check_int("workers", self.workers, 1, none_allowed=True)
        try:
            find_jail()
        except RewardError as error:
            raise ValueError(str(error)) from None

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] = (),
        **columns: Any,
    ) -> list[float | None]:
        tests = columns.get(self.tests_column)
        if tests is None:
            raise ValueError(
                f"code_reward needs a column '{self.tests_column}' (params.tests_column names another); columns found: "
                f"{', '.join(sorted(columns)) or 'none'}"
            )
        answers = self._answers(completions, completion_ids, columns.get("completion_mask"))
        try:
            jail = find_jail()
        except RewardError as error:
            raise WholeBatchError(str(error)) from None
        entries = columns.get("entry_point") or [None] * len(answers)
        with ThreadPoolExecutor(self.workers or len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(functools.partial(self._score, jail), answers, tests, entries))

    def _score(self, jail: Jail, answer: str, given: Any, entry: Any) -> float | None:
        try:
            tests, code = read_tests(given), find_code(answer)
            if not tests or not code:
                return 0.0 if tests else None
            run = self._run_asserts if isinstance(tests[0], str) else self._run_pairs
            return run(jail, code, tests, entry)
        except JailError as error:
            _say_once(f"WARNING: code_reward failed on the tests {excerpt(given)}: {error}")
            return math.nan

    def _run_asserts(self, jail: Jail, code: str, tests: list[str], entry: Any) -> float:
        row = compile_tests(tuple(tests), entry if isinstance(entry, str) else None)
        limits: dict[str, Any] = {"memory_mb": self.memory_mb, "cpu_s": math.ceil(self.answer_timeout_s) + 1}
        limits |= {"call_s": self.test_timeout_s, "answer_s": self.answer_timeout_s}
        with ExitStack() as stack:
            ends = [stack.enter_context(open(end, "rb", 0)) for _ in range(2) for end in os.pipe()]
            code_in, tests_out, tests_in, code_out = (end.fileno() for end in ends)
            stack.enter_context(jail.start("candidate", code_in, code_out, **limits))
            started = jail.start("tests", subprocess.PIPE, subprocess.PIPE, (tests_in, tests_out), **limits)
            process = stack.enter_context(started)
            for end in ends:
                end.close()  # so that each process sees the other's end
            try:
                verdict = process.communicate(marshal.dumps((code, row)), timeout=self.answer_timeout_s + 1)[0]
            except subprocess.TimeoutExpired:
                return 0.0
        found = json.loads(verdict or '{"value": 0.0}')  # none if a value of the code's filled its memory
        if "broken" in found:
            raise JailError(found["broken"])
        return found["value"]

    def _run_pairs(self, jail: Jail, code: str, tests: list[tuple[str, str]], entry: Any) -> float:
        """Each pair in a process of its own, so that none sees the input of another."""
        text, passed, ends_at = code.encode("utf-8", "replace"), 0, time.monotonic() + self.answer_timeout_s
        limits: dict[str, Any] = {"memory_mb": self.memory_mb, "cpu_s": math.ceil(self.test_timeout_s) + 1}
        for given, expected in tests:
            if (left_s := min(self.test_timeout_s, ends_at - time.monotonic())) <= 0:
                break
            with ExitStack() as stack:
                output = stack.enter_context(tempfile.TemporaryFile())
                program = jail.start("program", subprocess.PIPE, output, length=len(text), **limits)
                process = stack.enter_context(program)
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(text + given.encode(), timeout=left_s)
                output.seek(0)
                printed = _lines(output.read().decode(errors="replace"))
                passed += process.returncode == 0 and printed == _lines(expected)
        return passed / len(tests)


class Marks(ast.NodeTransformer):
    """Turns each `assert` into a mark, which counts and goes on. `straight` says of each if it is outside loops and
    functions (but `check`): one that was cut short says nothing of later rounds."""

    def __init__(self) -> None:
        self.straight: list[bool] = []
        self.inner = self.guarded = self.guards = 0

    def visit(self, node: ast.AST) -> Any:
        deeper = isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.ClassDef)
        deeper = deeper and getattr(node, "name", "") != "check"
        self.inner += deeper
        found = super().visit(node)
        self.inner -= deeper
        return found

    def visit_Try(self, node: ast.Try) -> ast.Try:
        self.guarded += 1
        node.body = [self.visit(one) for one in node.body]
        self.guarded -= 1
        for part in (node.handlers, node.orelse, node.finalbody):
            part[:] = [self.visit(one) for one in part]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        is_guard = isinstance(node.test, ast.Constant) and not node.test.value  # after a call that has to raise
        index = -1 if is_guard else len(self.straight)
        self.guards += is_guard
        self.straight += [] if is_guard else [not self.inner]
        passed, failed = (ast.parse(f"_mark_({index}, {held})").body for held in (True, False))
        made: ast.stmt = ast.If(node.test, passed, failed)
        if not self.guarded:
            made = ast.Try([made], [ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, failed)], [], [])
        return ast.fix_missing_locations(ast.copy_location(made, node))


@functools.lru_cache(maxsize=1024)
def compile_tests(texts: tuple[str, ...], entry: str | None) -> dict[str, Any]:
    """What `jailed.judge` needs of a row's tests: each text a unit, with the numbers of its assertions, and the names
    that the code has to define. Raises JailError for tests that are no Python, or assert nothing."""
    marks, units, trees = Marks(), [], []
    for text in texts:
        first, guards = len(marks.straight), marks.guards
        tree = marks.visit(_parse(text))
        if len(marks.straight) == first and marks.guards > guards:  # a test that holds if it ends
            marks.straight.append(True)
            tree.body += ast.parse(f"_mark_({first}, True)").body
        trees.append(tree)
        units.append((first, len(marks.straight)))
    if not marks.straight:
        raise JailError("there is no assert in them")
    nodes = [node for tree in trees for node in ast.walk(tree)]
    tested = {node.id for node in ast.walk(_parse(entry or "")) if isinstance(node, ast.Name)}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if "check" in own - {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}:
        if not entry:
            raise JailError("they define check() and never call it: the rows need a column entry_point")
        trees[-1].body += _parse(f"check({entry})").body
    names = [node for node in nodes if isinstance(node, ast.Name)]
    used = {one.id for one in names} - own - {one.id for one in names if isinstance(one.ctx, ast.Store)}
    used -= {"_mark_", "Exception"}
    bases = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    modules = sorted(used & bases & sys.stdlib_module_names - vars(builtins).keys())
    trees[0].body[:0] = ast.parse("\n".join(f"import {name}" for name in modules)).body
    # Builtins are the tests' own, unless there is nothing else to test (a task to write `sum`).
    wanted = (used - vars(builtins).keys() or used - JUDGES) - set(modules) | tested
    compiled = [(compile(tree, "tests.py", "exec"), *ends) for tree, ends in zip(trees, units, strict=True)]
    return {"units": compiled, "straight": marks.straight, "names": sorted(wanted)}


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise JailError(f"they are no Python: {error}") from None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def find_code(answer: str) -> str:
    r"""The last block of Python in an answer; without a fence all of it.

    >>> find_code("So:\n```python\nx = 1\n```\nIt prints:\n```text\n1\n```"), find_code("x = 1")
    ('x = 1\n', 'x = 1')
    """
    blocks = _FENCE.findall(answer)
    found = [text for language, text in blocks if language.lower() in _PYTHON] if blocks else [answer]
    return textwrap.dedent(found[-1]) if found and found[-1].strip() else ""


def read_tests(tests: Any) -> list[Any]:
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
