"""Tasks of the library reasoning-gym (`reasoning_gym/TASK`): which are offered, rows drawn by seed, scores.

The library takes over a second to import (sympy, numpy, matplotlib), may hang, and prints. So it is imported inside
functions, and a `Worker` calls those: `read_gym` draws rows with one, `graders.verifier` scores with another.
"""

import difflib
import functools
import importlib
import json
import random
import sys
from contextlib import closing, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from rloo_kit.config.checks import GYM_PREFIX
from rloo_kit.config.run import RunConfig
from rloo_kit.data.sources import DataSource, Part
from rloo_kit.errors import DataError, RewardError, SetupError, excerpt
from rloo_kit.system.isolation import LateError, Worker, worker_environment
from rloo_kit.system.versions import is_importable

# Of reasoning-gym 0.1.25 those tasks are offered whose verifier scores the stored answer 1 and nonsense 0, measured on
# 60 rows of each (`benchmarks/results/gym_tasks.json`); `tests/data/test_gym_tasks.py` scores them again.
_TASKS = json.loads(Path(__file__).with_name("gym_tasks.json").read_text(encoding="utf-8"))
SOUND: tuple[str, ...] = tuple(_TASKS["offered"])
REFUSED: dict[str, str] = _TASKS["refused"]
GYM_COLUMN = "reasoning_gym"  # JSON text: task, options, level, and the library's entry
MOST_PROMPTS = 100_000
BLOCK = 2**20  # seeds reserved for each source of a run
MOST_AT_ONCE = 10_000  # rows per dataset of the library; word_ladder allows at most 20,000
LEAST_AT_ONCE = 64
DRY = 500  # draws in a row without a new question, after which a task counts as exhausted
LOAD_LIMIT_S = 120.0  # to start the process and load the library
BUILD_LIMIT_S = 20.0  # to make a dataset
ROW_LIMIT_S = 5.0  # to draw one question: some tasks hang at one seed in thousands
MOST_LATE, LATE_PER = 2, 500  # questions that may take longer and are left out: 2, and one more for each 500 drawn
MEMORY_LIMIT = 8 * 2**30  # bytes of address space: options may ask for all the memory there is
SET_ELSEWHERE = {"seed": "data.seed", "size": "data.num_prompts"}
INSTALL = "run make reasoning-gym, or pip install 'rloo-kit[reasoning-gym]' (one of its packages needs a C compiler)"


def check_task(task: str, key: str) -> None:
    """Raise DataError for a task that does not exist or is refused; `key` names it in the configuration."""
    if task not in SOUND:
        nearest = difflib.get_close_matches(task, SOUND, n=3, cutoff=0.4)
        near = f"the nearest: {', '.join(nearest)}" if nearest else f"there are {', '.join(SOUND)}"
        if why := REFUSED.get(task):
            raise DataError(f"{key}: {GYM_PREFIX}{task} is refused: {why}. docs/data.md lists the tasks; {near}")
        raise DataError(f"{key}: reasoning-gym has no task '{task}'; {near}. docs/data.md lists those refused")


def require_library(key: str) -> None:
    """Raise SetupError with the install command if the library is missing; `key` is the key that needs it."""
    if not is_importable("reasoning_gym"):
        raise SetupError(f"{key} needs the library reasoning-gym, which is not installed: {INSTALL}")


def first_seed(seed: int, number: int) -> int:
    """The first of the BLOCK seeds of source `number` of a run with `data.seed`; 0 is the test source.

    Blocks do not overlap. Seeds are below 2**32, numpy's limit.
    """
    return random.Random(f"reasoning-gym-{seed}").randrange(2**31) + number * BLOCK


def read_source(run: RunConfig, part: Part, thinking: bool) -> DataSource:
    """The rows of a source `reasoning_gym/TASK` of a run."""
    return read_gym(part, first_seed(run.data.seed, part.number))


