"""Reads, draws and mixes the rows of a run's `data`, not yet rendered, with their answers as text.

Torch, transformers and `datasets` are loaded for what only they can read (`needs_stack`).
"""

import json
import math
import random
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rloo_kit.config.model_names import DEFAULT_FAMILY, EMBEDDED_PREFIX
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import DataSection, SourceSection
from rloo_kit.data.answers import (
    compares_with_answers,
    needs_all_answers,
    require_one_answer,
    require_verifier,
    with_answers,
    with_one_type,
)
from rloo_kit.data.columns import Columns, DataSource, arrow_column, select_rows
from rloo_kit.data.families import addition
from rloo_kit.data.gym import GYM_PROMPTS, GYM_TEST_PROMPTS, first_seed, is_gym, read_gym
from rloo_kit.data.sources import find_file, read_file, read_rows
from rloo_kit.data.tables import read_folder, read_hub
from rloo_kit.data.tasks import Family, find_family, make_rows
from rloo_kit.errors import ConfigError, DataError

EMBEDDED_PROMPTS = 10_000  # if data.num_prompts is null
SOURCE_COLUMN = "source"  # names each row's source in a mix


@dataclass(frozen=True)
class Part:
    """One source of a run with its settings from `data`; `key` and `split_key` name it in errors.

    Attributes:
        split: None for test. options, level: of a reasoning-gym task; `options_key` is the key of the options. count:
            its rows to draw; fewer are an error if `count_key` is set, the key that asks for them. number: of the
            source in the run, 0 for the test source.
    """

    source: str
    columns: Columns
    subset: str | None
    split: str | None
    answer_after: str | None
    key: str = "data.source"
    split_key: str = "data.split"
    options: dict[str, Any] | None = None
    level: int | None = None
    options_key: str = "data.options"
    count: int = GYM_PROMPTS
    count_key: str = ""
    number: int = 1

    @property
    def answer_key(self) -> str:
        """Key and name of the answer's column, for errors."""
        return f"{self.columns.prefix}answer_column: {self.columns.answer}"


def needs_stack(run: RunConfig) -> bool:
    """Whether only the stack can read a source of the run: Parquet, a folder of save_to_disk, a hub id."""
    section = run.data
    wanted = [*section.all_sources, *([section.test_source] if section.test_source else [])]
    return any(is_for_stack(source, run) for source in wanted)


def is_for_stack(source: str, run: RunConfig, key: str = "data.source") -> bool:
    """Whether only the stack can read a source, which `key` names."""
    if source.startswith(EMBEDDED_PREFIX) or is_gym(source):
        return False
    try:
        path = find_file(source, run.source, key)
    except DataError:  # the reader raises the error
        return False
    return path is None or path.is_dir() or path.suffix.lower() == ".parquet"


def read_training(run: RunConfig, rows: Any, thinking: bool) -> DataSource:
    """The rows to train on, or `rows`; `thinking` is for the embedded task."""
    section = run.data
    if rows is not None:
        part = replace(_part(run, ""), key="rows")
        source = read_rows(rows, part.columns)
    elif section.sources is not None:
        return _read_mix(run, thinking)
    else:
        part = _part(run, str(section.source))
        source = read_part(run, part, thinking)
    require_verifier(run, source, part.key)
    return _finish(run, part, draw(source, section.num_prompts, section.seed))


def read_test(run: RunConfig) -> DataSource | None:
    """The rows of the test source or split, in the source's order; None if the test set is split off."""
    section = run.data
    if not section.separate_test:
        return None
    key = "data.source" if section.test_source is None else "data.test_source"
    part = _part(run, str(section.test_source or section.source))
    part = replace(part, split=section.test_split, key=key, split_key="data.test_split", number=0)
    count = int(section.test_size) if section.test_size >= 1 else GYM_TEST_PROMPTS
    part = replace(part, count=count, count_key="data.test_size" if section.test_size >= 1 else "")
    if part.source not in section.all_sources and any(map(is_gym, section.all_sources)):  # of another task
        part = replace(part, options=None, level=None, options_key=key)
    return _finish(run, part, read_part(run, part, True))


def _finish(run: RunConfig, part: Part, source: DataSource) -> DataSource:
    source = with_answers(run, source, part.answer_after, part.answer_key)
    require_one_answer(run, source)
    return source


