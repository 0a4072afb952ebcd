"""`rloo-kit train --launch FILE`: one process becomes accelerate's launcher, which starts those of the run.

`hand_over` checks the launch file and replaces this process by `python -m rloo_kit.system.launcher`, which runs accelerate's
own `launch` program in itself. What it adds to that program: the exit code is that of the run (2 refused, 130
interrupted) and not always 1; what a process has said already is not said again around a traceback; after Ctrl-C the
processes have the time that a step takes to save a checkpoint, not 30 seconds; and none is left behind. Plain
`accelerate launch` and `torchrun` start the same run without these.

Nothing heavy is imported here: the processes of the run settle their environments themselves.
"""

import logging
import os
import runpy
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import psutil
import yaml

from rloo_kit.errors import ConfigError
from rloo_kit.system.gpu import Gpus, find_gpus
from rloo_kit.system.processes import count_processes

LAUNCH_VARIABLE = "RLOO_KIT_LAUNCH"  # what stands behind --launch, for the processes that it started
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_S = 3600  # after Ctrl-C the run finishes its step and saves; torch's 30 s are less than a long rollout
PROGRAM, RUN = "accelerate.commands.launch", ("-m", "rloo_kit.cli")
FAILED, REFUSED, INTERRUPTED = 1, 2, 130
_SAID_ALREADY = ("Sending process", "failed (exitcode", "Received", "Closing process")


def hand_over(launch_file: Path, arguments: Sequence[str], processes: int | None = None) -> NoReturn:
    """Start a run in several processes, in place of this one.

    Args:
        launch_file: as `accelerate config` writes them; the kit's own are in configs/accelerate.
        arguments: of `rloo-kit`, for each process: ["train", "configs/x.yaml", ...].
        processes: on all machines together, at least 1; None for the file's `num_processes`.

    Raises:
        ConfigError: the file cannot be used, or this process was started by a launcher already.
    """
    settings = check_launch_file(launch_file)
    if processes is not None:
        settings["num_processes"] = processes
    check_gpus(launch_file, settings, find_gpus())
    command = launch_command(launch_file, settings, arguments)
    print(f"launching: {shlex.join(['accelerate', 'launch', *command])}", flush=True)
    started_by = [str(launch_file), *(["--processes", str(processes)] if processes else [])]
    environment = os.environ | {LAUNCH_VARIABLE: shlex.join(started_by)}
    environment.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN_S))
    if not {"", os.getcwd()} & set(sys.path):  # `python -m` would put the working folder first, `rloo-kit` does not
        environment["PYTHONSAFEPATH"] = "1"
    os.execve(sys.executable, [sys.executable, "-m", "rloo_kit.system.launcher", *command], environment)


def check_launch_file(file: Path) -> dict[str, Any]:
    """The settings of a launch file.

    Raises:
        ConfigError: it cannot be read, is no launch file, starts a single process without saying so; or this process
            was launched itself.
    """
    launched = [name for name in ("RANK", "LOCAL_RANK") if os.environ.get(name)]
    if launched or count_processes() > 1:
        raise ConfigError(
            f"--launch {file}: this process was started by a launcher already ({launched[0] if launched else 'WORLD'}"
            f"{'' if launched else '_SIZE'} is set): leave --launch out"
        )
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error}"
        near = get_close_matches(file.name, sorted(path.name for path in file.parent.glob("*.yaml")), 1)
        meant = f"did you mean {file.parent / near[0]}?" if near else "the kit's own lie in configs/accelerate"
        raise ConfigError(f"--launch {file}: {why}; {meant}") from None
    if not isinstance(settings, dict) or "distributed_type" not in settings:
        raise ConfigError(
            f"--launch {file}: this is no launch file of accelerate (it has no distributed_type); see "
            "configs/accelerate, or write one with: accelerate config --config_file NAME.yaml"
        )
    if settings["distributed_type"] == "MULTI_CPU" and not settings.get("mpirun_config"):
        raise ConfigError(
            f"--launch {file}: accelerate starts a single process for distributed_type MULTI_CPU without mpirun; use "
            "configs/accelerate/cpu_two.yaml (MULTI_GPU without a GPU, through gloo)"
        )
    return settings


