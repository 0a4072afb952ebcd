"""Runs one surface of the kit on many bad inputs; each may only succeed or be refused with a message.

A refusal is an `RlooKitError` whose message is short, printable text. `run.py` counts; the tests stop at the first
failure.
"""

import contextlib
import os
import signal
import tempfile
import traceback
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from rloo_kit.errors import RlooKitError

CASES = int(os.environ.get("RLOO_KIT_FUZZ_CASES", "100"))  # a surface, in the tests
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
    """The outcome of many cases. `failures`: what went wrong and where, with the number of cases; `unclear`: those
    among them that were refused with an unreadable message."""

    surface: str
    cases: int = 0
    refused: int = 0
    unclear: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def tracebacks(self) -> int:
        """Number of cases that ended in another exception than a refusal, or did not end."""
        return sum(self.failures.values()) - self.unclear


class Hang(BaseException):
    """Raised for a case that does not end; no handler in the kit may catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the main thread after `seconds`."""

    def end(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(surface: Surface, case: Any, folder: Path) -> tuple[bool, str | None]:
    """Whether `case` was refused, and what is wrong with the kit's reaction (None: nothing)."""
    here = os.getcwd()
    try:
        with time_limit(HANGS_AFTER_S), warnings.catch_warnings():
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


def show(case: Any) -> str:
    """A case, shortened for reading."""
    try:
        text = repr(case)
    except Exception as error:  # huge integers have no repr
        return f"a case whose repr raises {type(error).__name__}"
    return text if len(text) <= 600 else f"{text[:400]} ... {text[-150:]} ({len(text)} characters)"


_QUICK: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def check(surface: Surface) -> None:
    """Fail at the first case (shrunk) that the kit handles badly; every call uses the same cases."""

    surface.prepare()
    found: list[str] = []

    @settings(max_examples=CASES, derandomize=True, report_multiple_bugs=False, **_QUICK)
    @given(surface.cases)
    def each(case: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            _, wrong = judge(surface, case, Path(folder))
        if wrong is not None:
            found.append(f"{surface.name}: {wrong}, with {show(case)}")
            raise AssertionError(found[-1])

    try:
        each()
    except Exception:
        if not found:
            raise
        pytest.fail(found[-1], pytrace=False)  # hypothesis prints the repr of a case, which may raise


def count(surface: Surface, cases: int, start: int = 0) -> Tally:
    """The outcome of this many cases; each `start` gives other cases."""
    surface.prepare()
    tally = Tally(surface.name)

    @seed(start)
    @settings(max_examples=cases, phases=[Phase.generate], **_QUICK)
    @given(surface.cases)
    def each(case: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            refused, wrong = judge(surface, case, Path(folder))
        tally.cases += 1
        tally.refused += refused
        tally.unclear += refused and wrong is not None
        if wrong is not None:
            tally.failures[wrong] += 1
            tally.examples.setdefault(wrong, show(case))

    each()
    return tally
