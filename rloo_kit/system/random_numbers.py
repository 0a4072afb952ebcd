"""The random numbers of a process that are not torch's."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keep_random_numbers() -> Iterator[None]:
    """A block after which Python's random numbers, and numpy's if it is loaded, continue as if it had not run."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
