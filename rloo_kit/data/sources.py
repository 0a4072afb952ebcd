"""Rows as they are read: from JSONL, CSV or a list in Python without the stack; from Parquet and the hub with it.

Each row keeps its line for error messages.
"""

import csv
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rloo_kit import _stack, seams
from rloo_kit.completion import ADDED_COLUMNS
from rloo_kit.config.checks import FILE_KINDS
from rloo_kit.data.chat import parse_conversation
from rloo_kit.errors import DataError, excerpt
from rloo_kit.system.input_files import DEEPEST, is_deep, looked_for, places_of

# Names that the trainer itself passes to a reward; columns may not use them.
TAKEN_COLUMNS = (
    "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    *ADDED_COLUMNS,
)  # fmt: skip
QUESTION = "question"  # the user's last message; `prompt` is the rendered template
USER_MESSAGE = "user_message"  # the same, where `question` is a column of the source's own
GYM_PROMPTS, GYM_TEST_PROMPTS = 2000, 200  # if data.num_prompts is null; if data.test_size is a share
SEED = 0  # of what is drawn and split: runs with another run.seed are compared on the same held-out prompts
IMAGE_COLUMNS = ("image", "images")  # of a row's images, by TRL's convention
_DECIMAL_COMMA = re.compile(r"[^\w,([{]*\d[\d.]*,\d+[^\d,)\]}]{,12}")  # with a currency or unit


@dataclass(frozen=True)
class Columns:
    """Names of the prompt and answer columns, and whether the answer is required; `prefix` is that of their keys."""

    prompt: str = "prompt"
    answer: str = "answer"
    answer_required: bool = False
    prefix: str = "data."


@dataclass(frozen=True)
class Part:
    """One source of a run with its settings from `data`; `key` and `split_key` name it in errors.

    Attributes:
        split: None for test. options: of a reasoning-gym task; `options_key` is their key. count: its rows to draw;
            fewer are an error if `count_key` is set, the key that asks for them. number: of the source in the run, 0
            for the test source.
    """

    source: str
    columns: Columns = Columns()
    subset: str | None = None
    split: str | None = None
    answer_after: str | None = None
    key: str = "data.source"
    split_key: str = "data.split"
    options: dict[str, Any] | None = None
    options_key: str = "data.options"
    count: int = GYM_PROMPTS
    count_key: str = ""
    number: int = 1

    @property
    def answer_key(self) -> str:
        """Key and name of the answer's column, for errors."""
        return f"{self.columns.prefix}answer_column: {self.columns.answer}"


@dataclass(frozen=True)
class DataSource:
    """N rows: `prompts` and `answers` (None without such a column) as Python values, and the other columns.

    Attributes:
        others: lists of N values by column; or a datasets.Dataset of N rows, if one was read.
        places: "line 12", "row 12". notes: sentences on what was changed or left out.
        is_mix: from `data.sources`. images: columns of the prompts' images, which `with_images` reads.
    """

    name: str
    prompts: list[Any]
    answers: list[Any] | None
    others: Any
    places: list[str]
    notes: tuple[str, ...] = ()
    is_mix: bool = False
    images: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    def where(self, row: int) -> str:
        """The place of a row, for errors."""
        return f"{self.name}, {self.places[row]}"

    def row(self, row: int) -> dict[str, Any]:
        """One row: `prompt`, `answer` (if there is such a column), and the columns that are passed on to rewards."""
        values = {"prompt": self.prompts[row]} | ({} if self.answers is None else {"answer": self.answers[row]})
        return values | {name: self.column(name)[row] for name in (self.added_name, *self.other_names)}

    @property
    def other_names(self) -> list[str]:
        """The columns that are passed on to rewards."""
        return list(self.others if isinstance(self.others, dict) else self.others.column_names)

    @property
    def added_name(self) -> str:
        """The column of the user's last message."""
        return USER_MESSAGE if QUESTION in self.other_names else QUESTION

    def column(self, name: str) -> Any:
        """The values of one of `other_names`, or the user's last messages, by each of their names; else only None."""
        if name in self.other_names:
            return self.others[name]
        return list(map(_last_question, self.prompts)) if name in (QUESTION, USER_MESSAGE) else [None] * len(self)

    def select(self, rows: list[int]) -> "DataSource":
        """Some of the rows, in the given order."""
        others = self.others
        if isinstance(others, dict):
            others = {name: [values[row] for row in rows] for name, values in others.items()}
        else:
            others = others.select(rows)
        return replace(
            self,
            prompts=[self.prompts[row] for row in rows],
            answers=None if self.answers is None else [self.answers[row] for row in rows],
            others=others,
            places=[self.places[row] for row in rows],
            images={name: [values[row] for row in rows] for name, values in self.images.items()},
        )


