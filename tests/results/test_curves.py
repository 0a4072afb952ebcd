"""The curves of a report: which are drawn, that none is clipped, and that a long run takes linear time."""

import math
import random
import re
from typing import Any

import pytest

from rloo_kit.health.rule import Finding
from rloo_kit.results.charts import MOST_POINTS, Chart, Mark, Point, draw_chart, thin_out
from rloo_kit.results.curves import budget_chart, draw_curves_of, held_out_chart, tokens_generated, tokens_per_second
from rloo_kit.results.evaluation import Budget, Evaluation
from rloo_kit.results.figures import moving_mean
from tests.evaluations import around


def titles(html: str) -> list[str]:
    return re.findall(r"<figcaption><span>(.*?)</span>", html)


def rows(steps: int, **values: Any) -> list[dict[str, Any]]:
    """Metrics whose values are numbers or functions of the step."""
    return [
        {"step": step} | {name.replace("__", "/"): one(step) if callable(one) else one for name, one in values.items()}
        for step in range(1, steps + 1)
    ]


def test_moving_mean_is_the_naive_one() -> None:
    """It was recomputed for each of 50,000 rows: 179 s for a report."""
    source = random.Random(0)
    for size, window in ((1, 5), (7, 5), (60, 6), (300, 30)):
        values = [source.uniform(-1, 1) * 10 ** source.randint(-6, 6) for _ in range(size)]
        naive = [
            math.fsum(part) / len(part) for end in range(1, size + 1) if (part := values[max(0, end - window) : end])
        ]
        assert moving_mean(values, window) == pytest.approx(naive, rel=1e-9, abs=1e-9)


def test_a_spike_leaves_no_trace_in_the_moving_mean() -> None:
    """A running sum that has added and subtracted 1e16 has lost everything below 1."""
    found = moving_mean([0.1] * 10 + [1e16] + [0.1] * 20, 5)
    assert found[-1] == pytest.approx(0.1, rel=1e-12)


def test_a_long_run_is_drawn_with_few_points() -> None:
    """Every row was a point in every panel, and the report of a run of 50,000 steps had tens of MB."""
    metrics = rows(50_000, reward=lambda step: math.sin(step / 900), grad_norm=lambda step: 1.0 + step % 7)
    html = draw_curves_of(metrics, [])
    assert titles(html) == ["Reward, weighted sum", "Gradient norm"] and len(html) < 60_000
    points = [Point(step, math.sin(step / 900)) for step in range(50_000)]
    points[31_234] = Point(31_234, 9.0)
    kept = thin_out(points)
    assert len(kept) <= MOST_POINTS and points[31_234] in kept and kept == sorted(kept)
    assert min(kept, key=lambda one: one.value).value == min(points, key=lambda one: one.value).value


def test_panels_that_say_nothing_are_named_instead() -> None:
    """The report of a healthy run had nine panels, four of them flat lines, and the reward twice."""
    values = {"reward": lambda step: step / 10, "rewards__answer_reward__mean": lambda step: step / 10}
    metrics = rows(9, **values, kl=0.0, thinking__closed_ratio=lambda step: 0.99 + step / 1000, entropy=0.25)
    html = draw_curves_of(metrics, [])
    assert titles(html) == ["Reward: answer_reward"]
    assert "thinking closed 99.1 % to 99.9 %; entropy, nats 0.25; KL to the reference, nats 0." in html
    assert draw_curves_of([], []) == "<p>No step was logged.</p>"
    assert "One step was logged: reward, weighted sum 0.5." in draw_curves_of([{"step": 1, "reward": 0.5}], [])


def test_a_flat_panel_is_drawn_where_it_is_the_finding() -> None:
    """A reward that stays at 0 is what the reader has to see."""
    finding = Finding("cold_start", "0 % right", "easier prompts", level="alarming", since=1, last=9)
    metrics = rows(9, reward=0.0, rewards__answer_reward__mean=0.0, kl=0.0)
    html = draw_curves_of(metrics, [finding])
    assert titles(html) == ["Reward: answer_reward"] and "href='#finding-cold_start'>cold start</a>" in html
    assert "Constant or nearly so: KL to the reference, nats 0." in html


