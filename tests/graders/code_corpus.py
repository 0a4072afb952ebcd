"""Answers whose worth plain Python decides, in the forms of tests that public data sets have: `code_corpus.txt`.

The file's grammar, a line's beginning each:
    == name | form | kind | function                     a task; its tests follow: as text, or an expression of pairs
    ++ and -- with lines below                           a right answer, a wrong one
    + and - with an edit, `old => new ;; old => new`     the same, made of the last right answer that was given whole
    + and - without an arrow                             the whole answer in a line
¶ is the end of a line in the last two. Run as a program, this file is the plain interpreter of `plain_shares`.
"""

import ast
import functools
import json
import os
import re
import signal
import subprocess
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

LIMIT_S = 2.0  # of a step of the tests, a call or a program
TEXTS = ("mbpp", "humaneval", "leetcode", "kodcode", "classeval")
CALLED = ("kodcode", "classeval")
FUNCTIONS = ("apps_fn", "lcb_fn", "prime_fn")
PROGRAMS = ("apps", "contests", "lcb", "prime", "pairs")


@dataclass
class Task:
    """A row of a data set, with answers to it."""

    name: str
    form: str
    kind: str
    entry: str
    given: str
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def pairs(self) -> list[Any]:
        """Of (what a program reads, what it prints), or of (arguments, result)."""
        return eval(self.given)

    @property
    def tests(self) -> Any:
        """As the data set has them."""
        if self.form in TEXTS:
            parts = re.split(r"\n(?!\s|except|else|finally|\Z)", self.given.strip())
            return parts if self.form == "mbpp" else self.given
        first, second = ([pair[side] for pair in self.pairs] for side in (0, 1))
        if self.form == "contests":
            return {"input": first, "output": second}
        if self.form == "pairs":
            return [{"input": one, "output": two} for one, two in self.pairs]
        if self.form == "lcb":
            return json.dumps([{"input": one, "output": two, "testtype": "stdin"} for one, two in self.pairs])
        if self.form == "lcb_fn":
            lines = [("\n".join(map(json.dumps, one)), json.dumps(two)) for one, two in self.pairs]
            return json.dumps([{"input": one, "output": two, "testtype": "functional"} for one, two in lines])
        found = {"inputs": first, "outputs": second} | ({"fn_name": self.entry} if self.entry else {})
        return json.dumps(found) if self.form.startswith("prime") else found

    @property
    def row(self) -> dict[str, Any]:
        """The columns of the data set next to the tests."""
        if self.form == "lcb_fn":
            return {"metadata": json.dumps({"func_name": self.entry})}
        return {"entry_point": self.entry} if self.form == "humaneval" else {}


def read_tasks() -> dict[str, Task]:
    """The corpus, by name."""
    tasks: dict[str, Task] = {}
    for part in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n== ")[1:]:
        head, _, body = part.partition("\n")
        name, form, kind, *more = (one.strip() for one in head.split(" | "))
        given, *answers = re.split(r"^(?=\+\+$|--$|\+ |- )", body, flags=re.MULTILINE)
        task = tasks[name] = Task(name, form, kind, "".join(more), given)
        whole = ""
        for answer in answers:
            right, text = answer[0] == "+", answer[2:].strip("\n").replace("¶", "\n") + "\n"
            if answer[1] == " " and " =>" in text:
                edits, text = text[:-1].split(" ;; "), whole
                for old, new in (edit.split(" =>") for edit in edits):
                    assert old in text, f"{name}: no {old!r} in {text}"
                    text = text.replace(old, new[1:])
            elif right:
                whole = text
            (task.right if right else task.wrong).append(text)
    return tasks


def plain_shares(jobs: Sequence[tuple[Task, str]]) -> list[float]:
    """1.0 for answers that pass all tests in a plain interpreter. Else, for programs and functions, the share of the
    pairs that hold; for texts an upper bound of the share of the assertions: those that hold, or whatever else could be
    counted as a test that holds, to themselves and those that fail, of which there is at least one."""
    programs = [(task, answer) for task, answer in jobs if task.form in PROGRAMS]
    others = [(task.form, task.given, task.entry, answer) for task, answer in jobs if task.form not in PROGRAMS]
    run = subprocess.run([sys.executable, __file__], input=json.dumps(others), stdout=subprocess.PIPE, text=True)
    with ThreadPoolExecutor(2) as pool:
        shares = {True: iter(list(pool.map(_run_program, programs))), False: iter(json.loads(run.stdout))}
    return [next(shares[task.form in PROGRAMS]) for task, _ in jobs]


