"""From a run's `data` to its two datasets: read and draw each source, decide its answers, render, check, split."""

import json
import math
import random
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

from rloo_kit import _stack
from rloo_kit.collective import main_first
from rloo_kit.config.checks import GYM_PREFIX, VERIFIERS_PREFIX
from rloo_kit.config.model_names import EMBEDDED_PREFIX
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import DataSection, SourceSection
from rloo_kit.data.answers import GYM_REWARD, REWARDS_WITH_ANSWERS, is_comparable
from rloo_kit.data.chat import family_of, prompt_identity, render_prompt
from rloo_kit.data.sources import (
    GYM_PROMPTS,
    GYM_TEST_PROMPTS,
    SEED,
    Columns,
    DataSource,
    Part,
    arrow_column,
    find_file,
    is_plain,
    read_data_file,
    read_given_rows,
    read_hub,
    to_dataset,
    with_images,
)
from rloo_kit.errors import DataError, excerpt
from rloo_kit.rewards.answer import has_no_answer
from rloo_kit.seams import part as load_part
from rloo_kit.system.processes import say

MADE_BY = {EMBEDDED_PREFIX: "families", GYM_PREFIX: "gym", VERIFIERS_PREFIX: "tools"}  # the parts that make rows
SOURCE_COLUMN = "source"  # names each row's source in a mix


@dataclass
class Data:
    """The prompts of a run.

    Attributes:
        train: datasets.Dataset with `prompt` (rendered text), `answer` (`decide_answers`; None for a row without one),
            `question` (the user's last message; `user_message` if that is a column of the source), other columns. Of
            `prepare_data`: a `Side`.
        test: the same; its prompts are distinct, and none is in `train`.
        dropped: how many prompts were too long. notes: what was left out or replaced, in sentences.
        made_for: the configuration and the chat template of `prepare_data`.
    """

    train: Any
    test: Any
    dropped: int = 0
    notes: list[str] = field(default_factory=list)
    made_for: str = ""

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


def load_data(run: RunConfig, tokenizer: Any, rows: Any = None, prepared: Data | None = None) -> Data:
    """The training and test prompts of a run.

    Args:
        rows: prompts in Python instead of `data.source`: a list of dicts or of bare prompts, or a `datasets.Dataset`,
            with the column names of `data`.
        prepared: what `check` returned; used if it was made for this run and this chat template.

    Raises:
        DataError: a source, row or column that cannot be used, with file and line; nothing left to train on.
        ConfigError: `model.family` contradicts the tokenizer's chat template.
    """
    with main_first():  # downloads and conversions are then cached for the other processes
        if rows is not None or prepared is None or prepared.made_for != _asked(run, tokenizer):
            prepared = prepare_data(run, tokenizer, rows)
    train, test = prepared.train, prepared.test
    tables = _datasets(train, test) if train.source is test.source else [*_datasets(train), *_datasets(test)]
    for note in prepared.notes:
        say(f"data: {note}")
    return replace(prepared, train=tables[0], test=tables[1])


def prepare_data(run: RunConfig, tokenizer: Any, rows: Any = None) -> Data:
    """`load_data` without building the datasets, with the same arguments and errors: `train` and `test` are `Side`s.
    Runs in one process only."""
    family, thinking = family_of(run, tokenizer)
    schemas = load_part("tools").tool_schemas(run) if run.rloo.has_tools else None
    sources = [_read_training(run, rows, thinking)]
    if run.data.separate_test:
        sources.append(_read_test(run))
    sides: list[Side] = []
    notes: list[str] = []
    for source in sources:
        notes += source.notes
        texts = [render_row(run, tokenizer, family, source, row, schemas) for row in range(len(source))]
        sides.append(Side(source, texts, _fitting_rows(run, tokenizer, source, texts, notes)))
    train_rows, test_rows = _split(sides, run.data, notes)
    dropped = sum(len(side.texts) - len(side.rows) for side in sides)
    train, test = replace(sides[0], rows=train_rows), replace(sides[-1], rows=test_rows)
    return Data(train, test, dropped, notes, _asked(run, tokenizer))


def _asked(run: RunConfig, tokenizer: Any) -> str:
    """What the prompts of a run are prepared from, the rows aside."""
    return f"{run.model_dump_json()} {tokenizer.chat_template}"


# ---- the sources of a run


