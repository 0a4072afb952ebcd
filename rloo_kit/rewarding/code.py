"""`code_reward`: the code of a completion against the tests of its row, in a jail.

A jail is bubblewrap, else the kernel's namespaces through util-linux; without either no code is run. `jailed` is what
runs inside, and what locks it.
"""

import ast
import builtins
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rloo_kit.errors import RewardError, WholeBatchError, excerpt, shorten
from rloo_kit.rewarding.verifiers import AnswerReader
from rloo_kit.rewards._binding import check_int, check_positive
from rloo_kit.system.processes import say

NO_JAIL = (
    "code_reward runs code in a jail only, and none works here:\n{}\nInstall bubblewrap (apt install bubblewrap). A "
    "container has to allow user namespaces: docker run --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined, or --cap-add SYS_ADMIN; a host too: sysctl user.max_user_namespaces above 0, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0"
)
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))  # of no virtual environment
JAILED = Path(__file__).with_name("jailed.py").read_text(encoding="utf-8")
JUDGES = {"abs", "all", "any", "bool", "isinstance", "round"}  # builtins that tests compare with
BUBBLEWRAP = "--unshare-all --die-with-parent --new-session --hostname jail --cap-drop ALL"
NAMESPACES = "--user --map-root-user --mount --net --pid --ipc --uts --fork --kill-child"
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_say_once = functools.cache(say)


class JailError(RewardError):
    """The jail or a row's tests cannot be used, whatever the code is."""


@dataclass(frozen=True)
class Jail:
    """A command that runs `jailed` with nothing but the interpreter's folders to see.

    Attributes:
        command: what stands before the interpreter. root: what `jailed` itself makes a root folder of, if anything.
    """

    command: tuple[str, ...]
    root: dict[str, Any]

    @contextmanager
    def start(self, role: str, stdin: Any, stdout: Any, fds: Sequence[int] = (), **settings: Any) -> Iterator[Any]:
        """The process of a role, locked already; killed at the end. Raises JailError if it could not be locked."""
        with ExitStack() as stack:
            null = stack.enter_context(open(os.devnull, "r+b", 0)).fileno()  # the jail has no /dev
            given = {"memory_mb": 512, "cpu_s": 60, "role": role, "root": self.root, "null": null, "link": fds}
            command = [*self.command, PYTHON, "-I", "-S", "-X", "utf8", "-c", JAILED, json.dumps(given | settings)]
            ends: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": subprocess.PIPE}
            process: Any = subprocess.Popen(command, env={}, cwd="/", pass_fds=(null, *fds), **ends)
            stack.enter_context(process)
            stack.callback(process.kill)
            if (first := process.stderr.readline()) != b"ready\n":
                lines = (first + process.stderr.read()).decode(errors="replace").strip().splitlines()
                raise JailError(shorten(lines[-1] if lines else "it ended without a word", 300))
            yield process


@functools.cache
def find_jail() -> Jail:
    """The first jail that works, tried out. Raises RewardError with the reason of each that does not."""
    reasons = []
    for make in (bubblewrap, namespaces):
        try:
            jail = make()
            with jail.start("probe", subprocess.DEVNULL, subprocess.DEVNULL):
                return jail
        except (RewardError, OSError) as error:
            reasons.append(f"{make.__name__}: {error}")
    raise RewardError(NO_JAIL.format("\n".join(reasons)))


def bubblewrap() -> Jail:
    """A jail of `bwrap`."""
    root, options = _root(), BUBBLEWRAP.split()
    for path in root["binds"]:
        options += ["--ro-bind", path, path]
    for path, target in root["links"].items():
        options += ["--symlink", target, path]
    return Jail((_find("bwrap"), *options, "--remount-ro", "/", "--chdir", "/"), {})


def namespaces() -> Jail:
    """A jail of the kernel's namespaces, which `unshare` makes and `jailed` furnishes."""
    return Jail((_find("setpriv"), "--pdeathsig", "KILL", _find("unshare"), *NAMESPACES.split()), _root())


def _find(program: str) -> str:
    if found := shutil.which(program):
        return found
    raise RewardError(f"there is no {program} on PATH")


def _root() -> dict[str, Any]:
    """What Python needs to run: folders and files to show, and links to make."""
    libraries = [f"{top}/{name}" for top in ("", "/usr") for name in ("lib", "lib32", "lib64", "libx32")]
    own = os.path.realpath(f"{sys.base_prefix}/lib")
    shown = [path for path in (*libraries, own, PYTHON, "/etc/ld.so.cache") if os.path.exists(path)]
    links = {path: os.readlink(path) for path in shown if os.path.islink(path)}
    return {"binds": [path for path in dict.fromkeys(shown) if path not in links], "links": links}


@dataclass
class CodeReward(AnswerReader):
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

    tests_column: str = "tests"
    memory_mb: int = 512
    test_timeout_s: float = 2.0
    answer_timeout_s: float = 10.0
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
            limits = {"memory_mb": self.memory_mb, "cpu_s": math.ceil(self.answer_timeout_s) + 1}
            if isinstance(tests[0], str):
                return self._run_asserts(jail, limits, code, tests, entry)
            return self._run_pairs(jail, limits, code, tests)
        except JailError as error:
            _say_once(f"WARNING: code_reward failed on the tests {excerpt(given)}: {error}")
            return math.nan

    def _run_asserts(self, jail: Jail, limits: Any, code: str, tests: list[str], entry: Any) -> float:
        row = compile_tests(tuple(tests), entry if isinstance(entry, str) else "") | {"code": code}
        row |= {"call_s": self.test_timeout_s, "answer_s": self.answer_timeout_s}
        with ExitStack() as stack:
            ends = [stack.enter_context(open(end, "rb", 0)) for _ in range(2) for end in os.pipe()]
            code_in, tests_out, tests_in, code_out = (end.fileno() for end in ends)
            stack.enter_context(jail.start("candidate", code_in, code_out, **limits))
            link, pipe = (tests_in, tests_out), subprocess.PIPE
            process = stack.enter_context(jail.start("tests", pipe, pipe, link, **limits))
            for end in ends:
                end.close()  # so that each process sees the other's end
            try:
                verdict = process.communicate(json.dumps(row).encode(), timeout=self.answer_timeout_s + 1)[0]
            except subprocess.TimeoutExpired:
                return 0.0
        found = json.loads(verdict or '{"value": 0.0}')  # none if a value of the code's filled its memory
        if "broken" in found:
            raise JailError(found["broken"])
        return found["value"]

    def _run_pairs(self, jail: Jail, limits: Any, code: str, tests: list[tuple[str, str]]) -> float:
        """Each pair in a process of its own, so that none sees the input of another."""
        text, passed, ends_at = code.encode("utf-8", "replace"), 0, time.monotonic() + self.answer_timeout_s
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
    return {"statements": statements, "asserts": marks.count, "names": sorted(wanted)}


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
