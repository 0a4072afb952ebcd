"""Dynamic sampling: which groups are replaced, by what, and where the fresh prompts come from."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rloo_kit.errors import ConfigError, DataError
from rloo_kit.loop.resample import PromptReservoir, find_tied_groups, replace_tied_groups

NAN = float("nan")
K = 2


@dataclass
class Spans:
    forced: list[Any]
    logps: list[list[float]] | None = None

    @property
    def thinking_forced(self) -> list[bool]:
        return [span is not None for span in self.forced]


@dataclass
class Sampled:
    scores: torch.Tensor
    ids: list[list[int]]
    rewards: torch.Tensor
    spans: Spans
    columns: dict[str, list[str]] = field(default_factory=dict)
    limit: int = 2  # not by rows, and as long as nothing: stays


def sampled(name: str, *scores: float) -> Sampled:
    rows = range(len(scores))
    return Sampled(
        torch.tensor(scores),
        [[row] * (row + 1) for row in rows],
        torch.tensor([[score, row] for row, score in enumerate(scores)]),
        Spans([(row, row + 1) if row % 2 else None for row in rows], [[float(row)] for row in rows]),
        {"names": [f"{name}{row}" for row in rows]},
    )


def test_a_group_that_is_not_scored_is_tied_too() -> None:
    """A prompt whose reward failed for all but one completion has no baseline: it teaches as little as a solved one."""
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0, NAN, NAN, 0.5, 0.25])
    assert find_tied_groups(scores, K) == [0, 2, 3]


def test_rows_are_exchanged_together() -> None:
    """A group whose ids came from the fresh prompt and whose rewards from the old one pushes the policy anywhere."""
    old, new = sampled("old", 1.0, 1.0, 0.0, 1.0, 0.0, 0.0), sampled("new", 0.0, 0.0, 1.0, 0.0)
    batch, replaced = replace_tied_groups(old, new, K)
    assert replaced == [0]
    assert batch.columns["names"] == ["new2", "new3", "old2", "old3", "old4", "old5"]
    assert batch.scores.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert batch.ids == [new.ids[2], new.ids[3], *old.ids[2:]]
    assert batch.rewards.tolist() == [*new.rewards[2:].tolist(), *old.rewards[2:].tolist()]
    assert batch.spans.forced == [None, (3, 4), None, (3, 4), None, (5, 6)]
    assert batch.spans.logps == [[2.0], [3.0], [2.0], [3.0], [4.0], [5.0]]
    assert batch.limit == 2
    assert old.columns["names"][0] == "old0" and old.scores.tolist()[:2] == [1.0, 1.0], "the inputs are as they were"


def test_only_groups_with_signal_come_in_and_only_tied_ones_go() -> None:
    """A round that swaps one solved prompt for another has cost its completions and gained nothing."""
    old = sampled("old", 1.0, 1.0, 0.0, 1.0)
    assert replace_tied_groups(old, sampled("new", 0.0, 0.0, NAN, NAN), K) == (old, [])
    full = sampled("old", 0.0, 1.0, 1.0, 0.0)
    assert replace_tied_groups(full, sampled("new", 0.0, 1.0), K) == (full, [])
    batch, replaced = replace_tied_groups(sampled("old", 0.0, 0.0), sampled("new", 0.0, 1.0, 1.0, 0.0), K)
    assert replaced == [0] and batch.columns["names"] == ["new0", "new1"]


def test_fields_that_are_absent_stay_absent() -> None:
    """Sampler log-probabilities are None where no engine records them."""
    old, new = sampled("old", 1.0, 1.0), sampled("new", 0.0, 1.0)
    old.spans.logps = new.spans.logps = None
    batch, replaced = replace_tied_groups(old, new, K)
    assert replaced == [0] and batch.spans.logps is None


# ------------------------------------------------------------------------------------------------- the reservoir


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{number}", "answer": number} for number in range(count)]


def names(drawn: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"] for row in drawn]


def test_every_prompt_comes_once_a_pass() -> None:
    """Drawing with replacement would leave a third of the prompts out of a pass."""
    reservoir = PromptReservoir(rows(10), seed=3)
    first = [name for _ in range(5) for name in names(reservoir.draw(2, []))]
    second = [name for _ in range(5) for name in names(reservoir.draw(2, []))]
    assert sorted(first) == sorted(second) == [f"p{n}" for n in range(10)]
    assert first != second, "each pass is shuffled anew"
    assert names(PromptReservoir(rows(10), seed=3).draw(10, [])) == first
    assert names(PromptReservoir(rows(10), seed=4).draw(10, [])) != first


def test_what_is_in_the_batch_is_passed_over_and_small_data_ends() -> None:
    """With 4 prompts and 3 of them in the batch one is left: a loop until there are enough would never end."""
    reservoir = PromptReservoir(rows(4), seed=0)
    assert names(reservoir.draw(3, rows(3))) == ["p3"]
    assert reservoir.draw(3, rows(4)) == []
    repeated = PromptReservoir([{"prompt": "same"}] * 5, seed=0)
    assert len(repeated.draw(3, [])) == 1, "groups of one prompt are one group's worth of news"


def test_a_resumed_reservoir_goes_on_where_it_was() -> None:
    """A resume that starts the order anew trains other prompts than the run that was never cut."""
    whole, cut = PromptReservoir(rows(7), seed=1), PromptReservoir(rows(7), seed=1)
    for reservoir in (whole, cut):
        reservoir.draw(5, rows(2))
    resumed = PromptReservoir(rows(7), seed=99)
    resumed.load_state_dict(cut.state_dict())
    for _ in range(4):
        assert resumed.draw(3, []) == whole.draw(3, [])
    with pytest.raises(DataError, match=r"of 7 training prompts, and there are 6 now.*data\.\*"):
        PromptReservoir(rows(6), seed=1).load_state_dict(cut.state_dict())


def test_a_stream_is_refused() -> None:
    """A streamed data set has no prompt number 5 to go back to."""
    with pytest.raises(ConfigError, match=r"rollout\.resample_rounds: 0"):
        PromptReservoir(iter(rows(3)), seed=0)
