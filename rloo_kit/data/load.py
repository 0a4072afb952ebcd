"""From a data source to the two datasets of a run: read, drawn, rendered, checked, split over distinct prompts."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

from rloo_kit import _stack
from rloo_kit.collective import main_first
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import DataSection
from rloo_kit.data.chat import refuse_surrogates, render_prompt, resolve_family, thinks
from rloo_kit.data.sources import Columns, DataSource, find_file, read_file, read_hub, read_rows, select_rows
from rloo_kit.data.tasks import addition_rows
from rloo_kit.errors import DataError
from rloo_kit.system.processes import say

EMBEDDED_SOURCE = "embedded/addition"
EMBEDDED_PROMPTS = 10_000  # if data.num_prompts is null
REWARDS_WITH_ANSWERS = ("answer_reward", "math_answer_reward")


@dataclass
class Data:
    """The prompts of a run.

    Attributes:
        train: datasets.Dataset with `prompt` (rendered text), `answer` (text, if the source has it), other columns.
        test: the same columns; its prompts are distinct, and none is in `train`.
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


def load_data(run: RunConfig, tokenizer: Any, rows: Any = None) -> Data:
    """The training and test prompts of a run.

    Args:
        run: reads `data`, `model.name`, `model.family`, `model.enable_thinking` and the names in `rewards`.
        tokenizer: the policy's.
        rows: prompts in Python instead of `data.source`: a list of dicts or of bare prompts, or a `datasets.Dataset`,
            with the column names of `data`.

    Returns:
        `Data`; the same for the same seed and source.

    Raises:
        DataError: a source, row or column that cannot be used, with file and line; nothing left to train on.
        ConfigError: `model.family` contradicts the tokenizer's chat template.
    """
    family = resolve_family(tokenizer, run.model.name, run.model.family, run.model.enable_thinking)
    with main_first():  # downloads and conversions are then cached for the other processes
        found = _read(run, rows, thinks(family, run.model.enable_thinking))
    source = _draw(found, run.data.num_prompts, run.data.seed)
    notes = list(source.notes)
    texts = [_render(run, tokenizer, family, source, row) for row in range(len(source.prompts))]
    answers = _answers(run, source)
    fitting = _fitting_rows(run, tokenizer, source, texts, notes)
    dropped = len(texts) - len(fitting)
    train_rows, test_rows = _split(source, fitting, run.data, notes)
    data = Data(
        train=_dataset(source, texts, answers, train_rows),
        test=_dataset(source, texts, answers, test_rows),
        dropped=dropped,
        notes=notes,
    )
    for note in notes:
        say(f"data: {note}")
    return data


def _read(run: RunConfig, rows: Any, thinking: bool) -> DataSource:
    answer = run.data.answer_column
    compared = any(reward.name in REWARDS_WITH_ANSWERS for reward in run.rewards)
    named = answer != type(run.data).model_fields["answer_column"].default or run.data.answer_after is not None
    columns = Columns(prompt=run.data.prompt_column, answer=answer, answer_required=compared or named)
    if rows is not None:
        return read_rows(rows, columns)
    if run.data.source == EMBEDDED_SOURCE:
        drawn = addition_rows(run.data.num_prompts or EMBEDDED_PROMPTS, run.data.seed, thinking)
        return read_rows(drawn, Columns())
    if run.data.source.startswith("embedded/"):
        raise DataError(f"data.source: no embedded task '{run.data.source}'; there is {EMBEDDED_SOURCE}")
    path = find_file(run.data.source, run.source)
    if path is not None:
        return read_file(path, columns)
    return read_hub(run.data.source, run.data.subset, run.data.split, columns)


def _draw(source: DataSource, num_prompts: int | None, seed: int) -> DataSource:
    """`num_prompts` rows, drawn without replacement, in the source's order."""
    total = len(source.prompts)
    if num_prompts is None or num_prompts >= total:
        return source
    return select_rows(source, sorted(random.Random(f"draw-{seed}").sample(range(total), num_prompts)))


