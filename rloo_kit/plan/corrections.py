"""By how much peaks measured on a GPU exceeded computed ones: `corrections.json`, written by `make gpu-report`."""

import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("corrections.json")


@functools.cache
def load_corrections() -> dict[str, Any]:
    """`source`: the GPU and the day, empty where nothing was measured. `factors`: by "BACKEND PART", 1 or more."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def correction(backend: str, part: str) -> float:
    """What a computed peak on a GPU is multiplied by, 1 where nothing was measured.

    Args:
        backend: "unsloth" or "transformers". part: "rollout" or "training".
    """
    return float(load_corrections()["factors"].get(f"{backend} {part}", 1.0))
