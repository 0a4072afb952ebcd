"""Applies the health rules to a run, row by row during training or afterwards over its rows. Never torch."""

from collections import defaultdict
from collections.abc import Iterable

from rloo_kit.health.rules import RULES, Context, Finding
from rloo_kit.health.series import Row, Series

NEAR = 5  # a consequence may show up to this many steps before its cause


class HealthWatch:
    """Applies the rules to a run's rows and reports the earliest cause; its consequences are not reported.

    Args:
        rows: rows of an earlier part of the run, whose findings were reported then.

    Attributes:
        stopped_by: the rule that ends the run, if one of `health.stop` has fired; else None.
        stop: the finding that caused it.

    >>> watch = HealthWatch(Context({"max_completion_length": 128}, no_signal_steps=2))
    >>> row = {"frac_reward_zero_std": 1.0, "completions/clipped_ratio": 1.0, "reward": -1.0, "grad_norm": 0.0}
    >>> watch.observe({"step": 1, **row})
    []
    >>> [(one.name, one.since, one.explains) for one in watch.observe({"step": 2, **row})]
    [('truncation', 1, ['no_movement', 'no_signal'])]
    """

    def __init__(self, context: Context, rows: Iterable[Row] = ()):
        self.context = context
        self.stopped_by: str | None = None
        self.stop: Finding | None = None
        self._excused: set[str] = set()  # active when an earlier part ended: does not stop the resumed run
        self._seen = Series()
        self._found: dict[str, Finding] = {}  # consequences included
        self._reported: dict[tuple[str, str], Finding] = {}  # by rule and cause: with another one it is new
        for row in rows:
            self.observe(row)
        self._excused = {name for name, one in self._found.items() if self.holds(one)}
        self.stopped_by = self.stop = None

    @property
    def findings(self) -> list[Finding]:
        """The reported causes, in step order."""
        names = dict.fromkeys(name for name, _ in self._reported)
        causes = [self._found[name] for name in names if self._is_first(self._found[name])]
        return sorted(causes, key=lambda one: (one.since, one.step, one.name))

    def holds(self, finding: Finding) -> bool:
        """Whether the finding was true of the last row."""
        return finding.last == self._seen.step

    def observe(self, row: Row) -> list[Finding]:
        """Add one logged row and return the new findings to report."""
        before = self._seen.step
        self._seen.add(row)
        firing = []
        for rule in RULES.values():
            if rule.name in self.context.off:
                continue
            evidence = rule.detect(self._seen, self.context)
            if evidence is None:
                continue
            firing.append(rule.name)
            values = defaultdict(lambda: "unset", self.context.rloo)
            cause = (evidence.cause or rule.cause).format_map(values)
            fix = (evidence.fix or rule.fix).format_map(values)
            if (found := self._found.get(rule.name)) is not None and found.cause == cause:
                found.since = found.since if found.last >= before else evidence.since  # it had ceased
                found.last, found.found, found.fix, found.level = row["step"], evidence.text, fix, evidence.level
                continue
            times = {"step": row["step"], "since": evidence.since, "last": row["step"]}
            self._found[rule.name] = Finding(rule.name, evidence.text, fix, level=evidence.level, cause=cause, **times)
        for finding in self._found.values():
            finding.explains = sorted(
                name for name, one in self._found.items() if one is not finding and self._root(one) is finding
            )
        firsts = (self._found[name] for name in firing if self._is_first(self._found[name]))
        new = {key: one for one in firsts if (key := (one.name, one.cause)) not in self._reported}
        self._reported |= new
        self._excused &= set(firing)
        stopping = [name for name in firing if name in self.context.stop and name not in self._excused]
        if stopping and self.stop is None:
            self.stopped_by = min(stopping, key=lambda name: self._found[name].since)
            self.stop = self._root(self._found[self.stopped_by])
        return list(new.values())

    def _root(self, finding: Finding) -> Finding:
        """The first cause of a finding: the earliest one that it follows from and that was active when it began, and so
        on. If findings form a cycle, the earliest of them."""
        passed = [finding]
        while True:
            last, causes = passed[-1], []
            for name in RULES[last.name].follows:
                other = self._found.get(name)
                slack = 0 if last.name in RULES[name].follows else NEAR
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