def _last_question(prompt: Any) -> str | None:
    """The user's last message of a prompt (text or messages); None without one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    asked = [message for message in messages if isinstance(message, dict) and message.get("role") == "user"]
    content = asked[-1].get("content") if asked else None
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content


# ---- files and lists, without the stack


def find_file(source: str, config_file: Path | None = None, key: str = "data.source") -> Path | None:
    """The file that `source` names (`places_of`, then the config's folder); None if it is a hub id. Raises DataError,
    with `key`, if it looks like a path and does not exist, or is of another kind."""
    places = places_of(source, key, config_file and config_file.parent)
    for candidate in places:
        if not os.path.exists(candidate):
            continue
        if candidate.is_dir():
            raise DataError(
                f"{key}: {candidate} is a folder; name a file in it ({', '.join(FILE_KINDS)}). One that save_to_disk "
                "wrote becomes a file with datasets.load_from_disk(folder)['train'].to_parquet('rows.parquet')"
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


def read_data_file(path: Path, columns: Columns) -> DataSource:
    """The rows of a JSONL, CSV or Parquet file. Raises DataError, with file and line, for a broken or empty file, a
    malformed row or a missing column."""
    with explained(path):
        if path.suffix.lower() == ".parquet":
            return _from_table(open_parquet(path), str(path), columns)
        rows = list(_text_rows(path, columns.answer))
    return _from_dicts([row for _, row in rows], [f"line {number}" for number, _ in rows], str(path), columns)


def read_columns(path: Path) -> dict[str, list[Any]]:
    """The values of such a file by column."""
    with explained(path):
        if path.suffix.lower() == ".parquet":
            return dict(open_parquet(path).to_pydict())
        rows = [row for _, row in _text_rows(path)]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


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


def _json_rows(file: TextIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            hint = ". Is this one JSON document? JSONL has one object per line" if number == 1 else ""
            problem = f"broken JSON: {error.msg} at column {error.colno}{hint}"
            raise DataError(f"{path}, line {number}: {problem}") from error
        except (ValueError, RecursionError) as error:  # thousands of digits or brackets
            raise DataError(f"{path}, line {number}: JSON that cannot be read: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: a JSON {type(row).__name__}; each line must be an object")
        yield number, row


def _text_rows(path: Path, answer: str | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a JSONL or CSV file with their lines (a quoted field may span several). The separator is a comma,
    semicolon or tab: which of them gives the first two lines the same number of fields, the largest one. With
    semicolons, decimal commas are refused in `answer`."""
    if path.suffix.lower() == ".jsonl":
        with path.open(encoding="utf-8-sig") as lines:
            yield from _json_rows(lines, path)
        return
    csv.field_size_limit(2**31 - 1)  # 131,072 characters by default, for the whole process
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = list(islice(filter(str.strip, file), 2))
        header, start = list[str](), 1
        file.seek(0)
        counts = {mark: [*map(len, csv.reader(head, delimiter=mark)), 0, 0] for mark in ",;\t"}
        separator = max(counts, key=lambda mark: (counts[mark][0] == counts[mark][1] > 1, counts[mark][0]))
        reader = csv.reader(file, delimiter=separator, strict=True)
        try:
            for fields in reader:
                number, start = start, reader.line_num + 1
                if not fields or (number == 1 and fields[0].lower().startswith("sep=")):  # Excel's hint
                    continue
                if not header and len(set(fields)) < len(fields):
                    raise DataError(f"{path}, line 1: duplicate column name in the header: {', '.join(fields)}")
                if header and len(fields) != len(header):
                    raise DataError(f"{path}, line {number}: {len(fields)} fields, but the header has {len(header)}")
                row = dict(zip(header, fields, strict=False))
                if separator == ";" and answer and _DECIMAL_COMMA.fullmatch(value := row.get(answer, "")):
                    raise DataError(f"{path}, line {number}: {value} has a decimal comma; write it with a point")
                if header:
                    yield number, row
                header = header or fields
        except csv.Error as error:
            raise DataError(f"{path}, line {start}: broken CSV: {error}") from error


def read_given_rows(rows: Any, columns: Columns) -> DataSource:
    """Rows given in Python: a `datasets.Dataset`, or a list of dicts or of bare prompts (text or messages). Raises
    DataError for no rows, a row of another type or a missing column."""
    if hasattr(rows, "features") and hasattr(rows, "select"):
        return _from_dataset(rows, "the dataset", columns)
    if isinstance(rows, (str, dict)) or hasattr(rows, "columns") or not hasattr(rows, "__iter__"):
        raise DataError(
            f"rows is a {type(rows).__name__}; it takes a list of dicts or of prompts, or a datasets.Dataset (of a "
            "DatasetDict one split, rows['train']; of a pandas table rows.to_dict('records'); of a pyarrow table "
            "datasets.Dataset(rows))"
        )
    named = (row if isinstance(row, dict) else {columns.prompt: row} for row in rows)
    bare = [{key: to_python(item) for key, item in row.items()} for row in named]
    return _from_dicts(bare, [f"row {number}" for number in range(1, len(bare) + 1)], "the list of rows", columns)


def _from_dicts(rows: list[dict[str, Any]], places: list[str], name: str, columns: Columns) -> DataSource:
    if not rows:
        raise DataError(f"{name} has no rows")
    for place, row in zip(places, rows, strict=True):
        for key in row:
            if not isinstance(key, str):
                problem = f"the column name {excerpt(key)} is a {type(key).__name__}"
                raise DataError(f"{name}, {place}: {problem}; write it as text")
        _require_columns(name, place, list(row), columns)
    names = list(dict.fromkeys(key for row in rows for key in row))
    taken, notes = _taken_columns(name, names, columns)
    others = {}
    for key in names:
        if key not in taken:
            with suppress(DataError) if key in (columns.prompt, columns.answer) else nullcontext():
                others[key] = arrow_column(key, [row.get(key) for row in rows], name)
    texts = columns.prompt, columns.answer
    images = {key: [row.get(key) for row in rows] for key in IMAGE_COLUMNS if key in taken and key not in texts}
    return DataSource(
        name=name,
        prompts=[parse_conversation(row[columns.prompt]) for row in rows],
        answers=[row.get(columns.answer) for row in rows] if columns.answer in names else None,
        others=others,
        places=places,
        notes=notes,
        images=images,
    )


def _require_columns(name: str, place: str, names: list[str], columns: Columns) -> None:
    """Raise DataError if the prompt column or a required answer column is missing."""
    for column, key, way_out in (
        (columns.prompt, "prompt_column", ""),
        (columns.answer, "answer_column", ", or remove the rewards that compare with an answer"),
    ):
        if column not in names and (columns.answer_required or key == "prompt_column"):
            raise DataError(
                f"{name}, {place}: no column '{column}'; columns found: {', '.join(names) or 'none'}. Name the right "
                f"one in {columns.prefix}{key}{way_out}"
            )


def _taken_columns(name: str, names: list[str], columns: Columns) -> tuple[list[str], tuple[str, ...]]:
    """Columns that are not passed on, and notes on those that were replaced or left out."""
    moved = [column for column in (columns.prompt, columns.answer) if column in names]
    hidden = [column for column in ("prompt", "answer") if column in names and column not in moved]
    refused = [column for column in TAKEN_COLUMNS if column in names and column not in moved]
    replaced = f"is replaced by the column that {columns.prefix}"
    notes = [f"{name}: column '{column}' {replaced}{column}_column names" for column in hidden]
    notes += [f"{name}: column '{column}' is left out: the trainer uses that name itself" for column in refused]
    taken = ("prompt", "answer", QUESTION, *TAKEN_COLUMNS, *IMAGE_COLUMNS) if columns.prefix == "data." else moved
    images = [column for column in IMAGE_COLUMNS if column in names and column not in moved]
    return [*(column for column in moved if column in taken), *hidden, *refused, *images], tuple(notes)


def with_images(source: DataSource) -> DataSource:
    """The source, with the images of its columns or messages in its prompts; once its rows are drawn, since all of them
    are read."""
    messages = (message for prompt in source.prompts if isinstance(prompt, list) for message in prompt)
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    if source.images or any(isinstance(content, list) for content in contents):
        return seams.part("image_rows").write(source)
    return source


# ---- what only the stack can read


def open_parquet(path: Path) -> Any:
    """The table of a Parquet file; raises DataError if it is none."""
    _stack.load_stack()  # before pyarrow, since these libraries ship their own
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a Parquet file that can be read: {str(error).splitlines()[0]}") from error


def _from_table(table: Any, name: str, columns: Columns) -> DataSource:
    """The rows of a table of pyarrow."""
    try:
        rows = _stack.load_stack().datasets.Dataset(table)
    except ValueError as error:  # a type that `datasets` has not
        raise DataError(f"{name}: {error} Convert or remove the columns of that type") from error
    return _from_dataset(rows, name, columns)


def read_hub(part: Part) -> DataSource:
    """One split of a dataset on the hub or in the local cache of `datasets`. Raises DataError if it is unreachable, or
    dataset, subset, split or column does not exist."""
    datasets = _stack.load_stack().datasets
    source, key, split = part.source, part.key, part.split or "test"
    try:
        table = datasets.load_dataset(source, name=part.subset, split=split)
    except Exception as error:  # the hub's libraries share no base class of errors
        text, where = " ".join(str(error).split()), f"{key}: '{source}' (subset {part.subset}, split {split})"
        cause = f"{where} could not be loaded: {type(error).__name__}: {text}"
        if re.search("config name is missing|builderconfig", text, re.IGNORECASE):
            raise DataError(f"{cause} Set {part.columns.prefix}subset to one of those named.") from error
        if "split" in text.lower() and not isinstance(error, OSError):
            raise DataError(f"{cause} Set {part.split_key} to one of those named.") from error
        raise DataError(
            f"{cause} If the id is right, the hub cannot be reached from here (or asks for a token: HF_TOKEN in .env). "
            "Load it once on a connected machine and copy the cache folder (HF_HOME), or save the split as a file "
            f"(dataset.to_parquet('data.parquet')) and set {key} to it."
        ) from error
    return _from_dataset(table, f"{source} ({split})", part.columns)


def _from_dataset(table: Any, name: str, columns: Columns) -> DataSource:
    """A `DataSource` from a `datasets.Dataset`; its other columns keep their types."""
    if not len(table):
        raise DataError(f"{name} has no rows")
    table = table.with_format(None)
    places = [f"row {number}" for number in range(1, len(table) + 1)]
    _require_columns(name, places[0], table.column_names, columns)
    taken, notes = _taken_columns(name, table.column_names, columns)
    kept = [column for column in table.column_names if column not in taken]
    if "Image(" in str(table.features):
        table = seams.part("image_rows").undecode(table, kept, name)
    answers = list(table[columns.answer]) if columns.answer in table.column_names else None
    feature = table.features.get(columns.answer)
    if answers and columns.prefix == "sft.":
        answers = [_drop_nulls(answer, feature) for answer in answers]
    if answers and hasattr(feature, "int2str"):  # class labels: their names
        answers = [None if label is None or label < 0 else feature.int2str(label) for label in answers]
    elif answers and getattr(feature, "dtype", "") == "float32":  # 0.1, as written
        answers = table.with_format("arrow")[:][columns.answer].cast("string").cast("double").to_pylist()
    prompts = [_drop_nulls(prompt, table.features[columns.prompt]) for prompt in table[columns.prompt]]
    texts = columns.prompt, columns.answer
    return DataSource(
        name=name,
        prompts=list(map(parse_conversation, prompts)),
        answers=answers,
        others=table.select_columns(kept) if kept else {},
        places=places,
        notes=notes,
        images={key: table[key] for key in IMAGE_COLUMNS if key in taken and key not in texts},
    )


def _drop_nulls(value: Any, feature: Any) -> Any:
    """Messages without the keys that Arrow adds to an object: those of all objects of the column, with null."""
    if isinstance(value, dict) and isinstance(feature, dict):
        return {key: _drop_nulls(item, feature[key]) for key, item in value.items() if item is not None}
    inner = getattr(feature, "feature", None)  # of a list; a column of datasets.Json has nulls of its own
    return [_drop_nulls(item, inner) for item in value] if isinstance(value, list) and inner is not None else value


# ---- what Arrow can store


def to_dataset(columns: Any, name: str) -> Any:
    """Columns of the source `name` as a `datasets.Dataset`, unless they are one; DataError if one has no type."""
    if not isinstance(columns, dict):
        return columns
    datasets = _stack.load_stack().datasets
    import pyarrow

    try:
        return datasets.Dataset(pyarrow.table(columns))
    except Exception as error:  # pyarrow's, or of datasets
        raise DataError(f"{name}: Arrow cannot store the columns {', '.join(columns)}: {error}") from error


def arrow_column(key: str, values: list[Any], name: str) -> list[Any]:
    """`values` as Arrow gives them back from one column, objects with the keys of all rows; raises DataError, with the
    source `name` and pyarrow's error, if it cannot store them."""
    kinds = {type(value) for value in values}
    if float in kinds and not kinds <= {float, int, type(None)}:  # pandas writes NaN where a text is missing
        values = [None if isinstance(value, float) and math.isnan(value) else value for value in values]
    if is_plain(values):
        return values
    if any(map(is_deep, values)):  # Arrow would overflow the C stack
        raise DataError(f"{name}: column '{key}' is nested more than {DEEPEST} levels deep, or contains itself")
    import pyarrow

    try:
        return list(pyarrow.array(values).to_pylist())
    except Exception as error:  # pyarrow's, or of an object that it looks into
        problem = f"column '{key}' has values that Arrow cannot store in one column ({error})"
        raise DataError(f"{name}: {problem}; a column has one type: convert, rename or remove it") from error


def is_plain(values: list[Any]) -> bool:
    """Whether all values are text, or numbers of one type, which Arrow can store: no need to load it (0.5 s)."""
    kinds = {type(value) for value in values} - {type(None)}
    present = [value for value in values if value is not None]
    if kinds == {str} and (text := "".join(present)).encode(errors="replace").decode() != text:
        return False  # half of a UTF-16 pair
    if kinds == {int}:
        return -(2**63) <= min(present) <= max(present) < 2**63
    return len(kinds) < 2 and kinds <= {str, float, bool}


def to_python(value: Any, in_array: bool = False) -> Any:
    """What numpy, pandas, pyarrow and torch hand over as Python's own values: arrays as lists, NA and NaT as None.
    Objects in an array come from Arrow, and lose the keys without a value that it gives them."""
    value = float(str(value)) if type(value).__name__ == "float32" else value  # 0.1, not 0.10000000149011612
    for name in ("as_py", "tolist"):
        if hasattr(value, name):
            value, in_array = getattr(value, name)(), True
    if not isinstance(value, (list, tuple, dict)) or is_deep(value):
        return None if type(value).__name__ in ("NAType", "NaTType") else value
    if isinstance(value, dict):
        return {key: to_python(item, in_array) for key, item in value.items() if not in_array or item is not None}
    return [to_python(item, in_array) for item in value]
