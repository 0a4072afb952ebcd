"""What `code_reward` reads: the code of an answer, and tests in the forms in which data sets have them."""

import json
import sys
import types
from typing import Any

import pytest

from rloo_kit.graders.code_tests import (
    TestsError,
    UncrossedError,
    compile_tests,
    find_code,
    find_row_faults,
    read_tests,
)
from rloo_kit.graders.mirrors import judge

F = "```"
ADD = "def add(a, b):\n    return a + b"
BLOCK = f"{F}python\n{ADD}\n{F}"
QUOTING = f'def add(a, b):\n    """Adds.\n\n    {F}python\n    add(1, 2)\n    {F}\n    """\n    return a + b'
FENCES = {
    "closed on the last line of the code": f"{F}python\n{ADD}{F}",
    "text behind the closing fence": f"{BLOCK} This adds the two numbers in Python.\nIt `works`.",
    "tildes": f"~~~python\n{ADD}\n~~~",
    "tildes around backticks": f"~~~~ python\n{QUOTING}\n~~~~\nIt is {F}O(1){F}.",
    "four backticks": f"{F}`\n{QUOTING}\n{F}`",
    "three backticks, around a text with fences": f"{F}python\n{QUOTING}\n{F}\nSo it goes:\n{F}\n3\n{F}",
    **{
        f"tag {tag}": f"{F}{tag}\n{ADD}\n{F}"
        for tag in ("", "py3", " python", 'Python title="add.py"', "{.python .numberLines}", "pycon", "python3.11")
    },
    "CRLF": f"{BLOCK}\n".replace("\n", "\r\n"),
    "no fence, an import first": f"Sure!\n\nimport math\n\n\n{ADD}\n\nprint(add(1, 2))",
    "then a usage block that assigns": f"{BLOCK}\n{F}py\nfrom add import add\nresult = add(1, 2)\nprint(result)\n{F}",
    "then a console": f"{BLOCK}\n{F}python\n>>> add(1, 2)\n3\n{F}",
    "then output that looks like code": f"{BLOCK}\nIt prints:\n{F}\nresult = 3\nsum: 3\n{F}",
    "then code that does not compile": f"{BLOCK}\nOr:\n{F}python\ndef add(a, b):\n    return ...?\n{F}",
    "behind a first attempt": f"{F}python\ndef add(a, b): return a - b\n{F}\nNo, wrong sign:\n{BLOCK}",
    "behind a first attempt never closed": f"{F}python\ndef add(a, b):\n    pass\n\n{BLOCK}",
    "behind a fence of text in a line": f"Use {F}add{F}:\n{BLOCK}",
    "behind one with a helper of the same name": f"{F}\ndef gcd(a, b): ...\n{F}\n{F}\nfrom math import gcd\n{ADD}\n{F}",
    "code tags": f"<code>{ADD}</code> It adds.",
    "answer tags around a fence": f"<answer>\n{BLOCK}\n</answer>",
    "non-breaking spaces": BLOCK.replace("    ", "\u00a0" * 4),
    "other spaces": "\ufeff" + BLOCK.replace("def", "\ufeffdef").replace("return", "return\u200b"),
    "quoted": "> " + BLOCK.replace("\n", "\n> "),
    "never closed": f"So:\n{F}python\n{ADD}",
    "in a list": "1. So:\n   " + BLOCK.replace("\n", "\n   "),
    "a lambda": f"{F}python\nadd = lambda a, b: a + b\n{F}\n{F}\nprint(add(1, 2))\n{F}",
}


@pytest.mark.parametrize("kind", FENCES)
def test_the_code_is_found(kind: str) -> None:
    """The situation 11-code-fences: right answers earned 0.0 by the look of their fence."""
    space: dict[str, Any] = {}
    exec(find_code(FENCES[kind]), space)
    assert space["add"](1, 2) == 3


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = '```'\ny = 2\n", "x = '```'\ny = 2\n"),
        ('1. so:\n   ```python title="x"\n   x = 1\n   ```', "x = 1\n"),
        ("```python\nprint(int(input()) ** 2)\n```\nFor 3 it prints\n```\n9\n```", "print(int(input()) ** 2)\n"),
        ("```\nimport sys\nprint(len(sys.stdin.read()))\n```\n```python\nprint(9)\n```", None),
        ("```python\nprint('hello')\n```\n```\nhello\n```", "print('hello')\n"),
        ("```python\ndef f(n):\n    return n *\n```", ""),
        ("```python\ndef f(n):\n    return n\nThis adds to it.\n```\nIt was done.", ""),
        ("def f(n): return n\n\ndef g(n:\n    return n", ""),
        ("", ""),
        ("(" * 10**5, ""),
        (F * 2000, ""),
    ],
)
def test_the_last_whole_program_is_the_code(answer: str, code: str | None) -> None:
    """A model shows a first attempt, an example of use or what is printed around its solution."""
    assert find_code(answer) == code if code is not None else "stdin" in find_code(answer)


