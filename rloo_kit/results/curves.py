"""Selects the curves of a run's pages from its metrics, evaluations and findings."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rloo_kit.health.rules import RULES, Finding
from rloo_kit.health.series import is_number, logged
from rloo_kit.results.charts import Chart, Drawing, Mark, Point, draw_chart, format_value
from rloo_kit.results.evaluation import Evaluation, name_of, says_nothing
from rloo_kit.results.held_out import HeldOut

Row = Mapping[str, Any]
SAME = 1e-9  # values that differ by less count as equal
FLAT = 0.02  # a share that moves by less over a whole run is listed, not drawn
_REWARD = re.compile(r"rewards/(.+)/mean")


class Sampled(NamedTuple):
    """Completion tokens generated since the row before, and the `step_time` of the steps in between."""

    step: int
    tokens: float
    seconds: float


def choose_curves(
    metrics: Sequence[Row], findings: Sequence[Finding], held_out: Chart | None = None
) -> tuple[list[Drawing], list[str]]:
    """The figures of the curves that change, with the findings marked, and each other curve in words.

    Args:
        metrics: rows with a `step`; if several have the same step, the last counts. held_out: its chart, shown first.
    """
    rows = in_order(metrics)
    charts = [] if held_out is None else [held_out]
    for found in select_charts(rows):
        if is_flat(found) or not any(_equal(found, other) for other in charts):
            charts.append(found)
    reads = {rule.name: rule.metrics for rule in RULES.values()}
    drawn, constant = [], []
    for chart in charts:
        chart.marks += [
            Mark(one.since, one.last, one.title, one.name)
            for one in findings
            if chart.metrics & {"reward", *reads.get(one.name, ())}
        ]
        of_finding = any(reads.get(one.name, ("",))[0] in chart.metrics for one in findings) and len(rows) > 1
        if chart is held_out or of_finding or not is_flat(chart):
            drawn.append(draw_chart(chart))
        else:
            ends = dict.fromkeys(format_value(end, chart.form) for end in (min(chart.values), max(chart.values)))
            title = chart.title if chart.title.startswith("KL") else chart.title[:1].lower() + chart.title[1:]
            constant.append(f"{title} {' to '.join(ends)}")
    return drawn, constant


def is_flat(chart: Chart) -> bool:
    """Whether all values are nearly equal, so that a curve would show no more than the value."""
    values = chart.values
    return max(values) - min(values) <= (FLAT if chart.form == "share" else SAME * max(1.0, abs(values[0])))


def _equal(one: Chart, other: Chart) -> bool:
    mine, its = (
        [(point.step, point.value) for points in chart.series.values() for point in points] for chart in (one, other)
    )
    return len(mine) == len(its) and all(
        a == b and abs(x - y) <= SAME for (a, x), (b, y) in zip(mine, its, strict=True)
    )


def held_out_chart(
    before: Evaluation | None, after: Evaluation | None, during: Sequence[HeldOut], measure: str, last: int
) -> Chart | None:
    """The held-out measure over the steps: before at 0, after at `last`, and evaluations during training; None with
    fewer than two points."""
    ends = [HeldOut(step, one) for step, one in ((0, before), (last, after)) if one is not None]
    whole, parts = measured_points(ends, measure), measured_points(during, measure)
    if len(whole) + len(parts) < 2:
        return None
    series = {}
    if whole:
        series[f"before and after, {ends[-1].evaluation.num_prompts:,} prompts" if parts else ""] = whole
    if parts:
        series[f"during training, {during[0].evaluation.num_prompts:,} prompts"] = parts
    name = name_of(measure, *(one.evaluation for one in [*ends, *during]))
    form = "share" if measure.endswith("accuracy") else "number"
    return Chart(f"Held-out {name}", series, form, dots=True, ends_of=0, metrics={"eval/accuracy"})


def measured_points(found: Sequence[HeldOut], measure: str) -> list[Point]:
    """A measure in evaluations, at their steps."""
    measured = ((one.step, one.measure(measure)) for one in found)
    return [Point(step, *one.ends) for step, one in measured if one is not None]


def budget_chart(before: Evaluation | None, after: Evaluation | None) -> Chart | None:
    """Accuracy by thinking budget, before and after; None if none was measured."""
    sides = {name: one for name, one in (("before", before), ("after", after)) if one is not None and one.budgets}
    budgets = sorted({budget.tokens for one in sides.values() for budget in one.budgets})
    series: dict[str, list[Point]] = {}
    for name, one in sides.items():
        found = [
            Point(budgets.index(budget.tokens), *budget.accuracy.ends)
            for budget in sorted(one.budgets, key=lambda budget: budget.tokens)
            if budget.accuracy is not None
        ]
        if (whole := one.measure("accuracy")) is not None and found:
            found.append(Point(len(budgets), *whole.ends))
        if found:
            series[name] = found
    if not series or says_nothing(before, after):
        return None
    labels = [*(f"{budget:,}" for budget in budgets), "no budget"]
    title = f"{name_of('accuracy', before, after).capitalize()} by thinking budget"
    return Chart(title, series, "share", dots=True, labels=labels, note="thinking budget, tokens")


def tokens_generated(metrics: Sequence[Row]) -> float:
    """Total completion tokens of a run's rollouts, from the mean lengths of its logged steps."""
    return sum(one.tokens for one in read_sampled(metrics))


