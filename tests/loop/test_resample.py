"""Dynamic sampling: where the fresh prompts come from. What is exchanged for them: `test_rollout_options`."""

from typing import Any

import pytest

from rloo_kit.errors import DataError
from rloo_kit.loop.collaborators import PromptReservoir


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{number}", "answer": number} for number in range(count)]


def names(drawn: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"] for row in drawn]


def test_every_prompt_comes_once_a_pass():
    """Drawing with replacement would leave a third of the prompts out of a pass."""
    reservoir = PromptReservoir(rows(10), seed=3)
    first = [name for _ in range(5) for name in names(reservoir.draw(2, []))]
    second = [name for _ in range(5) for name in names(reservoir.draw(2, []))]
    assert sorted(first) == sorted(second) == [f"p{n}" for n in range(10)]
    assert first != second, "each pass is reshuffled"
    assert names(PromptReservoir(rows(10), seed=3).draw(10, [])) == first
    assert names(PromptReservoir(rows(10), seed=4).draw(10, [])) != first


def test_what_is_in_the_batch_is_passed_over_and_small_data_ends():
    """With 4 prompts and 3 of them in the batch one is left: a loop until there are enough would never end."""
    reservoir = PromptReservoir(rows(4), seed=0)
    assert names(reservoir.draw(3, names(rows(3)))) == ["p3"]
    assert reservoir.draw(3, names(rows(4))) == []
    repeated = PromptReservoir([{"prompt": "same"}] * 5, seed=0)
    assert len(repeated.draw(3, [])) == 1, "groups of one prompt are one group's worth of news"


def test_a_reservoir_of_other_data_is_refused():
    """Another number of rows has another order, so a resumed run would train on other prompts."""
    with pytest.raises(DataError, match=r"7 training prompts, and there are 6 now.*data\.\*"):
        PromptReservoir(rows(6), seed=1).load_state_dict(PromptReservoir(rows(7), seed=1).state_dict())
