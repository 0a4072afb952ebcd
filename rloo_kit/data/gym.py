"""Rows of `reasoning_gym/TASK`: questions that reasoning-gym generates by seed, with the data to score them."""

import functools
import json
import os
import subprocess
import sys
from random import Random
from typing import Any

from rloo_kit.config.checks import GYM_PREFIX
from rloo_kit.data.columns import DataSource
from rloo_kit.data.gym_library import ROW_LIMIT_S, blamed_key, too_slow
from rloo_kit.data.gym_tasks import check_task
from rloo_kit.errors import DataError, SetupError
from rloo_kit.system.marked import module_path, starting_folder
from rloo_kit.system.versions import is_importable

GYM_COLUMN = "reasoning_gym"  # JSON text: task, options, level, and the library's entry
GYM_PROMPTS, GYM_TEST_PROMPTS = 2000, 200  # defaults: if data.num_prompts is null; if data.test_size is a share
MOST_PROMPTS = 100_000
BLOCK = 2**20  # seeds reserved for each source of a run
INSTALL = "run make reasoning-gym, or pip install 'rloo-kit[reasoning-gym]' (one of its packages needs a C compiler)"

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from rloo_kit.data.gym_library import serve; serve()"


def is_gym(source: str) -> bool:
    """Whether a source is a task of reasoning-gym."""
    return source.startswith(GYM_PREFIX)


def require_library(key: str) -> None:
    """Raise SetupError with the install command if the library is missing; `key` is the key that needs it."""
    if not is_importable("reasoning_gym"):
        raise SetupError(f"{key} needs the library reasoning-gym, which is not installed: {INSTALL}")


def first_seed(seed: int, number: int) -> int:
    """The first of the BLOCK seeds of source `number` of a run with `data.seed`; 0 is the test source.

    Blocks do not overlap. Seeds are below 2**32, numpy's limit.
    """
    return Random(f"reasoning-gym-{seed}").randrange(2**31) + number * BLOCK


def read_gym(
    source: str,
    options: dict[str, Any] | None,
    level: int | None,
    count: int,
    start: int,
    key: str,
    count_key: str,
    options_key: str = "data.options",
) -> DataSource:
    """`count` rows with different questions; if the task has fewer, all and a note, or with `count_key` an error.

    Args:
        source: reasoning_gym/TASK. options, level: as `data.options` and `data.curriculum_level`.
        count: at most MOST_PROMPTS. start: from `first_seed`. key, count_key, options_key: the keys of the
            source, `count` and the options, for errors; `count_key` is empty if `count` is a default.

    Raises:
        DataError: a task that does not exist or is refused; options or a level that it does not have; rows that cannot
            be drawn. SetupError: the library is not installed.
    """
    task, options = source.removeprefix(GYM_PREFIX), options or {}
    check_task(task, key)
    require_library(f"{key}: {source}")
    if count > MOST_PROMPTS:
        wanted = count_key or "data.num_prompts"
        raise DataError(f"{wanted} asks for {count} prompts of {source}; at most {MOST_PROMPTS} are drawn: lower it")
    asked = {"task": task, "options": options, "level": level}
    found = _draw(json.dumps(asked | {"start": start, "count": count, "options_key": options_key}), key)
    entries = found["entries"]
    few = f"{source} gave {len(entries)} different questions in {found['drawn']} draws; {count} were requested"
    left_out = {
        "late": f"questions that took more than {ROW_LIMIT_S} s to draw",
        "wrong": "questions whose stored answer the verifier does not score 1",
    }
    notes = [f"{source}: {found[name]} {what} are left out" for name, what in left_out.items() if found[name]]
    if len(entries) < count:
        other = f"another {blamed_key(options, level, options_key)}"
        if not entries:
            raise DataError(f"{key}: {'; '.join([few, *notes])}. Set {other}")
        if count_key:
            raise DataError(f"{'; '.join([few, *notes])}. Set {count_key}={len(entries)} or lower, or {other}")
        notes.insert(0, few)
    return DataSource(
        name=source,
        prompts=[entry["question"] for entry in entries],
        answers=[entry["answer"] for entry in entries],
        others={GYM_COLUMN: [json.dumps(asked | {"entry": entry}) for entry in entries]},
        places=[f"question {number}" for number in range(1, len(entries) + 1)],
        notes=tuple(notes),
        rows_left=len(entries) == count,
    )


@functools.lru_cache(maxsize=16)  # a run reads its data before and after loading the model
def _draw(request: str, key: str) -> dict[str, Any]:
    """`gym_library.draw` in a separate process: it may hang, and set order must be the same in every run."""
    asked = json.loads(request)
    done = subprocess.run(
        [sys.executable, "-c", _BOOT, *module_path()],
        input=request,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"PYTHONHASHSEED": "0"},
        cwd=starting_folder(),
        check=False,
    )
    source = f"{GYM_PREFIX}{asked['task']}"
    if done.stderr.startswith("Timeout (") or "\nTimeout (" in done.stderr:  # faulthandler ended it
        raise DataError(too_slow(asked["task"], asked["options"], asked["level"], asked["options_key"]))
    try:
        found = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DataError(f"{key}: {source} cannot be drawn: {lines[-1]}. If the library is broken, {INSTALL}") from None
    if "error" in found:
        raise DataError(found["error"])
    return found
