"""What `init` needs to know about the rows: their number, the length of the prompts, the form of the answers."""

import re
import string
from dataclasses import dataclass
from pathlib import Path

from rloo_kit.config.messages import suggest
from rloo_kit.data.chat import as_messages
from rloo_kit.data.load import comparable_text
from rloo_kit.data.sources import (
    Columns,
    DataSource,
    csv_lines,
    explained,
    find_file,
    json_lines,
    open_parquet,
    read_file,
)
from rloo_kit.errors import ConfigError, DataError, excerpt
from rloo_kit.rewards.answer import answers_agree, find_boxed, find_last_number, has_no_answer

MARKER = "####"  # before the answer in GSM8K and datasets in its format
PROMPT_NAMES = ("prompt", "question", "problem", "instruction", "query", "input", "text")
ANSWER_NAMES = ("answer", "solution", "target", "label", "output", "response", "result")
ADDITION = re.compile(r"\d+\+\d+=")


@dataclass(frozen=True)
class Table:
    """A file with prompts and answers.

    Attributes:
        source: the file, as given. prompt_column, answer_column: their names. other_columns: those of the rest.
        rows: as read. texts: of the prompts; of messages, their contents. longest_bytes: of a prompt, in UTF-8.
        gold: the answer of the first row that has one. answer_after: the marker in front of every answer. are_numbers:
        every answer is a number. are_texts: no prompt is a list of messages. are_additions: each looks like `12+34=`.
    """

    source: str
    prompt_column: str
    answer_column: str
    other_columns: tuple[str, ...]
    rows: DataSource
    texts: list[str]
    longest_bytes: int
    gold: str
    answer_after: str | None
    are_numbers: bool
    are_texts: bool
    are_additions: bool

    def find_other(self, alphabet: str) -> str | None:
        """The first prompt with a character outside `alphabet` and white space, with its place."""
        known = set(alphabet + string.whitespace)
        odd = ((row, text) for row, text in enumerate(self.texts) if set(text) - known)
        return next((f"{self.rows.where(row)}: {excerpt(text, 60)}" for row, text in odd), None)


def find_data(source: str) -> Path:
    """The file given as `--data`; raises DataError or ConfigError if it is not one."""
    found = find_file(source)
    if found is None:
        raise ConfigError(
            f"--data {source}: there is no such file; init reads a .csv, .jsonl or .parquet file. For a dataset "
            "from the hub, copy a file of configs/ and set data.source"
        )
    return found


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
    texts = []
    for row, prompt in enumerate(rows.prompts):
        try:
            texts.append("\n".join(message["content"] for message in as_messages(prompt)))
        except DataError as error:
            raise DataError(f"{rows.where(row)}: {error} (--prompt-column {prompt_column})") from None
    found = [(row, one) for row, one in enumerate(rows.answers or []) if not has_no_answer(one)]
    golds = [comparable_text(one, rows.where(row), f"--answer-column {answer_column}").strip() for row, one in found]
    if not golds:
        raise ConfigError(
            f"--answer-column {answer_column}: {path} has no answer in this column; name the column with the answers"
        )
    marked = 2 * sum(MARKER in gold for gold in golds) > len(golds)
    if marked:  # the training refuses a row without it
        key = f"data.answer_column: {answer_column}"
        golds = [comparable_text(one, rows.where(row), key, MARKER) for row, one in found]
    golds = [find_boxed(gold) or gold for gold in golds]
    return Table(
        source=source,
        prompt_column=prompt_column,
        answer_column=answer_column,
        other_columns=tuple(name for name in names if name not in (prompt_column, answer_column)),
        rows=rows,
        texts=texts,
        longest_bytes=max(len(text.encode("utf-8", "replace")) for text in texts),
        gold=golds[0],
        answer_after=MARKER if marked else None,
        are_numbers=all(answers_agree(find_last_number(gold) or "-", gold) for gold in golds),
        are_texts=all(isinstance(prompt, str) for prompt in rows.prompts),
        are_additions=all(ADDITION.fullmatch(text.strip()) for text in texts),
    )
