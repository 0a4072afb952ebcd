"""What `init` needs to know about the rows: their number, the length of the prompts, the form of the answers."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.config.messages import suggest
from rloo_kit.data.columns import Columns
from rloo_kit.data.sources import find_file, read_file
from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.rewards.answer import parse_number
from rloo_kit.starter.columns import read_columns

MARKER = "####"  # before the answer in GSM8K and datasets in its format
ADDITION = re.compile(r"\d+\+\d+=")


@dataclass(frozen=True)
class Table:
    """A file with prompts and answers.

    Attributes:
        source: the file, as given. prompt_column, answer_column: their names.
        num_rows: rows. longest_bytes: of a prompt, in UTF-8. gold: the answer of the first row that has one.
        answer_after: the marker in front of every answer. are_numbers: every answer is a number.
        not_an_addition: the first prompt that is not one, with its place; None if all look like `12+34=`.
        are_texts: every prompt is text, not a list of messages.
    """

    source: str
    prompt_column: str
    answer_column: str
    num_rows: int
    longest_bytes: int
    gold: str
    answer_after: str | None
    are_numbers: bool
    not_an_addition: str | None
    are_texts: bool


def find_data(source: str) -> Path:
    """The file given as `--data`; raises DataError or ConfigError if it is not one."""
    found = find_file(source)
    if found is None:
        raise ConfigError(
            f"--data {source}: there is no such file; init reads a .csv, .jsonl or .parquet file. For a dataset "
            "from the hub, copy a file of configs/ and set data.source"
        )
    return found


def check_column(name: str, flag: str, names: list[str]) -> str:
    """`name`, if the file has it; else raises ConfigError with the nearest of `names`."""
    if name not in names:
        raise ConfigError(f"{flag} {name}: there is no such column{suggest(name, names)}")
    return name


def read_table(source: str, prompt_column: str, answer_column: str) -> Table:
    """Read the whole file once; raises DataError with the line of a row that training would refuse."""
    path = find_data(source)
    names = read_columns(path)
    check_column(prompt_column, "--prompt-column", names)
    check_column(answer_column, "--answer-column", names)
    if prompt_column == answer_column:
        raise ConfigError(f"--prompt-column and --answer-column are both {prompt_column}; name two different columns")
    rows = read_file(path, Columns(prompt_column, answer_column, answer_required=True))
    golds = [str(one).strip() for one in rows.answers or [] if one is not None and str(one).strip()]
    if not golds:
        raise ConfigError(
            f"--answer-column {answer_column}: {path} has no answer in this column; name the column with the answers"
        )
    marked = all(MARKER in gold for gold in golds)
    golds = [gold.rpartition(MARKER)[2].strip() for gold in golds] if marked else golds
    odd = next((row for row, prompt in enumerate(rows.prompts) if not _is_addition(prompt)), None)
    return Table(
        source=source,
        prompt_column=prompt_column,
        answer_column=answer_column,
        num_rows=len(rows.prompts),
        longest_bytes=max(len(_text(prompt).encode("utf-8", "replace")) for prompt in rows.prompts),
        gold=golds[0],
        answer_after=MARKER if marked else None,
        are_numbers=all(parse_number(gold) is not None for gold in golds),
        not_an_addition=None if odd is None else f"{rows.where(odd)}: {excerpt(_text(rows.prompts[odd]), 60)}",
        are_texts=all(isinstance(prompt, str) for prompt in rows.prompts),
    )


def _is_addition(prompt: Any) -> bool:
    return isinstance(prompt, str) and ADDITION.fullmatch(prompt.strip()) is not None


def _text(prompt: Any) -> str:
    """A prompt's text; for messages, their contents."""
    if isinstance(prompt, list):
        return "\n".join(str(one.get("content", "")) if isinstance(one, dict) else str(one) for one in prompt)
    return str(prompt)
