"""A fault of a run with its stage, and the error that lists all faults."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rloo_kit.errors import RlooKitError

# In the order of the checks: the first line without the stack, the second with the model.
STAGES = (
    "config", "machine", "data", "row", "rewards", "folder", "disk", "trackers",
    "rollout", "memory", "gradient", "log-probs", "kl", "speed",
)  # fmt: skip
_KEY = re.compile(r"\b(?:run|model|data|rewards|rloo|rollout|eval|sft|health)(?:\.\w+)+")


@dataclass(frozen=True)
class Fault:
    """A problem of a run.

    Attributes:
        stage: one of STAGES. message: what was found, the limit, and the key with a value that works.
        level: "error" keeps the run from starting, "warning" does not.
    """

    stage: str
    message: str
    level: Literal["error", "warning"] = "error"

    @property
    def key(self) -> str:
        """The first configuration key that the message names; empty if it names none.

        >>> Fault("data", "mine.csv has no column 'anser': set data.answer_column=answer").key
        'data.answer_column'
        """
        found = _KEY.search(self.message)
        return found[0] if found else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"key": self.key}

    def __str__(self) -> str:
        return self.message if self.message.startswith(self.stage) else f"{self.stage}: {self.message}"


class PreflightError(RlooKitError, ValueError):
    """A run has faults that keep it from starting, listed in `faults`, warnings included. `found` completes the
    sentence "N problems, found ..."; the default is "before any weights were loaded"."""

    def __init__(self, faults: Sequence[Fault], found: str = ""):
        self.faults = tuple(faults)
        lines = [str(fault) for fault in faults if fault.level == "error"]
        if len(lines) > 1 or found:
            count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
            lines.insert(0, f"{count}, found {found or 'before any weights were loaded'}")
        warnings = [f"warning: {fault}" for fault in faults if fault.level == "warning"]
        super().__init__("\n".join([*lines, *warnings]))


@contextmanager
def catching(stage: str, faults: list[Fault]) -> Iterator[None]:
    """Turn an RlooKitError raised in the block into a fault of `stage`."""
    try:
        yield
    except RlooKitError as error:
        faults.append(Fault(stage, str(error)))
