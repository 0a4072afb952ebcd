"""`code_reward`: forms of tests, partial credit, what crosses between the code and its tests, and broken rows."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import build_rewards, load_config
from rloo_kit.errors import ConfigError, RewardError, WholeBatchError
from rloo_kit.graders import code as code_module
from rloo_kit.graders.code import CodeReward, Jail, find_jail
from rloo_kit.rewarding.guard import guard

END = 151668
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    try:
        find_jail()
    except RewardError as error:
        pytest.skip(str(error))
    return CodeReward(thinking=False, test_timeout_s=1.0)


def score(reward: CodeReward, code: str, tests: Any, **columns: Any) -> float | None:
    columns = {name: [value] for name, value in columns.items()}
    return reward(completions=[code], completion_ids=[[1]], tests=[tests], **columns)[0]


SQUARE = "def f(n):\n    return n * n if n < 3 else None"
RAISES = "def f(n):\n    if n > 2: raise KeyError(n)\n    return n * n"
CATCHES = ["try:\n    f('a')\n    assert False\nexcept TypeError:\n    pass", "assert f(1) == 1"]
FOUR = [f"assert f({n}) == {n * n}" for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        (SQUARE, FOUR, 0.5),
        (RAISES, "\n".join(FOUR), 0.5),
        (RAISES, "for n in (1, 2, 3):\n    value = f(n)\n    assert value == n * n\nassert f(1) == 1", 0.5),
        (SQUARE, "assert f(1) == 1\nfor n in (1, 2, 3, 4):\n    assert f(n) == n * n", 0.6),
        (SQUARE, "assert f(1) == 1\nf(2)\nf(3) + 1\nassert f(2) == 4", 2 / 3),
        (SQUARE, "assert f(1) == 1\nf(3) + 1", 0.5),
        (SQUARE, CATCHES, 1.0),
        ("def f(n): return 1", CATCHES, 0.5),
        ("def f(n):\n    while n > 1: pass\n    return n", FOUR, 0.25),
        ("def f(n):\n    if n > 2: exit()\n    return n * n", FOUR, 0.5),
        ("print(int(input()) ** 2 if True else 0)", [{"input": str(n), "output": "4"} for n in (2, 3)], 0.5),
        ("print(4)\nraise SystemExit(1)", [{"input": "2", "output": "4"}], 0.0),
        ("def f(n):\n    return n *", FOUR, 0.0),
        ("def g(n): return n * n", FOUR, 0.0),
        ("def f(n): return n * n\nraise ValueError", FOUR, 0.0),
        ("I cannot write this.", FOUR, 0.0),
    ],
)
def test_partial_credit(reward: CodeReward, code: str, tests: Any, expected: float) -> None:
    """The share of the assertions; a test that never ran is not passed, and a whole 1.0 needs every one that ran."""
    assert score(reward, code, tests) == pytest.approx(expected)


MONEY = """
class Money:
    def __init__(self, cents): self.cents = cents
    def __eq__(self, other): return self.cents == (other.cents if isinstance(other, Money) else other)
    def __mul__(self, times): return Money(self.cents * times)
class Wallet:
    def __init__(self, *coins): self.coins = list(coins)
    def total(self): return Money(sum(coin.cents for coin in self.coins))
def earn(hours): return Money(900 * hours)
"""


@pytest.mark.parametrize(
    ("code", "tests", "expected", "words"),
    [
        (MONEY, ["assert earn(2) == 1800"], None, "give a plain value to __eq__"),  # who knows what it says is equal
        (MONEY, ["assert (earn(2) * 3).cents == 5400"], None, "give a plain value to __mul__"),
        (MONEY, ["w = Wallet(Money(1), Money(2))\nassert w.total().cents == 3", "assert Money(1) * 2 == 2"], 1.0, ""),
        (MONEY, ["class Coin:\n    cents = 1\nassert Wallet(Coin()).total().cents == 1"], None, "an object of Coin"),
        ("import torch\ndef f(): return 1", ["assert f() == 1"], None, "imports torch, which is installed here"),
        ("def f():\n    with open('x', 'w') as file: file.write('1')\n    return 1", ["assert f() == 1"], 1.0, ""),
        (
            "import os\nprint(os.listdir('.'))\nopen('x', 'w').write(input())",
            [{"input": "ab", "output": "[]"}, {"input": "a", "output": "[]"}],
            1.0,
            "",
        ),
        ("def f(g): return g(2)", ["assert f(lambda n: n + 1) == 3"], 1.0, ""),
        ("def f(g): return g(3)", ["assert f(lambda n: n + 1) == 3"], 0.0, ""),
        ("def f(n, to=[]):\n    to.append(n)\n    return to", ["a = f(1)\nf(2)\nassert a == [1]"], 0.0, ""),
        ("import numpy as np\ndef f(n): return np.int64(n)", ["assert isinstance(f(3), int)"], 0.0, ""),
        ("def f(n): raise StopIteration", ["assert all(map(lambda n: f(n) == n, [1, 2]))"], 0.0, ""),
        (
            "def f(x): return x",
            "nan, *rest = f([float('nan'), float('inf'), 2**100, b'x', 1j, None, frozenset({(1, '\\ud800')})])\n"
            "assert nan != nan and rest == [float('inf'), 2**100, b'x', 1j, None, frozenset({(1, '\\ud800')})]",
            1.0,
            "",
        ),
        ("def f(n): return [n] * 3", ["import numpy as np\nassert np.array_equal(f(2), [2, 2, 2])"], 1.0, ""),
    ],
)
def test_right_code_is_never_wrong(
    reward: CodeReward, code: str, tests: Any, expected: float | None, words: str, capsys: Any
) -> None:
    """What plain Python calls right is worth 1.0, or is not scored with the reason; what it calls wrong is wrong."""
    code_module._SAID.clear()
    assert score(reward, code, tests) == expected
    printed = capsys.readouterr().out
    assert words in printed and printed.count("WARNING") == bool(words)


def test_quick_tests_pass_on_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are of CPU time; and nothing is written to the temporary folder, which may be full."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        judge = CodeReward(thinking=False, test_timeout_s=1.0, answer_timeout_s=4.0)
        pairs = [{"input": f"{n}\n", "output": f"{n * n}"} for n in range(200)]
        assert score(judge, "n = int(input())\nprint(n * n)", pairs) == 1.0
        slow = (
            "import time\ndef f(n):\n    end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n"
        )
        assert score(judge, slow + "    return n", ["assert f(1) == 1", "assert f(2) == 2"]) == 1.0
        assert score(judge, slow.replace("0.3", "1.5") + "    return n", ["assert f(1) == 1"]) == 0.0
    finally:
        for one in loops:
            one.kill()
            one.wait()


def test_a_machine_that_is_too_busy_is_a_failure(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that was never given the time that it may take is not wrong; else it is late."""
    given, limits = b"11\nimport time\n2\n+1\n", {"call_s": 2.0, "answer_s": 10.0}
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 9.0, 9.0))
    assert find_jail().run("programs", given, -0.2, **limits) == b""  # it waits for no time at all
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 9.0, 9.0))
    with pytest.raises(RewardError, match="the machine is too busy: code that may take 10 s of CPU time"):
        find_jail().run("programs", given, -0.2, **limits)


