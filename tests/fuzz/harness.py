"""Runs one surface of the kit on many bad inputs; each may only succeed or be refused with a message.

A refusal is an `RlooKitError` whose message is short, printable text. `make fuzz` is the long search.
"""

import os
import signal
import tempfile
import traceback
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from rloo_kit.errors import RlooKitError, excerpt

CASES = int(os.environ.get("RLOO_KIT_FUZZ_CASES", "50"))  # a surface, in the tests
LONGEST_MESSAGE, LONGEST_LINE = 20_000, 1_500  # characters
HANGS_AFTER_S = 60.0  # a case takes milliseconds; a bomb of aliases took minutes


@dataclass(frozen=True)
class Surface:
    """An attacked surface: `attack(case, folder)` passes one of `cases` to the kit and may write into `folder`.
    `prepare` does slow loading before the clock of the first case starts."""

    name: str
    cases: SearchStrategy[Any]
    attack: Callable[[Any, Path], object]
    prepare: Callable[[], object] = lambda: None


@dataclass
class Tally:
    """The outcome of many cases. `failures`: what went wrong and where, with the number of cases, and an example."""

    cases: int = 0
    refused: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        found = self.failures.most_common()
        return "\n".join(f"    {number} x {what}\n        {self.examples[what]}" for what, number in found)


class Hang(BaseException):
    """Raised for a case that does not end; no handler in the kit may catch it."""


def judge(surface: Surface, case: Any, folder: Path) -> tuple[bool, str | None]:
    """Whether `case` was refused, and what is wrong with the kit's reaction (None: nothing)."""

    def end(*_: object) -> None:
        raise Hang

    here, before = os.getcwd(), signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            surface.attack(case, folder)
    except RlooKitError as error:
        return True, judge_message(error)
    except Hang:
        return False, f"hangs: no end after {HANGS_AFTER_S:g} s"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(entry.filename).name}:{entry.name}" for entry in place if "rloo_kit" in entry.filename]
        return False, f"{type(error).__name__} in {own[-1] if own else 'the test'}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.chdir(here)
    return False, None


def judge_message(error: RlooKitError) -> str | None:
    """What is wrong with a refusal's text; None: nothing."""
    try:
        text = str(error)
        text.encode()
    except UnicodeEncodeError:
        return f"{type(error).__name__} with a message that cannot be printed"
    if not text.strip():
        return f"{type(error).__name__} without a message"
    if len(text) > LONGEST_MESSAGE or max(map(len, text.splitlines())) > LONGEST_LINE:
        return f"{type(error).__name__} with a message as long as its input"
    if any(unicodedata.category(mark) in ("Cc", "Zl", "Zp") and mark not in "\n\t" for mark in text):
        return f"{type(error).__name__} with control characters in its message"
    return None


def count(surface: Surface, cases: int) -> Tally:
    """The outcome of this many cases."""
    surface.prepare()
    tally = Tally()

    @seed(0)
    @settings(
        max_examples=cases, phases=[Phase.generate], deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(surface.cases)
    def each(case: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            refused, wrong = judge(surface, case, Path(folder))
        tally.cases += 1
        tally.refused += refused
        if wrong is not None:
            tally.failures[wrong] += 1
            tally.examples.setdefault(wrong, excerpt(case, 600))

    each()
    return tally


def check(surface: Surface) -> None:
    """Print the figures, and fail with every kind of case that the kit handles badly; the cases are always the same."""
    tally = count(surface, CASES)
    print(f"{surface.name}: {tally.cases:,} cases, {tally.refused:,} refused, {tally.failures.total():,} failures")
    if tally.failures:
        pytest.fail(f"{surface.name}:\n{tally}", pytrace=False)
