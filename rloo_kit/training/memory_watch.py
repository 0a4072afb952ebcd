"""What the memory plan limits in a run; the meter of peak memory, and the peak vs. the plan: a printed line, and
`memory.json`."""

import gc
import platform
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rloo_kit.collective import gather_objects
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.loop.options import loaded_engine
from rloo_kit.models.policy import Policy
from rloo_kit.plan.parts import (
    CONTEXT_GIB,
    Workload,
    body_bytes,
    own_bytes,
    rollout_gib,
    table_bytes,
    tower_bytes,
    training_gib,
)
from rloo_kit.plan.planner import find_machine, plan_vram, read_workload
from rloo_kit.plan.vram_plan import Machine
from rloo_kit.rollout.types import FOREIGN
from rloo_kit.runs.files import now
from rloo_kit.runs.folder import RunDir
from rloo_kit.sizes import TOKENS_PER_PASS
from rloo_kit.system.console import fill_text
from rloo_kit.system.gpu import GIB
from rloo_kit.system.memory import resident_gib, trim_heap
from rloo_kit.system.processes import is_main_process, say


class MemoryPeak:
    """The peak of this process's memory from `start` to `finish`, or of a `with` block, in GiB: torch's allocation on a
    GPU, else the kernel's own peak of resident memory.

    `gib`: the peak. `reserved_gib`: by torch's allocator; 0 without a GPU. `start_gib`: resident memory at the start;
    None on a GPU, or if the kernel has no peak that can be reset.
    """

    gib = reserved_gib = seconds = 0.0
    start_gib: float | None = None

    def start(self) -> "MemoryPeak":
        self._cuda = torch.cuda if torch.cuda.is_available() else None
        if self._cuda is not None:
            self._cuda.synchronize()
            self._cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
                self.start_gib = resident_gib()
        self._started = time.monotonic()
        return self

    def finish(self) -> None:
        if self._cuda is not None:
            self._cuda.synchronize()
            self.gib = self._cuda.max_memory_allocated() / GIB
            self.reserved_gib = self._cuda.max_memory_reserved() / GIB
        elif self.start_gib is not None:
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            self.gib = int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024 / GIB
        self.seconds = time.monotonic() - self._started

    def __enter__(self) -> "MemoryPeak":
        return self.start()

    def __exit__(self, *_error: Any) -> None:
        self.finish()


class MemoryWatch:
    """Measures this process from `start` to `report`; a rollout listener that records the longest rows in between.

    Off a GPU it counts the growth of resident memory. `rows`: completions at once."""

    def __init__(self, load: Workload, machine: Machine, rows: int) -> None:
        self.load, self.machine, self.rows = load, machine, rows
        self._prompt = self._completion = 0
        self._peak = MemoryPeak()

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self._prompt = max(self._prompt, row["prompt_tokens"])
            self._completion = max(self._completion, row["completion_tokens"])

    def start(self) -> None:
        gc.collect()
        if not self.machine.on_cuda:
            trim_heap()
        self._peak.start()

    def report(self, run_dir: RunDir) -> None:
        """Print and store the largest measurement of all processes; all of them call it."""
        gathered = [figures for figures in gather_objects(self._measure()) if figures is not None]
        if not gathered or not is_main_process():
            return
        largest = max(gathered, key=lambda figures: figures["measured_gib"])
        computed = f"{largest['computed_gib']:.2f} for the longest ({largest['row_tokens']})"
        measured = f"measured peak {largest['measured_gib']:.2f} GiB ({largest['ratio']:.2f})"
        planned_for = f"planned {largest['planned_gib']:.2f} GiB at {self.load.row_tokens} tokens"
        say(fill_text(f"memory: {planned_for}, {computed}; {measured}"))
        machine = self.machine
        name = f"{machine.name}, {machine.total_gib:.0f} GiB" if machine.on_cuda else f"{platform.node()}, CPU"
        figures = {key: round(value, 3) if isinstance(value, float) else value for key, value in largest.items()}
        run_dir.write_json("memory.json", {"machine": name, "date": now()} | figures)

    def _measure(self) -> dict[str, Any] | None:
        """This process's figures for `memory.json`; None if no completion was sampled or memory cannot be measured."""
        if not self._completion:
            return None
        load, peak = self.load, self._peak
        peak.finish()
        spare = 0.0
        if self.machine.on_cuda:
            measured = peak.gib + CONTEXT_GIB
            spare = peak.reserved_gib - peak.gib
        elif peak.start_gib is not None:
            loaded = body_bytes(load) + table_bytes(load) + tower_bytes(load) + own_bytes(load)
            measured = peak.gib - peak.start_gib + loaded / GIB + CONTEXT_GIB
        else:
            return None
        prompt, completion = min(self._prompt, load.prompt_tokens), min(self._completion, load.completion_tokens)
        seen = replace(load, prompt_tokens=prompt, completion_tokens=completion)
        rollout, training = rollout_gib(seen, self.rows), training_gib(seen, self.rows)
        computed = max(rollout, training)
        return {
            "part": "rollout" if rollout >= training else "training",
            "planned_gib": max(rollout_gib(load, self.rows), training_gib(load, self.rows)),
            "computed_gib": computed,
            "measured_gib": measured,
            "ratio": measured / computed,
            "spare_gib": spare,
            "row_tokens": seen.row_tokens,
            "rows": self.rows,
            "tokens_per_pass": seen.pass_tokens,
        }


def watch_memory(run: RunConfig, config: dict[str, Any], engine: str, args: Any) -> MemoryWatch | None:
    """The watch of a run with the trainer's `args`; None for a model that cannot be planned, and with vLLM."""
    machine = find_machine()
    try:
        load = read_workload(run, machine, config, engine)
    except ConfigError:
        return None
    if engine == "vllm":  # torch does not count its pool
        return None
    load = replace(load, tokens_per_pass=args.tokens_per_pass or load.tokens_per_pass)
    return MemoryWatch(load, machine, min(args.rollout_rows or load.completions, load.completions))


def planned_limits(run: RunConfig, policy: Policy) -> dict[str, int]:
    """`rollout_rows`, and `tokens_per_pass` if memory allows fewer than usual: the smallest plan of all processes."""
    gathered = gather_objects(_own_limits(run, policy))
    return {name: min(limits[name] for limits in gathered if name in limits) for name in set().union(*gathered)}


def _own_limits(run: RunConfig, policy: Policy) -> dict[str, int]:
    try:
        plan = plan_vram(run, config=policy.model.config.to_dict(), engine=loaded_engine(run, policy))
    except ConfigError as error:  # left to the out-of-memory handling
        say(f"memory: {error}")
        return {}
    limits = {} if plan.engine.name in FOREIGN else {"rollout_rows": plan.rows}  # those bound their rows themselves
    if run.rloo.tokens_per_pass is None and plan.tokens_per_pass < TOKENS_PER_PASS[not plan.machine.on_cuda]:
        limits["tokens_per_pass"] = plan.tokens_per_pass
    if not plan.fits:
        say(f"memory: {plan}")
    elif plan.verdict == "tight":
        say(f"memory: {plan.sentence}")
    if plan.fits and "rollout_rows" in limits and plan.rows < plan.completions and run.rollout.rows is None:
        say(
            f"memory: {plan.rows} of the {plan.completions} completions of a rollout are generated at once, as many as "
            f"fit {plan.machine.name} (computed; rollout.rows sets it by hand)"
        )
    return limits