def run(code: str, tests: Any, /, **row: Any) -> float:
    """The share of the asserts that hold where code and tests are one process."""
    compiled = compile_tests(tuple(map(str, read_tests(tests, row))), row.get("entry_point", ""))
    solution = sys.modules["solution"] = types.ModuleType("solution")
    exec(code, vars(solution))
    names = {name: getattr(solution, name) for name in compiled["names"] if hasattr(solution, name)}
    return judge({"solution": solution} | names, compiled)


LCB = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
SHIFT = "def shift(xs, by): return tuple(x + by for x in xs)"
METHOD = "class Solution:\n    def shift(self, xs, by): return [x + by for x in xs]"


@pytest.mark.parametrize(
    ("code", "tests", "row"),
    [
        (METHOD, LCB, {"metadata": '{"func_name": "shift"}'}),
        (SHIFT, json.dumps(LCB), {"metadata": {"func_name": "shift"}}),
        (SHIFT, LCB, {"starter_code": "class Solution:\n    def shift(self, xs: list[int], by: int):\n        "}),
        (SHIFT, [LCB[0] | {"metadata": {"func_name": "shift"}}, None], {}),
        ("from math import gcd\n" + SHIFT + "\n_n = 1", LCB, {}),
        ("class Node: pass\n" + METHOD + "\n    def _own(self): pass\ndef helper(): pass", LCB, {"metadata": "{}"}),
        (SHIFT, {"input": [[[1, 2], 3]], "output": [[4, 5]], "fn_name": ["shift"], "type": [None]}, {}),
        (SHIFT, [{"type": "function_call", "fn_name": "shift", "input": [[1, 2], 3], "output": [[4, 5]]}], {}),
        (SHIFT, {"inputs": [[[1, 2], 3]], "outputs": [[4, 5]], "fn_name": "shift"}, {}),
        (METHOD, {"inputs": [[[1, 2], 3]], "outputs": [[[4, 5]]], "fn_name": "shift"}, {}),
        (
            "def f(n): return {n: (1, {True: None})}",
            {"inputs": [[2]], "outputs": [{"2": [1, {"true": None}]}], "fn_name": "f"},
            {},
        ),
        ("def sum(a): return a * 2.0", {"inputs": [[2]], "outputs": [[4]], "fn_name": "sum"}, {}),
        ("def f(): return float('inf')", {"inputs": [[]], "outputs": [[float("inf")]], "fn_name": "f"}, {}),
    ],
)
def test_calls_become_asserts(code: str, tests: Any, row: dict[str, Any]) -> None:
    """Rows of LiveCodeBench, PRIME, TACO and APPS that call a function scored None, NaN or 0.0 for right answers."""
    assert run(code, tests, **row) == 1.0
    wrong = code.replace("+ by", "- by").replace("n: (", "n: (0, ").replace("* 2.0", "* 3").replace("inf", "nan")
    assert run(wrong, tests, **row) == 0.0
    if tests is LCB:  # APPS and PRIME have the expected value in a list; elsewhere the function has to return one
        assert run(code, [LCB[0] | {"output": "[[4, 5]]"}], **row) == 0.0


