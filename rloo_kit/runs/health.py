"""Health of a run from its logged metrics: healthy ranges, and a watch for steps in a row that train nothing. No
torch."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVELS = ("healthy", "watch", "alarming")
LAST_ROWS = 10  # logged steps that are averaged
TRUNCATED_LIMIT = 0.95  # share of completions cut off from which a step teaches next to nothing
SPREAD_LIMIT = 1.0  # the KL penalty's spread within a group over the reward's, above which the penalty decides
LARGEST = sys.float_info.max
EQUAL_REWARDS = 1e-6  # a standard deviation below this is rounding

Row = Mapping[str, Any]  # metrics of one logged step, under the trainer's names


@dataclass(frozen=True)
class Threshold:
    """The limits of one metric; None where there is none.

    Attributes:
        metrics: names; the first one that was logged counts.
        low, high: the healthy range, ends included; if_low, if_high: what to change outside of it.
        alarm_low, alarm_high: below or above these it is alarming; between them and the range, watch.
        on_policy: holds only where a rollout is used up before the next optimizer step.
    """

    metrics: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    alarm_low: float | None = None
    alarm_high: float | None = None
    if_low: str = ""
    if_high: str = ""
    on_policy: bool = False

    def level(self, value: float) -> str:
        """One of LEVELS.

        >>> THRESHOLDS[0].level(0.1), THRESHOLDS[0].level(0.5), THRESHOLDS[0].level(0.9)
        ('healthy', 'watch', 'alarming')
        """
        if _is_outside(value, self.alarm_low, self.alarm_high):
            return "alarming"
        return "watch" if _is_outside(value, self.low, self.high) else "healthy"

    def action(self, value: float) -> str:
        """What to change at this value; empty where it is healthy."""
        if self.level(value) == "healthy":
            return ""
        return self.if_low if _is_outside(value, self.low, None) else self.if_high


def _is_outside(value: float, low: float | None, high: float | None) -> bool:
    return (low is not None and value < low) or (high is not None and value > high)


@dataclass(frozen=True)
class Judgement:
    """One metric of one run: its mean over the last rows, how that is, and what to change (empty if nothing)."""

    metric: str
    value: float
    level: str
    action: str


THRESHOLDS = (
    Threshold(
        ("completions/clipped_ratio",),
        high=0.3,
        alarm_high=0.8,
        if_high="raise rloo.max_completion_length, or add soft_overlong_penalty to rewards",
    ),
    Threshold(
        ("frac_score_zero_std", "frac_reward_zero_std"),
        high=0.8,
        alarm_high=0.8,
        if_high="solved (reward near its highest): harder prompts in data.source; else easier prompts, a graded reward "
        "in rewards, more rloo.num_generations or a higher rloo.temperature",
    ),
    Threshold(
        ("entropy",),
        low=0.05,
        high=0.5,
        alarm_low=0.01,
        if_low="lower rloo.learning_rate, raise rloo.beta or rloo.temperature; at the end of a run that has learnt its "
        "task this is normal",
        if_high="normal at the start; if it keeps rising, lower rloo.learning_rate",
    ),
    Threshold(("kl",), high=0.5, alarm_high=2.0, if_high="raise rloo.beta or lower rloo.learning_rate"),
    Threshold(
        ("kl/spread_ratio",),
        high=1.0,
        if_high="the KL penalty decides more than the reward: lower rloo.beta or set rloo.kl_form=length_normalized",
    ),
    Threshold(
        ("grad_norm",),
        low=0.001,
        high=1.0,
        alarm_high=10.0,
        if_low="no signal: see frac_score_zero_std and completions/clipped_ratio; or raise rloo.learning_rate",
        if_high="lower rloo.learning_rate",
    ),
    Threshold(
        ("clip_ratio/region_mean",),
        high=0.0,
        alarm_high=0.0,
        if_high="a bug on-policy: the ratio has to be exactly 1; see references/troubleshooting.md",
        on_policy=True,
    ),
    Threshold(
        ("rewards/failed_ratio",),
        high=0.0,
        alarm_high=0.5,
        if_high="fix the reward: the run's output names it and the first sample it failed on",
    ),
)


def judge(rows: Sequence[Row], on_policy: bool = True, last: int = LAST_ROWS) -> list[Judgement]:
    """Judge the last rows of a `metrics.jsonl`; a metric that was not logged is left out.

    >>> rows = [{"step": 1, "completions/clipped_ratio": 1.0, "grad_norm": 0.2}]
    >>> [(found.metric, found.level) for found in judge(rows)]
    [('completions/clipped_ratio', 'alarming'), ('grad_norm', 'healthy')]

    Args:
        rows: one mapping a logged step, in order. on_policy: whether rules that hold only on-policy count.
        last: rows that are averaged, at least 1.
    """
    found = []
    for threshold in THRESHOLDS:
        if threshold.on_policy and not on_policy:
            continue
        for metric in threshold.metrics:
            values = [row[metric] for row in rows[-last:] if is_number(row.get(metric))]
            if values:
                value = sum(values) / len(values)
                found.append(Judgement(metric, value, threshold.level(value), threshold.action(value)))
                break
    return found


def is_number(value: Any) -> bool:
    """Whether a metric's value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -LARGEST <= value <= LARGEST  # false for NaN; math.isfinite raises for an integer of 400 digits


