"""Giving memory back in a living process, and ending the process of a notebook: its kernel.

`shutdown_kernel` does what the program that runs the notebook expects (`rloo_kit.notebook.runner`), after it has made sure that
nothing is lost. Nothing here imports torch: where nobody has, there is nothing on a GPU to free.
"""

import gc
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.errors import SetupError
from rloo_kit.notebook.kernel_end import POLL_S, end_when_idle
from rloo_kit.notebook.runner import Runner, find_runner
from rloo_kit.runs import files as saves
from rloo_kit.runs import run_dir
from rloo_kit.system.memory import GIB, clear_last_error, resident_gib, trim_heap


@dataclass(frozen=True)
class Released:
    """What this process held before and after, in GiB: of the GPU (the allocator's cache included), or of the RAM."""

    before_gib: float
    after_gib: float
    device: str = "cuda"  # or "cpu": resident memory


def release_memory(verbose: bool = True) -> Released | None:
    """Give memory back: what the last error's traceback holds, garbage, and what the allocators keep for later.

    Delete the names of your models first; what a name (or `Out[...]` of a notebook) still refers to stays. After it a
    debugger no longer sees the local variables of the last error.

    Args:
        verbose: print one line with the GiB held before and after.
    Returns:
        The figures: of the GPU where torch has used one, else of the process's resident memory; None where the
        system does not tell it (no /proc).
    """
    torch = sys.modules.get("torch")
    cuda = torch.cuda if torch is not None and torch.cuda.is_initialized() else None  # asking further opens a context
    before = _held_gib(cuda)
    clear_last_error()
    gc.collect()
    if cuda is not None:
        cuda.empty_cache()
        cuda.ipc_collect()
    trim_heap()
    after = _held_gib(cuda)
    if before is None or after is None:
        return None
    if verbose:
        what = "memory" if cuda is None else "GPU memory"
        print(f"{what} held by this process: {before:.2f} GiB before, {after:.2f} after", flush=True)
    return Released(before, after, "cpu" if cuda is None else "cuda")


def _held_gib(cuda: Any) -> float | None:
    return resident_gib() if cuda is None else cuda.memory_reserved() / GIB


def shutdown_kernel(force: bool = False, wait_s: float = 600.0, idle_s: float = 2.0) -> None:
    """Give memory back, say where the files are, and end the notebook's kernel where nothing else ends it.

    Safe as the last cell and in the middle (the cells that follow still run, then the kernel ends), and twice. It ends
    nothing while work could be lost: it waits for running saves, and leaves a kernel alone that trains a run.

    | run by | what happens |
    |---|---|
    | a script, IPython in a terminal | memory is given back; the process ends when you end it |
    | papermill, nbclient, nbconvert, `jupyter execute` | memory is given back; the runner ends the kernel |
    | a Jupyter server (JupyterLab) | once the kernel is idle the server is asked to shut it down, and it stays down |
    | another owner of a kernel (`jupyter_client`, VS Code, a console) | once idle, a shutdown request to the kernel |

    Args:
        force: do not look at saves and runs.
        wait_s: longest wait for running saves, in seconds.
        idle_s: for how long no cell may have run before the kernel is ended, in seconds.

    Raises:
        SetupError: under a batch runner, which will end the kernel in any case, when work still goes on after `wait_s`.
    """
    runner = find_runner()
    obstacle = None if force else _find_obstacle(runner, wait_s)
    if obstacle is not None and runner.kind == "batch":
        raise SetupError(
            f"{obstacle}, and the runner of this notebook ends the kernel after the last cell: join the thread in a "
            "cell before this one, or give shutdown_kernel a longer wait_s"
        )
    if obstacle is not None:
        print(f"Nothing is ended: {obstacle}. Call it again later; shutdown_kernel(force=True) does not wait.")
        return
    release_memory()
    _tell_files()
    print(end_when_idle(runner, idle_s, force), flush=True)


def _find_obstacle(runner: Runner, wait_s: float) -> str | None:
    """Work that would be lost, in words. Waits for saves; for runs only where the kernel is ended in any case."""
    deadline = time.monotonic() + wait_s
    if saves.running_saves():
        print(f"waiting until {_listed(saves.running_saves())} is saved", flush=True)
    if not saves.wait_for_saves(wait_s):
        return f"{_listed(saves.running_saves())} is still being saved after {wait_s:g} s"
    if runner.kind in ("script", "terminal"):  # they end nothing
        return None
    if runner.kind == "batch":
        while run_dir.open_runs() and time.monotonic() < deadline:
            time.sleep(POLL_S)
    runs = run_dir.open_runs()
    return f"the run in {_listed(runs)} goes on" if runs else None


def _tell_files() -> None:
    """One line for each folder in which this process saved something that is still there."""
    folders: dict[Path, list[str]] = {}
    for path in saves.saved_paths():
        if path.exists():
            folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
            folders.setdefault(folder, []).append(str(path.relative_to(folder)))
    for folder, names in folders.items():
        print(f"saved in {folder}: {', '.join(names)}")


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(str(path) for path in paths)