def _render(run: RunConfig, tokenizer: Any, family: str, source: DataSource, row: int) -> str:
    try:
        return render_prompt(tokenizer, source.prompts[row], family, run.model.enable_thinking, run.data.system_prompt)
    except DataError as error:
        raise DataError(f"{source.where(row)}: {error} (data.prompt_column: {run.data.prompt_column})") from error


def _answers(run: RunConfig, source: DataSource) -> list[str] | None:
    """The gold answers as text; None if the source has none."""
    if source.answers is None:
        return None
    return [_answer(value, run.data, source.where(row)) for row, value in enumerate(source.answers)]


def _answer(value: Any, section: DataSection, where: str) -> str:
    column = f"data.answer_column: {section.answer_column}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, str) and not (number and (isinstance(value, int) or math.isfinite(value))):
        what = "no answer" if number or value is None else f"an answer of type {type(value).__name__}"
        raise DataError(f"{where}: {what}; each row needs a text or a number ({column})")
    try:
        text = str(value).strip()
    except ValueError:  # Python writes no number of more than 4300 digits
        raise DataError(f"{where}: the answer has thousands of digits; give it as text ({column})") from None
    if section.answer_after is not None:
        _, found, text = text.rpartition(section.answer_after)
        if not found:
            raise DataError(f"{where}: the answer has no {section.answer_after!r} in it (data.answer_after; {column})")
    if not text.strip():
        raise DataError(f"{where}: the answer is empty ({column})")
    refuse_surrogates(text, f"{where}: the answer")
    return text.strip()


def _fitting_rows(run: RunConfig, tokenizer: Any, source: DataSource, texts: list[str], notes: list[str]) -> list[int]:
    """The rows whose prompt fits into `data.max_prompt_length` tokens, as the trainer counts them."""
    limit = run.data.max_prompt_length
    ids = tokenizer(texts)["input_ids"]
    _refuse_appended_eos(tokenizer, texts[0], ids[0])
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


def _refuse_appended_eos(tokenizer: Any, text: str, ids: list[int]) -> None:
    if ids[-1:] == [tokenizer.eos_token_id] and not text.rstrip().endswith(tokenizer.eos_token or "\0"):
        raise DataError(
            f"the tokenizer appends {tokenizer.eos_token} to every text, so the model would continue after the end of "
            "its turn. Set tokenizer.add_eos_token = False, or save the tokenizer that way"
        )


def _split(source: DataSource, rows: list[int], section: DataSection, notes: list[str]) -> tuple[list[int], list[int]]:
    """Training rows in order, test rows shuffled; no prompt is on both sides."""
    groups: dict[Any, list[int]] = {}
    for row in rows:
        groups.setdefault(_identity(source.prompts[row]), []).append(row)
    size = section.test_size
    wanted = int(size) if size >= 1 else max(round(size * len(groups)), 1 if size > 0 else 0)
    if wanted >= len(groups):
        raise DataError(
            f"{source.name} has {len(groups)} different prompts, and data.test_size={size} holds {wanted} of them out: "
            "none is left to train on. Lower data.test_size or raise data.num_prompts"
        )
    keys = list(groups)
    random.Random(f"split-{section.seed}").shuffle(keys)
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


def _identity(prompt: str | list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """What distinguishes prompts: roles and words, not white space."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tuple((message["role"], " ".join(message["content"].split())) for message in messages)


def _dataset(source: DataSource, texts: list[str], answers: list[str] | None, rows: list[int]) -> Any:
    datasets = _stack.load_stack().datasets
    columns = {"prompt": [texts[row] for row in rows]}
    if answers is not None:
        columns["answer"] = [answers[row] for row in rows]
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    table = datasets.Dataset.from_dict(columns, features=features)
    if source.others is None:
        return table
    chosen = source.others.with_format("arrow").select(rows)[:]  # a table of its own, not a view with indices
    others = datasets.Dataset(chosen, info=datasets.DatasetInfo(features=source.others.features))
    return datasets.concatenate_datasets([table, others], axis=1)
