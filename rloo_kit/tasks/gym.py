"""Tasks of the library reasoning-gym (`reasoning_gym/TASK`): which are offered, rows drawn by seed, scores.

The library takes over a second to import (sympy, numpy, matplotlib), may hang, and prints. So it is imported inside
functions, and a `Worker` calls those: `read_gym` draws rows with one, `graders.verifier` scores with another.
"""

import difflib
import functools
import importlib
import json
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from rloo_kit.config.checks import GYM_PREFIX
from rloo_kit.config.run import RunConfig
from rloo_kit.data.sources import DataSource, Part
from rloo_kit.errors import DataError, RewardError, SetupError, excerpt
from rloo_kit.system.isolation import Worker, worker_environment
from rloo_kit.system.versions import is_importable

# Of reasoning-gym 0.1.25 those tasks are offered whose verifier scores the stored answer 1 and nonsense 0, measured on
# 60 rows of each (`benchmarks/results/gym_tasks.json`); `tests/data/test_gym_tasks.py` scores them again.
_TASKS = json.loads(Path(__file__).with_name("gym_tasks.json").read_text(encoding="utf-8"))
SOUND: tuple[str, ...] = tuple(_TASKS["offered"])
REFUSED: dict[str, str] = _TASKS["refused"]
GYM_COLUMN = "reasoning_gym"  # JSON text: task, options, and the library's entry
MOST_PROMPTS = 100_000
FIRST_SEED = random.Random("reasoning-gym-0").randrange(2**31)  # of the test source, whose number is 0
BLOCK = 2**20  # seeds reserved for each source of a run
MOST_AT_ONCE = 10_000  # rows per dataset of the library; word_ladder allows at most 20,000
LEAST_AT_ONCE = 64
PER_CALL = 500  # of them per reply of its process
DRY = 500  # draws in a row without a new question, after which a task counts as exhausted
CALL_LIMIT_S = 900.0  # for PER_CALL questions, with the start of the process
BUILD_LIMIT_S = 20.0  # to make a dataset
ROW_LIMIT_S = 5.0  # to draw one question: some tasks hang at one seed in thousands
MOST_LATE = 2  # questions of PER_CALL that may take longer and are left out
NOT_SET = {"seed": "remove it; the kit draws from seeds of its own", "size": "set data.num_prompts instead"}
INSTALL = "run make reasoning-gym, or pip install 'rloo-kit[reasoning-gym]' (one of its packages needs a C compiler)"


def check_task(task: str, key: str) -> None:
    """Raise DataError for a task that does not exist or is refused; `key` names it in the configuration."""
    if task not in SOUND:
        near = f"the nearest: {', '.join(difflib.get_close_matches(task, SOUND, n=3, cutoff=0.0))}"
        if why := REFUSED.get(task):
            raise DataError(f"{key}: {GYM_PREFIX}{task} is refused: {why}. docs/data.md lists the tasks; {near}")
        raise DataError(f"{key}: reasoning-gym has no task '{task}'; {near}. docs/data.md lists those refused")


def require_library(key: str) -> None:
    """Raise SetupError with the install command if the library is missing; `key` is the key that needs it."""
    if not is_importable("reasoning_gym"):
        raise SetupError(f"{key} needs the library reasoning-gym, which is not installed: {INSTALL}")


def read_source(run: RunConfig, part: Part, thinking: bool) -> DataSource:
    """The rows of a source `reasoning_gym/TASK` of a run."""
    return read_gym(part, FIRST_SEED + part.number * BLOCK)


