"""The processes of a run (RANK, LOCAL_RANK, WORLD_SIZE), `rloo-kit train --launch FILE`, signals and random numbers."""

import logging
import os
import random
import runpy
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

from rloo_kit.errors import ConfigError, excerpt
from rloo_kit.system.console import hide_secrets, print_text
from rloo_kit.system.gpu import find_gpus

WORLD_SIZE, RANK, LOCAL_RANK = "WORLD_SIZE", "RANK", "LOCAL_RANK"
LAUNCH_VARIABLE = "RLOO_KIT_LAUNCH"  # what follows --launch, for the processes that it started
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_S = 3600  # after Ctrl-C the run finishes its step and saves; torch's 30 s are less than a long rollout
ACCELERATE = "accelerate.commands.launch"
REFUSED, INTERRUPTED = 2, 130
# Signals that end a run: Ctrl-C, SIGTERM, and SIGHUP, which is sent when a terminal or an ssh session closes.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FROM_OUTSIDE = tuple(number for number in ENDING if number != signal.SIGINT)  # Python's own Ctrl-C raises already
_REPEATED = ("Sending process", "failed (exitcode", "Received", "Closing process")  # torch's log lines that add nothing


# ------------------------------------------------------------------------------------------------ ranks


def count_processes() -> int:
    """Processes of a run (WORLD_SIZE), 1 without a launcher; ConfigError if it is no whole number above 0."""
    return _read(WORLD_SIZE, 1, least=1)


def process_index() -> int:
    """The rank of this process (RANK), 0 without a launcher; ConfigError if it is not a rank of WORLD_SIZE."""
    index, count = _read(RANK, 0), count_processes()
    if index >= count:
        raise ConfigError(f"the environment's {RANK} is {index} and {WORLD_SIZE} {count}; it must be below that number")
    return index


def local_index() -> int:
    """The rank of this process on its machine (LOCAL_RANK), which is its GPU; 0 without a launcher."""
    return _read(LOCAL_RANK, 0)


def is_main_process() -> bool:
    """Whether this is the process that writes files and prints."""
    return process_index() == 0


def is_distributed() -> bool:
    """Whether the run has more than one process."""
    return count_processes() > 1


def say(text: object) -> None:
    """Print a line at once, in the main process only."""
    if is_main_process():
        print_text(str(text))


def _read(name: str, default: int, least: int = 0) -> int:
    text = os.environ.get(name) or str(default)  # an empty variable counts as none; accelerate's -1 means none too
    if text == "-1" and least == 0:
        return default
    if not text.isdigit() or int(text) < least:
        raise ConfigError(
            f"the environment's {name} is {text!r}; a launcher sets it to a whole number, {least} or more"
        )
    return int(text)


# ------------------------------------------------------------------------------------------------ launching


def launch_run(file: Path, arguments: Sequence[str], processes: int | None = None) -> int:
    """Start a run in several processes through accelerate's `launch` program, and wait for its end. Returns the run's
    exit code (2 refused, 130 interrupted), or 128 and the signal's number.

    Unlike plain `accelerate launch` it returns that code, leaves out torch's account of a failure that the run has
    reported itself, gives the processes time to save after Ctrl-C, and leaves none of them behind. `file` is as
    `accelerate config` writes it (the kit's own are in configs/accelerate), `arguments` are those of `rloo-kit` in each
    process, and `processes`, on all machines together, replaces the file's `num_processes`. Raises ConfigError if the
    file cannot be used, there are too few GPUs, or a launcher started this process already.
    """
    settings = read_launch_file(file, processes)
    machines = settings.get("num_machines") or 1
    here, gpus = (settings.get("num_processes") or 1) // machines, find_gpus()
    if not settings.get("use_cpu") and here > gpus.count:
        found = f"{gpus.count} of its GPUs can be used" if gpus.count else gpus.reason
        on_cpu = "configs/accelerate/cpu_two.yaml runs on the CPU"
        fix = f"--processes {gpus.count * machines}" if gpus.count else on_cpu
        raise ConfigError(
            f"--launch {file}: it starts {here} processes on this machine, one a GPU, but {found}: {fix}; or set "
            "num_processes in the file"
        )
    command = ["--config_file", str(file)]
    if machines == 1 and settings.get("main_process_port") is None:
        command += ["--main_process_port", "0"]  # a free one, so that two runs do not share it
    if "num_processes" in settings:
        command += ["--num_processes", str(settings["num_processes"])]
    command += ["-m", "rloo_kit.cli", *arguments]
    print(f"launching: {hide_secrets(shlex.join(['accelerate', 'launch', *command]))}", flush=True)
    os.environ[LAUNCH_VARIABLE] = shlex.join([str(file), *(["--processes", str(processes)] if processes else [])])
    os.environ.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN_S))
    if not {"", os.getcwd()} & set(sys.path):  # `python -m` would put the working folder first, `rloo-kit` does not
        os.environ["PYTHONSAFEPATH"] = "1"
    return _run_accelerate(command)


def resume_words() -> list[str]:
    """What a command that continues this run has to add: `--launch FILE`, or nothing."""
    words = os.environ.get(LAUNCH_VARIABLE)
    return ["--launch", *shlex.split(words)] if words else []