def _part(run: RunConfig, source: str, entry: int | None = None) -> Part:
    """A source with the settings of `data`, or of an entry of `data.sources`; what that omits comes from `data`. If a
    reward scores rows without an answer, a source of a mix may lack the column unless its entry names it."""
    section = run.data
    settings: DataSection | SourceSection = section if entry is None else (section.sources or [])[entry]
    prefix, share = "data.", Fraction(1)
    if entry is not None:
        prefix = f"data.sources.{entry}."
        share = _shares([item.weight for item in section.sources or []])[entry]
    needed = compares_with_answers(run) if entry is None else needs_all_answers(run)
    has_no_marker = source.startswith(GYM_PREFIX) or (entry is not None and source.startswith(EMBEDDED_PREFIX))
    asked = section if settings.options is None else settings
    return Part(
        source=source,
        columns=Columns(
            prompt=settings.prompt_column or section.prompt_column,
            answer=settings.answer_column or section.answer_column,
            answer_required=needed or _names_answers(settings),
            prefix=prefix,
        ),
        subset=settings.subset or section.subset,
        split=settings.split or section.split,
        answer_after=None if has_no_marker else settings.answer_after or section.answer_after,
        key=f"{prefix}source",
        split_key=f"{prefix}split",
        options=asked.options,
        options_key="data.options" if asked is section else f"{prefix}options",
        count=GYM_PROMPTS if section.num_prompts is None else math.ceil(section.num_prompts * share),
        count_key="data.num_prompts" if section.num_prompts and entry is None else "",
        number=1 if entry is None else entry + 1,
    )


def _names_answers(section: DataSection | SourceSection) -> bool:
    """Whether the section names its answers, so that a source has to have them."""
    is_named = section.answer_column != type(section).model_fields["answer_column"].default
    return is_named or section.answer_after is not None


def _read_training(run: RunConfig, rows: Any, thinking: bool) -> DataSource:
    """The rows to train on, or `rows`; `thinking` is for the embedded task."""
    section = run.data
    if rows is not None:
        part = replace(_part(run, ""), key="rows")
        source = read_given_rows(rows, part.columns)
    elif section.sources is not None:
        return _read_mix(run, section.sources, thinking)
    else:
        part = _part(run, str(section.source))
        source = read_part(run, part, thinking)
    require_verifier(run, source, part.key)
    return require_one_answer(run, decide_answers(run, draw_subset(source, section.num_prompts), part))


def _read_test(run: RunConfig) -> DataSource:
    """The rows of the test source or split, in the source's order."""
    section = run.data
    part = _part(run, str(section.test_source or section.source))
    is_counted, key = section.test_size >= 1, "data.source" if section.test_source is None else "data.test_source"
    part = replace(
        part,
        split=section.test_split,
        key=key,
        split_key="data.test_split",
        count=int(section.test_size) if is_counted else GYM_TEST_PROMPTS,
        count_key="data.test_size" if is_counted else "",
        number=0,
    )
    is_gym = any(name.startswith(GYM_PREFIX) for name in section.all_sources)
    if is_gym and part.source not in section.all_sources:  # of another task
        part = replace(part, options=None, options_key=key)
    return require_one_answer(run, decide_answers(run, with_images(read_part(run, part, True)), part))


def _read_mix(run: RunConfig, entries: list[SourceSection], thinking: bool) -> DataSource:
    section = run.data
    parts = [_part(run, entry.source, number) for number, entry in enumerate(entries)]
    sources = [read_part(run, part, thinking) for part in parts]
    for part, source in zip(parts, sources, strict=True):
        require_verifier(run, source, part.key, alone=False)
    wanted = _names_answers(section) or compares_with_answers(run)
    if wanted and all(source.answers is None for source in sources):
        raise DataError(
            f"data.sources: no source has an answer column ({', '.join(part.answer_key for part in parts)}). Name the "
            "right ones, or remove the rewards that compare with an answer"
        )
    counts = share_out([len(source) for source in sources], [entry.weight for entry in entries], section.num_prompts)
    drawn, labels = [], []
    for part, source, count, entry in zip(parts, sources, counts, entries, strict=True):
        chosen = draw_subset(source, count, f"{SEED}-{part.number - 1}")
        drawn.append(decide_answers(run, chosen, part))
        details = [part.subset, part.split]
        if part.source.startswith(GYM_PREFIX):
            details = [json.dumps(entry.options) if entry.options else None]
        is_named_again = section.all_sources.count(part.source) > 1
        labels.append(" ".join(filter(None, (part.source, *(details if is_named_again else ())))))
    mixed = require_one_answer(run, _as_one_type(combine(drawn, labels), "answer_column of data.sources"))
    require_verifier(run, mixed, "data.sources")
    triples = zip(counts, sources, labels, strict=True)
    shares = ", ".join(f"{count} of the {len(source)} rows of {label}" for count, source, label in triples)
    return replace(mixed, notes=(*mixed.notes, f"the mix has {shares}"))


