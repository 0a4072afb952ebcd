"""A problem of a run, a machine or an export: what was found, the limit, the fix; and how problems are printed."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rloo_kit.errors import RlooKitError
from rloo_kit.system.processes import say

WIDTH = 80  # columns of a list of problems
_KEY = re.compile(r"\b(?:run|model|data|rewards|rloo|rollout|eval|sft|health)(?:\.\w+)+")


@dataclass
class Problem:
    """What a check found.

    Attributes:
        name: of the check, the stage or the rule. found: what was found. limit: what it may be. fix: the key with a
            value that works, or the command.
        level: "error" keeps a run from starting, "warning" does not; "ok" found nothing.
    """

    name: str
    found: str
    fix: str = ""
    limit: str = ""
    level: str = "error"

    @property
    def text(self) -> str:
        """All of it but the name.

        >>> Problem("disk", "2 GiB are free", "set run.output_dir=/data", "the run takes 5").text
        '2 GiB are free (the run takes 5): set run.output_dir=/data'
        """
        found = f"{self.found} ({self.limit})" if self.limit else self.found
        return ": ".join(part for part in (found, self.fix) if part)

    @property
    def key(self) -> str:
        """The first configuration key that the text names; empty if it names none.

        >>> Problem("data", "mine.csv has no column 'anser'", "set data.answer_column=answer").key
        'data.answer_column'
        """
        found = _KEY.search(self.text)
        return found[0] if found else ""

    def __str__(self) -> str:
        return self.text if self.text.startswith(self.name) else f"{self.name}: {self.text}"


def errors_of(problems: Iterable[Problem]) -> list[Problem]:
    """Those that keep a run from starting."""
    return [one for one in problems if one.level == "error"]


def warnings_of(problems: Iterable[Problem]) -> list[Problem]:
    """Those that do not."""
    return [one for one in problems if one.level == "warning"]


def list_problems(problems: Sequence[Problem]) -> list[str]:
    """Errors, then warnings, each with its number, wrapped at `WIDTH` columns without breaking keys and values."""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
    lines = []
    for title, some in (("problem", errors_of(problems)), ("warning", warnings_of(problems))):
        for number, one in enumerate(some, 1):
            first, *others = f"{title} {number}: {one}".split("\n")
            lines.append(textwrap.fill(first, WIDTH, **options))
            lines += [textwrap.fill(line, WIDTH, initial_indent="  ", **options) for line in others]
    return lines


def warn(problems: Iterable[Problem]) -> None:
    """Print each on a line, in the main process only."""
    for one in problems:
        say(f"WARNING: {one}")


@contextmanager
def catching(name: str, problems: list[Problem]) -> Iterator[None]:
    """Turn an RlooKitError raised in the block into a problem of this name."""
    try:
        yield
    except RlooKitError as error:
        problems.append(Problem(name, str(error)))


class PreflightError(RlooKitError, ValueError):
    """A run has problems that keep it from starting: `faults`, warnings included. `found` ends "N problems, found
    ..."."""

    def __init__(self, faults: Sequence[Problem], found: str = ""):
        self.faults = tuple(faults)
        lines = [str(fault) for fault in errors_of(faults)]
        if len(lines) > 1 or found:
            count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
            lines.insert(0, f"{count}, found {found or 'before any weights were loaded'}")
        super().__init__("\n".join([*lines, *(f"warning: {fault}" for fault in warnings_of(faults))]))


def raise_errors(faults: Sequence[Problem]) -> None:
    """Raise PreflightError if one of the problems is an error; else print the warnings."""
    if errors_of(faults):
        raise PreflightError(faults)
    warn(faults)
