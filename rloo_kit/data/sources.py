"""Reading rows (JSONL, CSV, Parquet, a hub id, a list in Python), each with its line or row for error messages."""

import csv
import json
import stat
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rloo_kit import _stack
from rloo_kit.data.chat import refuse_surrogates
from rloo_kit.errors import DataError, excerpt
from rloo_kit.system.input_files import DEEPEST

FILE_KINDS = (".jsonl", ".csv", ".parquet")
# Names that the trainer passes to a reward itself, or reads as an image prompt: a column may not use them.
TAKEN_COLUMNS = (
    "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "thinking_forced",
)  # fmt: skip
IMAGE_COLUMNS = ("image", "images")


@dataclass(frozen=True)
class DataSource:
    """N rows: `prompts` and `answers` (None without such a column) as Python values, the other columns as a table."""

    name: str
    prompts: list[Any]
    answers: list[Any] | None
    others: Any | None  # datasets.Dataset of N rows; None if there are no other columns
    places: list[str]  # "line 12", "row 12"
    notes: tuple[str, ...] = ()

    def where(self, row: int) -> str:
        """The place of a row, as errors name it."""
        return f"{self.name}, {self.places[row]}"


@dataclass(frozen=True)
class Columns:
    """Which columns hold prompt and answer, and whether the answer's is required."""

    prompt: str = "prompt"
    answer: str = "answer"
    answer_required: bool = False


def find_file(source: str, config_file: Path | None = None) -> Path | None:
    """The file that `source` names, from the working directory, then the config's folder; None if it is a hub id.
    Raises DataError where it looks like a path and does not exist, or is a file of another kind."""
    folders = [Path.cwd(), *([config_file.parent] if config_file else [])]
    for candidate in dict.fromkeys((folder / _expand_user(source)) for folder in folders):
        try:
            mode = candidate.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:  # too long a name, a NUL in it, a locked folder
            raise DataError(f"data.source: {excerpt(source)} cannot be looked up as a file: {error}") from None
        if stat.S_ISDIR(mode):
            raise DataError(f"data.source: {candidate} is a folder; name a file in it ({', '.join(FILE_KINDS)})")
        if not stat.S_ISREG(mode):
            raise DataError(f"data.source: {candidate} is no regular file, but a pipe or a device; save the rows first")
        if candidate.suffix.lower() not in FILE_KINDS:
            raise DataError(
                f"data.source: {candidate} has the ending '{candidate.suffix}'; read are {', '.join(FILE_KINDS)}. "
                "Convert it, or read it yourself and pass the rows: load_data(run, tokenizer, rows=...)"
            )
        return candidate
    looks_like_a_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source
    if looks_like_a_path or Path(source).suffix.lower() in FILE_KINDS:
        raise DataError(f"data.source: no file {source}, looked in {' and in '.join(map(str, dict.fromkeys(folders)))}")
    return None


def _expand_user(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:
        raise DataError(f"data.source: {excerpt(source)} names a user whom this machine does not know") from None


def read_file(path: Path, columns: Columns) -> DataSource:
    """The rows of a JSONL, CSV or Parquet file. Raises DataError, with file and line, for a broken or empty file, a
    malformed row or a missing column."""
    reader = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}[path.suffix.lower()]
    try:
        return reader(path, columns)
    except UnicodeDecodeError as error:
        line = _first_line_not_utf8(path)
        raise DataError(f"{path}, line {line}: not UTF-8 text ({error.reason}). Save the file as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _first_line_not_utf8(path: Path) -> int:
    """The reader decodes in chunks and knows only a position within one."""
    lines = path.read_bytes().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.decode(errors="replace").encode() != line)


def read_hub(source: str, subset: str | None, split: str, columns: Columns) -> DataSource:
    """One split of a dataset on the hub or in the local cache of `datasets`. Raises DataError where it is unreachable,
    or dataset, subset, split or column does not exist."""
    datasets = _stack.load_stack().datasets
    try:
        table = datasets.load_dataset(source, name=subset, split=split)
    except Exception as error:  # the hub's libraries share no base class of errors
        raise DataError(_hub_message(source, subset, split, error)) from error
    return from_dataset(table, f"{source} ({split})", columns)


