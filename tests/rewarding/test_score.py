"""What rewards get of completions and what they make of them, for everybody who calls them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.completion import ADDED_COLUMNS, Completion, Episode
from rloo_kit.rewarding.guard import guard
from rloo_kit.rewarding.score import make_columns, name_columns, score
from rloo_kit.rewarding.signature import IN_SOME_RUNS

ROW = {"prompt": "1+1=", "answer": "2", "completion": "1+1=2"}


@pytest.mark.parametrize("has_budget", [False, True])
@pytest.mark.parametrize("environment", [None, "mine:Maze"])
@pytest.mark.parametrize("has_tools", [False, True])
def test_the_columns_named_before_a_run_are_those_that_rewards_get(has_budget, environment, has_tools) -> None:
    """A reward that requires `thinking_forced` passed the check and was refused by the trainer."""
    toolbox: Any = SimpleNamespace(environment=environment, environments=lambda: ["a", "b", "of another batch"])
    episodes = [Episode([{"role": "assistant", "content": text}]) if has_tools else None for text in "23"]
    made = [Completion([5, 6, 7], "2", True, context=[(1, 2)], forced=[(0, 1)], episode=one, row=ROW, prompt="1+1=")
            for one in episodes]  # fmt: skip
    columns = make_columns(made, has_budget, toolbox if has_tools else None)
    named = name_columns(ROW, has_budget, toolbox if has_tools else None)
    assert [*columns] == ["prompts", "completions", "completion_ids", *named] and "answer" in named
    assert all(len(values) == 2 for values in columns.values()) and "completion" not in named
    assert {*ADDED_COLUMNS} == {*IN_SOME_RUNS} >= {*named} - {*ROW}
    if has_tools:
        assert columns["completion_mask"] == [[1, 0, 1]] * 2 and columns["turns"][1] == episodes[1].messages
    assert columns.get("thinking_forced", [True, True]) == [True, True]


def test_async_rewards_are_awaited_together_and_failures_are_values() -> None:
    """A failure travelled as an infinity; judges awaited one after the other take as long as all of them."""
    order: list[str] = []

    async def first(completions: list[str]) -> list[float]:
        order.append("first")
        await asyncio.sleep(0.05)
        order.append("first is done")
        return [1.0, 2.0]

    async def second(completions: list[str]) -> list[float]:
        order.append("second")
        return [3.0, 4.0]

    def plain(completions: list[str]) -> list[float | None]:
        order.append("plain")
        return [None if text == "a" else 1 / 0 for text in completions]

    found = score([guard(reward) for reward in (first, plain, second)], {"completions": ["a", "b"]})
    assert order[0] == "plain" and order.index("second") < order.index("first is done")
    assert [one.values for one in found] == [[1.0, 2.0], [None, None], [3.0, 4.0]]
    assert found[1].failed == [False, True] and str(found[1].marked) == "[None, nan]"
    assert found[0].failures == [] and "ZeroDivisionError" in found[1].failures[0]
