"""Tasks of the library reasoning-gym: created with their options, drawn, scored.

The library takes over a second to import (sympy, numpy, matplotlib), may hang, and prints. So it is imported inside
functions and runs in separate processes: `serve` draws rows for `gym`, `rewarding.gym` scores in a `Worker`.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import importlib
import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rloo_kit.data.gym_tasks import check_task
from rloo_kit.errors import DataError, excerpt

MEMORY_LIMIT = 8 * 2**30  # bytes of address space
BUILD_LIMIT_S = 20  # to make a dataset
ROW_LIMIT_S = 5  # to draw one question: some tasks hang at one seed in thousands
MOST_LATE = 2  # questions that may take longer (they are left out), plus one for each LATE_PER drawn
LATE_PER = 500
MOST_AT_ONCE = 10_000  # rows per dataset of the library; word_ladder allows at most 20,000
LEAST_AT_ONCE = 64
DRY = 500  # draws in a row without a new question, after which a task counts as exhausted
SET_ELSEWHERE = {"seed": "data.seed", "size": "data.num_prompts"}


def make_dataset(
    task: str, options: dict[str, Any], level: int | None, options_key: str = "data.options", **where: int
) -> Any:
    """A dataset of the library for a task.

    Args:
        options: of the task; they override those of its curriculum at `level`, which override its defaults.
        options_key: the key of `options`, for errors. where: `seed` and `size`.

    Raises:
        DataError: an option that the task does not have or refuses; a level that its curriculum does not have or whose
            values the task refuses.
    """
    from reasoning_gym.factory import DATASETS

    source = f"reasoning_gym/{task}"
    make, config = DATASETS[task]
    known = {field.name: field for field in dataclasses.fields(config) if field.name not in SET_ELSEWHERE}
    for name, value in options.items():
        key = f"{options_key}.{name}"
        if name in SET_ELSEWHERE:
            raise DataError(f"{key}: set {SET_ELSEWHERE[name]} instead")
        if name not in known:
            raise DataError(f"{key}: {source} has no such option; it has {', '.join(map(_describe, known.values()))}")
        _check_type(key, known[name], value)
    tuples = {name for name in options if isinstance(_default(known[name]), tuple)}
    given = {name: tuple(value) if name in tuples else value for name, value in options.items()}
    try:
        values = {} if level is None else _of_level(task, level)
        return make(config=config(**values | given | where))
    except Exception as error:  # a task's own checks may raise anything
        if level is not None:
            _check_level(task, level, options_key)
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        listed = ", ".join(map(_describe, known.values()))
        raise DataError(f"{options_key}: {source} refuses {excerpt(options)} ({what}); it has {listed}") from None


def blamed_key(options: dict[str, Any], level: int | None, options_key: str) -> str:
    """The key to change if a task fails with these options at this level: the level's if no options are set."""
    return options_key if options or level is None else _level_key(options_key)


def _level_key(options_key: str) -> str:
    return options_key.removesuffix("options") + "curriculum_level"


def _of_level(task: str, level: int) -> dict[str, Any]:
    """The options of a level of the task's curriculum; raises any exception if it has no such level."""
    from reasoning_gym.factory import create_curriculum

    curriculum = create_curriculum(task)
    if level >= _count_levels(curriculum):
        raise ValueError(level)
    curriculum.set_global_level(level)
    found = vars(curriculum.generate_configuration())
    return {name: value for name, value in found.items() if name not in SET_ELSEWHERE}


def _count_levels(curriculum: Any) -> int:
    return max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1)


def _check_level(task: str, level: int, options_key: str) -> None:
    """Raise DataError for a level that the task does not have, or whose own values it refuses."""
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    key, (make, config) = _level_key(options_key), DATASETS[task]
    if task not in CURRICULA:
        raise DataError(f"{key} is {level}, and reasoning_gym/{task} has no curriculum; set {options_key} instead")

    def works(candidate: int) -> bool:
        try:
            make(config=config(**_of_level(task, candidate) | {"seed": 0, "size": 1}))
        except Exception:
            return False
        return True

    if not works(level):
        listed = ", ".join(
            str(candidate) for candidate in range(_count_levels(create_curriculum(task))) if works(candidate)
        )
        raise DataError(f"{key} is {level}; the levels that reasoning_gym/{task} can be made with are {listed}")


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _describe(field: Any) -> str:
    return f"{field.name} ({excerpt(_default(field), 60)})"


def _check_type(key: str, field: Any, value: Any) -> None:
    """Refuse a value of another type than the option's default: a text or a list passes many of the library's checks,
    and fails, or hangs, in the middle of the rows."""
    default = _default(field)
    if default is None or (value is None and "None" in str(field.type).replace("Optional", "None")):
        return
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
    kind = list if isinstance(default, (list, tuple)) else type(default)
    if kind is int and "float" in str(field.type):
        kind = float
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool) == isinstance(value, bool)
    if not fits and kind in words:
        found = excerpt(value)
        raise DataError(f"{key} is {found}; it takes {words[kind]}, and its default is {excerpt(default)}")


