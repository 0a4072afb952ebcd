"""Ratios of measured to computed peaks, from runs on this machine or else from `corrections.json`, which
`make gpu-report` writes."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.plan.history import past_runs
from rloo_kit.plan.parts import Load
from rloo_kit.plan.result import Machine

FILE = Path(__file__).with_name("corrections.json")
PARTS = "rollout", "training"
NEAR = 0.9  # share of the planned length; a shorter run may raise a plan but not lower it
# The most by which a measured peak exceeded its computed one in benchmarks/results/plan_calibration.json (a test
# compares): the possible error of a plan if nothing was measured.
UNMEASURED = 0.1


@dataclass(frozen=True)
class Correction:
    """Factors of the computed peaks, and the remaining uncertainty.

    Attributes:
        factors: of the rollout and of training. sources: where each was measured; empty if not measured.
        unmeasured: share of the peak by which a measurement may exceed it.
        spare_gib: reserved but unused by torch's allocator, in the last run of this model here.
    """

    factors: tuple[float, float]
    sources: tuple[str, str]
    unmeasured: float
    spare_gib: float


@functools.cache
def load_corrections() -> dict[str, Any]:
    """`source`: the GPU and the day, empty if nothing was measured. `factors`: by "BACKEND PART", 1 or more."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def find_correction(machine: Machine, load: Load) -> Correction:
    """The correction for `load`; measurements on this machine override those that ship with the kit."""
    runs = past_runs(machine, load)
    shipped: dict[str, Any] = load_corrections() if load.on_cuda else {"source": "", "factors": {}}
    backend = "unsloth" if load.fused else "transformers"
    factors, sources = [], []
    for part in PARTS:
        own = [run for run in runs if run.part == part]
        found = [run.factor if run.load.row_tokens >= NEAR * load.row_tokens else max(run.factor, 1.0) for run in own]
        factors.append(max(found) if own else float(shipped["factors"].get(f"{backend} {part}", 1.0)))
        sources.append(f"this machine, {own[-1].date[:10]}" if own else shipped["source"])
    seen = max((run.load.row_tokens for run in runs), default=0)
    unmeasured = UNMEASURED * max(0.0, 1 - seen / load.row_tokens)
    spare = runs[-1].spare_gib if runs else 0.0
    return Correction((factors[0], factors[1]), (sources[0], sources[1]), unmeasured, spare)
