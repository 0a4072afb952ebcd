"""Applies the health rules to a run, row by row during training or afterwards over its rows. No torch."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rloo_kit.health.rule import Context, Finding
from rloo_kit.health.rules import RULES
from rloo_kit.health.series import Row, Series, is_number
from rloo_kit.health.signs import is_solved
from rloo_kit.system.problems import Problem

LAST_ROWS = 10  # logged steps to average
NEAR = 5  # a consequence may show up to this many steps before its cause


class HealthWatch:
    """Applies the rules to a run's rows and reports the earliest cause; its consequences are not reported.

    Args:
        rows: rows of an earlier part of the run, whose findings were reported then.

    Attributes:
        stopped_by: the rule that ends the run, if one with mode "stop" has fired; else None.
        stop: the finding that caused it.

    >>> watch = HealthWatch(Context({"max_completion_length": 128}, no_signal_steps=2))
    >>> row = {"frac_reward_zero_std": 1.0, "completions/clipped_ratio": 1.0, "reward": -1.0, "grad_norm": 0.0}
    >>> watch.observe({"step": 1, **row})
    []
    >>> [(one.name, one.since, one.explains) for one in watch.observe({"step": 2, **row})]
    [('truncation', 1, ['no_signal', 'zero_gradient'])]
    """

    def __init__(self, context: Context, rows: Iterable[Row] = ()):
        self.context = context
        self.stopped_by: str | None = None
        self.stop: Finding | None = None
        self._excused: set[str] = set()  # active when an earlier part ended: does not stop the resumed run
        self._seen = Series(context.rloo.get("logging_steps") or 1)
        self._found: dict[str, Finding] = {}  # consequences included
        self._reported: list[str] = []
        for row in rows:
            self.observe(row)
        self._excused = {name for name, one in self._found.items() if self.holds(one)}
        self.stopped_by = self.stop = None

    @property
    def findings(self) -> list[Finding]:
        """The reported causes, in step order."""
        causes = [self._found[name] for name in self._reported if self._is_first(self._found[name])]
        return sorted(causes, key=lambda one: (one.since, one.step, one.name))

    def holds(self, finding: Finding) -> bool:
        """Whether the finding was true of the last row."""
        return finding.last == self._seen.step

    def is_solved(self) -> bool:
        """Whether the task is learnt, so that tied groups and low entropy are not faults."""
        return is_solved(self._seen, self.context)

    def explained(self) -> set[str]:
        """Rules whose findings are active and follow from another finding."""
        return {name for name, one in self._found.items() if self.holds(one) and not self._is_first(one)}

    def observe(self, row: Row) -> list[Finding]:
        """Add one logged row and return the new findings to report."""
        self._seen.add(row)
        active = []
        for rule in RULES:
            if self.context.modes.get(rule.name) == "off":
                continue
            evidence = rule.detect(self._seen, self.context, rule.window or self.context.no_signal_steps)
            if evidence is None:
                continue
            active.append(rule)
            if (found := self._found.get(rule.name)) is not None:
                found.last, found.found = row["step"], evidence.text
                continue
            values = defaultdict(lambda: "unset", self.context.rloo)
            self._found[rule.name] = Finding(
                rule.name,
                evidence.text,
                (evidence.fix or rule.fix).format_map(values),
                level=rule.level,
                step=row["step"],
                since=evidence.since,
                last=row["step"],
                cause=(evidence.cause or rule.cause).format_map(values),
            )
        for finding in self._found.values():
            finding.explains = sorted(
                name for name, one in self._found.items() if one is not finding and self._root(one) is finding
            )
        new = [rule.name for rule in active if self._is_first(self._found[rule.name])]
        new = [name for name in new if name not in self._reported]
        self._reported += new
        firing = {rule.name for rule in active}
        self._excused &= firing
        stopping = [name for name in firing - self._excused if self.context.modes.get(name) == "stop"]
        if stopping and self.stop is None:
            self.stopped_by = min(stopping, key=lambda name: self._found[name].since)
            self.stop = self._root(self._found[self.stopped_by])
        return [self._found[name] for name in new]

    def _root(self, finding: Finding) -> Finding:
        """The first cause of a finding: the earliest one that it follows from and that was active when it began, and so
        on. If findings form a cycle, the earliest of them."""
        rules, passed = {rule.name: rule for rule in RULES}, [finding]
        while True:
            last, causes = passed[-1], []
            for name in rules[last.name].follows:
                other = self._found.get(name)
                slack = 0 if last.name in rules[name].follows else NEAR
                if other is not None and other.since <= last.since + slack and other.last >= last.since - NEAR:
                    causes.append(other)
            if not causes:
                return last
            cause = min(causes, key=lambda one: one.since)
            if cause in passed:
                return min(passed[passed.index(cause) :], key=lambda one: (one.since, one.step, one.name))
            passed.append(cause)

    def _is_first(self, finding: Finding) -> bool:
        return self._root(finding) is finding


def examine(rows: Iterable[Row], context: Context) -> list[Finding]:
    """The findings of a whole run from its rows, the same as during training."""
    return HealthWatch(context, rows).findings


@dataclass
class Judgement(Problem):
    """One metric of a run, `name`: its mean over the last rows, its level, what to change (empty if nothing), and the
    rule that watches it."""

    value: float = 0.0
    rule: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = {"metric": self.name, "value": self.value, "level": self.level}
        return found | {"action": self.fix, "rule": self.rule}


def judge(rows: Sequence[Row], on_policy: bool = True, last: int = LAST_ROWS, solved: bool = False) -> list[Judgement]:
    """Judge the last rows of a `metrics.jsonl`; metrics that were not logged are left out.

    >>> rows = [{"step": 1, "completions/clipped_ratio": 1.0, "grad_norm": 0.2}]
    >>> [(found.name, found.level) for found in judge(rows)]
    [('completions/clipped_ratio', 'alarming'), ('grad_norm', 'healthy')]

    Args:
        rows: one mapping per logged step, in order. on_policy: whether to apply limits that need on-policy training.
        last: number of rows to average, at least 1. solved: whether the run has learnt its task.
    """
    found = []
    for rule in RULES:
        for threshold in rule.thresholds:
            if threshold.on_policy and not on_policy:
                continue
            for metric in threshold.metrics:
                values = [row[metric] for row in rows[-last:] if is_number(row.get(metric))]
                if values:
                    value = sum(values) / len(values)
                    well = solved and threshold.unless_solved
                    level, action = ("healthy", "") if well else (threshold.level(value), threshold.action(value))
                    found.append(Judgement(metric, "", action, level=level, value=value, rule=rule.name))
                    break
    return found
