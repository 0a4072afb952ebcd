"""What a check is, and the lines of JSON in which a part of the first hour reports its results.

A line is one of: header (machine, versions, revision), begin, figure, end (a check and its state), note, closed.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BACKENDS = ("unsloth", "transformers")
STATES = ("passed", "failed", "out of memory", "over budget", "skipped", "not run")
PARTS = {1: "smoke and correctness", 2: "figures", 3: "the shipped configs on small GPUs", 0: "not in the hour"}


@dataclass(frozen=True)
class Check:
    """One check of one backend.

    Attributes:
        name: "BACKEND/FUNCTION". part: 1 to 3; 0 for one that runs only by name.
        budget_s: after this it is interrupted. needs: the function that must have passed with this backend.
        stand_in: runs only if the other backend's worker cannot.
        not_rehearsed: why it does not run on the CPU.
    """

    name: str
    part: int
    budget_s: int
    run: Callable[[Any], None]
    needs: str = ""
    stand_in: bool = False
    not_rehearsed: str = ""

    @property
    def backend(self) -> str:
        return self.name.partition("/")[0]

    @property
    def what(self) -> str:
        """The first paragraph of the function's docstring."""
        return " ".join((self.run.__doc__ or "").partition("\n\n")[0].split())


# ------------------------------------------------------------------------------------------------------- the lines


def append(path: Path, kind: str, **values: Any) -> None:
    """Append a line and flush it to disk, because the machine may disappear at any time."""
    line = {"kind": kind, "time": round(time.time(), 2)} | values
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@dataclass
class Found:
    """The results of a check: its state, the reason if it did not pass, seconds, and its figures.

    `after`: the check before it in the same file, if it was interrupted: memory that it holds is in this one's peaks.
    """

    state: str = "not run"
    reason: str = ""
    seconds: float = 0.0
    after: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Part:
    """A part's lines, read back."""

    header: dict[str, Any]
    checks: dict[str, Found]
    notes: list[str]

    def value(self, name: str, *keys: str) -> Any:
        """A figure of the check `name`, by its keys from the outside in; None if there is none."""
        found: Any = self.checks[name].values if name in self.checks else None
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found


def read_part(path: Path) -> Part | None:
    """The part in a file of lines; None without a file. A line that was cut off is left out."""
    if not path.is_file():
        return None
    part, before = Part({}, {}, []), ""
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        kind, name = line.pop("kind"), line.get("check", "")
        if kind == "header":
            part.header = line
        elif kind == "note":
            part.notes.append(line["text"])
        elif kind in ("begin", "figure", "end"):
            if kind == "begin" or name not in part.checks:  # a check that ran again has only its new figures
                part.checks[name] = Found("interrupted", "its worker ended", after=before)
            found = part.checks[name]
            if kind == "figure":
                merge(found.values, line["values"])
            elif kind == "end":
                found.state, found.reason, found.seconds = line["state"], line["reason"], line["seconds"]
                if found.state != "not run":
                    before = "" if found.state in ("passed", "skipped") else name
    return part


def merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    """Merge dictionaries at every depth; everything else is replaced.

    >>> found = {"a": {"b": 1}}
    >>> merge(found, {"a": {"c": 2}, "d": 3})
    >>> found
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            merge(into[name], value)
        else:
            into[name] = value
