"""Tools that fail in the ways that tools do, and an environment that counts."""

import asyncio
import enum
import functools
import math
import os
import sys
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import numpy as np


def good(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def raises(text: str) -> str:
    """Raise.

    Args:
        text: any.
    """
    return text[99]


def hangs() -> str:
    """Never return."""
    while True:
        time.sleep(1)


def dies() -> str:
    """End the process."""
    os._exit(3)


def quits() -> str:
    """Leave the program."""
    sys.exit("enough")


def nothing() -> None:
    """Return nothing."""


def an_object() -> object:
    """Return an object."""
    return object()


def endless() -> str:
    """Return ten million characters."""
    return "long " * 2_000_000


def prints() -> str:
    """Print to both outputs."""
    print("[null, 7]")
    print("noise", file=sys.stderr)
    return "printed"


def half() -> str:
    """Return half of a surrogate pair."""
    return "\ud83d"


async def later() -> list[int]:
    """Return a list, asynchronously."""
    return [1, 2]


@functools.lru_cache
def cached(x: int, *, y: "str | None" = None) -> str:
    """Show its arguments.

    Args:
        x (int): the first.
        y (`str | None`, *optional*): the second.
    """
    return repr((x, y))


@functools.cache
def keeps_number(x: int) -> Any:
    """Return numbers of NumPy.

    Args:
        x: any.
    """
    return {np.int64(x): [np.float32(0.5), np.arange(x)]}


@functools.cache
async def caches_async() -> str:
    """Return a text."""
    return "x"


def yields() -> Iterator[str]:
    """Yield a text."""
    yield "x"


async def yields_async() -> AsyncIterator[str]:
    """Yield a text."""
    yield "x"


caches_yields = functools.cache(yields)


def typed(
    text: str = "", texts: list[str] = [], by: dict[str, str] = {}, one: Literal["1", "2"] = "1",  # noqa: B006
    either: int | str = 0, yes: bool = False, number: float = 0.0, maybe: "int | None" = None,
) -> str:  # fmt: skip
    """Show its arguments.

    Args:
        text: a.
        texts: b.
        by: c.
        one: d.
        either: e.
        yes: f.
        number: g.
        maybe: h.
    """
    given = {"text": text, "texts": texts, "by": by, "one": one, "either": either, "yes": yes, "number": number}
    return repr([value for value in (*given.values(), maybe) if value and value != "1"])


def deep_error() -> str:
    """Raise an error whose text no tokenizer takes."""
    raise OSError("no file \ud83d")


async def leaves() -> str:
    """Leave the program, asynchronously."""
    sys.exit("enough")


class Client:
    """A client that belongs to the loop of its first call, as those of HTTP libraries do."""

    loop: Any = None

    async def ask(self, text: str) -> str:
        """Ask.

        Args:
            text: any.
        """
        self.loop = self.loop or asyncio.get_running_loop()
        return text if self.loop is asyncio.get_running_loop() and self.loop.is_running() else "another loop"

    @staticmethod
    def static(text: str) -> str:
        """Return it.

        Args:
            text: any.
        """
        return text

    def __call__(self, text: str) -> str:
        """Return it."""
        return text


client = Client()
partly = functools.partial(good, b=3)


def takes_any(*texts: str) -> str:
    """Take any."""
    return str(texts)


def numpy_style(x: int) -> int:
    """Return it.

    Parameters
    ----------
    x : int
        any.
    """
    return x


class Counter:
    """Counts for its episode."""

    def __init__(self) -> None:
        self.count = -1

    def reset(self, start: int = 0, **row: object) -> str | None:
        """Begin at `start`."""
        if start < 0:
            raise ValueError("start is negative")
        self.count = start
        return f" (from {start})" if start else None

    def step(self, by: int) -> str:
        """Count on.

        Args:
            by: how far.
        """
        time.sleep({13: 60, 4: 0.4}.get(by, 0))
        self.count += by
        return str(self.count)

    def get_reward(self) -> float:
        """What was counted."""
        return float(self.count)


class Mode(enum.Enum):
    """An enum."""

    FAST = "fast"


class Stateful:
    """Has attributes of all kinds."""

    rounds = 3
    __slots__ = ("__dict__", "place")

    def reset(self, **row: object) -> None:
        """Set them."""
        self._solved, self.place, self.visited, self.counts = True, (0, 1), {(0, 1)}, {1: "a"}
        self.best, self.clock, self.words = float("inf"), object(), "x" * 200_000
        self.hands = {"r": np.float64(1), (1,): [-math.inf, np.int64(2)]}
        self.mode, self.seen = Mode.FAST, Counts("aab")
        self.queue, self.past, self.cell = deque([1]), {frozenset({1}), frozenset()}, np.arange(2)

    @property
    def won(self) -> bool:
        """A property."""
        return self._solved

    @property
    def broken(self) -> bool:
        """One that fails."""
        raise KeyError("broken")

    @property
    def leaves(self) -> bool:
        """One that ends the process."""
        sys.exit("enough")

    def look(self) -> str:
        """Look."""
        return "wall"


def no_hints(a):
    """Add."""


def no_docstring(a: int) -> int:
    return a
