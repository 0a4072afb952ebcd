"""The curves of a report: which are drawn, and with how many points."""

import math
from typing import Any

import pytest

from rloo_kit.results.plots import (
    MOST_POINTS,
    Chart,
    Point,
    choose_curves,
    draw_chart,
    moving_mean,
    select_charts,
    split_time,
    tokens_generated,
    tokens_per_second,
)


def titles(metrics: list[dict[str, Any]]) -> list[str]:
    return [one.title for one in choose_curves(metrics)[0]]


def rows(steps: int, **values: Any) -> list[dict[str, Any]]:
    """Metrics whose values are numbers or functions of the step."""
    return [
        {"step": step} | {name.replace("__", "/"): one(step) if callable(one) else one for name, one in values.items()}
        for step in range(1, steps + 1)
    ]


def test_a_long_run_is_drawn_with_few_points() -> None:
    """Every row was a point in every panel, and the report of a run of 50,000 steps had tens of MB. Its highest value
    is still there, and the mean is over a tenth of them."""
    points = [Point(step, math.sin(step / 900)) for step in range(50_000)]
    points[31_234] = Point(31_234, 9.0)
    (line,) = draw_chart(Chart("x", {"": points})).lines
    assert max(line.raw.count("L"), line.path.count("L")) < MOST_POINTS
    assert min(float(one.split()[1]) for one in line.raw[1:].split("L")) < 25
    step, value, *_ = moving_mean(points)[-1]
    assert step == 49_999 and value == pytest.approx(sum(one.value for one in points[-5_000:]) / 5_000)


def test_flat_curves_are_words() -> None:
    """A panel of a straight line shows no more than its value."""
    drawn, constant = choose_curves(rows(9, reward=lambda step: step / 10, rewards__answer_reward__mean=0.0, kl=0.0))
    assert [one.title for one in drawn] == ["Reward: answer_reward"] and constant == ["KL to the reference, nats 0"]
    assert choose_curves([]) == ([], [])
    assert choose_curves([{"step": 1, "reward": 0.5}]) == ([], ["reward, weighted sum 0.5"])


def test_every_reward_has_its_panel() -> None:
    """With two rewards, the sum hides which of them changed."""
    parts = {"rewards__a__mean": lambda step: step / 10, "rewards__b__mean": lambda step: 1 - step / 10}
    metrics = rows(9, reward=lambda step: 2 * step, **parts, frac_score_zero_std=lambda step: step / 10)
    assert titles(metrics) == ["Reward, weighted sum", "Reward: a", "Reward: b", "Groups with signal"]


def test_the_curves_of_tools_are_there_with_tools() -> None:
    """Calls that the model wrote wrongly are its own fault, failures the tool's: two lines."""
    calls = {"tools__call_frequency": lambda n: n / 2, "tools__turns": float, "tools__failure_frequency": 0.0}
    made = rows(3, reward=lambda n: n / 4, tools__invalid_frequency=lambda n: n / 8, **calls)
    charts = {chart.title: chart for chart in select_charts(made)}
    assert {"Tool calls per completion", "Turns per completion"} < set(charts)
    wrong = charts["Tool calls gone wrong"].series
    assert [point.value for point in wrong["no valid call"]] == [0.125, 0.25, 0.375] and len(wrong) == 2
    assert not any("ool" in chart.title for chart in select_charts(rows(2, reward=1.0)))


def test_tokens_are_counted_over_steps_that_were_not_logged() -> None:
    """With logging_steps=5, a row covers five rollouts; with num_iterations=2 the time of every second step was that
    of the step that samples, which is longer."""
    row = {"completions/mean_length": 10.0, "step_time": 2.0}
    metrics = [row | {"step": step, "episode": 8 * step} for step in (5, 10, 12)]
    assert tokens_generated(metrics) == 12 * 8 * 10
    assert titles(metrics) == [] and "tokens per second 40.0" in choose_curves(metrics)[1]
    samples = {"step_time": 3.0, "completions/mean_length": 10.0}
    steps = [{"step": step, "episode": 8.0 * ((step + 1) // 2)} for step in range(1, 6)]
    metrics = [row | (samples if row["step"] % 2 else {"step_time": 1.0}) for row in steps]
    assert tokens_per_second(metrics) == 3 * 80 / (3 + 1 + 3 + 1 + 3)
    assert tokens_per_second(metrics, after=1) == 2 * 80 / (1 + 3 + 1 + 3)
    assert tokens_per_second(metrics, after=5) is None


def test_a_step_is_split_over_all_that_a_run_took() -> None:
    """Rows cover several steps, evaluations and saves are in `seconds` alone, and rows of before these metrics count
    for nothing: the time of their rollouts had the rewards in it."""
    parts = {"time/rollout_s": 9.0, "time/reward_s": 0.25, "time/gradient_s": 2.25}
    old = [{"step": 1, "seconds": 50.0, "time/rollout_s": 40.0, "time/gradient_s": 9.0}]
    speed = {"time/decode_ms_per_token_step": 14.9, "time/tokens_per_s": 540.0}
    new = [{"step": 3, "seconds": 75.0, **parts, **speed}]
    new += [{"step": 5, "seconds": 101.0, **parts, "time/evaluation_s": 1}]
    found = split_time([*old, *new])
    assert found is not None
    text = "rollout 9 s (71 %), rewards 0.25 s (2 %), gradient 2.25 s (18 %), evaluation 0.5 s (4 %), the rest 0.75 s"
    assert str(found) == f"A step takes 12.8 s: {text} (6 %); 14.9 ms a token step, 540 tokens/s sampled"
    assert sum(found.seconds.values()) == (101 - 50) / 4
    starts, widths = zip(*((start, width) for _, start, width, _ in found.bar), strict=True)
    assert sum(widths) == pytest.approx(100, abs=0.1) and starts[-1] + widths[-1] == pytest.approx(100, abs=0.1)
    assert str(split_time([{"step": 2, **parts}])).endswith("the rest 0 s (0 %)"), "a row without `seconds`"
    assert split_time(old) is None and split_time([]) is None
