"""The table of healthy and alarming values: its levels, its means, and that docs/metrics.md says the same."""

import math
import re
from pathlib import Path

import pytest

from rloo_kit.runs.health import LAST_ROWS, THRESHOLDS, judge

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BY_NAME = {one.metrics[0]: one for one in THRESHOLDS}


@pytest.mark.parametrize(
    ("metric", "value", "level", "key"),
    [
        ("completions/clipped_ratio", 0.3, "healthy", ""),
        ("completions/clipped_ratio", 0.31, "watch", "rloo.max_completion_length"),
        ("completions/clipped_ratio", 0.8, "watch", "rloo.max_completion_length"),
        ("completions/clipped_ratio", 0.81, "alarming", "rloo.max_completion_length"),
        ("frac_score_zero_std", 0.8, "healthy", ""),
        ("frac_score_zero_std", 0.81, "alarming", "rloo.num_generations"),
        ("entropy", 0.05, "healthy", ""),
        ("entropy", 0.04, "watch", "rloo.temperature"),
        ("entropy", 0.009, "alarming", "rloo.temperature"),
        ("entropy", 5.0, "watch", "if it keeps rising"),
        ("kl", 2.1, "alarming", "rloo.beta"),
        ("kl", -0.1, "healthy", ""),
        ("grad_norm", 0.0001, "watch", "no signal"),
        ("grad_norm", 10.1, "alarming", "lower rloo.learning_rate"),
        ("clip_ratio/region_mean", 1e-9, "alarming", "exactly 1"),
    ],
)
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
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        numbers = set(re.findall(r"\d+(?:\.\d+)?", row))
        limits = {f"{limit:g}" for limit in (one.low, one.high, one.alarm_low, one.alarm_high) if limit is not None}
        assert limits <= numbers, (name, limits - numbers)
