"""The columns of a data file: their names, and which look like prompt and answer."""

import json
from pathlib import Path

from rloo_kit import _stack
from rloo_kit.data.sources import csv_lines
from rloo_kit.errors import DataError

PROMPT_NAMES = ("prompt", "question", "problem", "instruction", "query", "input", "text")
ANSWER_NAMES = ("answer", "solution", "target", "label", "output", "response", "result")


def read_columns(path: Path) -> list[str]:
    """Column names from the header, first row or schema; raises DataError if there are none."""
    try:
        names = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_first(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line 1: not UTF-8 text ({error.reason}). Save the file as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if not names:
        raise DataError(f"{path} has no rows; it needs a column of prompts and one of answers")
    return names


def _read_first(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix.lower() == ".csv":
            return next(csv_lines(file, path), (0, []))[1]
        line = next((line for line in file if line.strip()), "{}")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line 1: broken JSON: {error}. JSONL has one object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}, line 1: a JSON {type(row).__name__}; each line must be an object")
    return list(row)


def _read_parquet(path: Path) -> list[str]:
    _stack.load_stack()  # before pyarrow, since these libraries ship their own
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_schema(path).names)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from None


def guess_columns(names: list[str]) -> tuple[str, str | None]:
    """Prompt and answer columns by name; else the first column, and the last of the others (None without one).

    >>> guess_columns(["id", "Question", "answer"]), guess_columns(["sum", "value"]), guess_columns(["text"])
    (('Question', 'answer'), ('sum', 'value'), ('text', None))
    """

    def find(known: tuple[str, ...], among: list[str]) -> str | None:
        by_name = {name.strip().lower(): name for name in reversed(among)}
        return next((by_name[word] for word in known if word in by_name), None)

    prompt = find(PROMPT_NAMES, names) or names[0]
    others = [name for name in names if name != prompt]
    return prompt, find(ANSWER_NAMES, others) or (others[-1] if others else None)