def check_gpus(file: Path, settings: Mapping[str, Any], gpus: Gpus) -> None:
    """One process a GPU: refuse more processes on this machine than it has GPUs, unless they are to use the CPU.

    Raises:
        ConfigError: there are too few GPUs, or none.
    """
    machines = int(settings.get("num_machines") or 1)
    here = int(settings.get("num_processes") or 1) // machines
    if settings.get("use_cpu") or here <= gpus.count:
        return
    found = f"{gpus.count} of its GPUs can be used" if gpus.count else gpus.reason
    cure = f"--processes {gpus.count * machines}" if gpus.count else "configs/accelerate/cpu_two.yaml runs on the CPU"
    raise ConfigError(
        f"--launch {file}: it starts {here} processes on this machine, one a GPU, but {found}: {cure}; or set "
        "num_processes in the file"
    )


def launch_command(file: Path, settings: Mapping[str, Any], arguments: Sequence[str]) -> list[str]:
    """The words behind `accelerate launch`; on one machine a free port, so that two runs do not meet on one."""
    alone = int(settings.get("num_machines") or 1) == 1 and settings.get("main_process_port") is None
    port = ["--main_process_port", "0"] if alone else []
    number = ["--num_processes", str(settings["num_processes"])] if "num_processes" in settings else []
    return ["--config_file", str(file), *port, *number, *RUN, *arguments]


def resume_words() -> list[str]:
    """What a command has to say to go on as this one was started: `--launch FILE`, or nothing."""
    words = os.environ.get(LAUNCH_VARIABLE)
    return ["--launch", *shlex.split(words)] if words else []


def exit_code(codes: Mapping[int, int]) -> tuple[int, str]:
    """Exit code of a run from those of its processes that failed, by rank, and what nobody has said yet.

    One that ended by itself is the reason, the others were ended by the launcher then (SIGTERM).

    >>> exit_code({0: 2, 1: -15})
    (2, '')
    >>> exit_code({0: -15, 1: 1})
    (1, 'process 1 of the run ended with exit code 1; what it said is above')
    >>> exit_code({0: -15, 1: -9})[0]
    137
    """
    ended = {rank: code for rank, code in sorted(codes.items()) if code > 0}
    if ended:
        rank, code = next(iter(ended.items()))
        told = code in (REFUSED, INTERRUPTED)
        return code, "" if told else f"process {rank} of the run ended with exit code {code}; what it said is above"
    killed = {rank: code for rank, code in sorted(codes.items()) if code not in (0, -signal.SIGTERM)} or dict(codes)
    rank, code = next(iter(killed.items()))
    cause = " (by the system, where its memory has run out)" if code == -signal.SIGKILL else ""
    return 128 - code, f"process {rank} of the run was killed by {signal.Signals(-code).name}{cause}"


def run_as_program() -> None:
    """accelerate's `launch` with this process's arguments; ends the process."""
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_is_news)
    sys.argv[0] = PROGRAM
    code = 0
    try:
        runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # by their names: their classes are torch's
        code = _explain(error)
    finally:
        _end_children()
    sys.exit(code)


def _explain(error: BaseException) -> int:
    """The exit code for what accelerate's launcher raised; says what is not said yet."""
    kind = type(error).__name__
    if kind in ("SignalException", "KeyboardInterrupt"):
        return INTERRUPTED
    if kind == "ChildFailedError":
        failures = error.failures  # type: ignore[attr-defined]
        code, text = exit_code({rank: failure.exitcode for rank, failure in failures.items()})
    elif kind == "CalledProcessError":
        return int(error.returncode)  # type: ignore[attr-defined]
    else:
        code = REFUSED if isinstance(error, ValueError | OSError | ImportError) else FAILED
        text = f"accelerate cannot launch this: {kind}: {error}"
    if text:
        print(f"rloo-kit: {text}", file=sys.stderr, flush=True)
    return code


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_SAID_ALREADY)


def _end_children() -> None:
    """Nobody is left behind, whatever ended the launcher."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()


if __name__ == "__main__":
    run_as_program()
