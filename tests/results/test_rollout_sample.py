"""Which rollouts a report shows: by a stated rule, in one pass, with bounded size, for any rows; and which prompts of
two evaluations are paired."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.results.changes import change_of, compare, find_changes, pair_means
from rloo_kit.results.evaluation import Evaluation, digest_prompt
from rloo_kit.results.samples import MOST_ROLLOUTS, ROOM, RolloutSample, sample_rollouts
from rloo_kit.runs.rollouts import Rollouts
from tests.evaluations import mean_of
from tests.results.test_report import make_rollout, make_sample

K = 4


def make_rows(steps: int, per_step: int, **changes: Any) -> Iterator[dict[str, Any]]:
    return (make_rollout(step, number, **changes) for step in range(1, steps + 1) for number in range(per_step))


def sample(folder: Path, rows: Iterable[dict[str, Any]]) -> RolloutSample:
    """What the report of a run with these rollouts shows."""
    folder.mkdir(exist_ok=True)
    Rollouts(folder).append(rows)
    return sample_rollouts(folder)


def test_a_large_run_is_sampled_by_the_rule(tmp_path: Path) -> None:
    """A small run is shown whole; else whole groups of the first, the last and evenly spaced steps."""
    small = sample(tmp_path / "small", make_rows(30, 8))
    assert len(small.rows) == 240 and small.describe() == "All 240 rollouts."
    found = sample(tmp_path / "large", make_rows(46, 200))
    groups = Counter((row["step"], row["group"]) for row in found.rows)
    assert set(groups.values()) == {K} and len(found.rows) == MOST_ROLLOUTS
    assert {step for step, _ in groups} == {*range(1, 47, 5)}
    assert "1,000 rollouts: whole groups from 10 of 46 steps" in found.describe()


def test_texts_are_cut_to_what_a_page_may_hold(tmp_path: Path) -> None:
    """1,500 completions of 8,000 tokens are 48 MB; the answer is cut last."""
    text = "x" * 30_000 + "</think>\n\n42"
    found = sample(tmp_path, make_rows(12, 16, completion=text, answer_start=30_008))
    assert found.limit is not None and len(json.dumps(found.rows)) < ROOM * 1.1
    assert all(row["answer"] == "42" for row in found.rows) and f"cut to {found.limit:,}" in found.describe()
    assert "characters left out" in found.rows[0]["thinking"][0][0]


def test_the_turns_of_an_episode_are_cut_before_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool returns up to 100,000 characters; the last turn, which is judged, stays whole."""
    monkeypatch.setattr("rloo_kit.results.samples.ROOM", 40_000)
    call = {"function": {"name": "read", "arguments": {"path": "a b", "lines": [1, 2]}}}
    turns = [{"role": "assistant", "reasoning_content": "hm", "content": "I look", "tool_calls": [call, call]}]
    turns += [{"role": "tool", "name": "read", "content": content} for content in ("x" * 50_000, "")]
    turns += [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "0"}]
    plain, row = sample(tmp_path / "a", [make_rollout(1, 0), make_rollout(1, 1, turns=turns, tool_calls=2)]).rows
    kinds = ["thinking", "text", "call", "call", "result", "result", "reply"]
    assert [kind for kind, _ in row["steps"]] == kinds and row["calls"] == "2"
    texts = [text for _, text in row["steps"]]
    assert texts[:3] == ["[...]", "[...]", "[...]"] and "characters left out" in texts[4]
    assert texts[5:] == ["(empty)", "go on"] and (row["thinking"], row["answer"]) == ([("sum 1", False)], "1")
    assert plain["steps"] == [] and "calls" not in plain
    (row,) = sample(tmp_path / "b", [make_rollout(1, 1, turns=[turns[0], *turns[2:]])]).rows
    assert row["steps"][2] == ("call", 'read(path="a b", lines=[1, 2])')


def test_a_prompt_may_be_messages(tmp_path: Path) -> None:
    """As TRL has them; and a completion may have no score."""
    messages, said = [{"role": "user", "content": "1+1="}], [{"role": "assistant", "content": "2"}]
    rows = [make_rollout(1, 1, reward=None, advantage=None)]
    rows.append(make_rollout(1, 2, prompt=messages, completion=said, answer_start=None))
    found = sample(tmp_path, rows)
    assert found.prompts[1] == "user: 1+1=" and found.rows[1]["answer"] == "2"
    assert sample_rollouts(tmp_path / "none").rows == []


def make_sides(old: list[float], new: list[float], samples: int) -> tuple[Evaluation, Evaluation]:
    made = []
    for values in (old, new):
        measures = {"accuracy": mean_of(values), "greedy_accuracy": mean_of(values[::-1])}
        digests = [digest_prompt(f"{number}+1=") for number in range(len(values))]
        one = Evaluation("", len(values), 1, 1.0, 64, measures, prompts_digest="x", prompt_digests=digests)
        kept = [make_sample(n, value == 1.0) for n, value in enumerate(values[:samples])]
        one.samples, one.more_samples = kept[:1], kept[1:]
        made.append(one)
    return made[0], made[1]


def test_changes_are_counted_over_all_prompts_and_regressions_come_first() -> None:
    """Ten samples of a thousand prompts showed none of the five that broke."""
    found = find_changes(*make_sides([1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1], samples=4))
    assert found.counts["temperature 1"] == {"broken": 1, "still wrong": 1, "fixed": 2, "still right": 2}
    assert found.counts["greedy"] == found.counts["temperature 1"] and found.total == 6
    assert [entry["kind"] for entry in found.prompts] == ["broken", "still wrong", "fixed", "still right"]
    assert found.prompts[0]["prompt"] == "3+1=" and found.prompts[0]["before"]["correct"] is True
    before, after = make_sides([0.0, 1.0], [1.0, 1.0], samples=1)
    after.prompts_digest, after.prompt_digests = "y", ["1", "2"]  # other prompts
    assert find_changes(before, after).counts == {} and find_changes(None, after).prompts[0]["kind"] == "right"


def test_prompts_without_an_answer_are_in_no_kind() -> None:
    """Only prompts with an answer have a share, so indices in the two lists differ."""
    before, after = make_sides([0, 1], [1, 1], samples=2)
    for one in (before, after):
        one.num_prompts = 3
        for measured in one.measures.values():
            measured.per_prompt.insert(0, None)
        one.prompt_digests.insert(0, digest_prompt("9+1="))
        one.samples, one.more_samples = [make_sample(9, None)], [*one.samples, *one.more_samples]
    kinds = {entry["prompt"]: entry["kind"] for entry in find_changes(before, after).prompts}
    assert kinds == {"0+1=": "fixed", "1+1=": "still right", "9+1=": None}


def test_prompts_of_nested_evaluations_are_counted_where_both_measured() -> None:
    """100 of the same 300 prompts: nothing was counted, because one digest stood for all of them."""
    before, after = make_sides([1, 0, 0, 1, 1, 0], [0, 1, 1], samples=6)
    after.samples, after.more_samples = [], [make_sample(number, number > 3) for number in (3, 4, 2)]
    after.prompts_digest, after.prompt_digests = "y", [digest_prompt(f"{number}+1=") for number in (3, 4, 2)]
    found = find_changes(before, after)
    assert found.counts["temperature 1"] == {"broken": 1, "fixed": 1, "still right": 1}
    kinds = {entry["prompt"]: entry["kind"] for entry in found.prompts}
    both = {"3+1=": "broken", "4+1=": "still right", "2+1=": "fixed"}
    assert kinds == both | {"0+1=": "right", "1+1=": "wrong", "5+1=": "wrong"}


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
