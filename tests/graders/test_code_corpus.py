"""`code_reward` on a corpus of right and wrong answers in every form of tests, sorted by plain Python.

The grammar of `code_corpus.txt`, a line's beginning each:
    == name | form | kind | function                     a task; its tests follow: as text, or an expression of pairs
    ++ and -- with lines below                           a right answer, a wrong one
    + and - with an edit, `old => new ;; old => new`     the same, made of the last right answer that was given whole
    + and - without an arrow                             the whole answer in a line
¶ is the end of a line in the last two.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.errors import RewardError
from rloo_kit.graders.code import CodeReward, find_jail

pytestmark = pytest.mark.slow
TEXTS = ("mbpp", "humaneval", "leetcode", "kodcode", "classeval")
# Tasks of which right answers are not scored, with the reason.
UNSCORED: dict[str, str] = {
    "logs_lines": "the tests replace a part of the code's process with unittest.mock",
    "tests_own_objects": "the tests hand the code an object of a class of their own",
}


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
    for part in Path(__file__).with_name("code_corpus.txt").read_text(encoding="utf-8").split("\n== ")[1:]:
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


def test_right_answers_are_worth_one_and_wrong_ones_less() -> None:
    """Else a run learns from a wrong verdict; what cannot be judged is not scored."""
    try:
        find_jail()
    except RewardError as error:
        pytest.skip(str(error))
    tasks = list(read_tasks().values())
    jobs: list[tuple[Task, str, bool]] = []
    for task in tasks:
        jobs += [(task, answer, True) for answer in task.right] + [(task, answer, False) for answer in task.wrong]
    columns: dict[str, list[Any]] = {
        name: [task.row.get(name) for task, _, _ in jobs] for task in tasks for name in task.row
    }
    values = CodeReward(thinking=False)(
        completions=[f"An answer:\n\n```python\n{answer}```\n" for _, answer, _ in jobs],
        completion_ids=[[1]] * len(jobs),
        tests=[task.tests for task, _, _ in jobs],
        **columns,
    )
    offenders, unscored = [], Counter[str]()
    for (task, answer, is_right), value in zip(jobs, values, strict=True):
        unscored[task.name] += value is None
        is_unscored = value is None and task.name in UNSCORED
        if not is_unscored and (value is None or (value == 1.0) != is_right):
            offenders.append(f"{task.name} ({task.form}, {task.kind}): {is_right}, reward {value}\n{answer}")
    assert not offenders, f"{len(offenders)} of {len(jobs)}:\n" + "\n".join(offenders)
    assert {name for name, count in unscored.items() if count} == UNSCORED.keys(), unscored
