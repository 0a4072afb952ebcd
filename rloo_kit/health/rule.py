"""The types of health rules: thresholds, context, evidence, rules and findings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rloo_kit.health.series import Series
from rloo_kit.system.problems import Problem

LEVELS = ("healthy", "watch", "alarming")


@dataclass(frozen=True)
class Threshold:
    """The limits of one metric; None means no limit.

    Attributes:
        metrics: names; the first one that was logged counts.
        low, high: the healthy range, ends included; if_low, if_high: what to change outside it.
        alarm_low, alarm_high: beyond these the level is alarming; between them and the range, watch.
        on_policy: applies only if a rollout is used up before the next optimizer step.
        unless_solved: does not apply to a run that has learnt its task.
    """

    metrics: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    alarm_low: float | None = None
    alarm_high: float | None = None
    if_low: str = ""
    if_high: str = ""
    on_policy: bool = False
    unless_solved: bool = False

    def level(self, value: float) -> str:
        """One of LEVELS.

        >>> limits = Threshold(("x",), high=0.3, alarm_high=0.8)
        >>> limits.level(0.1), limits.level(0.5), limits.level(0.9)
        ('healthy', 'watch', 'alarming')
        """
        if self.is_alarming(value):
            return "alarming"
        return "watch" if _is_outside(value, self.low, self.high) else "healthy"

    def is_alarming(self, value: float) -> bool:
        """Whether a value is beyond the alarm limits."""
        return _is_outside(value, self.alarm_low, self.alarm_high)

    def action(self, value: float) -> str:
        """What to change at this value; empty if it is healthy."""
        if self.level(value) == "healthy":
            return ""
        return self.if_low if _is_outside(value, self.low, None) else self.if_high


def _is_outside(value: float, low: float | None, high: float | None) -> bool:
    return (low is not None and value < low) or (high is not None and value > high)


@dataclass(frozen=True)
class Context:
    """What the rules need to know about a run in addition to its rows.

    Attributes:
        rloo: the values of the `rloo:` section. modes: "warn", "stop" or "off" by rule name; "warn" if missing.
        no_signal_steps: steps in a row without signal before it is reported. max_steps: planned; None: unknown.
        answers: names of the rewards whose mean is the accuracy on the training prompts. weights: of the rewards.
    """

    rloo: Mapping[str, Any]
    modes: Mapping[str, str] = field(default_factory=dict)
    no_signal_steps: int = 5
    max_steps: int | None = None
    answers: tuple[str, ...] = ("answer_reward", "math_answer_reward", "reasoning_gym_score")
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Any, max_steps: int | None = None) -> "Context":
        """The context of a `RunConfig`; `max_steps`: the actual number of steps if `rloo.max_steps` is unset."""
        modes = run.health.model_dump()
        steps = modes.pop("no_signal_steps")
        planned = max_steps or run.rloo.max_steps
        return cls(run.rloo.model_dump(), modes, steps, planned, weights=run.reward_weights)

    @property
    def on_policy(self) -> bool:
        """Whether a rollout is used up before the next optimizer step."""
        accumulation = self.rloo.get("gradient_accumulation_steps", 1)
        return (
            self.rloo.get("num_iterations", 1) == 1
            and (self.rloo.get("steps_per_generation") or accumulation) <= accumulation
        )


class Evidence(NamedTuple):
    """What a rule has found: the first step that shows it, a text, and cause and fix if they differ from the rule's."""

    since: int
    text: str
    cause: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Rule:
    """Detects one way in which a run fails.

    Attributes:
        name: the key of `health:` that makes it warn, stop the run or stay off.
        metrics: the metrics it reads; without the first one it stays silent.
        window: number of values it looks at, or None for `health.no_signal_steps` steps.
        detect: maps the series, the run's context and the window to the evidence, or None.
        cause, fix: texts; {key} is replaced with the value of rloo.key.
        follows: rules whose finding, if it began no later, is the cause of this one, which is then not reported.
        level: "alarming" or "watch". thresholds: healthy ranges of single metrics.
    """

    name: str
    metrics: tuple[str, ...]
    window: int | None
    detect: Callable[[Series, Context, int], Evidence | None]
    cause: str
    fix: str
    follows: tuple[str, ...] = ()
    level: str = "alarming"
    thresholds: tuple[Threshold, ...] = ()


@dataclass
class Finding(Problem):
    """A rule's finding in a run: `name` is the rule's, `found` the evidence.

    Attributes:
        step: when it was found. since: the first step that shows it. last: the latest so far. cause: a text.
        explains: rules that fired as its consequences.
    """

    step: int = 0
    since: int = 0
    last: int = 0
    cause: str = ""
    explains: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The rule's name with spaces."""
        return self.name.replace("_", " ")

    def to_dict(self) -> dict[str, Any]:
        """As in `health.jsonl`."""
        found = {"rule": self.name, "step": self.step, "since": self.since, "last": self.last, "evidence": self.found}
        return found | {"cause": self.cause, "fix": self.fix, "level": self.level, "explains": self.explains}

    def __str__(self) -> str:
        return f"{self.title} since step {self.since}: {self.found}. {self.cause}. To do: {self.fix}"
