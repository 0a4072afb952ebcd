"""How the rows of a batch are cut into passes, each of which is scored and backpropagated at once."""

from collections.abc import Callable


def cut_passes(
    groups: list[list[int]], tokens: Callable[[list[int]], int], limit: int, whole_groups: bool
) -> list[list[int]]:
    """The rows of each pass: groups together up to `limit` tokens, and a group that exceeds it row by row.

    >>> cut_passes([[0, 1], [2, 3], [4, 5]], lambda rows: 10 * len(rows), 40, whole_groups=False)
    [[0, 1, 2, 3], [4, 5]]
    >>> cut_passes([[0, 1, 2]], lambda rows: 10 * len(rows), 20, whole_groups=False)
    [[0, 1], [2]]

    Args:
        groups: rows, neighbours of one group together. tokens: what a pass over some rows computes.
        limit: below the tokens of a single row, each row is a pass. whole_groups: a group is never cut.
    """
    passes: list[list[int]] = []
    for group in groups:
        stays_whole = whole_groups or tokens(group) <= limit
        for unit in [group] if stays_whole else [[row] for row in group]:
            if passes and tokens(passes[-1] + unit) <= limit:
                passes[-1] = passes[-1] + unit
            else:
                passes.append(unit)
    return passes