@dataclass(frozen=True)
class Finding:
    """A problem that has held for `steps` steps in a row; `message` has what was found and the key that fixes it.

    `kind` is one of PROBLEMS: "tied", "truncated", "zero_gradient" or, which never stops a run, "kl_outweighs".
    """

    kind: str
    steps: int
    message: str

    @property
    def may_stop(self) -> bool:
        """Whether `run.stop_when_no_signal` counts it: where the KL outweighs, the run still learns."""
        return self.kind != "kl_outweighs"


def _number(metrics: Row, name: str) -> float:
    """A metric, 0 where it is not logged or NaN."""
    value = metrics.get(name)
    return 0.0 if value is None or math.isnan(value) else float(value)


def _is_tied(metrics: Row) -> bool:
    # With a KL penalty the rewards of a group differ by it alone, so the scores before the penalty come first.
    share = metrics.get("frac_score_zero_std", metrics.get("frac_reward_zero_std"))
    deviation = metrics.get("reward_std")
    return (share is not None and share >= 1.0) or (deviation is not None and deviation < EQUAL_REWARDS)


# Kind: (whether a row shows it, the metrics of which a row must hold one to decide; a step that reuses a rollout
# (`rloo.num_iterations`) logs none of them).
PROBLEMS: dict[str, tuple[Callable[[Row], bool], tuple[str, ...]]] = {
    "tied": (_is_tied, ("frac_score_zero_std", "frac_reward_zero_std", "reward_std")),
    "truncated": (
        lambda row: _number(row, "completions/clipped_ratio") >= TRUNCATED_LIMIT,
        ("completions/clipped_ratio",),
    ),
    "zero_gradient": (lambda row: row.get("grad_norm") == 0.0, ()),
    "kl_outweighs": (lambda row: _number(row, "kl/spread_ratio") > SPREAD_LIMIT, ("kl/spread_ratio",)),
}


def find_problems(metrics: Row) -> set[str]:
    """The kinds of `Finding` that one row of metrics shows.

    >>> sorted(find_problems({"frac_reward_zero_std": 1.0, "grad_norm": 0.0, "completions/clipped_ratio": 0.1}))
    ['tied', 'zero_gradient']
    """
    return {kind for kind, (shows, _) in PROBLEMS.items() if shows(metrics)}


def explain(kind: str, steps: int, metrics: Row, rloo: Mapping[str, Any]) -> str:
    """What a problem of `steps` steps in a row means for a run with the `rloo:` values given, and the key to change."""
    clipped = _number(metrics, "completions/clipped_ratio")
    longer = (
        f"raise rloo.max_completion_length (currently {rloo.get('max_completion_length')}): {clipped:.0%} of the "
        "completions are cut off before they end"
    )
    if kind == "truncated":
        closed = metrics.get("thinking/closed_ratio")
        thinking = "" if closed is None else f", and {closed:.0%} of them close their thinking"
        return f"nearly every completion was truncated in {steps} steps in a row: {longer}{thinking}"
    if kind == "kl_outweighs":
        return _explain_kl(steps, metrics, rloo)
    if kind == "zero_gradient":
        fix = _find_gradient(clipped, longer, rloo)
        return f"the gradient was zero in {steps} steps in a row, so no weight moved: {fix}"
    if _number(metrics, "rewards/unscored_ratio") >= 1.0:
        return (
            f"no completion was scored in {steps} steps in a row: every reward failed (see rewards/failed_ratio) "
            "or returned None, as one does that misses its column; check rewards and data.answer_column"
        )
    reward = metrics.get("reward")
    value = "" if reward is None else f" (mean reward {reward:.3g})"
    fix = longer if clipped >= TRUNCATED_LIMIT else _untie(rloo)
    return (
        f"every group of completions earned one and the same reward in {steps} steps in a row{value}, so every "
        f"advantage is zero: {fix}"
    )


