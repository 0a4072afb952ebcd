"""Rows as read, each with its line or row for error messages, and the columns they may have."""

import json
import math
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rloo_kit.errors import DataError
from rloo_kit.system.input_files import DEEPEST

# Names that the trainer itself passes to a reward; columns may not use them.
TAKEN_COLUMNS = (
    "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "thinking_forced",
)  # fmt: skip
QUESTION = "question"  # the user's last message; `prompt` is the rendered template
IMAGE_COLUMNS = ("image", "images")  # TRL reads columns of these names as images


@dataclass(frozen=True)
class Columns:
    """Names of the prompt and answer columns, and whether the answer is required; `prefix` is that of their keys."""

    prompt: str = "prompt"
    answer: str = "answer"
    answer_required: bool = False
    prefix: str = "data."


@dataclass(frozen=True)
class DataSource:
    """N rows: `prompts` and `answers` (None without such a column) as Python values, and the other columns.

    Attributes:
        others: lists of N values by column; or a datasets.Dataset of N rows, if one was read; None if there are none.
        places: "line 12", "row 12". notes: sentences on what was changed or left out.
        rows_left: whether data.num_prompts left rows out. is_mix: from `data.sources`.
    """

    name: str
    prompts: list[Any]
    answers: list[Any] | None
    others: Any | None
    places: list[str]
    notes: tuple[str, ...] = ()
    rows_left: bool = False
    is_mix: bool = False

    def __len__(self) -> int:
        return len(self.prompts)

    def where(self, row: int) -> str:
        """The place of a row, for errors."""
        return f"{self.name}, {self.places[row]}"

    def row(self, row: int) -> dict[str, Any]:
        """One row: `prompt`, `answer` (if there is such a column), and the columns that are passed on to rewards."""
        found = {"prompt": self.prompts[row]} | ({} if self.answers is None else {"answer": self.answers[row]})
        return found | {name: self.column(name)[row] for name in (QUESTION, *self.other_names)}

    @property
    def other_names(self) -> list[str]:
        """The columns that are passed on to rewards."""
        if self.others is None:
            return []
        return list(self.others) if isinstance(self.others, dict) else list(self.others.column_names)

    def column(self, name: str) -> Any:
        """The values of one of `other_names`, or of `question`, which every source has; None for each row of others."""
        if name == QUESTION and name not in self.other_names:
            return [read_question(prompt) for prompt in self.prompts]
        return self.others[name] if self.others and name in self.other_names else [None] * len(self)


