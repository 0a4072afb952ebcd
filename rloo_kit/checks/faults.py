"""The error that lists what keeps a run from starting."""

from collections.abc import Sequence

from rloo_kit.errors import RlooKitError
from rloo_kit.system.problems import Problem, errors_of, warn, warnings_of


class PreflightError(RlooKitError, ValueError):
    """A run has problems that keep it from starting, listed in `faults`, warnings included. `found` completes the
    sentence "N problems, found ..."; the default is "before any weights were loaded"."""

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
