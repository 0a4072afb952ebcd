"""What a check is, their list, and the lines of JSON in which the first hour reports its results.

A line is one of: header (machine, versions, revision), ready (a process has loaded its libraries), begin, figure, end
(a check and its state), note, closed.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BACKENDS = ("unsloth", "transformers")
STATES = ("passed", "failed", "out of memory", "over budget", "skipped", "not run")
CALLS = {1: "what a quarter of an hour answers", 2: "small GPUs, simulated by a cap", 0: "run by name only"}


@dataclass(frozen=True)
class Check:
    """One check of one backend.

    Attributes:
        name: "BACKEND/FUNCTION". call: 1 or 2; 0 for one that runs only by name.
        budget_s: after this it is interrupted. needs: the check that must have passed.
        lane: lanes run side by side, before all else; "" for a check that nothing may disturb.
        environment: variables of its process, which is then its own; None removes one.
        imports: whether its process loads the backend's libraries.
        not_rehearsed: why it does not run on the CPU.
    """

    name: str
    call: int
    budget_s: int
    run: Callable[[Any], None]
    needs: str = ""
    lane: str = ""
    environment: tuple[tuple[str, str | None], ...] = ()
    imports: bool = True
    not_rehearsed: str = ""

    @property
    def backend(self) -> str:
        return self.name.partition("/")[0]

    @property
    def process(self) -> str:
        """The name of its process, which it may share with others."""
        return " ".join([self.backend, self.lane, *(f"{name}={value}" for name, value in self.environment)]).strip()

    @property
    def what(self) -> str:
        """The first paragraph of the function's docstring."""
        return " ".join((self.run.__doc__ or "").partition("\n\n")[0].split())


CHECKS: dict[str, Check] = {}  # by name, in order; complete once the modules that have some are imported


def check(call: int, budget_s: int, *backends: str, **more: Any) -> Callable[[Callable[[Any], None]], Any]:
    """Add a function to the list, once for each backend (by default Unsloth)."""

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        for backend in backends or ("unsloth",):
            name = f"{backend}/{function.__name__}"
            CHECKS[name] = Check(name, call, budget_s, function, **more)
        return function

    return register


def list_checks() -> dict[str, Check]:
    """All checks by name, in order."""
    from on_gpu import command_line, decoding, small_model, steps  # noqa: F401

    return CHECKS


# ------------------------------------------------------------------------------------------------------- the lines


def append(path: Path, kind: str, **values: Any) -> None:
    """Append a line by one write: several processes do, and the machine may disappear at any time."""
    line = json.dumps({"kind": kind, "time": round(time.time(), 2)} | values) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


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
    """The lines of one call, read back."""

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
    """What a file of lines contains; None without a file. A line that was cut off is left out."""
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
                part.checks[name] = Found("interrupted", "its process ended", after=before)
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