def read_part(run: RunConfig, part: Part, thinking: bool) -> DataSource:
    """The rows of one source."""
    for prefix, name in MADE_BY.items():
        if part.source.startswith(prefix):
            return load_part(name).read_source(run, part, thinking)
    path = find_file(part.source, run.source, part.key)
    if path is None:
        return read_hub(part)
    return read_data_file(path, part.columns)


def draw_subset(source: DataSource, wanted: int | None, seed: int | str = SEED) -> DataSource:
    """`wanted` rows, drawn without replacement, in the source's order, with their images; None for all."""
    if wanted is not None and wanted < len(source):
        source = source.select(sorted(random.Random(f"draw-{seed}").sample(range(len(source)), wanted)))
    return with_images(source)


def share_out(sizes: list[int], weights: list[float], most: int | None) -> list[int]:
    """How many rows to take of each source: in proportion to the weights, until one is exhausted or there are `most`.

    >>> share_out([600, 100], [1.0, 1.0], None), share_out([600, 100], [3.0, 1.0], 50)
    ([100, 100], [38, 12])
    """
    exact = _shares(weights)
    total = int(min(size / share for size, share in zip(sizes, exact, strict=True)))
    total = total if most is None else min(total, most)
    counts = [int(total * share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda place: counts[place] - total * exact[place])  # the largest first
    for place in by_rest[: total - sum(counts)]:
        counts[place] += 1
    return counts


def _shares(weights: list[float]) -> list[Fraction]:
    written = [Fraction(str(weight)) for weight in weights]  # 0.1 exactly, as written in the file
    return [weight / sum(written) for weight in written]


def combine(sources: list[DataSource], labels: list[str]) -> DataSource:
    """All rows of the sources, evenly interleaved: any stretch of them has the sources in proportion. A column missing
    from a source is None in its rows. `labels` become the column `source`, unless there is one. Raises DataError for a
    column with different types in two sources."""
    order = sorted(
        (Fraction(2 * row + 1, 2 * len(source)), place, row)
        for place, source in enumerate(sources)
        for row in range(len(source))
    )
    rows = [(place, row) for _, place, row in order]

    def mixed(columns: list[Any]) -> list[Any]:
        return [columns[place][row] for place, row in rows]

    others: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for source in sources for name in source.other_names):
        columns = [list(source.column(name)) for source in sources]
        others[name] = arrow_column(name, mixed(columns), " with ".join(source.name for source in sources))
    others.setdefault(SOURCE_COLUMN, [labels[place] for place, _ in rows])
    has_answers = any(source.answers is not None for source in sources)
    return DataSource(
        name="data.sources",
        prompts=mixed([source.prompts for source in sources]),
        answers=mixed([source.answers or [None] * len(source) for source in sources]) if has_answers else None,
        others=others,
        places=[sources[place].where(row) for place, row in rows],
        notes=tuple(note for source in sources for note in source.notes),
        is_mix=True,
    )


# ---- answers: which rows may go without one, and in which form they are passed on


def compares_with_answers(run: RunConfig) -> bool:
    """Whether a reward of the run compares completions with the `answer` column."""
    return any(reward.name in REWARDS_WITH_ANSWERS for reward in run.rewards)


def needs_all_answers(run: RunConfig) -> bool:
    """Whether a row without an answer gets no reward, because every reward with a weight compares with answers."""
    names = {reward.name for reward in run.rewards if reward.weight}
    return names <= {*REWARDS_WITH_ANSWERS, GYM_REWARD} and names != {GYM_REWARD}


