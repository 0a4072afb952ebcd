"""Runs one surface of the kit on many bad inputs; each may only succeed or be refused with a message.

A refusal is an `RlooKitError` whose message is short, printable text. `make fuzz` is the long search.
"""

import os
import signal
import tempfile
import traceback
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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


def count(surface: Surface, cases: int) -> tuple[int, int, dict[str, list[str]]]:
    """How many cases ran and how many were refused, and the cases for which something else happened, by what did."""
    surface.prepare()
    counts, failures = [0, 0], dict[str, list[str]]()

    @seed(0)
    @settings(
        max_examples=cases, phases=[Phase.generate], deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(surface.cases)
    def each(case: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            refused, wrong = judge(surface, case, Path(folder))
        counts[:] = counts[0] + 1, counts[1] + refused
        if wrong is not None:
            failures.setdefault(wrong, []).append(excerpt(case, 600))

    each()
    return counts[0], counts[1], failures


def check(surface: Surface) -> None:
    """Print the figures, and fail with every kind of case that the kit handles badly; the cases are always the same."""
    cases, refused, failures = count(surface, CASES)
    failed = sum(map(len, failures.values()))
    print(f"{surface.name}: {cases:,} cases, {refused:,} refused, {failed:,} failures")
    if failures:
        lines = [f"    {len(found)} x {what}\n        {found[0]}" for what, found in failures.items()]
        pytest.fail("\n".join([f"{surface.name}:", *lines]), pytrace=False)
