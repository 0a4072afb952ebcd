"""Which prompts of two evaluations are paired."""

from dataclasses import replace

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