def read_rows(rows: Any, columns: Columns) -> DataSource:
    """Rows given in Python: a `datasets.Dataset`, or a list of dicts or of bare prompts (text or messages). Raises
    DataError for no rows, a row of another type or a missing column."""
    if hasattr(rows, "column_names") and hasattr(rows, "select"):
        return from_dataset(rows, "the dataset", columns)
    if isinstance(rows, (str, dict)) or hasattr(rows, "columns") or not hasattr(rows, "__iter__"):
        raise DataError(
            f"rows is a {type(rows).__name__}; it takes a list of dicts or of prompts, or a datasets.Dataset (of a "
            "DatasetDict one split, rows['train']; of a pandas table rows.to_dict('records'))"
        )
    bare = [row if isinstance(row, dict) else {columns.prompt: row} for row in rows]
    return _from_dicts(bare, [f"row {number}" for number in range(1, len(bare) + 1)], "the list of rows", columns)


def from_dataset(table: Any, name: str, columns: Columns) -> DataSource:
    """A `DataSource` from a `datasets.Dataset`; its other columns keep their types."""
    if not len(table):
        raise DataError(f"{name} has no rows")
    places = [f"row {number}" for number in range(1, len(table) + 1)]
    _require_columns(name, places[0], table.column_names, columns)
    has_answer = columns.answer in table.column_names
    taken, notes = _taken_columns(name, table.column_names, columns)
    kept = [column for column in table.column_names if column not in taken]
    return DataSource(
        name=name,
        prompts=list(table[columns.prompt]),
        answers=list(table[columns.answer]) if has_answer else None,
        others=table.select_columns(kept) if kept else None,
        places=places,
        notes=notes,
    )


def select_rows(source: DataSource, rows: list[int]) -> DataSource:
    """Some of the rows, in the given order."""
    return replace(
        source,
        prompts=[source.prompts[row] for row in rows],
        answers=None if source.answers is None else [source.answers[row] for row in rows],
        others=None if source.others is None else source.others.select(rows),
        places=[source.places[row] for row in rows],
    )


def _read_jsonl(path: Path, columns: Columns) -> DataSource:
    rows, places = [], []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                hint = ". Is this one JSON document? JSONL has one object a line" if number == 1 else ""
                what = f"broken JSON: {error.msg} at column {error.colno}{hint}"
                raise DataError(f"{path}, line {number}: {what}") from error
            except (ValueError, RecursionError) as error:  # thousands of digits or brackets
                raise DataError(f"{path}, line {number}: JSON that cannot be read: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: a JSON {type(row).__name__}; each line has to be an object")
            rows.append(row)
            places.append(f"line {number}")
    return _from_dicts(rows, places, str(path), columns)