def read_question(prompt: Any) -> str | None:
    """The user's last message of a prompt (text or messages); None without one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    asked = [one for one in messages if isinstance(one, dict) and one.get("role") == "user"]
    return asked[-1].get("content") if asked else None


def select_rows(source: DataSource, rows: list[int]) -> DataSource:
    """Some of the rows, in the given order."""
    others = source.others
    if isinstance(others, dict):
        others = {name: [values[row] for row in rows] for name, values in others.items()}
    elif others is not None:
        others = others.select(rows)
    return replace(
        source,
        prompts=[source.prompts[row] for row in rows],
        answers=None if source.answers is None else [source.answers[row] for row in rows],
        others=others,
        places=[source.places[row] for row in rows],
    )


def arrow_column(key: str, values: list[Any], where: Callable[[int], str]) -> list[Any]:
    """`values`, if Arrow can store them in one column; else raises DataError with the place of the first that fails."""
    kinds = {type(value) for value in values}
    if float in kinds and not kinds <= {float, int, type(None)}:  # pandas writes NaN where a text is missing
        values = [None if isinstance(value, float) and math.isnan(value) else value for value in values]
    if is_plain(values):
        return values
    refuse_deep(key, values, where)
    error, is_nested = _store(values), all(isinstance(value, list | dict | None) for value in values)
    if not isinstance(error, Exception) or (is_nested and exact_array(values) is not None):
        return values
    first_bad = bisect_left(range(len(values)), True, key=lambda row: isinstance(_store(values[: row + 1]), Exception))
    what = f"column '{key}' has a value that Arrow cannot store with those before it ({error})"
    raise DataError(f"{where(first_bad)}: {what}; a column has one type: convert, rename or remove it") from error


def refuse_deep(key: str, values: list[Any], where: Callable[[int], str]) -> None:
    """Raise DataError if a value is nested so deeply that Arrow would overflow the C stack."""
    for row, value in enumerate(values):
        if isinstance(value, (list, tuple, dict)) and _is_deeper(value, DEEPEST):
            raise DataError(
                f"{where(row)}: column '{key}' is nested more than {DEEPEST} levels deep, or contains itself"
            )


def exact_array(values: list[Any]) -> Any:
    """The Arrow array that gives back these values; None if there is none. Lists and objects are JSON if Arrow would
    change them: it gives all objects the keys of all rows, and makes floats of integers among floats."""
    import pyarrow

    array, is_nested = _store(values), any(isinstance(value, list | dict) for value in values)
    same = repr if is_nested else list  # a column of integers and floats may be floats
    if not isinstance(array, Exception) and same(array.to_pylist()) == same(values):
        return array
    with suppress(Exception):  # of what JSON has not
        from pandas.io.json import ujson_loads  # by which `datasets` reads JSON; it changes the last bit of most floats

        texts = [json.dumps(value, ensure_ascii=False) for value in values if is_nested]
        if texts and repr(list(map(ujson_loads, texts))) == repr(values):
            return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(texts))
    return None


def _store(values: list[Any]) -> Any:
    """The values as an Arrow array, or the error."""
    import pyarrow

    try:
        return pyarrow.array(values)
    except Exception as error:  # pyarrow's, or of an object that it looks into
        return error


def plain(value: Any, maps: bool = True) -> Any:
    """What numpy, pandas, pyarrow and torch hand over as Python's own values: arrays as lists, NA and NaT as None, and
    with `maps` lists of pairs as mappings."""
    value = float(str(value)) if type(value).__name__ == "float32" else value  # 0.1, not 0.10000000149011612
    for name in ("as_py", "tolist"):
        value = getattr(value, name)() if hasattr(value, name) else value
    if not isinstance(value, (list, tuple, dict)) or _is_deeper(value, DEEPEST):
        return None if type(value).__name__ in ("NAType", "NaTType") else value
    pairs = value.items() if isinstance(value, dict) else value if maps else ()
    if pairs and all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in pairs):
        return {key: plain(item, maps) for key, item in pairs}
    return value if isinstance(value, dict) and not (value and maps) else [plain(item, maps) for item in pairs or value]


def is_plain(values: list[Any]) -> bool:
    """Whether all values are text, or numbers of one type, which Arrow can store: no need to load it (0.5 s)."""
    kinds = {type(value) for value in values} - {type(None)}
    found = [value for value in values if value is not None]
    if kinds == {str} and (text := "".join(found)).encode(errors="replace").decode() != text:
        return False  # half of a UTF-16 pair
    if kinds == {int}:
        return -(2**63) <= min(found) <= max(found) < 2**63
    return len(kinds) < 2 and kinds <= {str, float, bool}


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings in `value` are nested more than `levels` deep."""
    left = [(value, 1)]
    while left:
        found, level = left.pop()
        if isinstance(found, (list, tuple, dict)):
            if level > levels:
                return True
            left += [(item, level + 1) for item in (found.values() if isinstance(found, dict) else found)]
    return False


def require_columns(name: str, place: str, found: list[str], columns: Columns) -> None:
    """Raise DataError if the prompt column or a required answer column is missing."""
    listed = ", ".join(found) or "none"
    if columns.prompt not in found:
        raise DataError(
            f"{name}, {place}: no column '{columns.prompt}'; columns found: {listed}. Name the right one in "
            f"{columns.prefix}prompt_column"
        )
    if columns.answer_required and columns.answer not in found:
        raise DataError(
            f"{name}, {place}: no column '{columns.answer}'; columns found: {listed}. Name the right one in "
            f"{columns.prefix}answer_column, or remove the rewards that compare with an answer"
        )


def taken_columns(
    name: str, found: list[str], columns: Columns, images: tuple[str, ...] = ()
) -> tuple[list[str], tuple[str, ...]]:
    """Columns that are not passed on, and notes on those that were replaced or left out.

    The prompt and the answer column are passed on under their own names too; in a mix each source has others.

    Raises DataError for columns that TRL reads as images because of their name, and for `images`, those with an image
    type.
    """
    moved = [column for column in (columns.prompt, columns.answer) if column in found]
    for column in found:
        if column in images or (column in IMAGE_COLUMNS and column not in moved):
            how = "type" if column in images else "name"
            raise DataError(
                f"{name}: column '{column}' contains images or other media, by its {how}; rloo-kit trains on text. "
                "Remove the column from the data, or rename it if it contains something else"
            )
    hidden = [column for column in ("prompt", "answer") if column in found and column not in moved]
    refused = [column for column in TAKEN_COLUMNS if column in found and column not in moved]
    notes = [
        f"{name}: column '{column}' is replaced by the column that {columns.prefix}{column}_column names"
        for column in hidden
    ]
    notes += [f"{name}: column '{column}' is left out: the trainer uses that name itself" for column in refused]
    own = ("prompt", "answer", QUESTION, *TAKEN_COLUMNS, *IMAGE_COLUMNS) if columns.prefix == "data." else moved
    return [*(column for column in moved if column in own), *hidden, *refused], tuple(notes)
