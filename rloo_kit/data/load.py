"""Turns a data source into a run's two datasets: read, draw, render, check, split by distinct prompts."""

import random
from dataclasses import dataclass, field
from typing import Any

from rloo_kit import _stack
from rloo_kit.collective import main_first
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import DataSection
from rloo_kit.data.chat import prompt_identity, render_prompt, resolve_family, thinks
from rloo_kit.data.columns import QUESTION, DataSource
from rloo_kit.data.reading import read_test, read_training
from rloo_kit.data.tables import to_dataset
from rloo_kit.errors import DataError
from rloo_kit.system.processes import say


@dataclass
class Data:
    """The prompts of a run.

    Attributes:
        train: datasets.Dataset with `prompt` (rendered text), `answer` (as in the source, if it has answers; None for a
            row without one; see `with_answers`), `question` (the user's last message), other columns.
        test: the same, with its source's columns; its prompts are distinct, and none is in `train`.
        dropped: prompts left out because they were too long.
        notes: what was left out or replaced, in sentences.
    """

    train: Any
    test: Any
    dropped: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        dropped = f", {self.dropped} dropped as too long" if self.dropped else ""
        return f"{len(self.train)} training prompts, {len(self.test)} held out{dropped}"


@dataclass(frozen=True)
class Side:
    """The rows of a source that a dataset is made of; `texts` are the prompts of all its rows, rendered."""

    source: DataSource
    texts: list[str]
    rows: list[int]

    def row(self, index: int) -> dict[str, Any]:
        """One row as passed to rewards: `prompt`, `answer` and the other columns."""
        row = self.rows[index]
        return self.source.row(row) | {"prompt": self.texts[row]}


@dataclass(frozen=True)
class Prepared:
    """The prompts of a run before they become datasets; `dropped` and `notes` as in `Data`."""

    train: Side
    test: Side
    dropped: int
    notes: list[str]


def load_data(run: RunConfig, tokenizer: Any, rows: Any = None) -> Data:
    """The training and test prompts of a run.

    Args:
        run: reads `data`, `model.name`, `model.family`, `model.enable_thinking`, and names and weights in `rewards`.
        tokenizer: the policy's.
        rows: prompts in Python instead of `data.source`: a list of dicts or of bare prompts, or a `datasets.Dataset`,
            with the column names of `data`.

    Returns:
        `Data`; the same for the same seed and source.

    Raises:
        DataError: a source, row or column that cannot be used, with file and line; nothing left to train on.
        ConfigError: `model.family` contradicts the tokenizer's chat template.
    """
    with main_first():  # downloads and conversions are then cached for the other processes
        prepared = prepare_data(run, tokenizer, rows)
    train, test = prepared.train, prepared.test
    if train.source is test.source:
        tables = _datasets(train.source, train.texts, train.rows, test.rows)
    else:
        tables = [*_datasets(train.source, train.texts, train.rows), *_datasets(test.source, test.texts, test.rows)]
    for note in prepared.notes:
        say(f"data: {note}")
    return Data(train=tables[0], test=tables[1], dropped=prepared.dropped, notes=prepared.notes)


def prepare_data(run: RunConfig, tokenizer: Any, rows: Any = None) -> Prepared:
    """`load_data` without building the datasets, with the same arguments and errors. Runs in one process only, and
    without the stack if `needs_stack` is False."""
    family = resolve_family(tokenizer, run.model.name, run.model.family, run.model.enable_thinking)
    source = read_training(run, rows, thinks(family, run.model.enable_thinking))
    held_out = read_test(run)
    notes = list(source.notes)
    texts = [render_row(run, tokenizer, family, source, row) for row in range(len(source))]
    fitting = _fitting_rows(run, tokenizer, source, texts, notes)
    dropped = len(texts) - len(fitting)
    if held_out is None:
        train_rows, test_rows = _split(Side(source, texts, fitting), run.data, notes)
        return Prepared(Side(source, texts, train_rows), Side(source, texts, test_rows), dropped, notes)
    notes += held_out.notes
    test_texts = [render_row(run, tokenizer, family, held_out, row) for row in range(len(held_out))]
    test_fitting = _fitting_rows(run, tokenizer, held_out, test_texts, notes)
    dropped += len(test_texts) - len(test_fitting)
    sides = Side(source, texts, fitting), Side(held_out, test_texts, test_fitting)
    train_rows, test_rows = _hold_out(*sides, run.data, notes)
    return Prepared(Side(source, texts, train_rows), Side(held_out, test_texts, test_rows), dropped, notes)


def render_row(run: RunConfig, tokenizer: Any, family: str, source: DataSource, row: int) -> str:
    """The text that the model reads for one row; raises DataError with file and line if it cannot be rendered.

    `family` is that of `resolve_family`.
    """
    try:
        return render_prompt(tokenizer, source.prompts[row], family, run.model.enable_thinking, run.data.system_prompt)
    except DataError as error:
        key = "prompt_column of data.sources" if source.is_mix else f"data.prompt_column: {run.data.prompt_column}"
        raise DataError(f"{source.where(row)}: {error} ({key})") from error


