"""Problems in the forms in which data sets have tests of code, with a right solution each: `code_forms.txt`.

A problem there is `== form | function`, its solution, `--` and its tests: text, or `what goes in => what comes out`, a
test a line, with ¶ for the end of a line.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A row with the columns of its data set, of which `column` has the tests."""

    form: str
    column: str
    row: dict[str, Any]
    solution: str


def read_problems() -> list[Problem]:
    """All of them, in the file's order."""
    problems = []
    for part in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n== ")[1:]:
        head, _, body = part.partition("\n")
        form, name = (one.strip() for one in head.split("|"))
        solution, _, tests = body.partition("\n--\n")
        column, row = columns_of(form, name, tests.strip("\n"))
        problems.append(Problem(form, column, row, solution))
    return problems


def columns_of(form: str, name: str, tests: str) -> tuple[str, dict[str, Any]]:
    """The column of the tests, and the columns of a row, as the data set of that form has them."""
    if form == "humaneval":
        return "test", {"task_id": "T/0", "entry_point": name, "test": tests}
    if form == "mbpp":
        parts = [tests] if "try:" in tests else tests.splitlines()
        return "test_list", {"test_setup_code": "", "test_list": parts}
    if form in ("kodcode", "classeval"):
        return "test", {"test": tests}
    pairs: list[Any] = [line.replace("¶", "\n").partition(" => ")[::2] for line in tests.splitlines()]
    if form == "code_contests":
        return "public_tests", {
            "public_tests": {"input": [one for one, _ in pairs], "output": [two for _, two in pairs]}
        }
    if form == "lcb_stdin":
        tests = json.dumps([{"input": one, "output": two, "testtype": "stdin"} for one, two in pairs])
        return "public_test_cases", {"public_test_cases": tests, "metadata": "{}", "starter_code": ""}
    if form == "lcb_functional":
        lines = [("\n".join(map(json.dumps, json.loads(one))), two) for one, two in pairs]
        tests = json.dumps([{"input": one, "output": two, "testtype": "functional"} for one, two in lines])
        starter = f"class Solution:\n    def {name}(self, given):\n        "
        return "tests", {"tests": tests, "metadata": json.dumps({"func_name": name}), "starter_code": starter}
    if name:
        pairs = [(json.loads(one), json.loads(two)) for one, two in pairs]
    found = {"inputs": [one for one, _ in pairs], "outputs": [two for _, two in pairs]} | (
        {"fn_name": name} if name else {}
    )
    column = "input_output" if form == "apps" else "ground_truth"
    return column, {column: json.dumps(found)}