def _read_csv(path: Path, columns: Columns) -> DataSource:
    rows, places = [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        lines = _csv_lines(reader, path)
        _, header = next(lines, (0, []))
        if len(set(header)) < len(header):
            raise DataError(f"{path}, line 1: a column name stands twice in the header: {', '.join(header)}")
        for number, fields in lines:
            if len(fields) != len(header):
                raise DataError(f"{path}, line {number}: {len(fields)} fields, but the header has {len(header)}")
            rows.append(dict(zip(header, fields, strict=True)))
            places.append(f"line {number}")
    return _from_dicts(rows, places, str(path), columns)


def _csv_lines(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Non-blank records, each with its first line (a quoted field may span several)."""
    start = 1
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{path}, line {start}: broken CSV: {error}") from error
        if fields:
            yield start, fields
        start = reader.line_num + 1


def _read_parquet(path: Path, columns: Columns) -> DataSource:
    datasets = _stack.load_stack().datasets
    import pyarrow
    import pyarrow.parquet

    try:
        table = datasets.Dataset(pyarrow.parquet.read_table(path))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a Parquet file that can be read: {error}") from error
    return from_dataset(table, str(path), columns)


def _from_dicts(rows: list[dict[str, Any]], places: list[str], name: str, columns: Columns) -> DataSource:
    if not rows:
        raise DataError(f"{name} has no rows")
    for place, row in zip(places, rows, strict=True):
        for key in row:
            if not isinstance(key, str):
                raise DataError(
                    f"{name}, {place}: the column name {excerpt(key)} is a {type(key).__name__}; write it as text"
                )
            refuse_surrogates(key, f"{name}, {place}: the column name")
        _require_columns(name, place, list(row), columns)
    names = list(dict.fromkeys(key for row in rows for key in row))
    taken, notes = _taken_columns(name, names, columns)
    others = {
        key: _arrow_column(key, [row.get(key) for row in rows], lambda row: f"{name}, {places[row]}")
        for key in names
        if key not in taken
    }
    return DataSource(
        name=name,
        prompts=[row[columns.prompt] for row in rows],
        answers=[row.get(columns.answer) for row in rows] if columns.answer in names else None,
        others=_table(others, name) if others else None,
        places=places,
        notes=notes,
    )


def _table(columns: dict[str, list[Any]], name: str) -> Any:
    """A `datasets.Dataset` of columns that Arrow can hold, each alone."""
    import pyarrow

    try:
        return _stack.load_stack().datasets.Dataset.from_dict(columns)
    except (
        pyarrow.ArrowException,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # nested too deeply to be combined
        raise DataError(f"{name}: Arrow cannot hold the columns {', '.join(columns)}: {error}") from error


def _arrow_column(key: str, values: list[Any], where: Callable[[int], str]) -> list[Any]:
    """`values`, if Arrow can hold them in one column."""
    import pyarrow

    def explain(rows: list[Any]) -> Exception | None:
        try:
            pyarrow.array(rows)
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError, RecursionError) as error:
            return error
        return None

    for row, value in enumerate(values):
        if isinstance(value, (list, tuple, dict)) and _is_deeper(value, DEEPEST):  # Arrow overflows the stack of C
            raise DataError(f"{where(row)}: column '{key}' is nested more than {DEEPEST} levels deep, or holds itself")
    error = explain(values)
    if error is None:
        return values
    kinds = [type(value) for value in values]
    first = next(kind for kind in kinds if kind is not type(None))
    odd = next((row for row, kind in enumerate(kinds) if kind not in (first, type(None))), None)
    if odd is not None:
        what = f"holds a {kinds[odd].__name__}, and before it a {first.__name__}; a column needs one type"
        raise DataError(f"{where(odd)}: column '{key}' {what} ({error})") from error
    first_bad = bisect_left(range(len(values)), True, key=lambda row: explain(values[: row + 1]) is not None)
    what = f"column '{key}' holds a value that Arrow cannot hold with those before it: {error}"
    raise DataError(f"{where(first_bad)}: {what}") from error


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested in `value` more than so many levels deep."""
    left = [(value, 1)]
    while left:
        found, level = left.pop()
        if isinstance(found, (list, tuple, dict)):
            if level > levels:
                return True
            left += [(item, level + 1) for item in (found.values() if isinstance(found, dict) else found)]
    return False


def _require_columns(name: str, place: str, found: list[str], columns: Columns) -> None:
    listed = ", ".join(found) or "none"
    if columns.prompt not in found:
        raise DataError(
            f"{name}, {place}: no column '{columns.prompt}'; columns found: {listed}. Name the right one in "
            "data.prompt_column"
        )
    if columns.answer_required and columns.answer not in found:
        raise DataError(
            f"{name}, {place}: no column '{columns.answer}'; columns found: {listed}. Name the right one in "
            "data.answer_column, or remove the rewards that compare with an answer"
        )


def _taken_columns(name: str, found: list[str], columns: Columns) -> tuple[list[str], tuple[str, ...]]:
    """Columns that are not passed on, and notes on those that the user may miss."""
    moved = [column for column in (columns.prompt, columns.answer) if column in found]
    hidden = [column for column in ("prompt", "answer") if column in found and column not in moved]
    refused = [column for column in (*TAKEN_COLUMNS, *IMAGE_COLUMNS) if column in found and column not in moved]
    notes = [
        f"{name}: column '{column}' is replaced by the column that data.{column}_column names" for column in hidden
    ]
    notes += [f"{name}: column '{column}' is left out: the trainer uses that name itself" for column in refused]
    return [*moved, *hidden, *refused], tuple(notes)


def _hub_message(source: str, subset: str | None, split: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    found = (
        f"data.source: '{source}' (subset {subset}, split {split}) could not be loaded: {type(error).__name__}: {text}"
    )
    lowered = text.lower()
    if "config name is missing" in lowered or "builderconfig" in lowered:
        return f"{found} Set data.subset to one of those named."
    if "split" in lowered and not isinstance(error, OSError):
        return f"{found} Set data.split to one of those named."
    return (
        f"{found} If the id is right, the hub cannot be reached from here (or asks for a token: HF_TOKEN in .env). "
        "Load it once where there is a connection and copy the cache folder (HF_HOME), or save the split as a file "
        "(dataset.to_parquet('data.parquet')) and set data.source to it."
    )