def _fitting_rows(run: RunConfig, tokenizer: Any, source: DataSource, texts: list[str], notes: list[str]) -> list[int]:
    """The rows whose prompt fits into `data.max_prompt_length` tokens, as the trainer counts them."""
    limit = run.data.max_prompt_length
    ids = tokenizer(texts)["input_ids"]
    if ids[0][-1:] == [tokenizer.eos_token_id] and not texts[0].rstrip().endswith(tokenizer.eos_token or "\0"):
        raise DataError(
            f"the tokenizer appends {tokenizer.eos_token} to every text, so the model would continue after the end of "
            "its turn. Set tokenizer.add_eos_token = False, or save the tokenizer that way"
        )
    lengths = [len(row) for row in ids]
    fitting = [row for row, length in enumerate(lengths) if length <= limit]
    if len(fitting) == len(texts):
        return fitting
    longest = max(range(len(texts)), key=lengths.__getitem__)
    found = (
        f"{len(texts) - len(fitting)} of {len(texts)} prompts are longer than data.max_prompt_length={limit} tokens; "
        f"the longest has {lengths[longest]} ({source.where(longest)})"
    )
    if run.data.too_long == "refuse":
        raise DataError(f"{found}. Raise data.max_prompt_length, or set data.too_long: drop to leave them out")
    if not fitting:
        raise DataError(f"{found}, the shortest {min(lengths)}: none is left. Raise data.max_prompt_length")
    notes.append(f"{found}. They are dropped (data.too_long: drop)")
    return fitting


def _split(found: Side, section: DataSection, notes: list[str]) -> tuple[list[int], list[int]]:
    """Training rows in order, test rows shuffled; no prompt is on both sides."""
    groups, source, rows = _group(found), found.source, found.rows
    size = section.test_size
    wanted = int(size) if size >= 1 else max(round(size * len(groups)), 1 if size > 0 else 0)
    if wanted >= len(groups):
        raise DataError(
            f"{source.name} has {len(groups)} different prompts, and data.test_size={size} holds out {wanted} of them: "
            f"none is left to train on. {_ways_out(source, len(groups), len(source) - len(rows))}"
        )
    keys = _shuffled(groups, section.seed)
    held_out = keys[:wanted]
    test = [groups[key][0] for key in held_out]
    train = sorted(row for key in keys[wanted:] for row in groups[key])
    if len(groups) < len(rows):
        left_out = sum(len(groups[key]) - 1 for key in held_out)
        notes.append(
            f"{len(rows) - len(groups)} rows repeat an earlier prompt; the split keeps equal prompts together"
            + (f", and {left_out} repeats of held-out prompts are left out" if left_out else "")
        )
    return train, test


def _ways_out(source: DataSource, prompts: int, dropped: int) -> str:
    """Fixes that leave a run prompts to train on; only those that apply to this source."""
    ways = ["set data.test_source to hold out prompts of another file"]
    if prompts > 1:
        ways.insert(0, f"lower data.test_size to at most {prompts - 1}")
    if source.rows_left:
        ways.append("raise data.num_prompts, which left rows out")
    if dropped:
        ways.append(f"raise data.max_prompt_length, which dropped {dropped}")
    text = f"{', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else ways[0]
    return text[0].upper() + text[1:]


def _hold_out(found: Side, held_out: Side, section: DataSection, notes: list[str]) -> tuple[list[int], list[int]]:
    """Training rows of the source, and shuffled, distinct rows of the test source (`data.test_size` of them if it is a
    count); no prompt is on both sides."""
    groups = _group(held_out)
    keys = _shuffled(groups, section.seed)
    if section.test_size >= 1:
        keys = keys[: int(section.test_size)]
    if left_out := len(held_out.rows) - len(groups):
        notes.append(f"{left_out} repeats of held-out prompts are left out of {held_out.source.name}")
    known = set(keys)
    train = [row for row in found.rows if prompt_identity(found.texts[row]) not in known]
    both = len(found.rows) - len(train)
    if not train:
        raise DataError(
            f"all {both} training prompts of {found.source.name} are held-out prompts of {held_out.source.name} too: "
            "none is left to train on. Name another file or split in data.test_source or data.test_split"
        )
    if both:
        notes.append(f"{both} rows of {found.source.name} are left out of training: their prompts are held out too")
    return train, [groups[key][0] for key in keys]


def _group(side: Side) -> dict[str, list[int]]:
    """The rows of each different prompt, in order."""
    groups: dict[str, list[int]] = {}
    for row in side.rows:
        groups.setdefault(prompt_identity(side.texts[row]), []).append(row)
    return groups


def _shuffled(groups: dict[str, list[int]], seed: int) -> list[str]:
    keys = list(groups)
    random.Random(f"split-{seed}").shuffle(keys)
    return keys


def _datasets(source: DataSource, texts: list[str], *sides: list[int]) -> list[Any]:
    """A dataset of the rows of each side; a column has one type on all sides."""
    columns = {"prompt": texts} | ({} if source.answers is None else {"answer": source.answers})
    if QUESTION not in source.other_names:
        columns[QUESTION] = source.column(QUESTION)
    tables = [to_dataset(part, source.name) for part in (columns, source.others) if part is not None]
    return [
        _stack.load_stack().datasets.concatenate_datasets([_take(table, rows) for table in tables], axis=1)
        for rows in sides
    ]


def _take(table: Any, rows: list[int]) -> Any:
    """A table of its own: a view with indices, or one chunk per row, would pickle the whole column each time."""
    datasets = _stack.load_stack().datasets
    chosen = table.with_format("arrow").select(rows)[:].combine_chunks()
    return datasets.Dataset(chosen, info=datasets.DatasetInfo(features=table.features))
