"""Which tasks of reasoning-gym 0.1.25 are offered: those whose verifier scores the stored answer 1 and nonsense 0.

Measured on 60 rows of each task (`benchmarks/results/gym_tasks.json`); `tests/data/test_gym_tasks.py` scores those
that are offered again.
"""

import difflib
import json
from pathlib import Path

from rloo_kit.config.checks import GYM_PREFIX
from rloo_kit.errors import DataError

_TASKS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SOUND: tuple[str, ...] = tuple(_TASKS["offered"])
REFUSED: dict[str, str] = _TASKS["refused"]


def check_task(task: str, key: str) -> None:
    """Raise DataError for a task that does not exist or is refused; `key` names it in the configuration."""
    if task in SOUND:
        return
    if task in REFUSED:
        raise DataError(
            f"{key}: {GYM_PREFIX}{task} is refused: {REFUSED[task]}. docs/data.md lists the tasks; {_nearest(task)}"
        )
    raise DataError(f"{key}: reasoning-gym has no task '{task}'; {_nearest(task)}. docs/data.md lists those refused")


def _nearest(task: str) -> str:
    found = difflib.get_close_matches(task, SOUND, n=3, cutoff=0.4)
    return f"the nearest: {', '.join(found)}" if found else f"there are {', '.join(SOUND)}"