def test_a_bubblewrap_that_cannot_limit_tmp(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu 22.04 has such a one: the jail has no /tmp then, and ended after a program's first input."""
    command = list(find_jail().command)
    if "--size" in command:
        start = command.index("--size")
        command = [*command[:start], *command[start + 4 : -1], "/"]
    monkeypatch.setattr(code_module, "find_jail", lambda: Jail(tuple(command)))
    assert score(reward, "print(int(input()) ** 2)", {"inputs": ["2", "3"], "outputs": ["4", "9"]}) == 1.0
    assert score(reward, "def f(n): return n", ["assert f(1) == 1"]) == 1.0


def test_broken_tests_and_a_jail_that_fails_later(
    reward: CodeReward, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Neither is a 0.0 for the completion, and no jail at all is the batch's failure; each has its reason."""
    code_module._SAID.clear()
    assert math.isnan(score(reward, "def f(n): return n", ["f(1)"]) or 0.0)
    assert "they assert nothing" in capsys.readouterr().out
    monkeypatch.setattr(code_module, "find_jail", lambda: Jail(("/bin/false",)))
    assert math.isnan(score(reward, "f = len", ["assert f('a') == 1"]) or 0.0)
    assert math.isnan(score(reward, "print(1)", [{"input": "", "output": "1"}]) or 0.0)
    assert "it ended without a word" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    find_jail.cache_clear()
    with pytest.raises(WholeBatchError, match="no bwrap on PATH"):
        score(reward, "f = len", ["assert f('a') == 1"])


def test_rows_without_tests_and_answers_without_an_end(reward: CodeReward, capsys: Any) -> None:
    """Rows of another task in the same data; parquet gives None, and None for the keys that only other rows have."""
    thinks = CodeReward(think_end_id=END)
    texts = ["so</think>def f(): return 1", "so\n```\ndef f(): return 1\n```", "no</think>def f(): return 1"] * 2
    rows: list[Any] = [["assert f() == 1"], ["assert f() == 1"], None, "", [], float("nan")]
    batch = {"completions": texts, "completion_ids": [[7, END, 8], [7, 8], [7, END, 8]] * 2, "tests": rows}
    assert thinks(**batch) == [1.0, 0.0, None, None, None, None]
    scored = guard(thinks).score(
        prompts=["p"] * 2, completions=texts[:1] * 2, completion_ids=[[END]] * 2, tests=["f(1)", rows[0]]
    )
    assert scored.values[1] == 1.0 and scored.failed == [True, False]
    with pytest.raises(ValueError, match=r"needs a column 'tests' \(params.tests_column"):
        thinks(completions=texts[:1], completion_ids=[[END]], unit_tests=[["assert f() == 1"]])
    named = CodeReward(thinking=False, tests_column="unit_tests")
    assert named(completions=["f = len"], completion_ids=[[1]], unit_tests=[["assert f('ab') == 2"]]) == [1.0]
    mixed = [{"input": "", "output": "1", "fn": None}, None, {"input": "", "output": "2", "fn": None}]
    assert score(reward, "print(1)", mixed) == 0.5


def test_it_is_built_from_a_config(tmp_path: Path, tiny_tokenizer: Any, reward: CodeReward) -> None:
    """Limits out of range are errors of the config, with its key; the tag's id comes from the tokenizer."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: embedded/thinking}\ndata: {source: embedded/addition}\nrloo: {max_steps: 1}\n")
    params = {"memory_mb": 256, "test_timeout_s": 1, "tests_column": "test_list"}
    [built] = build_rewards(load_config(file, rewards=[{"name": "code_reward", "params": params}]), tiny_tokenizer)
    assert built.reward.think_end_id == 260 and built.reward.memory_mb == 256 and built.__name__ == "code_reward"
    for name, value in (("memory_mb", 8), ("workers", 0), ("test_timeout_s", 0), ("answer_timeout_s", -1)):
        run = load_config(file, rewards=[{"name": "code_reward", "params": {name: value}}])
        with pytest.raises(ConfigError, match=rf"rewards\.0\.params: code_reward cannot be built: {name} is {value}"):
            build_rewards(run, tiny_tokenizer)
