"""Measured peaks of runs on this machine, which correct the next plan. They are in `memory.json` of the kit's cache
(RLOO_KIT_MEMORY names another file).

An entry has the inputs of the arithmetic with the lengths that the run reached, so that today's formulas apply to it.
"""

import functools
import math
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rloo_kit.errors import RlooKitError
from rloo_kit.plan.parts import Load, context_bytes
from rloo_kit.plan.peaks import rollout_gib, training_gib
from rloo_kit.plan.result import Machine
from rloo_kit.plan.shapes import ModelShape
from rloo_kit.runs.files import now, read_json, write_json
from rloo_kit.system.environment import cache_folder
from rloo_kit.system.gpu import GIB

VARIABLE = "RLOO_KIT_MEMORY"
KEPT = 50  # entries, the newest
BOUNDS = 0.25, 4.0  # of a factor; beyond them an entry is damaged or includes another program's memory


@dataclass(frozen=True)
class PastRun:
    """The peak of a run in GiB: `measured_gib` includes CUDA's context; `spare_gib` is reserved but unused.

    Attributes:
        load: with the longest prompt, completion and pass of the run. rows: completions at once.
    """

    machine: str
    date: str
    load: Load
    rows: int
    measured_gib: float
    spare_gib: float = 0.0

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
    def factor(self) -> float:
        """The ratio without the context, which does not vary with the run: the factor in `Load.factors`."""
        context = context_bytes(self.load) / GIB
        return (self.measured_gib - context) / (self.computed_gib - context)

    @property
    def _computed(self) -> tuple[float, float]:
        plain = replace(self.load, factors=(1.0, 1.0))
        return rollout_gib(plain, self.rows), training_gib(plain, self.rows)


def machine_key(machine: Machine) -> str:
    """A GPU's name and memory; without a GPU the machine's name."""
    return f"{machine.name}, {machine.total_gib:.0f} GiB" if machine.on_cuda else f"{platform.node()}, CPU"


def past_runs(machine: Machine, load: Load) -> list[PastRun]:
    """Runs on this machine with the same model, backend, engine and checkpointing, oldest first."""
    if not machine.is_here:
        return []
    key, wanted = machine_key(machine), _identity(load)
    return [run for run in _read_all() if run.machine == key and _identity(run.load) == wanted]


def keep_run(machine: Machine, load: Load, rows: int, measured_gib: float, spare_gib: float) -> None:
    """Add an entry; if the cache cannot be written, print a line on stderr."""
    try:
        added = PastRun(machine_key(machine), now(), load, rows, measured_gib, spare_gib)
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, [asdict(run) for run in [*_read_all(), added][-KEPT:]])
    except (OSError, RlooKitError) as error:
        _warn(f"the measured peak is not kept for the next plan: {error}. Set {VARIABLE} to a writable file")


def _file() -> Path:
    chosen = os.environ.get(VARIABLE)
    return Path(chosen).expanduser() if chosen else cache_folder() / "memory.json"


def _identity(load: Load) -> tuple[Any, ...]:
    shape = replace(load.shape, source="", kept=())
    return shape, load.four_bit, load.lora_rank is None, load.fused, load.engine, load.checkpointing, load.on_cuda


def _read_all() -> list[PastRun]:
    file = _file()
    found = read_json(file)
    if not isinstance(found, list):
        if file.is_file():
            _warn(f"{file} is damaged and counts as empty; delete it")
        return []
    return list(_read_entries(found))


def _read_entries(found: list[Any]) -> Iterator[PastRun]:
    """The readable entries; those of another version may have other fields."""
    for entry in found:
        try:
            load = dict(entry["load"])
            shape = load["shape"] | {"kept": tuple(load["shape"]["kept"])}
            listed = {name: tuple(load[name]) for name in ("lora_targets", "factors")}
            run = PastRun(**entry | {"load": Load(**load | listed | {"shape": ModelShape(**shape)})})
            if math.isfinite(run.spare_gib) and BOUNDS[0] <= run.factor <= BOUNDS[1]:
                yield run
        except (TypeError, KeyError, ValueError, ArithmeticError, AttributeError):
            continue


@functools.cache
def _warn(text: str) -> None:
    """Warn once per text, since a plan reads the file several times."""
    print(f"memory: {text}", file=sys.stderr)
