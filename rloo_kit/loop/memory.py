"""Peak memory of a run vs. the plan: a printed line, `memory.json`, and an entry for the next plan."""

import gc
from dataclasses import replace
from typing import Any

import torch

from rloo_kit.collective import gather_objects
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import BackendError, ConfigError
from rloo_kit.loop.options import option
from rloo_kit.plan.history import PastRun, keep_run, machine_key
from rloo_kit.plan.load import find_machine, read_load
from rloo_kit.plan.parts import Load, body_bytes, context_bytes, table_bytes
from rloo_kit.plan.peaks import own_bytes, rollout_gib, training_gib
from rloo_kit.plan.result import Machine
from rloo_kit.runs.files import now
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.console import fill_text
from rloo_kit.system.memory import GIB, ResidentPeak, trim_heap
from rloo_kit.system.processes import is_main_process, say

LEAST_SHARE = 0.5  # of a CPU's peak that must be the run's, not Python's, to correct a plan


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
        found = [past for past in gather_objects(self._measure()) if past is not None]
        if not found or not is_main_process():
            return
        largest = max(found, key=lambda past: past.measured_gib)
        planned = max(rollout_gib(self.load, self.rows), training_gib(self.load, self.rows))
        computed = f"{largest.computed_gib:.2f} for the longest ({largest.load.row_tokens})"
        measured = f"measured peak {largest.measured_gib:.2f} GiB ({largest.ratio:.2f})"
        planned_for = f"planned {planned:.2f} GiB at {self.load.row_tokens} tokens"
        say(fill_text(f"memory: {planned_for}, {computed}; {measured}"))
        run_dir.write_json("memory.json", describe(largest, planned))
        context = context_bytes(self.load) / GIB
        if self.machine.on_cuda or largest.computed_gib - context >= LEAST_SHARE * largest.computed_gib:
            keep_run(self.machine, largest.load, self.rows, largest.measured_gib, largest.spare_gib)

    def _measure(self) -> PastRun | None:
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
        return PastRun(machine_key(self.machine), now(), seen, self.rows, gib, spare)


def describe(past: PastRun, planned_gib: float) -> dict[str, Any]:
    """The content of a run's `memory.json`, GiB with three decimals."""
    figures = {"planned_gib": planned_gib, "computed_gib": past.computed_gib, "measured_gib": past.measured_gib}
    figures |= {"ratio": past.ratio, "spare_gib": past.spare_gib}
    named = {"machine": past.machine, "date": past.date, "part": past.part}
    lengths = {"row_tokens": past.load.row_tokens, "rows": past.rows, "tokens_per_pass": past.load.pass_tokens}
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
