"""Selects the curves of a report from a run's metrics, evaluations and findings."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloo_kit.health.rule import Finding
from rloo_kit.health.rules import RULES
from rloo_kit.health.series import is_number, logged
from rloo_kit.results.charts import Chart, Mark, Point, draw_chart, format_value, from_to, series_class
from rloo_kit.results.evaluation import Evaluation, Measured
from rloo_kit.results.held_out import HeldOut
from rloo_kit.results.pages import escape_text

Row = Mapping[str, Any]
SAME = 1e-9  # values that differ by less count as equal
FLAT = 0.02  # a share that moves by less over a whole run is listed, not drawn
_REWARD = re.compile(r"rewards/(.+)/mean")


@dataclass
class _Panel:
    """A chart and the metrics it reads."""

    chart: Chart
    metrics: set[str] = field(default_factory=set)

    @property
    def values(self) -> list[tuple[float, float]]:
        return [(one.step, one.value) for points in self.chart.series.values() for one in points]

    @property
    def is_flat(self) -> bool:
        """Whether all values are nearly equal, so that a curve would show no more than the value."""
        values = self.chart.values
        return max(values) - min(values) <= (FLAT if self.chart.form == "share" else SAME * max(1.0, abs(values[0])))

    @property
    def in_words(self) -> str:
        """The title with the value or the range of values."""
        form, values = self.chart.form, self.chart.values
        ends = list(dict.fromkeys(format_value(end, form) for end in (min(values), max(values))))
        return f"{self.chart.title[:1].lower()}{self.chart.title[1:]} {' to '.join(ends)}".replace("kL", "KL")

    def equals(self, other: "_Panel") -> bool:
        mine, its = self.values, other.values
        return len(mine) == len(its) and all(
            a == b and abs(x - y) <= SAME for (a, x), (b, y) in zip(mine, its, strict=True)
        )


def draw_curves_of(
    metrics: Sequence[Row], findings: Sequence[Finding], held_out: Chart | None = None, names: Sequence[str] = ()
) -> str:
    """The section's HTML: a figure for each curve that changes, and a line that lists the others.

    Args:
        metrics: rows with a `step`; if several have the same step, the last counts. held_out: its chart, shown first.
        names: of the rewards, in order.
    """
    by_step = {row["step"]: row for row in metrics if is_number(row.get("step"))}
    rows = [by_step[step] for step in sorted(by_step)]
    panels = [] if held_out is None else [_Panel(held_out, {"eval/accuracy"})]
    for found in _panels(rows, names):
        if found.is_flat or not any(found.equals(other) for other in panels):
            panels.append(found)
    reads = {rule.name: set(rule.metrics) for rule in RULES}
    main = {rule.name: rule.metrics[0] for rule in RULES}
    shown, constant = [], []
    for panel in panels:
        for one in findings:
            if panel.metrics & ({"reward"} | reads.get(one.rule, set())):
                panel.chart.marks.append(Mark(one.since, one.last, one.title))
        of_finding = any(main.get(one.rule) in panel.metrics for one in findings) and len(rows) > 1
        if panel.is_flat and not of_finding and panel.chart is not held_out:
            constant.append(panel.in_words)
        else:
            shown.append(draw_figure(panel.chart, findings))
    if not shown and not constant:
        return "<p>No step was logged.</p>"
    smooth = "Thin: each logged step. Thick: moving mean over 10 % of them. " if len(rows) >= 20 else ""
    said = (
        f"{'Constant or nearly so' if len(rows) > 1 else 'One step was logged'}: {'; '.join(constant)}."
        if constant
        else ""
    )
    note = f"<p class='notes'>{smooth}{escape_text(said)}</p>" if smooth or said else ""
    return f"<div class='curves'>{''.join(shown)}</div>\n{note}"


def held_out_chart(
    before: Evaluation | None, after: Evaluation | None, during: Sequence[HeldOut], measure: str, last: int
) -> Chart | None:
    """The held-out measure over the steps: before at 0, after at `last`, and evaluations during training; None with
    fewer than two points."""
    ends = [(0, before), (last, after)]
    found = [_point(step, one.measure(measure)) for step, one in ends if one is not None]
    whole = [one for one in found if one is not None]
    parts = [one for each in during if (one := _point(each.step, each.measure(measure))) is not None]
    if len(whole) + len(parts) < 2:
        return None
    series = {}
    sizes = [one.num_prompts for _, one in ends if one is not None]
    if whole:
        series[f"before and after, {sizes[-1]:,} prompts" if parts else ""] = whole
    if parts:
        series[f"during training, {during[0].evaluation.num_prompts:,} prompts"] = parts
    name = "Held-out accuracy" if measure == "accuracy" else f"Held-out {measure.replace('_', ' ')}"
    return Chart(name, series, "share" if measure.endswith("accuracy") else "number", dots=True, ends_of=0)


def budget_chart(before: Evaluation | None, after: Evaluation | None) -> str:
    """Accuracy by thinking budget, before and after, as a figure; empty if none was measured."""
    measured = [(name, one) for name, one in (("before", before), ("after", after)) if one is not None and one.budgets]
    budgets = sorted({entry["budget"] for _, one in measured for entry in one.budgets})
    series: dict[str, list[Point]] = {}
    for name, one in measured:
        entries = {entry["budget"]: entry for entry in one.budgets}
        found = [
            Point(place, entry["accuracy"], entry["low"], entry["high"])
            for place, budget in enumerate(budgets)
            if (entry := entries.get(budget)) is not None and entry["accuracy"] is not None
        ]
        if one.accuracy is not None and found:
            found.append(Point(len(budgets), one.accuracy, one.low, one.high))
        if found:
            series[name] = found
    if not series:
        return ""
    labels = [*(f"{budget:,}" for budget in budgets), "no budget"]
    chart = Chart("Accuracy by thinking budget", series, "share", dots=True, labels=labels)
    chart.note = "thinking budget, tokens"
    return f"<div class='curves'>{draw_figure(chart)}</div>"


def tokens_generated(metrics: Sequence[Row]) -> float:
    """Total completion tokens of a run's rollouts, from the mean lengths of its logged steps."""
    return sum(mean * count for mean, count, _ in _rollouts(metrics))