def decide_answers(run: RunConfig, source: DataSource, part: Part) -> DataSource:
    """The source with its answers as rewards get them: as they are, or the text after the marker of `part`; None for a
    row without one if a reward scores such rows; all as text if they are of several types. Raises DataError for an
    answer without the marker, for one that is no text or number if a reward of the run compares it, and for a row
    without an answer it needs."""
    if source.answers is None:
        return source
    answers, missing = list(source.answers), []
    for row, value in enumerate(answers):
        if has_no_answer(value):
            if needs_all_answers(run):
                raise DataError(
                    f"{source.where(row)}: no answer, and each reward with a weight compares with one; give the row a "
                    f"text or a number ({part.answer_key}), or add a reward for rows without an answer"
                )
            answers[row] = None
            missing.append(row)
        elif part.answer_after is not None or compares_with_answers(run):
            text = comparable_text(value, source.where(row), part.answer_key, part.answer_after)
            answers[row] = value if part.answer_after is None else text
    notes = source.notes
    if missing:
        notes += (
            f"{len(missing)} of {len(answers)} rows of {source.name} have no answer (the first: "
            f"{source.places[missing[0]]}); rewards that compare with one skip them",
        )
    return _as_one_type(replace(source, answers=answers, notes=notes), part.answer_key)


def _as_one_type(source: DataSource, column: str) -> DataSource:
    """The source with all answers as text, and a note, if they are numbers and text, or numbers of no type of Arrow."""
    answers = source.answers
    if answers is None or is_plain(answers):
        return source
    try:
        return replace(source, answers=arrow_column(column, answers, source.name))
    except DataError:
        if not all(isinstance(value, str | Real | Decimal | None) for value in answers):
            raise
    note = f"the answers of {source.name} are not of one type; all are passed on as text ({column})"
    texts = [value if value is None else str(value) for value in answers]
    return replace(source, answers=texts, notes=(*source.notes, note))


def comparable_text(value: Any, where: str, column: str, after: str | None = None) -> str:
    """The text of an answer that rewards compare, behind the marker `after`; raises DataError, with the place and the
    column, if there is none."""
    if not is_comparable(value):
        problem = f"an answer of type {type(value).__name__} ({excerpt(value, 40)})"
        raise DataError(f"{where}: {problem}; it must be text or a number where a reward compares it ({column})")
    if after is None:
        return str(value)
    _, marker, text = str(value).rpartition(after)
    if not marker:
        key = column.split("answer_column")[0] + "answer_after"
        raise DataError(f"{where}: the answer has no {after!r} in it ({key}; {column})")
    if not text.strip():
        raise DataError(f"{where}: the answer is empty ({column})")
    return text.strip()


def require_one_answer(run: RunConfig, source: DataSource) -> DataSource:
    """`source`; raises DataError if a reward compares with answers but no row has one."""
    if compares_with_answers(run) and source.answers is not None and all(map(has_no_answer, source.answers)):
        raise DataError(
            f"{source.name}: no row has an answer, and a reward compares with one. Name the right column in "
            "data.answer_column, or remove the rewards that compare with an answer"
        )
    return source


def require_verifier(run: RunConfig, source: DataSource, key: str, alone: bool = True) -> None:
    """Raise DataError if `reasoning_gym_score` is a reward of the run but scores no row of the source; in a mix
    (`alone` is False), only if no other reward scores its rows. `key` names the source."""
    names = {reward.name for reward in run.rewards if reward.weight or alone}
    if GYM_REWARD not in names or (names != {GYM_REWARD} and not alone):
        return
    if all(map(has_no_answer, source.column("reasoning_gym"))):
        way_out = f"use a reward other than {GYM_REWARD}" if alone else "add a reward that scores its rows"
        raise DataError(
            f"{key}: {source.name} has no rows of a task of reasoning-gym, and {GYM_REWARD} scores no others: name "
            f"reasoning_gym/TASK as the source, or {way_out}, such as {REWARDS_WITH_ANSWERS[0]}"
        )


# ---- rendered prompts


def render_row(
    run: RunConfig, tokenizer: Any, family: str, source: DataSource, row: int, tools: Any = None, key: str | None = None
) -> str:
    """The text that the model reads for one row, with the schemas of the tools; raises DataError with file, line and
    the `key` of the prompt column if it cannot be rendered."""
    try:
        options = run.model.enable_thinking, run.data.system_prompt, tools
        return render_prompt(tokenizer, source.prompts[row], family, *options)
    except DataError as error:
        default = "prompt_column of data.sources" if source.is_mix else f"data.prompt_column: {run.data.prompt_column}"
        raise DataError(f"{source.where(row)}: {error} ({key or default})") from error


