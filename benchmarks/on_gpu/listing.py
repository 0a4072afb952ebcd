"""All checks of the first hour: a module that has some puts them on the list when it is imported."""

from on_gpu import claim, correctness, extras, figures  # noqa: F401
from on_gpu.bench import CHECKS
from on_gpu.checks import Check


def list_checks() -> dict[str, Check]:
    """All checks by name, in order."""
    return CHECKS
