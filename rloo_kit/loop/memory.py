"""Peak memory of a run vs. the plan: a printed line, and `memory.json`."""

import gc
import platform
from dataclasses import dataclass, replace
from typing import Any

import torch

from rloo_kit.collective import gather_objects
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import BackendError, ConfigError
from rloo_kit.loop.options import option
from rloo_kit.plan.load import find_machine, read_load
from rloo_kit.plan.parts import Load, body_bytes, context_bytes, table_bytes
from rloo_kit.plan.peaks import own_bytes, rollout_gib, training_gib
from rloo_kit.plan.result import Machine
from rloo_kit.runs.files import now
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.console import fill_text
from rloo_kit.system.memory import GIB, ResidentPeak, trim_heap
from rloo_kit.system.processes import is_main_process, say


@dataclass(frozen=True)
class Peak:
    """A process's measured peak in GiB: `measured_gib` includes CUDA's context; `spare_gib` is reserved but unused.

    Attributes:
        load: with the longest prompt, completion and pass of the run. rows: completions at once.
    """

    load: Load
    rows: int
    measured_gib: float
    spare_gib: float

    @property
    def part(self) -> str:
        """The part with the larger computed peak: "rollout" or "training"."""
        return "rollout" if self._computed[0] >= self._computed[1] else "training"

    @property
    def computed_gib(self) -> float:
        return max(self._computed)

    @property
    def ratio(self) -> float:
        return self.measured_gib / self.computed_gib

    @property
    def _computed(self) -> tuple[float, float]:
        plain = replace(self.load, factors=(1.0, 1.0))
        return rollout_gib(plain, self.rows), training_gib(plain, self.rows)


class MemoryWatch:
    """Measures this process from `start` to `report`; a rollout listener that records the longest rows in between.

    On a GPU it reads torch's peaks; elsewhere the growth of resident memory, which excludes what else a notebook has
    loaded.

    Args:
        load, machine: from the plan. rows: completions at once.
    """

    def __init__(self, load: Load, machine: Machine, rows: int) -> None:
        self.load, self.machine, self.rows = load, machine, rows
        self._prompt = self._completion = 0
        self._resident: ResidentPeak | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self._prompt = max(self._prompt, row["prompt_tokens"])
            self._completion = max(self._completion, row["completion_tokens"])

    def start(self) -> None:
        """Reset the peaks."""
        gc.collect()
        if self.machine.on_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        trim_heap()
        try:
            self._resident = ResidentPeak()
        except BackendError:
            self._resident = None

    def report(self, run_dir: RunDir) -> None:
        """Print and store the largest measurement of all processes; all of them call it."""
        found = [peak for peak in gather_objects(self._measure()) if peak is not None]
        if not found or not is_main_process():
            return
        largest = max(found, key=lambda peak: peak.measured_gib)
        planned = max(rollout_gib(self.load, self.rows), training_gib(self.load, self.rows))
        computed = f"{largest.computed_gib:.2f} for the longest ({largest.load.row_tokens})"
        measured = f"measured peak {largest.measured_gib:.2f} GiB ({largest.ratio:.2f})"
        planned_for = f"planned {planned:.2f} GiB at {self.load.row_tokens} tokens"
        say(fill_text(f"memory: {planned_for}, {computed}; {measured}"))
        run_dir.write_json("memory.json", describe(largest, self.machine, planned))

    def _measure(self) -> Peak | None:
        """This process's measurement; None if no completion was sampled or memory cannot be measured."""
        if not self._completion:
            return None
        load, spare = self.load, 0.0
        if self.machine.on_cuda:
            gib = torch.cuda.max_memory_allocated() / GIB
            spare = torch.cuda.max_memory_reserved() / GIB - gib
            gib += context_bytes(load) / GIB
        elif self._resident is not None:
            loaded = context_bytes(load) + body_bytes(load) + table_bytes(load) + own_bytes(load)
            gib = self._resident.finish() - self._resident.start_gib + loaded / GIB
        else:
            return None
        prompt, completion = min(self._prompt, load.prompt_tokens), min(self._completion, load.completion_tokens)
        seen = replace(load, prompt_tokens=prompt, completion_tokens=completion)
        return Peak(seen, self.rows, gib, spare)


def describe(peak: Peak, machine: Machine, planned_gib: float) -> dict[str, Any]:
    """The content of a run's `memory.json`, GiB with three decimals."""
    figures = {"planned_gib": planned_gib, "computed_gib": peak.computed_gib, "measured_gib": peak.measured_gib}
    figures |= {"ratio": peak.ratio, "spare_gib": peak.spare_gib}
    name = f"{machine.name}, {machine.total_gib:.0f} GiB" if machine.on_cuda else f"{platform.node()}, CPU"
    named = {"machine": name, "date": now(), "part": peak.part}
    lengths = {"row_tokens": peak.load.row_tokens, "rows": peak.rows, "tokens_per_pass": peak.load.pass_tokens}
    return named | {name: round(value, 3) for name, value in figures.items()} | lengths


def watch_memory(run: RunConfig, config: dict[str, Any], engine: str, args: Any) -> MemoryWatch | None:
    """The watch of a run, with the rows and passes of its arguments; None for a model that cannot be planned, and with
    vLLM, whose pool torch does not count."""
    machine = find_machine()
    try:
        load = read_load(run, machine, config, engine)
    except ConfigError:
        return None
    if engine == "vllm":
        return None
    load = replace(load, tokens_per_pass=option(args, "tokens_per_pass") or load.tokens_per_pass)
    return MemoryWatch(load, machine, min(option(args, "rollout_rows") or load.completions, load.completions))