def _point(step: int, found: Measured | None) -> Point | None:
    return None if found is None else Point(step, found.value, found.low, found.high)


def _rollouts(metrics: Iterable[Row]) -> Iterable[tuple[float, float, Point]]:
    """Mean length, completions since the previous row, and tokens per second, for each row that has them."""
    episode, step = 0.0, 0
    for row in metrics:
        numbers = [row.get(name) for name in ("completions/mean_length", "episode", "step_time", "step")]
        if not all(map(is_number, numbers)):
            continue
        length, count, seconds, now = numbers
        made, steps = count - episode, now - step  # type: ignore[operator]
        episode, step = count, now  # type: ignore[assignment]
        if made > 0 and steps > 0 and seconds:
            yield length, made, Point(now, length * made / (steps * seconds))  # type: ignore[misc,arg-type,operator]


def _panels(rows: Sequence[Row], names: Sequence[str]) -> Iterable[_Panel]:
    def take(*metrics: str, change: Callable[[float], float] = lambda value: value) -> list[Point]:
        return [Point(step, change(value)) for step, value in logged(rows, *metrics)]

    def panel(title: str, form: str, *metrics: str, **change: Callable[[float], float]) -> Any:
        if points := take(*metrics, **change):
            yield _Panel(Chart(title, {"": points}, form), {*metrics})

    present = list(dict.fromkeys(found[1] for row in rows[:50] for name in row if (found := _REWARD.fullmatch(name))))
    rewards = [name for name in names if name in present] or present
    if len(rewards) == 1:
        yield from panel(f"Reward: {rewards[0]}", "number", "reward", f"rewards/{rewards[0]}/mean")
    else:
        yield from panel("Reward, weighted sum", "number", "reward")
        for name in rewards:
            yield from panel(f"Reward: {name}", "number", f"rewards/{name}/mean")
    yield from panel("Groups with signal", "share", "frac_score_zero_std", "frac_reward_zero_std",
                     change=lambda value: 1 - value)  # fmt: skip
    lengths = {"completion": take("completions/mean_length"), "thinking": take("thinking/mean_length")}
    lengths = {name: points for name, points in lengths.items() if points}
    if lengths:
        title = "Tokens" if len(lengths) > 1 else f"{next(iter(lengths)).title()} tokens"
        yield _Panel(Chart(title, lengths, "count"), {"completions/mean_length", "thinking/mean_length"})
    yield from panel("Thinking closed", "share", "thinking/closed_ratio")
    yield from panel("Closed by the budget", "share", "thinking/forced_ratio")
    yield from panel("Truncated at the limit", "share", "completions/clipped_ratio")
    yield from panel("Entropy, nats", "number", "entropy")
    yield from panel("KL to the reference, nats", "number", "kl")
    yield from panel("Gradient norm", "number", "grad_norm")
    if speed := [point for _, _, point in _rollouts(rows)]:
        yield _Panel(Chart("Tokens per second", {"": speed}, "count"))


def draw_figure(chart: Chart, findings: Sequence[Finding] = ()) -> str:
    """A chart with its title, start and end values and legend; findings marked in it are linked."""
    legend = "".join(
        f"<span class='key {series_class(chart, number)}'>{escape_text(name)}</span>"
        for number, (name, points) in enumerate(chart.series.items())
        if name and points
    )
    links = {one.title: one.rule for one in findings}
    marks = ", ".join(
        f"<a href='#finding-{links[one.name]}'>{escape_text(one.name)}</a>" for one in chart.marks if one.name in links
    )
    legend += f"<span>found: {marks}</span>" if marks else ""
    ends = "" if chart.alike else escape_text(from_to(chart))
    below = f"<p class='legend'>{legend}</p>" if legend else ""
    return (
        f"<figure class='panel'><figcaption><span>{escape_text(chart.title)}</span>"
        f"<span class='ends'>{ends}</span></figcaption>{draw_chart(chart)}{below}</figure>\n"
    )