def tokens_per_second(metrics: Sequence[Row], after: int = 0) -> float | None:
    """Completion tokens generated per second of `step_time` (rollout, forward, backward) in the steps later than
    `after`: evaluations and saves do not count. None without a rollout."""
    found = [one for one in read_sampled(metrics) if one.step > after]
    return sum(one.tokens for one in found) / sum(one.seconds for one in found) if found else None


def signal_shares(metrics: Sequence[Row]) -> list[Point]:
    """The share of groups with signal over the steps: with different scores, before any KL penalty."""
    return [Point(step, 1 - tied) for step, tied in logged(metrics, "frac_score_zero_std", "frac_reward_zero_std")]


def in_order(metrics: Sequence[Row]) -> list[Row]:
    """The rows of a run's logged steps, each step once; of several rows of one step the last counts."""
    by_step = {row["step"]: row for row in metrics if is_number(row.get("step"))}
    return [by_step[step] for step in sorted(by_step)]


def read_sampled(metrics: Sequence[Row]) -> Iterable[Sampled]:
    """The rollouts of a run's rows; a step that reuses one adds its time to the next."""
    episode, step, seconds = 0.0, 0, 0.0
    for row in in_order(metrics):
        found: list[Any] = [row.get(name) for name in ("step", "step_time", "completions/mean_length", "episode")]
        now, each, length, count = (one if is_number(one) else 0 for one in found)
        seconds, step = seconds + each * (now - step), now
        if length and count > episode and seconds:
            yield Sampled(now, length * (count - episode), seconds)
            episode, seconds = count, 0.0


def select_charts(metrics: Sequence[Row]) -> Iterable[Chart]:
    """The curves of a run, the most important first; of several rows of one step the last counts."""
    rows = in_order(metrics)

    def take(*metrics: str) -> list[Point]:
        return [Point(*found) for found in logged(rows, *metrics)]

    def chart(title: str, form: str, *metrics: str) -> Iterable[Chart]:
        if points := take(*metrics):
            yield Chart(title, {"": points}, form, metrics={*metrics})

    rewards = list(dict.fromkeys(found[1] for row in rows[:50] for name in row if (found := _REWARD.fullmatch(name))))
    if len(rewards) == 1:
        yield from chart(f"Reward: {rewards[0]}", "number", "reward", f"rewards/{rewards[0]}/mean")
    else:
        yield from chart("Reward, weighted sum", "number", "reward")
        for name in rewards:
            yield from chart(f"Reward: {name}", "number", f"rewards/{name}/mean")
    if signal := signal_shares(rows):
        tied = {"frac_score_zero_std", "frac_reward_zero_std"}
        yield Chart("Groups with signal", {"": signal}, "share", metrics=tied)
    lengths = {"completion": take("completions/mean_length"), "thinking": take("thinking/mean_length")}
    lengths = {name: points for name, points in lengths.items() if points}
    if lengths:
        title = "Tokens" if len(lengths) > 1 else f"{next(iter(lengths)).title()} tokens"
        yield Chart(title, lengths, "count", metrics={"completions/mean_length", "thinking/mean_length"})
    yield from chart("Thinking closed", "share", "thinking/closed_ratio")
    yield from chart("Closed by the budget", "share", "thinking/forced_ratio")
    yield from chart("Truncated at the limit", "share", "completions/clipped_ratio")
    yield from chart("Entropy, nats", "number", "entropy")
    yield from chart("KL to the reference, nats", "number", "kl")
    yield from chart("Gradient norm", "number", "grad_norm")
    if speed := [Point(one.step, one.tokens / one.seconds) for one in read_sampled(rows)]:
        yield Chart("Tokens per second", {"": speed}, "count")