def _run_program(job: tuple[Task, str]) -> float:
    task, answer = job
    passed = 0
    for pair in task.pairs:
        given, expected = ("\n".join(text) if isinstance(text, list) else text for text in pair)
        command = [sys.executable, "-I", "-X", "utf8", "-c", answer]
        with suppress(subprocess.TimeoutExpired):
            run = subprocess.run(command, input=given.encode(), capture_output=True, timeout=LIMIT_S)
            passed += run.returncode == 0 and _lines(run.stdout.decode()) == _lines(expected)
    return passed / len(task.pairs)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


# What follows runs in the plain interpreter.


def main() -> None:
    """Reads jobs, prints the share of each; every job runs in a fork."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    shares = []
    for job in json.load(sys.stdin):
        ends = os.pipe()
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGALRM, lambda *_: _fail(TimeoutError()))
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
            share = 0.0
            with suppress(BaseException):
                share = judge(*job)
            os.write(ends[1], str(share).encode())
            os._exit(0)
        os.close(ends[1])
        shares.append(float(os.read(ends[0], 100) or 0.0))
        os.close(ends[0])
        os.waitpid(child, 0)
    print(json.dumps(shares))


def _fail(error: Exception) -> NoReturn:
    raise error


def judge(form: str, given: str, entry: str, answer: str) -> float:
    """The share of one answer, which this process runs itself."""
    tree = ast.parse(given)
    if form in FUNCTIONS:
        solution, pairs = load(answer), eval(given)
        return sum(holds_pair(solution, form, entry, *pair) for pair in pairs) / len(pairs)
    if all(runs(step) for step in steps(form, [tree], entry, load(answer))):
        return 1.0
    counts = [0, 0]  # failed, held
    solution = load(answer)
    solution.__dict__["_mark_"] = lambda holds=True: counts.__setitem__(bool(holds), counts[bool(holds)] + 1)
    alone = [ast.Module([Marks().visit(one)], []) for one in tree.body]
    cases = sum([runs(step) for step in steps(form, alone, entry, solution)][len(alone) :])
    held = counts[1] if form not in CALLED else counts[1] + cases + given.count("self.assert") + given.count("raises(")
    return held / (held + max(1, counts[0] if form not in CALLED else 1))


def load(answer: str) -> types.ModuleType:
    """The answer as a module of its own, as far as it runs."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    runs(lambda: exec(compile(answer, "answer", "exec"), module.__dict__))
    return module


def steps(form: str, parts: list[ast.Module], entry: str, solution: Any) -> Iterator[Callable[[], Any]]:
    """What has to run without an exception: the tests' text, in parts, then the calls that its form implies."""
    space = solution.__dict__
    for part in parts:
        yield functools.partial(exec, compile(ast.fix_missing_locations(part), "tests", "exec"), space)
    if form == "humaneval":
        yield lambda: space["check"](space[entry])
    for name, value in list(space.items()) if form in CALLED else ():
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for one in unittest.defaultTestLoader.getTestCaseNames(value):
                yield unittest.TestSuite([value(one)]).debug
        elif isinstance(value, type) and name.startswith("Test"):
            yield from (getattr(value(), one) for one in dir(value) if one.startswith("test"))
        elif name.startswith("test"):
            yield from (functools.partial(value, **case) for case in read_cases(value))


def read_cases(function: Any) -> list[dict[str, Any]]:
    """The arguments that pytest's marks give a function."""
    cases: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        names = re.findall(r"\w+", mark.args[0]) if isinstance(mark.args[0], str) else mark.args[0]
        values = [getattr(one, "values", (one,) if len(names) == 1 else one) for one in mark.args[1]]
        cases = [case | dict(zip(names, one, strict=True)) for one in values for case in cases]
    return cases


def holds_pair(solution: Any, form: str, entry: str, arguments: Any, expected: Any) -> bool:
    """As LiveCodeBench and APPS compare: a tuple is a list, and an expected value may lie in a list of its own."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S)
    try:
        function = getattr(solution, entry, None) or getattr(solution.Solution(), entry)
        value = function(*arguments)
    except Exception:
        return False
    value = list(value) if isinstance(value, tuple) else value
    return bool(value == expected or form != "lcb_fn" and isinstance(expected, list) and [value] == expected)


def runs(function: Any) -> bool:
    """Whether a call ends without an exception, in time."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S)
    try:
        function()
    except BaseException:
        return False
    return True


class Marks(ast.NodeTransformer):
    """Makes each `assert` count what it found and go on."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        made: Any = ast.parse("try:\n    _mark_()\nexcept Exception:\n    _mark_(False)").body[0]
        made.body[0].value.args.append(node.test)
        return made


if __name__ == "__main__":
    main()