def _fitting_rows(run: RunConfig, tokenizer: Any, source: DataSource, texts: list[str], notes: list[str]) -> list[int]:
    """The rows whose prompt fits into `data.max_prompt_length` tokens, as the trainer counts them."""
    limit = run.data.max_prompt_length
    ids = tokenizer(texts)["input_ids"]
    if ids[0][-1:] == [tokenizer.eos_token_id] and not texts[0].rstrip().endswith(tokenizer.eos_token or "\0"):
        problem = f"the tokenizer appends {tokenizer.eos_token} to every text"
        fix = "Set tokenizer.add_eos_token = False, or save the tokenizer that way"
        raise DataError(f"{problem}, so the model would continue after the end of its turn. {fix}")
    lengths = [len(row) for row in ids]
    fitting = [row for row, length in enumerate(lengths) if length <= limit]
    if len(fitting) == len(texts):
        return fitting
    longest = max(range(len(texts)), key=lengths.__getitem__)
    problem = (
        f"{len(texts) - len(fitting)} of {len(texts)} prompts are longer than data.max_prompt_length={limit} tokens; "
        f"the longest has {lengths[longest]} ({source.where(longest)})"
    )
    if not fitting:
        raise DataError(f"{problem}, the shortest {min(lengths)}: none is left. Raise data.max_prompt_length")
    notes.append(f"{problem}. They are dropped")
    return fitting


# ---- two datasets


def _split(sides: list[Side], section: DataSection, notes: list[str]) -> tuple[list[int], list[int]]:
    """Training rows in order, and shuffled, distinct test rows, of the training source or of the test source behind it;
    no prompt is on both sides."""
    side, tested, size = sides[0], sides[-1], section.test_size
    groups: dict[str, list[int]] = {}  # the rows of each different prompt, in order
    for row in tested.rows:
        groups.setdefault(prompt_identity(tested.texts[row]), []).append(row)
    repeats, keys = len(tested.rows) - len(groups), list(groups)
    random.Random(f"split-{SEED}").shuffle(keys)
    if tested is not side:
        held_out = keys[: int(size)] if size >= 1 else keys
        if repeats:
            notes.append(f"{repeats} repeats of held-out prompts are left out of {tested.source.name}")
        excluded = set(held_out)
        train = [row for row in side.rows if prompt_identity(side.texts[row]) not in excluded]
        lost = len(side.rows) - len(train)
        if not train:
            raise DataError(
                f"all {lost} training prompts of {side.source.name} are held-out prompts of {tested.source.name} too: "
                "none is left to train on. Name another file or split in data.test_source or data.test_split"
            )
        if lost:
            notes.append(f"{lost} rows of {side.source.name} are left out of training: their prompts are held out too")
        return train, [groups[key][0] for key in held_out]
    wanted = int(size) if size >= 1 else max(round(size * len(groups)), 1 if size > 0 else 0)
    if wanted >= len(groups):
        raise DataError(
            f"{side.source.name} has {len(groups)} different prompts, and data.test_size={size} holds out {wanted} of "
            "them: none is left to train on. Lower data.test_size, set data.test_source to hold out prompts of another "
            "file, or raise data.num_prompts or data.max_prompt_length if they left prompts out"
        )
    held_out = keys[:wanted]
    if repeats:
        left_out = sum(len(groups[key]) - 1 for key in held_out)
        notes.append(
            f"{repeats} rows repeat an earlier prompt; the split keeps equal prompts together"
            + (f", and {left_out} repeats of held-out prompts are left out" if left_out else "")
        )
    return sorted(row for key in keys[wanted:] for row in groups[key]), [groups[key][0] for key in held_out]


def _datasets(*sides: Side) -> list[Any]:
    """A `datasets.Dataset` of each side of one source; a column has one type on all of them."""
    source = sides[0].source
    answers = {} if source.answers is None else {"answer": source.answers}
    columns: dict[str, Any] = {"prompt": sides[0].texts} | answers
    if (added := source.added_name) not in source.other_names:
        columns[added] = source.column(added)
    tables = [to_dataset(part, source.name) for part in (columns, source.others) if part]
    concatenate = _stack.load_stack().datasets.concatenate_datasets
    return [concatenate([_take(table, side.rows) for table in tables], axis=1) for side in sides]


def _take(table: Any, rows: list[int]) -> Any:
    """A table of its own: a view with indices, or one chunk per row, would pickle the whole column each time."""
    datasets = _stack.load_stack().datasets
    chosen = table.with_format("arrow").select(rows)[:].combine_chunks()
    return datasets.Dataset(chosen, info=datasets.DatasetInfo(features=table.features))
