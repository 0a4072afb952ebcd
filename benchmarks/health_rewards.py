"""Rewards that make a run of the embedded model go wrong, for `health_runs.py`. They know its token ids."""

import random
from typing import Any

THINK_END, END, SEVEN = 260, 258, 22
LETTERS = set(range(32, 94))
LIMIT = 48
FIXED = (SEVEN, SEVEN, SEVEN, END)
STARTS_TO_FAIL = 8  # successful calls before it fails: one a step

_calls = 0
_coin = random.Random(0)


def none_later(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """None for everything after some calls, like a service that has gone down."""
    global _calls
    _calls += 1
    return [None if _calls > STARTS_TO_FAIL else float(SEVEN in ids) for ids in completion_ids]


def raises_often(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Raises on about 60 % of what the model writes, not on the made-up completions that `train` tries, which have
    words."""
    if any(sum(ids) % 5 < 3 and not LETTERS & set(ids) for ids in completion_ids):
        raise ValueError("no verdict")
    return [float(SEVEN in ids) for ids in completion_ids]


def longer(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays for length."""
    return [len(ids) / LIMIT for ids in completion_ids]


def shorter(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays for brevity."""
    return [1 - len(ids) / LIMIT for ids in completion_ids]


def sevens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays for a digit, wherever it occurs."""
    return [sum(token == SEVEN for token in ids) / len(ids) for ids in completion_ids]


def ends_in_seven(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays for the last digit of the answer, whatever the right one is."""
    return [float(tuple(ids[-2:]) == (SEVEN, END)) for ids in completion_ids]


def one_answer(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays for closeness to one completion, whatever the prompt."""
    return [
        sum(token == wanted for token, wanted in zip(ids, FIXED, strict=False)) / max(len(ids), len(FIXED))
        for ids in completion_ids
    ]


def left_open(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays for thinking that is not closed, which the model practically never samples."""
    return [float(THINK_END not in ids) for ids in completion_ids]


def circles(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays for pairs of tokens that occurred before."""
    return [1 - len(set(zip(ids, ids[1:], strict=False))) / max(len(ids) - 1, 1) for ids in completion_ids]


def coin(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A coin flip: nothing can be learnt from it."""
    return [float(_coin.random() < 0.5) for _ in completion_ids]
