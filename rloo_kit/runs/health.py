"""Rules that keep a run from training nothing in silence: pure functions and a counter over logged metrics.

A step whose groups all earned one reward, whose completions were nearly all cut off, or whose gradient is zero moves
nothing, and the loss looks calm while it happens. `SignalWatch` counts such steps and says which key to change.
No torch here, so the rules can be run over the `metrics.jsonl` of any run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVELS = ("healthy", "watch", "alarming")
LAST_ROWS = 10  # logged steps that are averaged


@dataclass(frozen=True)
class Threshold:
    """The limits of one metric; None where there is none.

    Attributes:
        metrics: names, of which the first one that was logged counts.
        low, high: the healthy range, both ends in it.
        alarm_low, alarm_high: below the first and above the second it is alarming; between it and the range, watch.
        if_low, if_high: what to change.
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
        if (self.alarm_low is not None and value < self.alarm_low) or (
            self.alarm_high is not None and value > self.alarm_high
        ):
            return "alarming"
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            return "watch"
        return "healthy"

    def action(self, value: float) -> str:
        """What to change at this value; empty where it is healthy."""
        if self.level(value) == "healthy":
            return ""
        below = self.low is not None and value < self.low
        return self.if_low if below else self.if_high


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
        if_high="mend the reward: the run's output names it and the first sample it failed on",
    ),
)


def judge(rows: Sequence[Mapping[str, Any]], on_policy: bool = True, last: int = LAST_ROWS) -> list[Judgement]:
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
            values = [row[metric] for row in rows[-last:] if _is_number(row.get(metric))]
            if values:
                value = sum(values) / len(values)
                found.append(Judgement(metric, value, threshold.level(value), threshold.action(value)))
                break
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


