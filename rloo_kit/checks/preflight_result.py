"""The result of a preflight: GO or NO-GO with every problem, and the measurements, as an object, text and JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from rloo_kit.runs.files import finite
from rloo_kit.system.console import render_text
from rloo_kit.system.problems import WIDTH, Problem, errors_of, list_problems, warnings_of


@dataclass(frozen=True)
class Spread:
    """Token counts: the median, the 90th percentile and the largest."""

    median: int
    p90: int
    most: int

    @classmethod
    def of(cls, values: list[int]) -> "Spread":
        ordered = sorted(values)
        return cls(*(ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 90, 100)))

    def __str__(self) -> str:
        return f"median {self.median}, p90 {self.p90}, longest {self.most}"


@dataclass(frozen=True)
class RewardFound:
    """One reward: its mean, in how many groups it differed, and for how many completions it failed."""

    mean: float
    differs: int
    failed: int


@dataclass
class Measures:
    """Measurements on the loaded model; None if not measured. Shares are in [0, 1], GiB are peaks.

    Attributes:
        episodes: from `measure_calls`. episode: the steps of one.
        prompts, generations: of the probe rollout; a prompt's completions are a group.
        truncated: share that the limit cut off. thinking_tokens: before the first `</think>`, all if it is not closed.
        closed: share of completions that close their thinking themselves. forced: share that the budget closed.
        signal: groups that can move the policy. pass_rate: share of correct answers, with its 95 % interval.
        logp_gap: mean absolute difference of the trainer's and the sampler's log-probability, nats per token.
        grad_norm: of a step at full length.
        rollout_gib: computed. training_gib: of a step at full length. usable_gib: of the machine.
        step_s: seconds of an optimizer step. hours: of the run with its evaluations, on `device`.
    """

    episodes: dict[str, float] = field(default_factory=dict)
    episode: list[str] = field(default_factory=list)
    prompts: int | None = None
    generations: int | None = None
    completion_tokens: Spread | None = None
    truncated: float | None = None
    thinking_tokens: Spread | None = None
    closed: float | None = None
    forced: float | None = None
    think_end_id: int | None = None
    rewards: dict[str, RewardFound] = field(default_factory=dict)
    signal: int | None = None
    pass_rate: float | None = None
    pass_low: float | None = None
    pass_high: float | None = None
    logp_gap: float | None = None
    grad_norm: float | None = None
    rollout_gib: float | None = None
    training_gib: float | None = None
    usable_gib: float | None = None
    step_s: float | None = None
    steps: int | None = None
    hours: float | None = None
    device: str = "CPU"

    def lines(self) -> Iterator[tuple[str, str]]:
        """The measurements as text: (name, value)."""
        if self.prompts is not None and self.generations is not None:
            count = self.prompts * self.generations
            yield "probe rollout", f"{self.prompts} prompts x {self.generations} = {count} completions"
            yield "tokens", f"{self.completion_tokens}; {self.truncated:.0%} cut off"
            if self.thinking_tokens is not None:
                forced = f", {self.forced:.0%} closed by the budget" if self.forced else ""
                closed = f"{self.closed:.0%} close it (token {self.think_end_id}){forced}"
                yield "thinking", f"{self.thinking_tokens}; {closed}"
            if found := self.episodes:
                wrong = f"{found['failure_frequency']:.0%} of them failed, {found['invalid_frequency']:.0%} invalid"
                yield "episodes", f"{found['turns']:.3g} turns and {found['call_frequency']:.3g} calls each; {wrong}"
                yield "an episode", "\n".join(self.episode)
            for name, one in self.rewards.items():
                failed = f"; failed for {one.failed}" if one.failed else ""
                yield name, f"mean {one.mean:.3g}; differs in {one.differs} of {self.prompts} groups{failed}"
            yield "groups with signal", f"{self.signal} of {self.prompts}"
            if self.pass_rate is not None:
                yield "pass rate", f"{self.pass_rate:.2f} (95 % interval {self.pass_low:.2f} to {self.pass_high:.2f})"
        if self.logp_gap is not None:
            yield "sampler, trainer", f"log-probs differ by {self.logp_gap:.1e} nats per token"
        if self.grad_norm is not None:
            yield "gradient", f"norm {self.grad_norm:.3g}, of a step at full length"
        if self.training_gib:
            rollout = f"rollout {self.rollout_gib:.2f} GiB (computed), " if self.rollout_gib else ""
            yield "memory", f"{rollout}training {self.training_gib:.2f} GiB of {self.usable_gib:.2f}"
        if self.step_s is not None and self.hours is not None:
            minutes, seconds = round(60 * self.hours), 3600 * self.hours
            whole = f"{minutes} min" if seconds >= 100 else f"{seconds:.0f} s"
            whole = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else whole
            about = f"about {whole} on this {self.device}, evaluations included"
            yield "speed", f"{self.step_s:.2g} s a step, {self.steps} steps; {about}"


@dataclass
class Preflight:
    """GO or NO-GO of a run, with its problems; `measures` is None if no model was loaded."""

    run: str
    faults: tuple[Problem, ...]
    measures: Measures | None = None
    seconds: float = 0.0

    @property
    def go(self) -> bool:
        """Whether the run may start."""
        return not self.errors

    @property
    def errors(self) -> list[Problem]:
        """Problems that keep it from starting."""
        return errors_of(self.faults)

    @property
    def warnings(self) -> list[Problem]:
        """Problems that do not."""
        return warnings_of(self.faults)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        faults = [{"stage": one.name, "message": one.text, "level": one.level, "key": one.key} for one in self.faults]
        measures = None if self.measures is None else asdict(self.measures)
        found = {"run": self.run, "go": self.go, "faults": faults, "measures": measures}
        return finite(found | {"seconds": round(self.seconds, 1)})

    def __str__(self) -> str:
        lines = list_problems(self.faults)
        if self.measures is not None:
            title = f"Preflight of {self.run}, {self.seconds:.0f} s"
            table = Table(title=title, title_justify="left", show_header=False)
            table.add_column("what", overflow="fold", max_width=24)
            table.add_column("found", overflow="fold")
            for row in self.measures.lines():
                table.add_row(*map(Text, row))
            lines.insert(0, render_text(table, WIDTH))
        count = "1 problem" if len(self.errors) == 1 else f"{len(self.errors)} problems"
        verdict = "GO" if self.go else f"NO-GO: {count}; fix as described above"
        if self.measures is None:
            verdict += "; nothing was measured" if self.go else "; the model was not loaded"
        return "\n".join([*lines, verdict])

    __repr__ = __str__