def read_launch_file(file: Path, processes: int | None = None) -> dict[str, Any]:
    """The settings in an accelerate launch file, with `processes` in place of its number. Raises ConfigError if it
    cannot be read, is no launch file, starts a single process, or a launcher started this process already."""
    from rloo_kit.system.input_files import parse_yaml, read_text

    if by_launcher := [name for name in (RANK, LOCAL_RANK) if os.environ.get(name)] + [WORLD_SIZE] * is_distributed():
        why = f"this process was started by a launcher already ({by_launcher[0]} is set)"
        raise ConfigError(f"--launch {file}: {why}: leave --launch out")
    try:
        settings, _ = parse_yaml(read_text(file), f"--launch {file}", version=(1, 1))  # as accelerate reads it
    except FileNotFoundError:
        near = get_close_matches(file.name, [path.name for path in file.parent.glob("*.yaml")], 1)
        meant = f"did you mean {file.parent / near[0]}?" if near else "the kit's own are in configs/accelerate"
        raise ConfigError(f"--launch {file}: there is no such file; {meant}") from None
    if not isinstance(settings, dict) or "distributed_type" not in settings:
        raise ConfigError(
            f"--launch {file}: not a launch file of accelerate (it has no distributed_type); see configs/accelerate, "
            "or write one with: accelerate config --config_file NAME.yaml"
        )
    if settings["distributed_type"] == "MULTI_CPU" and not settings.get("mpirun_config"):
        raise ConfigError(
            f"--launch {file}: accelerate starts a single process for distributed_type MULTI_CPU without mpirun; use "
            "configs/accelerate/cpu_two.yaml (MULTI_GPU without a GPU, through gloo)"
        )
    settings |= {} if processes is None else {"num_processes": processes}
    for name in ("num_processes", "num_machines"):
        value = settings.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"--launch {file}: {name} is {excerpt(value)}; it takes a whole number, 1 or more")
    return settings


def exit_code(codes: Mapping[int, int]) -> tuple[int, str]:
    """Exit code of a run from those of its processes that failed, by rank, and what the run has not reported yet. In
    `codes` they are in the order in which the launcher found them: the first is the reason, unless the launcher then
    ended it (SIGTERM); later ones may have lost the connection to the first."""
    rank, code = min(codes.items(), key=lambda item: item[1] == -signal.SIGTERM)
    if code > 0:
        known = code in (REFUSED, INTERRUPTED)
        return code, "" if known else f"process {rank} of the run ended with exit code {code}; its error is above"
    cause = " (by the system, if memory ran out)" if code == -signal.SIGKILL else ""
    return 128 - code, f"process {rank} of the run was killed by {signal.Signals(-code).name}{cause}"


def _run_accelerate(command: Sequence[str]) -> int:
    """accelerate's `launch` program in this process. Returns: the exit code of the run."""
    import psutil

    for name in ("multiprocessing.api", "agent.server.api"):
        logger = logging.getLogger(f"torch.distributed.elastic.{name}")
        logger.addFilter(lambda record: not record.getMessage().startswith(_REPEATED))
    sys.argv = [ACCELERATE, *command]
    try:
        runpy.run_module(ACCELERATE, run_name="__main__", alter_sys=True)
        return 0
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"accelerate cannot launch this: {type(error).__name__}: {error}") from None
    except subprocess.CalledProcessError as error:  # a single process
        failed = {0: error.returncode}
    except Exception as error:
        if type(error).__name__ == "SignalException":  # torch's class by its name: this package never imports torch
            return INTERRUPTED
        if type(error).__name__ != "ChildFailedError":
            raise
        failed = {rank: failure.exitcode for rank, failure in error.failures.items()}  # type: ignore[attr-defined]
    finally:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    code, text = exit_code(failed)
    if text:
        print(f"rloo-kit: {text}", file=sys.stderr, flush=True)
    return code


# ---------------------------------------------------------------------------------------------- signals, random numbers


@contextmanager
def handle_signals(numbers: Sequence[signal.Signals], handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `handler(number)` for each of the signals while the block runs. Does nothing outside the main thread.

    A signal that the process ignores stays ignored (`nohup` ignores SIGHUP). After SIGHUP, output to a terminal is
    discarded, because writing to a closed one raises; so is that to a pipe, whose reader had the same terminal.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        for stream in (sys.stdout, sys.stderr) if name.name == "SIGHUP" else ():
            with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as nowhere:
                mode = os.fstat(stream.fileno()).st_mode
                if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
                    os.dup2(nowhere.fileno(), stream.fileno())
        handler(name)

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, handle) for number in taken}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Signals that arrive while the block runs are handled after it; nothing changes outside the main thread."""
    held: list[signal.Signals] = []
    try:
        with handle_signals(ENDING, held.append):
            yield
    finally:
        for number in held:
            signal.raise_signal(number)


def interrupt(number: signal.Signals) -> None:
    """A handler that ends the block like Ctrl-C."""
    raise KeyboardInterrupt(number.name)


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
