"""Rows drawn by seed: some of one source, or several sources in proportion to their weights."""

import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rloo_kit.data.columns import DataSource, arrow_column, select_rows

SOURCE_COLUMN = "source"  # names each row's source in a mix


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