def test_every_reward_has_its_panel() -> None:
    """With two rewards, the sum hides which of them changed."""
    parts = {"rewards__a__mean": lambda step: step / 10, "rewards__b__mean": lambda step: 1 - step / 10}
    metrics = rows(9, reward=lambda step: 2 * step, **parts, frac_score_zero_std=lambda step: step / 10)
    html = draw_curves_of(metrics, [])
    assert titles(html) == ["Reward, weighted sum", "Reward: a", "Reward: b"], (
        "the groups with signal are the curve of b"
    )
    damaged = [{"step": 1, "reward": 0.1, "kl": None}, {"step": 2, "reward": float("nan")}, {"step": 3, "reward": 0.4}]
    assert titles(draw_curves_of([*damaged, {"loss": 1.0}], [])) == ["Reward, weighted sum"]


@pytest.mark.parametrize("values", [[0.0, 1.0], [3.0, 3.0], [-5.0, 1e-9], [1e12, 2e12], [0.5], [-1e150, 1e150]])
def test_no_point_is_cut_by_an_axis(values: list[float]) -> None:
    """The dot of a share of exactly 1 was half outside the frame."""
    drawing = draw_chart(Chart("x", {"": [Point(step, value) for step, value in enumerate(values)]}, dots=True))
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawing)[0])
    dots = re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)" r="([\d.]+)"', drawing)
    assert len(dots) == len(values)
    for x, y, r in dots:
        assert float(r) <= float(x) <= width - float(r) and float(r) <= float(y) <= height - 30 - float(r)


def test_the_drawing_is_the_same_each_time_and_escaped() -> None:
    """A report under version control must not change when nothing did."""
    chart = Chart("<b>", {"<i>": [Point(0, 0.1), Point(9, 0.4)]}, marks=[Mark(2, 5, "<u>")])
    assert draw_chart(chart) == draw_chart(chart) and not re.search("<[biu]>", draw_chart(chart))


def test_held_out_points_are_before_during_and_after() -> None:
    """Held-out accuracy is the curve that counts, but was drawn without the two largest evaluations."""
    before, after = (Evaluation("", 100, 1, 1.0, 64, {"accuracy": around(value)}) for value in (0.2, 0.8))
    chart = held_out_chart(before, after, [], "accuracy", 60)
    assert chart is not None and list(chart.series.values()) == [
        [Point(0, 0.2, 0.1, 0.30000000000000004), Point(60, 0.8, 0.7000000000000001, 0.9)]
    ]
    assert held_out_chart(before, None, [], "accuracy", 60) is None


def test_accuracy_against_the_thinking_budget() -> None:
    """Budgets were rows of a table, without a curve."""
    one = Evaluation("", 100, 1, 1.0, 64, {"accuracy": around(0.9)})
    one.budgets = [Budget(2048, 0.5, around(0.5)), Budget(512, 0.5, around(0.2))]
    html = budget_chart(None, one)
    assert "20.0 % at 512, 90.0 % at no budget" in html and "2,048" in html
    assert budget_chart(one, None) and budget_chart(None, None) == ""


def test_tokens_are_counted_over_steps_that_were_not_logged() -> None:
    """With logging_steps=5, a row covers five rollouts."""
    metrics = [
        {"step": step, "completions/mean_length": 10.0, "episode": 8 * step, "step_time": 2.0} for step in (5, 10, 12)
    ]
    assert tokens_generated(metrics) == 12 * 8 * 10
    assert titles(draw_curves_of(metrics, [])) == [] and "tokens per second 40.0" in draw_curves_of(metrics, [])


def test_a_step_that_reuses_a_rollout_takes_its_time() -> None:
    """With num_iterations=2 the time of every second step was that of the step that samples, which is longer."""
    metrics = [
        {"step": step, "episode": 8.0 * ((step + 1) // 2), "step_time": 3.0 if step % 2 else 1.0}
        | ({"completions/mean_length": 10.0} if step % 2 else {})
        for step in range(1, 6)
    ]
    assert tokens_per_second(metrics) == 3 * 80 / (3 + 1 + 3 + 1 + 3)
    assert tokens_per_second(metrics, after=1) == 2 * 80 / (1 + 3 + 1 + 3)
    assert tokens_per_second(metrics, after=5) is None