@pytest.mark.parametrize(
    ("tests", "read"),
    [
        ({"input": ["3\n", "4\n"], "output": ["9\n", "16\n"]}, [("3\n", "9\n"), ("4\n", "16\n")]),
        ({"inputs": ["3\n"], "outputs": ["9\n"], "fn_name": None}, [("3\n", "9\n")]),
        ({"inputs": [["3", "a b"], "x"], "outputs": ["9\n", ["y", 2]]}, [("3\na b", "9\n"), ("x", "y\n2")]),
        ([{"input": "3", "output": 9, "testtype": None}, None], [("3", "9")]),
        ([{"input": "3", "output": "9", "testtype": "stdin", "fn_name": None}], [("3", "9")]),
        ([{"stdin": "3\n", "expected_output": "9\n"}], [("3\n", "9\n")]),
        ([{"type": "stdin_stdout", "input": "3", "output": "9", "fn_name": None}], [("3", "9")]),
        ({"input": ["3"], "output": ["9"], "testtype": ["stdin"]}, [("3", "9")]),
        ([{"assert_case": ["assert f(1)", "assert f(2)"], "type": "assert"}], ["assert f(1)", "assert f(2)"]),
        ([{"assert": "assert f(1)", "input": None}], ["assert f(1)"]),
        ({"assert_case": ["assert f(1)"], "input": [], "output": []}, ["assert f(1)"]),
        ({"input": "3", "output": "9"}, [("3", "9")]),
        ({"input": [], "output": []}, []),
        (["assert f(1)", "assert f(2)"], ["assert f(1)", "assert f(2)"]),
        ("  ", []),
        (float("nan"), []),
    ],
)
def test_forms(tests: Any, read: Any) -> None:
    """As a column has it, and as JSON text."""
    assert read_tests(tests, {}) == read
    if tests:
        assert read_tests(json.dumps(tests), {}) == read_tests(repr(tests).replace("nan", "None"), {}) == read


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([["3\n", "9\n"]], ["a list that holds ['3\\n', '9\\n'] of type list", "[{input, output"]),
        ([{"input": "1"}], ["the keys input"]),
        ([{"type": ["stdin"], "input": "1", "output": "2"}], ["the type ['stdin']"]),
        ([{"type": "special_judge", "input": "1", "output": "2"}], ["the type 'special_judge'"]),
        ({"inputs": [[[1, 2], 3]], "outputs": [[4]]}, ["without a function's name (fn_name)"]),
        ({"inputs": ["a b"], "outputs": ["1"], "fn_name": "f"}, ["no JSON, a value a line: 'a b'"]),
        ({"inputs": [{"n": 1}], "outputs": [1], "fn_name": "f"}, ["of type dict"]),
        ({"input": ["1", "2"], "output": ["1"]}, ["2 inputs and 1 outputs"]),
        ("eJxrYJmqyQABGldZGBQAYXFhYXqQDlq5KUMAEZkGPA==", ["packed", "LiveCodeBench"]),
        (["assert f(1)", {"input": "1", "output": "2"}], ["texts and pairs"]),
        (7, ["of type int: 7"]),
    ],
)
def test_other_forms_are_refused_by_name(tests: Any, words: list[str]) -> None:
    """A form that is not read was a failure of every completion of the run, in a sentence about something else."""
    with pytest.raises(TestsError) as caught:
        read_tests(tests, {})
    assert all(word in str(caught.value) for word in words[:1]) and "it reads" in str(caught.value)
    assert not isinstance(caught.value, UncrossedError)


STACK = """class StackError(Exception): pass
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, one): self.items.append(one)
    def pop(self):
        if not self.items: raise StackError("empty")
        return self.items.pop()
def double(n): return n * 2
"""
UNITTEST = """
import unittest
from solution import *

class Base(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.made = []
    def setUp(self):
        self.stack = Stack(1, 2)

class TestStack(Base):
    def test_pop(self):
        self.assertEqual(self.stack.pop(), 2)
        self.assertEqual(self.stack.pop(), 1)
        with self.assertRaises(StackError) as caught:
            self.stack.pop()
        self.assertIn("empty", str(caught.exception))
    def test_fresh(self):
        self.made.append(1)
        for n in (2, 1):
            with self.subTest(n=n):
                self.assertTrue(self.stack.pop() == n)
    @unittest.skip("later")
    def test_later(self):
        self.fail()

if __name__ == "__main__":
    unittest.main(argv=["x"], exit=False)
"""
PYTEST = """
import pytest
from solution import Stack, StackError, double as twice
import solution

@pytest.fixture
def stack(empty):
    empty.push(3)
    yield empty

@pytest.fixture(scope="module")
def empty():
    return Stack()

def test_own_fixture(stack):
    assert stack.pop() == 3
    with pytest.raises(StackError, match="empty"):
        assert stack.pop()

def test_aliases():
    assert twice(2) == 4 and solution.double(2) == 4

class TestStack:
    def setup_method(self, method):
        self.stack = Stack(5)
    def test_state(self):
        assert self.stack.pop() == 5
    def test_state_again(self):
        assert self.stack.pop() == 5
    def helper(self):
        assert False

def helper():
    assert False

if __name__ == "__main__":
    pytest.main([__file__])
"""
SQUARES = """
import unittest
class TestSq(unittest.TestCase):
    test_cases = [(1, 2), (2, 4)]
    def test_all(self):
        for given, wanted in self.test_cases:
            self.assertEqual(double(given), wanted)
"""


@pytest.mark.parametrize("tests", [UNITTEST, PYTEST, SQUARES])
def test_tests_of_every_kind_run(tests: str) -> None:
    """Test functions and methods were defined and never called, and each assertion of unittest was no assert."""
    assert run(STACK, tests) == 1.0 and run(STACK.replace("n * 2", "n").replace("pop()", "pop(0)"), tests) < 1.0


