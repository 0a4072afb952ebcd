"""Which prompts of two evaluations are paired; and files of older versions: each measure had keys of its own."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.results.changes import change_of, compare, pair_means
from rloo_kit.results.evaluation import Evaluation
from tests.evaluations import mean_of


def measured(shares: list[float], digests: str) -> Evaluation:
    """An evaluation of prompts that are letters."""
    measures = {"accuracy": mean_of(shares)}
    return Evaluation("", len(shares), 1, 1.0, 6, measures, prompts_digest=digests, prompt_digests=list(digests))


def test_nested_evaluations_are_paired_on_what_they_share() -> None:
    """A part of the same prompts, in another order, was "measured on different prompts", because there was one digest
    of all of them. An evaluation without one of each, from an older version, pairs as a whole or not."""
    before, after = measured([1.0, 0.0, 1.0, 0.0, 1.0], "abcde"), measured([1.0, 1.0, 0.0], "dba")
    for first, second, sign in ((before, after, 1), (after, before, -1)):
        found = change_of("accuracy", first, second)
        assert found is not None and found.paired and found.difference.count == 3
        assert found.difference.value == pytest.approx(sign / 3) == found.after.value - found.before.value
    older = [replace(one, prompt_digests=None) for one in (before, after)]
    for first, second in (older, (before, older[1])):
        found = change_of("accuracy", first, second)
        assert found is not None and not found.paired
    assert compare(before, older[0]) == compare(before, before) == compare(older[0], older[0])
    few, other = measured([1.0, 0.0], "ax"), measured([1.0, 0.0, 1.0], "axy")
    assert change_of("accuracy", after, few).paired and not change_of("accuracy", other, after).paired


def test_of_two_equal_prompts_the_first_is_paired_with_the_first() -> None:
    """By digest alone, both would be paired with the last one."""
    before, after = measured([1.0, 0.0, 1.0], "aab"), measured([0.0, 0.0, 1.0, 1.0], "baca")
    assert pair_means(before, after, "accuracy") == {("a", 0): (1.0, 0.0), ("a", 1): (0.0, 1.0), ("b", 0): (1.0, 0.0)}


# ------------------------------------------------------------------------------------------ older files

OLDER: dict[str, Any] = {
    "label": "before", "num_prompts": 4, "num_samples": 1, "temperature": 1.0, "max_completion_length": 8,
    "num_judged": 3, "unjudged": [1], "prompt_digests": ["a", "b", "c", "d"], "prompts_digest": "all",
    "accuracy": 0.5, "low": 0.25, "high": 0.75, "per_prompt": [1.0, 0.0, 0.5],
    "reward": -0.5, "reward_low": -1.0, "reward_high": 0.0, "reward_per_prompt": [None, -1.0, 0.0, -0.5],
    "rewards": {"mine": {"mean": 2.0, "low": 1.0, "high": 3.0, "per_prompt": [1.0, 2.0, 2.0, 3.0]}},
    "budgets": [{"budget": 16, "accuracy": 0.5, "low": 0.2, "high": 0.8, "forced_share": 0.25}],
}  # fmt: skip


def test_an_older_file_reads_as_it_was() -> None:
    """A prompt without an answer had no entry in `per_prompt`; it has None, so that prompts stay in their places."""
    found = Evaluation.from_dict(copy.deepcopy(OLDER))
    accuracy, reward = found.measures["accuracy"], found.measures["reward"]
    assert (accuracy.ends, accuracy.count, accuracy.per_prompt) == ((0.5, 0.25, 0.75), 3, [1.0, None, 0.0, 0.5])
    assert (reward.ends, reward.count, found.rewards["mine"].value) == ((-0.5, -1.0, 0.0), 3, 2.0)
    assert (found.budgets[0].tokens, found.budgets[0].accuracy.value) == (16, 0.5)
    assert Evaluation.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    "edit",
    [
        {"per_prompt": [1.0, 0.0]}, {"accuracy": 5.0}, {"low": None}, {"unjudged": [1, 2]}, {"rewards": {"mine": 1.0}},
        {"budgets": [OLDER["budgets"][0] | {"forced_share": float("inf")}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_older_file_counts_as_not_measured(
    edit: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean too few shifted every later prompt, and with it the paired difference; infinity ended in a traceback."""
    file = tmp_path / "before.json"
    file.write_text(json.dumps(OLDER | edit))
    assert Evaluation.read(file) is None
    assert "before.json is damaged" in "".join(capsys.readouterr())
