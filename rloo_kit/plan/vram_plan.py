"""The plan of a run's memory in GiB, as text and JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from rloo_kit.config.yaml_files import write_value
from rloo_kit.plan.parts import MemoryPart
from rloo_kit.plan.speed import RunTime
from rloo_kit.system.console import fill_text, render_text
from rloo_kit.system.problems import Problem


@dataclass(frozen=True)
class Machine:
    """What the run has to fit: a GPU, or the memory of a machine without one; `reserve_gib` stays free. The compute
    capability is None if unknown."""

    name: str
    total_gib: float
    reserve_gib: float
    on_cuda: bool
    is_here: bool = True
    capability: tuple[int, int] | None = None

    @property
    def usable_gib(self) -> float:
        return self.total_gib - self.reserve_gib

    @property
    def room(self) -> str:
        return f"{self.total_gib:.2f} ({self.reserve_gib:.1f} reserved)"


@dataclass(frozen=True)
class VllmPlan:
    """vLLM in the trainer's process; computed, not measured.

    Attributes:
        gpu_memory_utilization: share of the GPU that vLLM may take while it samples, weights included (0 to 1).
        max_num_seqs: completions at once. pool_gib: KV cache.
        obstacle: why vLLM cannot be used, and the fix; None if it can.
    """

    gpu_memory_utilization: float
    max_num_seqs: int
    pool_gib: float
    obstacle: str | None

    def __str__(self) -> str:
        share = f"in {self.gpu_memory_utilization:.2f} of the GPU, KV cache {self.pool_gib:.2f} GiB"
        return f"vLLM: {self.max_num_seqs} completions at once {share}"


@dataclass(frozen=True)
class EngineChoice:
    """The engine that samples (vllm, server, native or generate), and the reason in one line."""

    name: str
    reason: str


@dataclass(frozen=True)
class Remedy:
    """A key to change, on top of the remedies before it, and the resulting peaks in GiB."""

    key: str
    value: int | str | bool | None
    rollout_gib: float
    training_gib: float
    fits: bool

    @property
    def override(self) -> str:
        """KEY=VALUE for the command line."""
        return f"{self.key}={write_value(self.value)}"

    def __str__(self) -> str:
        which = "rollout" if self.rollout_gib > self.training_gib else "training"
        peak = max(self.rollout_gib, self.training_gib)
        return f"{self.override:<38} {peak:6.2f} GiB ({which}){', fits' if self.fits else ''}"


@dataclass(frozen=True)
class VramPlan:
    """Memory of a run with all completions at their full length; computed, not measured.

    Attributes:
        vllm: if it samples. step: on a GPU with known speed. parts: memory by part; they add up to the two peaks.
        rows: completions of a rollout at once, of `completions` in all. tokens_per_pass: tokens of a training pass.
        margin_gib: by how much the peaks may be too small. no_gpu: why fitting is not enough without a GPU.
        binds: the larger peak, "rollout" or "training". fits: whether both leave the reserve free, and vLLM can sample
            if `rollout.engine` is vllm.
        verdict: "fits", "tight" if less than the margin is left, or "does not fit".
        changes: what to change if it does not fit, cheapest first.
    """

    run: str
    model: str
    machine: Machine
    engine: EngineChoice
    vllm: VllmPlan | None
    step: RunTime | None
    parts: tuple[MemoryPart, ...]
    rollout_gib: float
    training_gib: float
    rows: int
    completions: int
    tokens_per_pass: int
    margin_gib: float
    no_gpu: Problem | None
    changes: tuple[Remedy, ...]

    @property
    def binds(self) -> str:
        return "training" if self.training_gib > self.rollout_gib else "rollout"

    @property
    def peak_gib(self) -> float:
        """The larger of the two peaks."""
        return max(self.rollout_gib, self.training_gib)

    @property
    def headroom_gib(self) -> float:
        """What stays free on top of the reserve; below 0 the run does not fit."""
        return self.machine.usable_gib - self.peak_gib

    @property
    def fits(self) -> bool:
        return self.headroom_gib >= 0 and (self.vllm is None or self.vllm.obstacle is None)

    @property
    def verdict(self) -> str:
        if not self.fits:
            return "does not fit"
        return "fits" if self.headroom_gib >= self.margin_gib else "tight"

    @property
    def sentence(self) -> str:
        """The verdict of a run that fits, with the headroom and the margin (docs/plan.md)."""
        covers = "less than" if self.verdict == "tight" else "which covers"
        left = f"{self.headroom_gib:.2f} GiB to spare of {self.machine.room}, {covers} the margin"
        return f"{self.verdict.capitalize()}: {left} of {self.margin_gib:.2f}; {self.binds} binds."

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON; GiB with three decimals."""

        peaks = "rollout_gib", "training_gib"
        names = "run", "model", "fits", "verdict", "binds", "rows", "completions", "tokens_per_pass", *peaks
        machine = {"machine": self.machine.name} | _values(self.machine, "total_gib", "reserve_gib")
        return _values(self, *names, "headroom_gib", "margin_gib") | machine | {
            "no_gpu": self.no_gpu and self.no_gpu.text,
            "engine": asdict(self.engine),
            "vllm": self.vllm and _values(self.vllm, *asdict(self.vllm)),
            "step": self.step and _values(self.step, "gpu", "step_s", "evaluation_s", "hours"),
            "parts": {part.name: _values(part, *peaks) for part in self.parts},
            "changes": [_values(change, "override", *peaks, "fits") for change in self.changes],
        }  # fmt: skip

    def __str__(self) -> str:
        title = f"Memory of {self.run}, GiB (computed, not measured)"
        table = Table(title=title, title_justify="left", show_footer=True)
        table.add_column("part", "sum", no_wrap=True)
        table.add_column("rollout", f"{self.rollout_gib:.2f}", no_wrap=True, justify="right")
        table.add_column("training", f"{self.training_gib:.2f}", no_wrap=True, justify="right")
        table.add_column("details", f"of {self.machine.usable_gib:.2f} on {self.machine.name}", overflow="fold")
        for part in self.parts:
            table.add_row(part.name, _written(part.rollout_gib), _written(part.training_gib), Text(part.detail))
        lines = [render_text(table), *map(fill_text, self._say())]
        lines += [f"  {change}" for change in self.changes]
        if self.headroom_gib < 0 and not any(change.fits for change in self.changes):
            lines.append("  not enough: docs/plan.md#out-of-memory has more; else a smaller model or a larger GPU")
        return "\n".join(lines)

    def _say(self) -> Iterator[str]:
        """The verdict, engine, rows, speed, and the heading of the changes."""
        obstacle = None if self.vllm is None else self.vllm.obstacle
        if self.no_gpu is not None:
            yield f"{self.no_gpu.text}."
        if self.headroom_gib < 0:
            yield f"Does not fit: {-self.headroom_gib:.2f} GiB too much for {self.machine.room}; {self.binds} binds."
        elif obstacle is not None:
            yield f"Cannot run: rollout.engine is vllm, but {obstacle}."
        else:
            # Without a GPU a bare "Fits" would read like a go-ahead.
            yield self.sentence if self.no_gpu is None else f"Memory alone: {self.sentence}"
        yield f"Rollouts: {self.engine.name} ({self.engine.reason})."
        if self.engine.name == "server":
            yield f"Rows of a rollout: {self.completions}, with the KV cache on the server; not planned."
        else:
            yield f"Rows of a rollout: {self.rows} of {self.completions} at once."
        yield from (f"{line}." for line in (self.vllm, self.step) if line is not None)
        if self.headroom_gib < 0:
            yield "Changes, cheapest first, each on top of those before it:"

    __repr__ = __str__


def _values(source: Any, *names: str) -> dict[str, Any]:
    """These values of an object; GiB and shares with three decimals."""
    values = {name: getattr(source, name) for name in names}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


def _written(gib: float) -> str:
    """Two decimals, three for small figures; empty for 0."""
    if gib == 0:
        return ""
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.3f}"