def draw(
    task: str,
    options: dict[str, Any],
    level: int | None,
    start: int,
    count: int,
    options_key: str,
    *,
    judged: bool = True,
    kills: bool = False,
) -> dict[str, Any]:
    """`count` entries with different questions (fewer if the task has no more), how many were `drawn`, and how many of
    those were left out because they took too long (`late`) or because the verifier does not score their stored answer
    1 (`wrong`).

    Item i of a dataset is drawn with its seed + i, so it equals item i - 1 of the next seed: rows use the seeds from
    `start` on, each once. Rows without a stored answer are left out too.

    Args:
        options_key: the key of `options`, for errors. judged: whether stored answers are scored. kills: whether a hang
            in C code may end this process.
    """
    importlib.import_module("reasoning_gym")  # before a time limit starts
    entries: dict[str, Any] = {}
    left_out = Counter(late=0, wrong=0)
    drawn = dry = 0
    while len(entries) < count and dry < DRY:
        size = min(max(count - len(entries), LEAST_AT_ONCE), MOST_AT_ONCE)
        try:
            with _limit(BUILD_LIMIT_S, kills):
                _seed(start + drawn)
                dataset = make_dataset(task, options, level, options_key, seed=start + drawn, size=size)
                verifier = _scorer(task, json.dumps(options), level) if judged else None
        except _Late:
            raise DataError(too_slow(task, options, level, options_key)) from None
        for index in range(size):
            try:
                with _limit(ROW_LIMIT_S, kills):
                    _seed(start + drawn)
                    entry = _entry(dataset, index, f"reasoning_gym/{task}, seed {start + drawn}", options_key)
                    if entry and verifier and _score(verifier, entry["answer"].strip(), entry) != 1:
                        entry = None
                        left_out["wrong"] += 1
            except _Late:
                entry = None
                left_out["late"] += 1
                if left_out["late"] > MOST_LATE + drawn // LATE_PER:
                    raise DataError(too_slow(task, options, level, options_key)) from None
            drawn += 1
            words = "" if entry is None else " ".join(entry["question"].split())
            dry = 0 if words and words not in entries else dry + 1
            if entry is not None:
                entries.setdefault(words, entry)
            if len(entries) == count or dry == DRY:
                break
    return {"entries": list(entries.values()), "drawn": drawn, **left_out}


def too_slow(task: str, options: dict[str, Any], level: int | None, options_key: str) -> str:
    """The error of a task whose questions take too long."""
    key = blamed_key(options, level, options_key)
    given = options or ("its defaults" if level is None else f"the values of level {level}")
    limits = f"{BUILD_LIMIT_S} s to set up or more than {ROW_LIMIT_S} s to draw one question"
    return f"{key}: reasoning_gym/{task} took more than {limits} with {given}; set smaller values, or a wider range"


def _seed(seed: int) -> None:
    """Some tasks draw from the global generators."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


class _Late(BaseException):
    """Not an Exception, because tasks catch those and retry."""


@contextlib.contextmanager
def _limit(limit_s: float, kills: bool) -> Iterator[None]:
    """Raises _Late after `limit_s`; with `kills`, ends the process soon after if Python code does not get to run."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    if kills:
        faulthandler.dump_traceback_later(limit_s + 2 * ROW_LIMIT_S, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if kills:
            faulthandler.cancel_dump_traceback_later()


def _entry(dataset: Any, index: int, where: str, options_key: str) -> dict[str, Any] | None:
    """A library entry as JSON-compatible values; None if its stored answer is empty."""
    try:
        entry = json.loads(json.dumps(dataset[index], allow_nan=False))
        if not isinstance(entry["answer"], str):
            raise ValueError(f"the stored answer is {entry['answer']!r}")
    except Exception as error:
        what = excerpt(f"{type(error).__name__}: {error}", 300)
        raise DataError(f"{where} cannot be drawn: {what}. Change {options_key}, or data.seed") from None
    return {name: entry[name] for name in ("question", "answer", "metadata")} if entry["answer"].strip() else None


@functools.cache
def _scorer(task: str, options: str, level: int | None) -> Any:
    check_task(task, "reasoning_gym")  # a row may come from a file
    return make_dataset(task, json.loads(options), level, seed=0, size=1)


def score(row: str, given: str | None) -> float | None:
    """The score in [0, 1] that the task's verifier gives an answer; 0.0 if it raises or does not return a number.

    Args:
        row: the column `reasoning_gym` of the question's row. given: None only creates the verifier, which may be slow.

    Raises:
        DataError: a task that is not offered, or cannot be created with its options.
    """
    found = json.loads(row)
    verifier = _scorer(found["task"], json.dumps(found["options"]), found["level"])
    return None if given is None else _score(verifier, given, found["entry"])


def _score(verifier: Any, given: str, entry: dict[str, Any]) -> float:
    try:
        value = float(verifier.score_answer(given, entry))
    except (KeyboardInterrupt, _Late):
        raise
    except BaseException:  # verifiers assume that an answer has the requested form; SystemExit is not an Exception
        return 0.0
    return min(max(value, 0.0), 1.0) if value == value else 0.0


def serve() -> None:
    """Answer one request: the arguments of `draw` as JSON on standard input, its result or `error` on standard
    output; what the library prints goes to standard error."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.suppress(ImportError, ValueError, OSError):  # options may ask for all the memory there is
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.RLIM_INFINITY))
    request = json.load(sys.stdin)
    try:
        result = draw(**request, kills=True)
    except DataError as error:
        result = {"error": str(error)}
    with reply:
        json.dump(result, reply)
