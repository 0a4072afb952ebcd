"""The columns of a data file: their names, and which look like prompt and answer."""

from pathlib import Path

from rloo_kit.data.sources import csv_lines, explained, json_lines
from rloo_kit.data.tables import open_parquet
from rloo_kit.errors import DataError

PROMPT_NAMES = ("prompt", "question", "problem", "instruction", "query", "input", "text")
ANSWER_NAMES = ("answer", "solution", "target", "label", "output", "response", "result")


def read_columns(path: Path) -> list[str]:
    """Column names from the header, first row or schema; raises DataError if there are none."""
    with explained(path):
        if path.suffix.lower() == ".parquet":
            names = open_parquet(path, schema_only=True).names
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                lines = csv_lines(file, path) if path.suffix.lower() == ".csv" else json_lines(file, path)
                names = list(next(lines, (0, []))[1])
    if not names:
        raise DataError(f"{path} has no rows; it needs a column of prompts and one of answers")
    return names


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