TRUNCATED_LIMIT = 0.95  # share of completions cut off from which a step teaches next to nothing
SPREAD_LIMIT = 1.0  # the KL penalty's spread within a group over the reward's, above which the penalty decides
EQUAL_REWARDS = 1e-6  # a standard deviation below this is rounding
ROLLOUT_METRICS = {  # kinds that only a row with a rollout can tell about, by what it then holds
    "tied": ("frac_score_zero_std", "frac_reward_zero_std", "reward_std"),
    "truncated": ("completions/clipped_ratio",),
    "kl_outweighs": ("kl/spread_ratio",),
}
NEVER_STOP = ("kl_outweighs",)  # kinds under which a run still learns, if not what was meant


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and what to change.

    Attributes:
        kind: "tied", "truncated", "zero_gradient" or, which never stops a run, "kl_outweighs".
        steps: how many steps in a row it has been so.
        message: what was found and the key that mends it.
    """

    kind: str
    steps: int
    message: str

    @property
    def may_stop(self) -> bool:
        """Whether `run.stop_when_no_signal` counts it."""
        return self.kind not in NEVER_STOP


def find_problems(metrics: Mapping[str, Any]) -> set[str]:
    """The kinds of `Finding` that one row of metrics shows, under the names that the trainer logs.

    >>> sorted(find_problems({"frac_reward_zero_std": 1.0, "grad_norm": 0.0, "completions/clipped_ratio": 0.1}))
    ['tied', 'zero_gradient']
    """
    problems = set()
    # With a KL penalty the rewards of a group differ by it alone, so the scores before the penalty are asked first.
    tied = metrics.get("frac_score_zero_std", metrics.get("frac_reward_zero_std"))
    deviation = metrics.get("reward_std")
    if (tied is not None and tied >= 1.0) or (deviation is not None and deviation < EQUAL_REWARDS):
        problems.add("tied")
    if _number(metrics, "completions/clipped_ratio", 0.0) >= TRUNCATED_LIMIT:
        problems.add("truncated")
    if _number(metrics, "kl/spread_ratio", 0.0) > SPREAD_LIMIT:
        problems.add("kl_outweighs")
    norm = metrics.get("grad_norm")
    if norm is not None and norm == 0.0:
        problems.add("zero_gradient")
    return problems


def explain(kind: str, steps: int, metrics: Mapping[str, Any], rloo: Mapping[str, Any]) -> str:
    """What the finding means for this run and the key to change.

    Args:
        kind: a kind of `Finding`. steps: for how many steps in a row.
        metrics: the last row. rloo: the values of the `rloo:` section.
    """
    clipped = _number(metrics, "completions/clipped_ratio", 0.0)
    longer = (
        f"raise rloo.max_completion_length (currently {rloo.get('max_completion_length')}): {clipped:.0%} of the "
        "completions are cut off before they end"
    )
    if kind == "truncated":
        closed = metrics.get("thinking/closed_ratio")
        thinking = "" if closed is None else f", and {closed:.0%} of them close their thinking"
        return f"nearly every completion was truncated in {steps} steps in a row: {longer}{thinking}"
    if kind == "tied":
        if _number(metrics, "rewards/unscored_ratio", 0.0) >= 1.0:
            return (
                f"no completion was scored in {steps} steps in a row: every reward failed (see rewards/failed_ratio) "
                "or answered None, as one does that misses its column; check rewards and data.answer_column"
            )
        reward = metrics.get("reward")
        found = "every group of completions earned one and the same reward"
        value = "" if reward is None else f" (mean reward {reward:.3g})"
        return f"{found} in {steps} steps in a row{value}, so every advantage is zero: {_untie(clipped, longer, rloo)}"
    if kind == "kl_outweighs":
        return _explain_kl(steps, metrics, rloo)
    return (
        f"the gradient was zero in {steps} steps in a row, so no weight moved: {_find_gradient(clipped, longer, rloo)}"
    )


def _explain_kl(steps: int, metrics: Mapping[str, Any], rloo: Mapping[str, Any]) -> str:
    ratio, form = _number(metrics, "kl/spread_ratio", 0.0), rloo.get("kl_form", "sum")
    if math.isinf(ratio):
        found = f"nothing but the KL penalty told the completions of a prompt apart in {steps} steps in a row"
    else:
        found = (
            f"the KL penalty differed {ratio:.2g} times as much within a group as the task reward in {steps} steps in "
            "a row"
        )
    mend = f"lower rloo.beta (currently {rloo.get('beta')})"
    if form != "length_normalized":
        mend += f", or set rloo.kl_form=length_normalized (currently {form}): a long thought is charged no more then"
    return f"{found}, so the policy learns to stay near its reference rather than to earn rewards: {mend}"


def _untie(clipped: float, longer: str, rloo: Mapping[str, Any]) -> str:
    if clipped >= TRUNCATED_LIMIT:
        return longer
    return (
        "the rewards cannot tell the completions apart. Use prompts that are solved sometimes (data.source), a reward "
        f"with grades between its extremes (rewards), more completions a prompt (rloo.num_generations, currently "
        f"{rloo.get('num_generations')}) or a higher rloo.temperature (currently {rloo.get('temperature')})"
    )


def _find_gradient(clipped: float, longer: str, rloo: Mapping[str, Any]) -> str:
    if rloo.get("mask_truncated_completions") and clipped >= TRUNCATED_LIMIT:
        return f"rloo.mask_truncated_completions leaves truncated completions out of the loss; {longer}"
    if clipped >= TRUNCATED_LIMIT:
        return longer
    clip = rloo.get("reward_clip_range")
    if clip:
        return f"rloo.reward_clip_range (currently {list(clip)}) may flatten all rewards to one value; widen it"
    return (
        "either every advantage is zero (see frac_reward_zero_std; change rewards, data.source, rloo.num_generations) "
        "or nothing is trainable (see model.lora)"
    )


class SignalWatch:
    """Counts steps in a row without a learning signal; speaks once a kind, and again each time the row has doubled.

    Args:
        patience: steps in a row before it speaks (`run.no_signal_steps`).
        rloo: the values of the `rloo:` section, for the message.

    >>> watch = SignalWatch(2, {"max_completion_length": 128, "num_generations": 4, "temperature": 1.0})
    >>> row = {"frac_reward_zero_std": 1.0, "completions/clipped_ratio": 1.0, "reward": -1.0}
    >>> watch.observe(1, row)
    []
    >>> [finding.kind for finding in watch.observe(2, row)]
    ['tied', 'truncated']
    """

    KINDS = ("tied", "truncated", "zero_gradient", "kl_outweighs")

    def __init__(self, patience: int, rloo: Mapping[str, Any]):
        self.patience = patience
        self.rloo = rloo
        self._last_step: int | None = None
        self._rows = dict.fromkeys(self.KINDS, 0)
        self._said = dict.fromkeys(self.KINDS, 0)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Take one logged row and return what there is to say about it.

        Args:
            step: optimizer steps done; a row stands for all steps since the last one (`rloo.logging_steps`).
            metrics: the row, under the trainer's names.
        """
        unlogged = self.rloo.get("logging_steps", 1) if self._last_step is None else step - self._last_step
        covered = max(unlogged, 1)
        self._last_step = step
        problems = find_problems(metrics)
        findings = []
        for kind in self.KINDS:
            if _tells(metrics, kind):
                self._rows[kind] = self._rows[kind] + covered if kind in problems else 0
            elif self._rows[kind]:  # this step reused the rollout of the last one, with what was wrong with it
                self._rows[kind] += covered
            if self._rows[kind] >= max(self.patience, 2 * self._said[kind]):
                self._said[kind] = self._rows[kind]
                message = explain(kind, self._rows[kind], metrics, self.rloo)
                findings.append(Finding(kind, self._rows[kind], message))
        return findings


def _tells(metrics: Mapping[str, Any], kind: str) -> bool:
    """Whether a row says if `kind` is so; a step that reuses a rollout (`rloo.num_iterations`) logs none."""
    return kind not in ROLLOUT_METRICS or any(metrics.get(name) is not None for name in ROLLOUT_METRICS[kind])


def _number(metrics: Mapping[str, Any], name: str, default: float) -> float:
    value = metrics.get(name)
    return default if value is None or math.isnan(value) else float(value)
