"""The watch for steps that train nothing, and the table of healthy values, over rows of metrics as they are logged."""

import math
import re
from pathlib import Path

import pytest

from rloo_kit.runs.health import LAST_ROWS, THRESHOLDS, LearningSignalWatch, find_problems, judge

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BY_NAME = {one.metrics[0]: one for one in THRESHOLDS}

RLOO = {"max_completion_length": 128, "num_generations": 4, "temperature": 0.7, "logging_steps": 1}
TIED = {"frac_reward_zero_std": 1.0, "reward_std": 0.4, "reward": 0.0, "completions/clipped_ratio": 0.0}
HEALTHY = {"frac_reward_zero_std": 0.25, "reward_std": 0.4, "grad_norm": 0.3, "completions/clipped_ratio": 0.1}


def watch(rows, patience=3, **rloo):
    """Findings as (step, kind, message) over rows of consecutive steps."""
    guard = LearningSignalWatch(patience, RLOO | rloo)
    return [(n, f.kind, f.message) for n, row in enumerate(rows, start=1) for f in guard.observe(n, row)]


def test_a_healthy_run_is_left_alone():
    """A watch that cries wolf is switched off before the day it is needed."""
    almost = HEALTHY | {"frac_reward_zero_std": 0.99, "completions/clipped_ratio": 0.94, "grad_norm": 1e-4}
    assert watch([HEALTHY] * 50) == [] and watch([almost] * 50) == []


def test_steps_must_follow_each_other():
    """Two tied batches now and then are ordinary in a run that is nearly solved."""
    assert watch([TIED, TIED, HEALTHY] * 10) == []


def test_it_speaks_once_and_again_when_the_row_has_doubled():
    """One line a step buries the run's own lines; one line in all is scrolled away."""
    assert [step for step, kind, _ in watch([TIED] * 25) if kind == "tied"] == [3, 6, 12, 24]
    assert [step for step, kind, _ in watch([TIED] * 4 + [HEALTHY] + [TIED] * 6)] == [3, 11]


def test_steps_that_reuse_a_rollout_count_with_it():
    """With num_iterations=2 every second row holds no rewards; it used to end the row, so nothing was ever said."""
    truncated = TIED | {"completions/clipped_ratio": 1.0, "grad_norm": 0.2}
    found = watch([truncated, {"grad_norm": 0.2}] * 3, patience=4)
    assert [(step, kind) for step, kind, _ in found] == [(4, "tied"), (4, "truncated")]
    assert watch([HEALTHY, {"grad_norm": 0.2}] * 5, patience=1) == []


def test_a_logged_row_stands_for_the_steps_since_the_last_one():
    """With logging_steps=10 five steps without signal are less than one row."""
    guard = LearningSignalWatch(20, RLOO | {"logging_steps": 10})
    assert guard.observe(10, TIED) == []
    assert [finding.steps for finding in guard.observe(20, TIED)] == [20]


def test_truncation_names_the_limit_and_its_value():
    """The published recipe: 128 tokens, -1.0 without </think>. What has to change is the limit, not the reward."""
    row = {"frac_reward_zero_std": 1.0, "reward": -1.0, "grad_norm": 0.0, "completions/clipped_ratio": 1.0}
    found = watch([row | {"thinking/closed_ratio": 0.0}] * 3)
    assert [kind for _, kind, _ in found] == ["tied", "truncated", "zero_gradient"]
    assert all("raise rloo.max_completion_length (currently 128): 100%" in message for _, _, message in found)
    assert "mean reward -1" in found[0][2] and "0% of them close their thinking" in found[1][2]


def test_a_run_that_scores_nothing_is_not_called_tied():
    """All rewards None came out as "one and the same reward", with the advice to raise the temperature."""
    row = TIED | {"reward": None, "reward_std": None, "rewards/unscored_ratio": 1.0, "rewards/failed_ratio": 0.0}
    ((_, kind, message),) = watch([row] * 3)
    assert kind == "tied" and "rewards/failed_ratio" in message
    assert "data.answer_column" in message and "temperature" not in message


def test_ties_without_truncation_name_what_tells_completions_apart():
    """A longer limit does not help a run whose prompts are all too hard or all too easy."""
    ((_, _, message),) = watch([TIED] * 3)
    assert "rloo.max_completion_length" not in message
    keys = ("data.source", "rewards", "rloo.num_generations, currently 4", "rloo.temperature (currently 0.7)")
    assert all(key in message for key in keys)


