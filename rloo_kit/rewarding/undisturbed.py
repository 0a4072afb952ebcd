"""State that a reward in the run's process must not change. The worker imports this module, so it imports no torch."""

import os
import sys
from contextlib import suppress
from typing import Any


class Undisturbed:
    """A context manager around rewards that restores what the run depends on.

    That is torch's random state, which rollouts are drawn from, and the working directory, which a run's paths may be
    relative to. A child that a reward has forked ends here.

    Async rewards overlap, so the first to start saves and the last to end restores.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._process = 0
        self._folder: str | None = None
        self._states: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._inside += 1
        if self._inside == 1:
            self._process = os.getpid()
            with suppress(FileNotFoundError):  # deleted
                self._folder = os.getcwd()
            self._states = [(generator, generator.get_rng_state()) for generator in _generators()]

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._process:  # it would go on as a second run in the same folder
            os._exit(0)
        self._inside -= 1
        if self._inside:
            return
        for generator, state in self._states:
            if not (generator.get_rng_state() == state).all():
                generator.set_rng_state(state)
        if self._folder is not None:
            with suppress(OSError):
                os.chdir(self._folder)
        self._states, self._folder = [], None


def _generators() -> list[Any]:
    """The modules with torch's generators in use, for the CPU and this process's GPU; none if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_rng_state"):
        return []
    return [torch, torch.cuda] if torch.cuda.is_initialized() else [torch]