def read_gym(part: Part, start: int) -> DataSource:
    """`part.count` rows (at most MOST_PROMPTS) of the task reasoning_gym/TASK, drawn from the seed `start` on
    (`first_seed`), with different questions; if the task has fewer, all and a note, or with `count_key` an error.
    Raises DataError for a task that does not exist or is refused, for options or a level that it does not have, and if
    rows cannot be drawn; SetupError without the library."""
    source, key, count, count_key, level = part.source, part.key, part.count, part.count_key, part.level
    task, options = source.removeprefix(GYM_PREFIX), part.options or {}
    check_task(task, key)
    require_library(f"{key}: {source}")
    if count > MOST_PROMPTS:
        wanted = count_key or "data.num_prompts"
        raise DataError(f"{wanted} asks for {count} prompts of {source}; at most {MOST_PROMPTS} are drawn: lower it")
    blamed = part.options_key if options or level is None else _level_key(part.options_key)
    try:
        entries, drawn, left_out = _draw(task, json.dumps(options), level, part.options_key, start, count)
    except LateError:
        settings = options or ("its defaults" if level is None else f"the values of level {level}")
        limits = f"{BUILD_LIMIT_S:g} s to set up or more than {ROW_LIMIT_S:g} s to draw one question"
        fix = "set smaller values, or a wider range"
        raise DataError(f"{blamed}: {source} took more than {limits} with {settings}; {fix}") from None
    except RewardError as error:
        raise DataError(f"{key}: {source} cannot be drawn: {error}. If the library is broken, {INSTALL}") from None
    few = f"{source} gave {len(entries)} different questions in {drawn} draws; {count} were requested"
    notes = [f"{source}: {number} questions {why} are left out" for why, number in left_out.items() if number]
    if len(entries) < count:
        if not entries:
            raise DataError(f"{key}: {'; '.join([few, *notes])}. Set another {blamed}")
        if count_key:
            fix = f"Set {count_key}={len(entries)} or lower, or another {blamed}"
            raise DataError(f"{'; '.join([few, *notes])}. {fix}")
        notes.insert(0, few)
    asked = {"task": task, "options": options, "level": level}
    return DataSource(
        name=source,
        prompts=[entry["question"] for entry in entries],
        answers=[entry["answer"] for entry in entries],
        others={GYM_COLUMN: [json.dumps(asked | {"entry": entry}) for entry in entries]},
        places=[f"question {number}" for number in range(1, len(entries) + 1)],
        notes=tuple(notes),
        rows_left=len(entries) == count,
    )


def _draw(
    task: str, options: str, level: int | None, options_key: str, start: int, count: int
) -> tuple[list[dict[str, Any]], int, dict[str, int]]:
    """`count` entries with different questions, fewer if the task has no more; how many were drawn; how many of those
    were left out, by the reason.

    They come from a process of their own: the library may hang, and the order of sets must be the same in every run.
    Item i of a dataset is drawn with its seed + i, so it equals item i - 1 of the next seed: rows use the seeds from
    `start` on, each once. Rows without a stored answer are left out too."""
    late, wrong = f"that took more than {ROW_LIMIT_S:g} s to draw", "whose stored answer the verifier does not score 1"
    left_out = {late: 0, wrong: 0}
    entries: dict[str, dict[str, Any]] = {}  # by the words of the question
    drawn = dry = 0
    with closing(Worker("its process", worker_environment() | {"PYTHONHASHSEED": "0"})) as worker:
        while len(entries) < count and dry < DRY:
            size = min(max(count - len(entries), LEAST_AT_ONCE), MOST_AT_ONCE)
            dataset = task, options, level, options_key, start + drawn, size
            for index in range(size):
                if index == 0 or not worker.running:
                    worker.call(load_library, True, timeout_s=LOAD_LIMIT_S)
                    worker.call(draw_row, *dataset, None, timeout_s=BUILD_LIMIT_S)
                entry, is_sound = None, True
                try:
                    entry, is_sound = worker.call(draw_row, *dataset, index, timeout_s=ROW_LIMIT_S, restart=False)
                except LateError:
                    left_out[late] += 1
                    if left_out[late] > MOST_LATE + drawn // LATE_PER:
                        raise
                left_out[wrong] += not is_sound
                drawn, dry = drawn + 1, dry + 1
                if entry is not None and is_sound and (words := " ".join(entry["question"].split())) not in entries:
                    entries[words], dry = entry, 0
                if len(entries) == count or dry == DRY:
                    break
    return list(entries.values()), drawn, left_out


# ---- in a process of their own


def load_library(limit_memory: bool = False) -> None:
    """Import the library, before a time limit for anything else counts."""
    if limit_memory:
        with suppress(ImportError, ValueError, OSError):
            import resource

            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            soft = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    importlib.import_module("reasoning_gym.factory")


