"""Selects the curves of a report from a run's metrics, evaluations and findings."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rloo_kit.health.rule import Finding
from rloo_kit.health.rules import RULES
from rloo_kit.health.series import is_number, logged
from rloo_kit.results.charts import Chart, Mark, Point, draw_chart, format_value, from_to, series_class
from rloo_kit.results.evaluation import Evaluation, name_of, says_nothing
from rloo_kit.results.held_out import HeldOut
from rloo_kit.results.intervals import Measured
from rloo_kit.results.pages import escape_text

Row = Mapping[str, Any]
SAME = 1e-9  # values that differ by less count as equal
FLAT = 0.02  # a share that moves by less over a whole run is listed, not drawn
_REWARD = re.compile(r"rewards/(.+)/mean")


class Sampled(NamedTuple):
    """Completion tokens generated since the row before, and the `step_time` of the steps in between."""

    step: int
    tokens: float
    seconds: float


@dataclass
class Panel:
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

    def equals(self, other: "Panel") -> bool:
        mine, its = self.values, other.values
        return len(mine) == len(its) and all(
            a == b and abs(x - y) <= SAME for (a, x), (b, y) in zip(mine, its, strict=True)
        )


def draw_curves_of(metrics: Sequence[Row], findings: Sequence[Finding], held_out: Chart | None = None) -> str:
    """The section's HTML: a figure for each curve that changes, and a line that lists the others.

    Args:
        metrics: rows with a `step`; if several have the same step, the last counts. held_out: its chart, shown first.
    """
    rows = _in_order(metrics)
    panels = [] if held_out is None else [Panel(held_out, {"eval/accuracy"})]
    for found in select_panels(rows):
        if found.is_flat or not any(found.equals(other) for other in panels):
            panels.append(found)
    reads = {rule.name: set(rule.metrics) for rule in RULES}
    main = {rule.name: rule.metrics[0] for rule in RULES}
    shown, constant = [], []
    for panel in panels:
        for one in findings:
            if panel.metrics & ({"reward"} | reads.get(one.name, set())):
                panel.chart.marks.append(Mark(one.since, one.last, one.title))
        of_finding = any(main.get(one.name) in panel.metrics for one in findings) and len(rows) > 1
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
    name = name_of(measure, before, after, *(one.evaluation for one in during))
    return Chart(
        f"Held-out {name}", series, "share" if measure.endswith("accuracy") else "number", dots=True, ends_of=0
    )


def budget_chart(before: Evaluation | None, after: Evaluation | None) -> str:
    """Accuracy by thinking budget, before and after, as a figure; empty if none was measured."""
    measured = [(name, one) for name, one in (("before", before), ("after", after)) if one is not None and one.budgets]
    budgets = sorted({entry.tokens for _, one in measured for entry in one.budgets})
    series: dict[str, list[Point]] = {}
    for name, one in measured:
        entries = {entry.tokens: entry.accuracy for entry in one.budgets}
        found = [
            Point(place, *accuracy.ends)
            for place, budget in enumerate(budgets)
            if (accuracy := entries.get(budget)) is not None
        ]
        if (accuracy := one.measure("accuracy")) is not None and found:
            found.append(Point(len(budgets), *accuracy.ends))
        if found:
            series[name] = found
    if not series or says_nothing(before, after):
        return ""
    labels = [*(f"{budget:,}" for budget in budgets), "no budget"]
    title = name_of("accuracy", before, after).capitalize()
    chart = Chart(f"{title} by thinking budget", series, "share", dots=True, labels=labels)
    chart.note = "thinking budget, tokens"
    return f"<div class='curves'>{draw_figure(chart)}</div>"


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


def _point(step: int, found: Measured | None) -> Point | None:
    return None if found is None else Point(step, *found.ends)


def _in_order(metrics: Sequence[Row]) -> list[Row]:
    by_step = {row["step"]: row for row in metrics if is_number(row.get("step"))}
    return [by_step[step] for step in sorted(by_step)]


def read_sampled(metrics: Sequence[Row]) -> Iterable[Sampled]:
    """The rollouts of a run's rows; a step that reuses one adds its time to the next."""
    episode, step, seconds = 0.0, 0, 0.0
    for row in _in_order(metrics):
        found: list[Any] = [row.get(name) for name in ("step", "step_time", "completions/mean_length", "episode")]
        now, each, length, count = (one if is_number(one) else 0 for one in found)
        seconds, step = seconds + each * (now - step), now
        if length and count > episode and seconds:
            yield Sampled(now, length * (count - episode), seconds)
            episode, seconds = count, 0.0


def select_panels(metrics: Sequence[Row]) -> Iterable[Panel]:
    """The curves of a run, the most important first; of several rows of one step the last counts."""
    rows = _in_order(metrics)

    def take(*metrics: str) -> list[Point]:
        return [Point(*found) for found in logged(rows, *metrics)]

    def panel(title: str, form: str, *metrics: str) -> Any:
        if points := take(*metrics):
            yield Panel(Chart(title, {"": points}, form), {*metrics})

    rewards = list(dict.fromkeys(found[1] for row in rows[:50] for name in row if (found := _REWARD.fullmatch(name))))
    if len(rewards) == 1:
        yield from panel(f"Reward: {rewards[0]}", "number", "reward", f"rewards/{rewards[0]}/mean")
    else:
        yield from panel("Reward, weighted sum", "number", "reward")
        for name in rewards:
            yield from panel(f"Reward: {name}", "number", f"rewards/{name}/mean")
    if signal := signal_shares(rows):
        yield Panel(Chart("Groups with signal", {"": signal}, "share"), {"frac_score_zero_std", "frac_reward_zero_std"})
    lengths = {"completion": take("completions/mean_length"), "thinking": take("thinking/mean_length")}
    lengths = {name: points for name, points in lengths.items() if points}
    if lengths:
        title = "Tokens" if len(lengths) > 1 else f"{next(iter(lengths)).title()} tokens"
        yield Panel(Chart(title, lengths, "count"), {"completions/mean_length", "thinking/mean_length"})
    yield from panel("Thinking closed", "share", "thinking/closed_ratio")
    yield from panel("Closed by the budget", "share", "thinking/forced_ratio")
    yield from panel("Truncated at the limit", "share", "completions/clipped_ratio")
    yield from panel("Entropy, nats", "number", "entropy")
    yield from panel("KL to the reference, nats", "number", "kl")
    yield from panel("Gradient norm", "number", "grad_norm")
    if speed := [Point(one.step, one.tokens / one.seconds) for one in read_sampled(rows)]:
        yield Panel(Chart("Tokens per second", {"": speed}, "count"))


def draw_figure(chart: Chart, findings: Sequence[Finding] = ()) -> str:
    """A chart with its title, start and end values and legend; findings marked in it are linked."""
    legend = "".join(
        f"<span class='key {series_class(chart, number)}'>{escape_text(name)}</span>"
        for number, (name, points) in enumerate(chart.series.items())
        if name and points
    )
    links = {one.title: one.name for one in findings}
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