def _read_mix(run: RunConfig, thinking: bool) -> DataSource:
    entries = run.data.sources or []
    parts = [_part_of_mix(run, number) for number in range(len(entries))]
    sources = [read_part(run, part, thinking) for part in parts]
    for part, source in zip(parts, sources, strict=True):
        require_verifier(run, source, part.key, alone=False)
    if all(source.answers is None for source in sources) and _answers_wanted(run):
        raise DataError(
            f"data.sources: no source has an answer column ({', '.join(part.answer_key for part in parts)}). Name the "
            "right ones, or remove the rewards that compare with an answer"
        )
    counts = share_out([len(source) for source in sources], [entry.weight for entry in entries], run.data.num_prompts)
    drawn = []
    for number, (part, source, count) in enumerate(zip(parts, sources, counts, strict=True)):
        chosen = draw(source, count, f"{run.data.seed}-{number}")
        drawn.append(with_answers(run, chosen, part.answer_after, part.answer_key))
    labels = _labels(run.data)
    mixed = with_one_type(combine(drawn, labels), "answer_column of data.sources")
    require_one_answer(run, mixed)
    require_verifier(run, mixed, "data.sources")
    each = ", ".join(
        f"{count} of the {len(source)} rows of {label}"
        for label, source, count in zip(labels, sources, counts, strict=True)
    )
    limited = run.data.num_prompts is not None and sum(counts) == run.data.num_prompts
    return replace(mixed, notes=(*mixed.notes, f"the mix has {each}"), rows_left=limited)


def _labels(section: DataSection) -> list[str]:
    """The name of each source of a mix in the column `source`: as in the file; with subset and split, or a task's level
    and options, if a source occurs more than once."""
    entries, names = section.sources or [], section.all_sources
    return [
        entry.source
        if names.count(entry.source) == 1
        else " ".join(filter(None, (entry.source, *_details(entry, section))))
        for entry in entries
    ]


def _details(entry: SourceSection, section: DataSection) -> tuple[str | None, str | None]:
    if not is_gym(entry.source):
        return entry.subset or section.subset, entry.split or section.split
    level = None if entry.curriculum_level is None else f"level {entry.curriculum_level}"
    return level, json.dumps(entry.options) if entry.options else None


def read_part(run: RunConfig, part: Part, thinking: bool) -> DataSource:
    """The rows of one source."""
    if part.source.startswith(EMBEDDED_PREFIX):
        return _read_embedded(run, part, thinking)
    if is_gym(part.source):
        start = first_seed(run.data.seed, part.number)
        asked = part.options, part.level, part.count, start
        return read_gym(part.source, *asked, part.key, part.count_key, part.options_key)
    path = find_file(part.source, run.source, part.key)
    if path is None:
        return read_hub(part.source, part.subset, part.split, part.columns, part.key, part.split_key)
    if path.is_dir():
        return read_folder(path, part.split, part.split_key, part.columns)
    return read_file(path, part.columns)


def _read_embedded(run: RunConfig, part: Part, thinking: bool) -> DataSource:
    """As many problems as the run needs; for a mix at most `max_rows`, since the other sources supply the rest."""
    name, family = find_embedded_family(run, part, thinking)
    wanted = run.data.num_prompts or min(EMBEDDED_PROMPTS, family.max_rows)
    drawn = make_rows(family, min(wanted, family.max_rows) if run.data.sources else wanted, run.data.seed, name)
    return replace(read_rows(drawn, Columns()), name=part.source, rows_left=wanted < family.max_rows)


def find_embedded_family(run: RunConfig, part: Part, thinking: bool) -> tuple[str, Family]:
    """The family of a source `embedded/...` and its name; a model that answers at once gets smaller numbers."""
    name = part.source.removeprefix(EMBEDDED_PREFIX)
    if name == DEFAULT_FAMILY and not thinking:
        return name, addition.IN_THE_HEAD
    try:
        return name, find_family(name, run.source)
    except ConfigError as error:
        raise DataError(f"{part.key}: {error}") from None


def _part(run: RunConfig, source: str) -> Part:
    section = run.data
    columns = Columns(section.prompt_column, section.answer_column, _answers_wanted(run))
    return Part(
        source=source,
        columns=columns,
        subset=section.subset,
        split=section.split,
        answer_after=None if is_gym(source) else section.answer_after,
        options=section.options,
        level=section.curriculum_level,
        count=section.num_prompts or GYM_PROMPTS,
        count_key="data.num_prompts" if section.num_prompts else "",
    )