@pytest.mark.parametrize(
    ("row", "is_tied"),
    [
        ({"frac_reward_zero_std": 0.0, "frac_score_zero_std": 1.0, "reward_std": 0.4}, True),  # the KL alone differs
        ({"frac_reward_zero_std": 0.0, "frac_score_zero_std": 0.9, "reward_std": 0.4}, False),
        ({"frac_reward_zero_std": 0.0, "reward_std": 0.0}, True),  # a bare TRL run's log
        ({"frac_reward_zero_std": 1.0}, True),
        ({"reward_std": math.nan, "completions/clipped_ratio": math.nan, "grad_norm": math.nan}, False),
        ({}, False),
    ],
)
def test_a_tie_is_judged_before_the_kl_penalty(row, is_tied):
    """With beta above zero equal rewards differ by the KL, so TRL's share of tied groups says 0 while nothing is
    learnt but staying where one is."""
    assert ("tied" in find_problems(row)) is is_tied


@pytest.mark.parametrize(
    ("rloo", "key"),
    [
        ({"mask_truncated_completions": True}, "rloo.mask_truncated_completions"),
        ({"reward_clip_range": [0.0, 0.1], "clipped": 0.0}, "rloo.reward_clip_range (currently [0.0, 0.1])"),
        ({"clipped": 0.0}, "see model.lora"),
    ],
)
def test_a_zero_gradient_names_its_likely_cause(rloo, key):
    """A gradient of zero has several causes, and the wrong advice costs another run."""
    row = HEALTHY | {"grad_norm": 0.0, "completions/clipped_ratio": rloo.pop("clipped", 1.0)}
    messages = [message for _, kind, message in watch([row] * 3, **rloo) if kind == "zero_gradient"]
    assert len(messages) == 1 and key in messages[0]


LEVELS = [("completions/clipped_ratio", 0.3, "healthy", ""), ("frac_score_zero_std", 0.8, "healthy", "")]
LEVELS += [
    ("completions/clipped_ratio", *pair, "rloo.max_completion_length") for pair in ((0.31, "watch"), (0.81, "alarming"))
]
LEVELS += [("entropy", 0.05, "healthy", ""), ("entropy", 5.0, "watch", "rloo.learning_rate")]
LEVELS += [("entropy", *pair, "rloo.temperature") for pair in ((0.04, "watch"), (0.009, "alarming"))]
LEVELS += [("frac_score_zero_std", 0.81, "alarming", "rloo.num_generations"), ("kl", 2.1, "alarming", "rloo.beta")]
LEVELS += [("grad_norm", *rest, "rloo.learning_rate") for rest in ((0.0001, "watch"), (10.1, "alarming"))]
LEVELS += [("clip_ratio/region_mean", 1e-9, "alarming", "exactly 1")]


@pytest.mark.parametrize(("metric", "value", "level", "key"), LEVELS)
def test_levels_at_the_limits(metric: str, value: float, level: str, key: str) -> None:
    """A limit that is off by its own value calls a healthy run alarming."""
    threshold = BY_NAME[metric]
    assert threshold.level(value) == level
    assert key in threshold.action(value) and bool(threshold.action(value)) == (level != "healthy")


def test_means_are_over_the_last_rows_that_have_a_number() -> None:
    """One odd step is no alarm; a NaN or a row of a reused rollout, which has no such metric, must not count as 0."""
    rows = [{"kl": 9.0}] * 5 + [{"kl": 0.1}] * (LAST_ROWS - 3) + [{"kl": math.nan}, {"kl": None}, {"loss": 0.0}]
    (found,) = judge(rows)
    assert (found.metric, found.level) == ("kl", "healthy") and found.value == pytest.approx(0.1)
    assert judge(rows, last=len(rows))[0].level == "alarming"
    assert judge([]) == [] and judge([{"kl": True}]) == []


def test_the_score_counts_before_the_reward_with_its_penalty() -> None:
    """With beta above 0 the penalty keeps tied groups from being equal, and frac_reward_zero_std stays at 0."""
    (found,) = judge([{"frac_reward_zero_std": 0.0, "frac_score_zero_std": 1.0}])
    assert (found.metric, found.level) == ("frac_score_zero_std", "alarming")
    (found,) = judge([{"frac_reward_zero_std": 1.0}])
    assert (found.metric, found.level) == ("frac_reward_zero_std", "alarming")


def test_off_policy_the_ratio_may_be_clipped() -> None:
    """With num_iterations above 1 clipping is what the ratio is for."""
    rows = [{"clip_ratio/region_mean": 0.1}]
    assert judge(rows)[0].level == "alarming" and judge(rows, on_policy=False) == []


def test_the_page_of_metrics_has_the_same_limits() -> None:
    """Two tables of limits drift apart."""
    text = PAGE.read_text(encoding="utf-8")
    for name in ("completions/clipped_ratio", "frac_reward_zero_std", "entropy", "kl", "grad_norm"):
        one = next(one for one in THRESHOLDS if name in one.metrics)
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        numbers = set(re.findall(r"\d+(?:\.\d+)?", row))
        limits = {f"{limit:g}" for limit in (one.low, one.high, one.alarm_low, one.alarm_high) if limit is not None}
        assert limits <= numbers, (name, limits - numbers)
