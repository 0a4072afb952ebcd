"""Ratios of measured to computed peaks of a GPU, from `corrections.json`, which `make gpu-report` writes."""

import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("corrections.json")
PARTS = "rollout", "training"
# The most by which a measured peak exceeded its computed one in benchmarks/results/plan_calibration.json (a test
# compares): the possible error of a plan.
UNMEASURED = 0.1


@functools.cache
def load_corrections() -> dict[str, Any]:
    """`source`: the GPU and the day, empty if nothing was measured. `factors`: by "BACKEND PART", 1 or more."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def find_factors(on_cuda: bool, fused: bool) -> tuple[float, float]:
    """Factors of the computed peaks of rollout and training; 1 without a GPU. `fused`: of Unsloth."""
    if not on_cuda:
        return 1.0, 1.0
    backend = "unsloth" if fused else "transformers"
    rollout, training = (float(load_corrections()["factors"].get(f"{backend} {part}", 1.0)) for part in PARTS)
    return rollout, training
