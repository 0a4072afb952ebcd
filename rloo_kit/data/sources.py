"""Reads rows from JSONL, CSV or a list in Python, without torch and `datasets`; `tables.py` has what needs them."""

import csv
import json
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from rloo_kit.config.checks import FILE_KINDS
from rloo_kit.data import tables
from rloo_kit.data.chat import parse_conversation, refuse_surrogates
from rloo_kit.data.columns import Columns, DataSource, arrow_column, plain, require_columns, taken_columns
from rloo_kit.errors import DataError, excerpt
from rloo_kit.system.input_files import looked_for, places_of


def find_file(source: str, config_file: Path | None = None, key: str = "data.source") -> Path | None:
    """The file or the folder of `save_to_disk` that `source` names (`places_of`, then the config's folder); None if it
    is a hub id. Raises DataError, with `key`, if it looks like a path and does not exist, or is of another kind."""
    places = places_of(source, key, config_file and config_file.parent)
    for candidate in places:
        try:
            mode = candidate.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:  # name too long, NUL in it, no access
            raise DataError(f"{key}: {excerpt(source)} cannot be looked up as a file: {error}") from None
        if stat.S_ISDIR(mode):
            if tables.is_saved_folder(candidate):
                return candidate
            raise DataError(
                f"{key}: {candidate} is a folder; name a file in it ({', '.join(FILE_KINDS)}), or a folder that "
                "save_to_disk of a datasets.Dataset or DatasetDict wrote"
            )
        if not stat.S_ISREG(mode):
            raise DataError(
                f"{key}: {candidate} is a pipe or a device, not a regular file; save the rows to a file first"
            )
        if candidate.suffix.lower() not in FILE_KINDS:
            raise DataError(
                f"{key}: {candidate} has the ending '{candidate.suffix}'; supported are {', '.join(FILE_KINDS)}. "
                "Convert it, or read it yourself and pass the rows: load_data(run, tokenizer, rows=...)"
            )
        return candidate
    looks_like_a_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source
    if looks_like_a_path or Path(source).suffix.lower() in FILE_KINDS:
        raise DataError(f"{key}: no file {source}; {looked_for(places, key)}")
    return None


def read_file(path: Path, columns: Columns) -> DataSource:
    """The rows of a JSONL, CSV or Parquet file. Raises DataError, with file and line, for a broken or empty file, a
    malformed row or a missing column."""
    reader = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": tables.read_arrow}[path.suffix.lower()]
    with explained(path):
        return reader(path, columns)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """What fails while `path` is read becomes a DataError."""
    try:
        yield
    except UnicodeDecodeError as error:
        lines = path.read_bytes().splitlines()  # the reader decodes in chunks, and knows only a position within one
        line = next(number for number, line in enumerate(lines, 1) if line.decode(errors="replace").encode() != line)
        raise DataError(f"{path}, line {line}: not UTF-8 text ({error.reason}). Save the file as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def read_rows(rows: Any, columns: Columns) -> DataSource:
    """Rows given in Python: a `datasets.Dataset`, a `pyarrow.Table`, or a list of dicts or of bare prompts (text or
    messages). Raises DataError for no rows, a row of another type or a missing column."""
    is_arrow = hasattr(rows, "to_pylist")
    if hasattr(rows, "column_names") and hasattr(rows, "select"):
        return tables.read_arrow(rows, columns) if is_arrow else tables.from_dataset(rows, "the dataset", columns)
    rows = rows.to_pylist(maps_as_pydicts="lossy") if is_arrow else rows
    if isinstance(rows, (str, dict)) or hasattr(rows, "columns") or not hasattr(rows, "__iter__"):
        raise DataError(
            f"rows is a {type(rows).__name__}; it takes a list of dicts or of prompts, or a datasets.Dataset (of a "
            "DatasetDict one split, rows['train']; of a pandas table rows.to_dict('records'))"
        )
    named = (row if isinstance(row, dict) else {columns.prompt: row} for row in rows)
    bare = [{key: plain(item, is_arrow or key == columns.prompt) for key, item in row.items()} for row in named]
    return _from_dicts(bare, [f"row {number}" for number in range(1, len(bare) + 1)], "the list of rows", columns)


def _read_jsonl(path: Path, columns: Columns) -> DataSource:
    with path.open(encoding="utf-8-sig") as file:
        lines = list(json_lines(file, path))
    return _from_dicts([row for _, row in lines], [f"line {number}" for number, _ in lines], str(path), columns)


def json_lines(file: TextIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their lines."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            hint = ". Is this one JSON document? JSONL has one object per line" if number == 1 else ""
            what = f"broken JSON: {error.msg} at column {error.colno}{hint}"
            raise DataError(f"{path}, line {number}: {what}") from error
        except (ValueError, RecursionError) as error:  # thousands of digits or brackets
            raise DataError(f"{path}, line {number}: JSON that cannot be read: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: a JSON {type(row).__name__}; each line must be an object")
        yield number, row


def _read_csv(path: Path, columns: Columns) -> DataSource:
    rows, places = [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        is_european, lines = _mark(file) == ";", csv_lines(file, path)
        _, header = next(lines, (0, []))
        if len(set(header)) < len(header):
            raise DataError(f"{path}, line 1: duplicate column name in the header: {', '.join(header)}")
        for number, fields in lines:
            if len(fields) != len(header):
                raise DataError(f"{path}, line {number}: {len(fields)} fields, but the header has {len(header)}")
            rows.append(dict(zip(header, fields, strict=True)))
            if is_european and re.fullmatch(r"[+-]?\d+,\d+", found := rows[-1].get(columns.answer, "")):
                raise DataError(f"{path}, line {number}: {found} has a decimal comma; write it with a point")
            places.append(f"line {number}")
    return _from_dicts(rows, places, str(path), columns)


def csv_lines(file: TextIO, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Non-blank records, each with its first line (a quoted field may span several)."""
    reader, start = csv.reader(file, delimiter=_mark(file), strict=True), 1
    try:
        for fields in reader:
            if fields:
                yield start, fields
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {start}: broken CSV: {error}") from error


def _mark(file: TextIO) -> str:
    """What separates all fields: of comma, semicolon and tab, the one that gives the header most fields."""
    csv.field_size_limit(2**31 - 1)  # 131,072 characters by default, for the whole process
    head = next((line for line in file if line.strip()), "")
    file.seek(0)
    return max(",;\t", key=lambda mark: sum(map(len, csv.reader([head], delimiter=mark))))


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
        require_columns(name, place, list(row), columns)
    names = list(dict.fromkeys(key for row in rows for key in row))
    taken, notes = taken_columns(name, names, columns)
    others = {}
    for key in names:
        if key not in taken:
            with suppress(DataError) if key in (columns.prompt, columns.answer) else nullcontext():
                others[key] = arrow_column(key, [row.get(key) for row in rows], lambda row: f"{name}, {places[row]}")
    return DataSource(
        name=name,
        prompts=[parse_conversation(row[columns.prompt]) for row in rows],
        answers=[row.get(columns.answer) for row in rows] if columns.answer in names else None,
        others=others or None,
        places=places,
        notes=notes,
    )