def read_gym(part: Part, start: int) -> DataSource:
    """`part.count` rows (at most MOST_PROMPTS) of the task reasoning_gym/TASK, drawn from the seed `start` on,
    with different questions; if the task has fewer, all and a note, or with `count_key` an error.
    Raises DataError for a task that does not exist or is refused, for options that it does not have, and if rows cannot
    be drawn; SetupError without the library."""
    source, key, count, count_key = part.source, part.key, part.count, part.count_key
    task, options = source.removeprefix(GYM_PREFIX), part.options or {}
    check_task(task, key)
    require_library(f"{key}: {source}")
    if count > MOST_PROMPTS:
        wanted = count_key or "data.num_prompts"
        raise DataError(f"{wanted} asks for {count} prompts of {source}; at most {MOST_PROMPTS} are drawn: lower it")
    try:
        entries, drawn, left_out = _draw(task, json.dumps(options), part.options_key, start, count)
    except RewardError as error:
        raise DataError(f"{key}: {source} cannot be drawn: {error}. If the library is broken, {INSTALL}") from None
    few = f"{source} gave {len(entries)} different questions in {drawn} draws; {count} were requested"
    notes = [f"{source}: {number} questions {why} are left out" for why, number in left_out.items() if number]
    if len(entries) < count:
        if not entries:
            raise DataError(f"{key}: {'; '.join([few, *notes])}. Set another {part.options_key}")
        if count_key:
            fix = f"Set {count_key}={len(entries)} or lower, or another {part.options_key}"
            raise DataError(f"{'; '.join([few, *notes])}. {fix}")
        notes.insert(0, few)
    asked = {"task": task, "options": options}
    return DataSource(
        name=source,
        prompts=[entry["question"] for entry in entries],
        answers=[entry["answer"] for entry in entries],
        others={GYM_COLUMN: [json.dumps(asked | {"entry": entry}) for entry in entries]},
        places=[f"question {number}" for number in range(1, len(entries) + 1)],
        notes=tuple(notes),
    )


def _draw(
    task: str, options: str, options_key: str, start: int, count: int
) -> tuple[list[dict[str, Any]], int, dict[str, int]]:
    """`count` entries with different questions, fewer if the task has no more; how many were drawn; how many of those
    were left out, by the reason.

    They come from a process of their own: the order of sets must be the same in every run. Item i of a dataset is drawn
    with its seed + i, so it equals item i - 1 of the next seed: rows use the seeds from `start` on, each once. Rows
    without a stored answer are left out too."""
    late, wrong = f"that took more than {ROW_LIMIT_S:g} s to draw", "whose stored answer the verifier does not score 1"
    left_out = {late: 0, wrong: 0}
    entries: dict[str, dict[str, Any]] = {}  # by the words of the question
    drawn = dry = 0
    limits = BUILD_LIMIT_S, ROW_LIMIT_S
    with closing(Worker("its process", worker_environment() | {"PYTHONHASHSEED": "0"})) as worker:
        while len(entries) < count and dry < DRY:
            size = min(max(count - len(entries), LEAST_AT_ONCE), MOST_AT_ONCE)
            asked = task, options, options_key, start + drawn, size, *limits
            calls = (
                worker.call(draw_rows, *asked, first, timeout_s=CALL_LIMIT_S) for first in range(0, size, PER_CALL)
            )
            for entry, is_late, is_sound in chain.from_iterable(calls):
                left_out[late] += is_late
                left_out[wrong] += not is_sound
                drawn, dry = drawn + 1, dry + 1
                if entry is not None and is_sound and (words := " ".join(entry["question"].split())) not in entries:
                    entries[words], dry = entry, 0
                if len(entries) == count or dry == DRY:
                    break
    return list(entries.values()), drawn, left_out


# ---- in a process of their own


def load_library() -> None:
    """Import the library, before a time limit for anything else counts."""
    importlib.import_module("reasoning_gym.factory")