def make_dataset(
    task: str, options: dict[str, Any], level: int | None, options_key: str = "data.options", **where: int
) -> Any:
    """A dataset of the library for a task; `options` override those of its curriculum at `level`, which override its
    defaults; `where`: `seed` and `size`. Raises DataError for an option that the task does not have or refuses, and
    for a level that its curriculum does not have or whose values the task refuses."""
    from reasoning_gym.factory import DATASETS

    source, (make, config) = f"{GYM_PREFIX}{task}", DATASETS[task]
    defaults = {name: value for name, value in vars(config()).items() if name not in SET_ELSEWHERE}
    types = {field.name: str(field.type) for field in fields(config)}
    has = f"it has {', '.join(f'{name} ({excerpt(value, 60)})' for name, value in defaults.items())}"
    chosen = {}
    for name, value in options.items():
        if name in SET_ELSEWHERE:
            raise DataError(f"{options_key}.{name}: set {SET_ELSEWHERE[name]} instead")
        if name not in defaults:
            raise DataError(f"{options_key}.{name}: {source} has no such option; {has}")
        _check_type(f"{options_key}.{name}", types[name], defaults[name], value)
        chosen[name] = tuple(value) if isinstance(defaults[name], tuple) else value
    values = {} if level is None else _read_level(task, level, options_key)
    try:
        return make(config=config(**values | chosen | where))
    except Exception as error:  # a task's own checks may raise anything
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
    if values:
        try:
            make(config=config(**values | where))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            problem = f"{_level_key(options_key)} is {level}, and {source} refuses the values of that level ({reason})"
            raise DataError(f"{problem}; set another, or {options_key} instead") from None
    raise DataError(f"{options_key}: {source} refuses {excerpt(options)} ({reason}); {has}")


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


def _level_key(options_key: str) -> str:
    return options_key.removesuffix("options") + "curriculum_level"


def _read_level(task: str, level: int, options_key: str) -> dict[str, Any]:
    """The options of a level of the task's curriculum; DataError if it has no such level."""
    from reasoning_gym.factory import CURRICULA, create_curriculum

    source, key = f"{GYM_PREFIX}{task}", _level_key(options_key)
    if task not in CURRICULA:
        raise DataError(f"{key} is {level}, and {source} has no curriculum; set {options_key} instead")
    curriculum = create_curriculum(task)
    count = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1)
    if level >= count:
        raise DataError(f"{key} is {level}; the levels of {source} are 0 to {count - 1}")
    curriculum.set_global_level(level)
    values = vars(curriculum.generate_configuration())
    return {name: value for name, value in values.items() if name not in SET_ELSEWHERE}


@functools.lru_cache(maxsize=1)
def _open(task: str, options: str, level: int | None, options_key: str, seed: int, size: int) -> Any:
    _seed(seed)
    return make_dataset(task, json.loads(options), level, options_key, seed=seed, size=size)


def draw_row(
    task: str, options: str, level: int | None, options_key: str, seed: int, size: int, index: int | None
) -> tuple[dict[str, Any] | None, bool] | None:
    """Item `index` of the library's dataset with that seed and size (question, answer and metadata in JSON's types;
    None if the stored answer is empty), and whether the verifier scores the stored answer 1. Without an index only the
    dataset and its verifier are made. Raises DataError as `make_dataset`, or if the item cannot be drawn."""
    dataset, verifier = _open(task, options, level, options_key, seed, size), _make_verifier(task, options, level)
    if index is None:
        return None
    _seed(seed + index)
    try:
        entry = json.loads(json.dumps(dataset[index], allow_nan=False))
        if not isinstance(entry["answer"], str):
            raise ValueError(f"the stored answer is {entry['answer']!r}")
    except Exception as error:
        reason = excerpt(f"{type(error).__name__}: {error}", 300)
        where = f"{GYM_PREFIX}{task}, seed {seed + index}"
        raise DataError(f"{where} cannot be drawn: {reason}. Change {options_key}, or data.seed") from None
    if not (answer := entry["answer"].strip()):
        return None, True
    return {name: entry[name] for name in ("question", "answer", "metadata")}, _score(verifier, answer, entry) == 1


def _seed(seed: int) -> None:
    """Some tasks draw from the global generators."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@functools.cache
def _make_verifier(task: str, options: str, level: int | None) -> Any:
    check_task(task, "reasoning_gym")  # a row may come from a file
    return make_dataset(task, json.loads(options), level, seed=0, size=1)


def score(row: str, given: str | None) -> float | None:
    """The score in [0, 1] that the task's verifier gives an answer to a row with this column `reasoning_gym`; 0.0 if it
    raises or does not return a number. Without an answer it only creates the verifier, which may be slow. Raises
    DataError for a task that is not offered, or cannot be created with its options."""
    stored = json.loads(row)
    verifier = _make_verifier(stored["task"], json.dumps(stored["options"]), stored["level"])
    return None if given is None else _score(verifier, given, stored["entry"])


def _score(verifier: Any, answer: str, entry: dict[str, Any]) -> float:
    try:
        value = float(verifier.score_answer(answer, entry))
    except KeyboardInterrupt:
        raise
    except BaseException:  # verifiers assume that an answer has the requested form; SystemExit is not an Exception
        return 0.0
    return min(max(value, 0.0), 1.0) if value == value else 0.0