@pytest.mark.parametrize(
    ("tests", "kind", "words"),
    [
        (["return 1"], TestsError, "no Python: 'return' outside function"),
        (["f(1)"], TestsError, "they assert nothing"),
        (["import pandas, requests\nassert f(1)"], TestsError, "import pandas, requests; the jail has"),
        (["def check(g):\n    assert g(1) == 1"], TestsError, "need a column entry_point"),
        (["def test_f(tmp_path):\n    assert f(tmp_path)"], TestsError, "fixture tmp_path"),
        (
            ["import pytest\n@pytest.fixture(params=[1])\ndef n(): pass\ndef test(n): assert f(n)"],
            TestsError,
            "pytest.fixture",
        ),
        (["import pytest\npytest.importorskip('x')\nassert f(1)"], TestsError, "pytest.importorskip"),
        (["from unittest.mock import patch\nassert f(1)"], UncrossedError, "mock"),
        (["def test_f(capsys):\n    f()\n    assert capsys.readouterr().out"], UncrossedError, "capsys"),
        (["class Dog(Animal):\n    pass\nassert Dog().name"], UncrossedError, "a subclass of the code's Animal"),
        (["open('x', 'w').write('1')\nassert f('x') == 1"], UncrossedError, "open"),
        (["import io, sys\nsys.stdin = io.StringIO('2')\nassert f() == 2"], UncrossedError, "sys.stdin"),
        (["import random\nrandom.seed(1)\nassert f() == 3"], UncrossedError, "random.seed"),
    ],
)
def test_what_cannot_be_judged_is_named(tests: list[str], kind: type[TestsError], words: str) -> None:
    """Tests that nothing can pass would be a 0.0 for every completion, for the whole run."""
    with pytest.raises(TestsError) as caught:
        compile_tests(tuple(tests), "")
    assert words in str(caught.value) and type(caught.value) is kind


@pytest.mark.parametrize(
    "tests",
    [
        "class Door:\n    def open(self): return 1\nassert f(Door()) == 'open(1)'  # not open(\ndoor.open()",
        "import random\nrandom.seed(1)\nassert f(random.random())",
        "assert f('import mock', 'await')  # monkeypatch",
        "class Strange(Exception): pass\nclass Own(Strange): pass\nassert f(Own)",
        "import sys\nassert f(sys.stdout) or sys.maxsize == f(1)",
    ],
)
def test_what_only_looks_like_it_is_judged(tests: str) -> None:
    """Words in texts, comments and the tests' own classes."""
    assert compile_tests((tests,), "")["asserts"] == 1


@pytest.mark.parametrize(
    ("tests", "names", "classes"),
    [
        ("assert Extract([[1, 2]]) == [1]\nassert Extract([]).count(1) == 0", "Extract", ""),
        ("assert isinstance(Average([1]), float)\nx = Average([2])\nassert x.real == 2", "Average", ""),
        ("assert sum(10, 15) == 5", "sum", ""),
        ("assert sorted(f(3)) == sum([1])", "f", ""),
        ("assert Vector(1, (2)) + Vector(3, g(4)) == u", "Vector g u", "Vector"),
        ("v = Vector(1, 2)\nassert v.x == 1", "Vector", "Vector"),
        ("with Account(5) as a:\n    assert a.balance == 5", "Account", "Account"),
        (
            "class TestA:\n def setup(self):\n  self.a = A(5)\n def test(self):\n  assert self.a.draw(1)",
            "A",
            "A",
        ),
        ("assert Stack(f(3)).push(1) is None", "Stack f", "Stack"),
        ("try:\n    raise Odd(1)\nexcept (Odd, KeyError) as e:\n    assert e", "Odd", ""),
        ("assert isinstance(Dog(), Animal) and Animal()", "Animal Dog", "Animal Dog"),
        ("assert Color.RED and Color(1)", "Color", "Color"),
        ("def test_a():\n    f = g(1)\n    assert f\ndef test_b():\n    assert f(2)", "f g", ""),
        ("import solution\nfrom solution import max\nassert max(1) and solution.f(2)", "max solution", ""),
    ],
)
def test_names_and_classes(tests: str, names: str, classes: str) -> None:
    """The names that the code has to define; MBPP has functions whose names begin like those of classes."""
    made = compile_tests((tests,), "")
    assert (" ".join(made["names"]), " ".join(made["classes"])) == (names, classes)


def test_faults_are_counted_by_reason() -> None:
    """Preflight says how many rows a run would train on in vain."""
    texts: list[Any] = [["assert f(1)"], "f(1)", None, [["1", "2"]], "f(2)", [{"input": "1", "output": "2"}]]
    found = find_row_faults((10 * number, tests, {}) for number, tests in enumerate(texts))
    assert {key: rows for (key, _), rows in found.items()} == {False: [10, 40], True: [30]}