class _Late(BaseException):
    """Raised in a task that takes too long; none of them catches it."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def make_dataset(task: str, options: dict[str, Any], options_key: str = "data.options", **where: int) -> Any:
    """A dataset of the library for a task; `options` override its defaults; `where`: `seed` and `size`. Raises
    DataError for an option that the task does not have or refuses."""
    from reasoning_gym.factory import DATASETS

    source, (make, config) = f"{GYM_PREFIX}{task}", DATASETS[task]
    defaults = {name: value for name, value in vars(config()).items() if name not in NOT_SET}
    types = {field.name: str(field.type) for field in fields(config)}
    has = f"it has {', '.join(f'{name} ({excerpt(value, 60)})' for name, value in defaults.items())}"
    chosen = {}
    for name, value in options.items():
        if name in NOT_SET:
            raise DataError(f"{options_key}.{name}: {NOT_SET[name]}")
        if name not in defaults:
            raise DataError(f"{options_key}.{name}: {source} has no such option; {has}")
        _check_type(f"{options_key}.{name}", types[name], defaults[name], value)
        chosen[name] = tuple(value) if isinstance(defaults[name], tuple) else value
    try:
        return make(config=config(**chosen | where))
    except Exception as error:  # a task's own checks may raise anything
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise DataError(f"{options_key}: {source} refuses {excerpt(options)} ({reason}); {has}") from None


def _check_type(key: str, declared: str, default: Any, value: Any) -> None:
    """Refuse a value of another type than the option's default: a text or a list passes many of the library's checks,
    and fails, or hangs, in the middle of the rows."""
    if default is None or (value is None and ("None" in declared or "Optional" in declared)):
        return
    kind = list if isinstance(default, (list, tuple)) else type(default)
    kind = float if kind is int and "float" in declared else kind
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool) == isinstance(value, bool)
    if not fits and kind in words:
        raise DataError(f"{key} is {excerpt(value)}; it takes {words[kind]}, and its default is {excerpt(default)}")


@functools.lru_cache(maxsize=1)
def _open(task: str, options: str, options_key: str, seed: int, size: int) -> Any:
    """The dataset of several calls, which may take seconds to make."""
    _seed(seed)
    return make_dataset(task, json.loads(options), options_key, seed=seed, size=size)


def draw_rows(
    task: str,
    options: str,
    options_key: str,
    seed: int,
    size: int,
    build_limit_s: float,
    row_limit_s: float,
    first: int,
) -> list[tuple[dict[str, Any] | None, bool, bool]]:
    """PER_CALL items, from `first` on, of the library's dataset with that seed and size: question, answer and metadata
    in JSON's types (None if the stored answer is empty, or the item took longer than `row_limit_s`); whether it took
    longer; whether the verifier scores the stored answer 1. Raises DataError as `make_dataset`, if that takes longer
    than `build_limit_s` or more than MOST_LATE items took longer, and if an item cannot be drawn."""
    load_library()
    rows: list[tuple[dict[str, Any] | None, bool, bool]] = []
    try:
        with _time_limit(build_limit_s):
            dataset = _open(task, options, options_key, seed, size)
            verifier = _make_verifier(task, options)
        for index in range(first, min(first + PER_CALL, size)):
            _seed(seed + index)
            try:
                with _time_limit(row_limit_s):
                    rows.append(_draw_row(dataset, verifier, index))
            except _Late:
                rows.append((None, True, True))
                if sum(is_late for _, is_late, _ in rows) > MOST_LATE:
                    raise
            except Exception as error:
                reason = excerpt(f"{type(error).__name__}: {error}", 300)
                where = f"{GYM_PREFIX}{task}, seed {seed + index}"
                raise DataError(f"{where} cannot be drawn: {reason}. Change {options_key}") from None
    except _Late:
        limits = f"{build_limit_s:g} s to set up or more than {row_limit_s:g} s to draw one question"
        values = json.loads(options) or "its defaults"
        fix = "set smaller values, or a wider range"
        raise DataError(f"{options_key}: {GYM_PREFIX}{task} took more than {limits} with {values}; {fix}") from None
    return rows


def _draw_row(dataset: Any, verifier: Any, index: int) -> tuple[dict[str, Any] | None, bool, bool]:
    entry = json.loads(json.dumps(dataset[index], allow_nan=False))
    if not isinstance(entry["answer"], str):
        raise ValueError(f"the stored answer is {entry['answer']!r}")
    if not (answer := entry["answer"].strip()):
        return None, False, True
    chosen = {name: entry[name] for name in ("question", "answer", "metadata")}
    return chosen, False, _score(verifier, answer, entry) == 1


def _seed(seed: int) -> None:
    """Some tasks draw from the global generators."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@functools.cache
def _make_verifier(task: str, options: str) -> Any:
    check_task(task, "reasoning_gym")  # a row may come from a file
    return make_dataset(task, json.loads(options), seed=0, size=1)


def score(row: str, given: str | None) -> float | None:
    """The score in [0, 1] that the task's verifier gives an answer to a row with this column `reasoning_gym`; 0.0 if it
    raises or does not return a number. Without an answer it only creates the verifier, which may be slow. Raises
    DataError for a task that is not offered, or cannot be created with its options."""
    stored = json.loads(row)
    verifier = _make_verifier(stored["task"], json.dumps(stored["options"]))
    return None if given is None else _score(verifier, given, stored["entry"])


def _score(verifier: Any, answer: str, entry: dict[str, Any]) -> float:
    try:
        value = float(verifier.score_answer(answer, entry))
    except (KeyboardInterrupt, _Late):
        raise
    except BaseException:  # verifiers assume that an answer has the requested form; SystemExit is not an Exception
        return 0.0
    return min(max(value, 0.0), 1.0) if value == value else 0.0
