"""Which of a run's processes this is: what launchers (accelerate launch, torchrun) say in the environment.

One process a GPU. RANK counts all processes of a run from 0, LOCAL_RANK those of one machine, and WORLD_SIZE says how
many there are; without a launcher there is one process. Only the environment is read, so that it is known before torch
is imported. Left out: talking to the other processes, for which `collective` is there.
"""

import os

from rloo_kit.errors import ConfigError

WORLD_SIZE, RANK, LOCAL_RANK = "WORLD_SIZE", "RANK", "LOCAL_RANK"


def count_processes() -> int:
    """Processes of a distributed run (WORLD_SIZE, which launchers set), 1 or more; 1 without one.

    Raises:
        ConfigError: the variable holds something else than a whole number from 1 on.
    """
    return _read(WORLD_SIZE, 1, least=1)


def process_index() -> int:
    """The rank of this process among all of the run, from 0; 0 without a launcher.

    Raises:
        ConfigError: RANK is no whole number, or not below WORLD_SIZE.
    """
    index, count = _read(RANK, 0), count_processes()
    if index >= count:
        raise ConfigError(f"the environment's {RANK} is {index} and {WORLD_SIZE} {count}; a rank lies below the number")
    return index


def local_index() -> int:
    """The rank of this process on its machine, from 0: the GPU that it takes; 0 without a launcher.

    Raises:
        ConfigError: LOCAL_RANK is no whole number.
    """
    return _read(LOCAL_RANK, 0)


def is_main_process() -> bool:
    """Whether this is the process that writes files and prints."""
    return process_index() == 0


def say(text: object) -> None:
    """Print a line at once; in the main process only, so that a run with many says it once."""
    if is_main_process():
        print(text, flush=True)


def is_distributed() -> bool:
    """Whether there are further processes."""
    return count_processes() > 1


def _read(name: str, default: int, least: int = 0) -> int:
    text = os.environ.get(name) or str(default)  # an empty variable counts as none; accelerate's -1 means none too
    if text == "-1" and least == 0:
        return default
    if not text.isdigit() or int(text) < least:
        raise ConfigError(
            f"the environment's {name} is {text!r}; a launcher sets it to a whole number, {least} or more"
        )
    return int(text)