def _part_of_mix(run: RunConfig, number: int) -> Part:
    """An entry of `data.sources`; if a reward scores rows without an answer, a source may lack the column unless the
    entry itself names it."""
    section, prefix = run.data, f"data.sources.{number}."
    entry = (section.sources or [])[number]
    named = entry.answer_column is not None or entry.answer_after is not None
    made = entry.source.startswith(EMBEDDED_PREFIX) or is_gym(entry.source)
    weights = [Fraction(str(each.weight)) for each in section.sources or []]
    share = weights[number] / sum(weights)
    own = (entry.options, entry.curriculum_level) != (None, None)
    asked = entry if own or (section.options, section.curriculum_level) == (None, None) else section
    columns = Columns(
        prompt=entry.prompt_column or section.prompt_column,
        answer=entry.answer_column or section.answer_column,
        answer_required=named or needs_all_answers(run),
        prefix=prefix,
    )
    return Part(
        source=entry.source,
        columns=columns,
        subset=entry.subset or section.subset,
        split=entry.split or section.split,
        answer_after=None if made else entry.answer_after or section.answer_after,
        key=f"{prefix}source",
        split_key=f"{prefix}split",
        options=asked.options,
        level=asked.curriculum_level,
        options_key="data.options" if asked is section else f"{prefix}options",
        count=GYM_PROMPTS if section.num_prompts is None else math.ceil(section.num_prompts * share),
        number=number + 1,
    )


def _answers_wanted(run: RunConfig) -> bool:
    """Whether the answer column is required: `data` names it, or a reward compares with it."""
    section = run.data
    named = section.answer_column != type(section).model_fields["answer_column"].default
    return named or section.answer_after is not None or compares_with_answers(run)


def draw(source: DataSource, wanted: int | None, seed: int | str) -> DataSource:
    """`wanted` rows, drawn without replacement, in the source's order; None for all."""
    total = len(source)
    if wanted is None or wanted >= total:
        return source
    rows = sorted(random.Random(f"draw-{seed}").sample(range(total), wanted))
    return replace(select_rows(source, rows), rows_left=True)


def share_out(sizes: list[int], weights: list[float], most: int | None) -> list[int]:
    """How many rows to take of each source: in proportion to the weights, until one is exhausted or there are `most`.

    >>> share_out([600, 100], [1.0, 1.0], None), share_out([600, 100], [3.0, 1.0], 50)
    ([100, 100], [38, 12])
    """
    written = [Fraction(str(weight)) for weight in weights]  # 0.1 exactly, as written in the file
    exact = [weight / sum(written) for weight in written]
    total = int(min(size / share for size, share in zip(sizes, exact, strict=True)))
    total = total if most is None else min(total, most)
    counts = [int(total * share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda place: counts[place] - total * exact[place])  # the largest first
    for place in by_rest[: total - sum(counts)]:
        counts[place] += 1
    return counts


def combine(sources: list[DataSource], labels: list[str]) -> DataSource:
    """All rows of the sources, evenly interleaved: any stretch of them has the sources in proportion.

    A column missing from a source is None in its rows. `labels` become the column `source`, unless there is one.

    Raises:
        DataError: a column with different types in two sources.
    """
    order = sorted(
        (Fraction(2 * row + 1, 2 * len(source)), place, row)
        for place, source in enumerate(sources)
        for row in range(len(source))
    )
    rows = [(place, row) for _, place, row in order]
    names = list(dict.fromkeys(name for source in sources for name in source.other_names))
    places = [sources[place].where(row) for place, row in rows]
    others: dict[str, list[Any]] = {}
    for name in names:
        columns = [list(source.column(name)) for source in sources]
        others[name] = arrow_column(name, [columns[place][row] for place, row in rows], places.__getitem__)
    if SOURCE_COLUMN not in others:
        others[SOURCE_COLUMN] = [labels[place] for place, _ in rows]
    has_answers = any(source.answers is not None for source in sources)
    answers = [source.answers or [None] * len(source.prompts) for source in sources]
    return DataSource(
        name="data.sources",
        prompts=[sources[place].prompts[row] for place, row in rows],
        answers=[answers[place][row] for place, row in rows] if has_answers else None,
        others=others,
        places=places,
        notes=tuple(note for source in sources for note in source.notes),
        is_mix=True,
    )