def _explain_kl(steps: int, metrics: Row, rloo: Mapping[str, Any]) -> str:
    ratio, form = _number(metrics, "kl/spread_ratio"), rloo.get("kl_form", "sum")
    if math.isinf(ratio):
        found = f"within a group of completions nothing but the KL penalty differed in {steps} steps in a row"
    else:
        found = (
            f"the KL penalty differed {ratio:.2g} times as much within a group as the task reward in {steps} steps in "
            "a row"
        )
    fix = f"lower rloo.beta (currently {rloo.get('beta')})"
    if form != "length_normalized":
        fix += f", or set rloo.kl_form=length_normalized (currently {form}): a long thought is then charged no more"
    return f"{found}, so the policy learns to stay near its reference rather than to earn rewards: {fix}"


def _untie(rloo: Mapping[str, Any]) -> str:
    return (
        "the rewards cannot tell the completions apart. Use prompts that are solved sometimes (data.source), a reward "
        f"with grades between its extremes (rewards), more completions a prompt (rloo.num_generations, currently "
        f"{rloo.get('num_generations')}) or a higher rloo.temperature (currently {rloo.get('temperature')})"
    )


def _find_gradient(clipped: float, longer: str, rloo: Mapping[str, Any]) -> str:
    if clipped >= TRUNCATED_LIMIT:
        masked = "rloo.mask_truncated_completions leaves truncated completions out of the loss; "
        return masked + longer if rloo.get("mask_truncated_completions") else longer
    clip = rloo.get("reward_clip_range")
    if clip:
        return f"rloo.reward_clip_range (currently {list(clip)}) may flatten all rewards to one value; widen it"
    return (
        "either every advantage is zero (see frac_reward_zero_std; change rewards, data.source, rloo.num_generations) "
        "or nothing is trainable (see model.lora)"
    )


class LearningSignalWatch:
    """Counts steps in a row without a learning signal; reports once a kind, and again each time the row has doubled.

    Args:
        patience: steps in a row before it reports (`run.no_signal_steps`).
        rloo: the values of the `rloo:` section, for the message.

    >>> watch = LearningSignalWatch(2, {"max_completion_length": 128, "num_generations": 4, "temperature": 1.0})
    >>> row = {"frac_reward_zero_std": 1.0, "completions/clipped_ratio": 1.0, "reward": -1.0}
    >>> watch.observe(1, row)
    []
    >>> [finding.kind for finding in watch.observe(2, row)]
    ['tied', 'truncated']
    """

    def __init__(self, patience: int, rloo: Mapping[str, Any]):
        self.patience = patience
        self.rloo = rloo
        self._last_step: int | None = None
        self._in_a_row = dict.fromkeys(PROBLEMS, 0)
        self._reported = dict.fromkeys(PROBLEMS, 0)

    def observe(self, step: int, metrics: Row) -> list[Finding]:
        """What to report after one logged row.

        Args:
            step: optimizer steps done; a row stands for all steps since the last one (`rloo.logging_steps`).
        """
        unlogged = self.rloo.get("logging_steps", 1) if self._last_step is None else step - self._last_step
        covered = max(unlogged, 1)
        self._last_step = step
        findings = []
        for kind, (shows, needs) in PROBLEMS.items():
            steps = self._in_a_row[kind]
            if not needs or any(metrics.get(name) is not None for name in needs):
                steps = steps + covered if shows(metrics) else 0
            elif steps:  # this step reused the last rollout, with what was wrong with it
                steps += covered
            self._in_a_row[kind] = steps
            if steps >= max(self.patience, 2 * self._reported[kind]):
                self._reported[kind] = steps
                findings.append(Finding(kind, steps, explain(kind, steps, metrics, self.rloo)))
        return findings
