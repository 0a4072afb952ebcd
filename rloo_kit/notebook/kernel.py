"""Frees memory in a running process, and shuts down a notebook's kernel without losing work or output. Never imports
torch."""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rloo_kit.errors import SetupError
from rloo_kit.notebook.jupyter_server import Server, ServerError, find_servers
from rloo_kit.runs.files import running_saves, saved_paths, wait_for_saves
from rloo_kit.runs.run_dir import open_runs
from rloo_kit.system.memory import GIB, clear_last_error, resident_gib, trim_heap

POLL_S = 0.2
SLOW_CLIENT_S = 60.0  # longest wait for a client to fetch large outputs once the kernel is idle
CLICK = "in JupyterLab: Kernel > Shut Down Kernel"
# Services that restart a kernel whose process exits; only their menus can stop it.
HOSTED = {
    "COLAB_RELEASE_TAG": "Colab would restart it; use Runtime > Disconnect and delete runtime",
    "KAGGLE_KERNEL_RUN_TYPE": "Kaggle would restart it; use Run > Stop session",
}
OUTCOMES = {
    "script": "This is a script: its process exits when the script does.",
    "terminal": "To end this process, type exit",
    "batch": "The runner of this notebook ends the kernel after the last cell.",
    "server": "The kernel ends when nothing is left to run, and stays down.",
    "kernel": "The kernel ends when nothing is left to run.",
}


@dataclass(frozen=True)
class Released:
    """GiB in use before and after: on the GPU (allocator cache included), or in RAM."""

    before_gib: float
    after_gib: float
    device: str = "cuda"  # or "cpu": resident memory


def release_memory(verbose: bool = True) -> Released | None:
    """Free the objects that the last error's traceback keeps alive, garbage, and the allocators' caches.

    Delete the names of your models first: objects that a name (or a notebook's `Out[...]`) refers to stay. Afterwards a
    debugger no longer sees the last error's local variables.

    Args:
        verbose: print one line with the GiB in use before and after.

    Returns:
        GPU memory if torch has used a GPU, else the process's resident memory; None on systems without /proc.
    """
    torch = sys.modules.get("torch")
    cuda = torch.cuda if torch is not None and torch.cuda.is_initialized() else None  # any other call opens a context
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
    """Free memory, print where the files are, and shut down the notebook's kernel unless its runner does.

    Safe as the last cell, in the middle (later cells still run, then the kernel ends), and twice. Waits for
    running saves and never ends a kernel that is training.

    | run by | what happens |
    |---|---|
    | a script, IPython in a terminal | frees memory; the process ends when you end it |
    | papermill, nbclient, nbconvert, `jupyter execute` | frees memory; the runner ends the kernel |
    | a Jupyter server (JupyterLab) | once the kernel is idle, asks the server to shut it down for good |
    | another owner of a kernel (`jupyter_client`, VS Code, a console) | once idle, sends a shutdown request |

    Args:
        force: skip the checks for saves and runs.
        wait_s: longest wait for running saves, in seconds.
        idle_s: seconds without a running cell before the kernel is ended.

    Raises:
        SetupError: under a batch runner, which ends the kernel anyway, if work is unfinished after `wait_s`.
    """
    runner = find_runner()
    obstacle = None if force else _find_obstacle(runner, wait_s)
    if obstacle is not None and runner.kind == "batch":
        raise SetupError(
            f"{obstacle}, but the runner of this notebook ends the kernel after the last cell: join the thread in a "
            "cell before this one, or raise shutdown_kernel's wait_s"
        )
    if obstacle is not None:
        print(f"Kernel not shut down: {obstacle}. Call it again later; shutdown_kernel(force=True) does not wait.")
        return
    release_memory()
    _print_saved()
    print(_end_when_idle(runner, idle_s, force), flush=True)


def _find_obstacle(runner: "Runner", wait_s: float) -> str | None:
    """Work that shutting down would lose. Waits for saves; for runs only if the runner ends the kernel anyway."""
    deadline = time.monotonic() + wait_s
    if running_saves():
        print(f"waiting until {_join(running_saves())} is saved", flush=True)
    if not wait_for_saves(wait_s):
        return f"{_join(running_saves())} is still being saved after {wait_s:g} s"
    if runner.kind in ("script", "terminal"):
        return None
    while runner.kind == "batch" and open_runs() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return f"the run in {_join(open_runs())} is still training" if open_runs() else None


def _print_saved() -> None:
    """Print one line per folder in which this process saved something that still exists."""
    folders: dict[Path, list[str]] = {}
    for path in filter(Path.exists, saved_paths()):
        folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        folders.setdefault(folder, []).append(str(path.relative_to(folder)))
    for folder, names in folders.items():
        print(f"saved in {folder}: {', '.join(names)}")


def _join(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))


# ------------------------------------------------------------------------------------------------ who runs this


@dataclass(frozen=True)
class Runner:
    """The program that runs this process.

    Attributes:
        kind: `script`; `terminal`: IPython without a kernel; `batch`: papermill, nbclient, nbconvert, which end the
            kernel themselves; `server`: a Jupyter server that responds; `kernel`: another owner of a kernel; `foreign`:
            one that would restart the kernel and cannot be queried.
        reason: for `foreign`: why the kernel cannot be shut down from here, and what to click.
    """

    kind: Literal["script", "terminal", "batch", "server", "kernel", "foreign"]
    shell: Any = None
    kernel_id: str = ""
    server: Server | None = None
    reason: str = ""


def find_runner() -> Runner:
    """The runner of this process; asks this user's Jupyter servers whether the kernel is theirs."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return Runner("script")
    kernel: Any = getattr(shell, "kernel", None)
    if not hasattr(getattr(kernel, "parent", None), "get_connection_info"):  # none, or one inside another program
        return Runner("terminal", shell)
    request = kernel.get_parent("shell") or {}
    if request.get("content", {}).get("allow_stdin", True) is False:  # input() would get no answer
        return Runner("batch", shell)

    from jupyter_core.paths import jupyter_runtime_dir  # installed wherever ipykernel is

    connection_file = Path(kernel.parent.abs_connection_file)
    kernel_id = connection_file.stem.removeprefix("kernel-")
    parents = {str(os.getppid()), os.environ.get("JPY_PARENT_PID")}
    refusal = next((reason for name, reason in HOSTED.items() if name in os.environ), "")
    servers = find_servers({connection_file.parent, Path(jupyter_runtime_dir())})
    for server in sorted(servers, key=lambda server: str(server.pid) not in parents):  # the likely one first
        try:
            if server.ask("GET", kernel_id) is not None:
                return Runner("server", shell, kernel_id, server)
        except ServerError as error:
            if str(server.pid) in parents:
                refusal = refusal or f"{error}; {CLICK}"
    if not servers and "JPY_SESSION_NAME" in os.environ:
        refusal = refusal or f"its Jupyter server, which would restart it, was not found as this user's; {CLICK}"
    return Runner("foreign", shell, kernel_id, None, refusal) if refusal else Runner("kernel", shell, kernel_id)


# ------------------------------------------------------------------------------------------------ the end

_ending: threading.Thread | None = None


def _end_when_idle(runner: Runner, idle_s: float, force: bool) -> str:
    """Start the thread that ends the kernel, if that is our job; returns a sentence on what will happen."""
    global _ending
    if runner.kind == "foreign":
        return f"The kernel is not ended: {runner.reason}"
    if runner.kind in ("server", "kernel"):
        if _ending is not None and _ending.is_alive():
            return "The kernel is already set to end when nothing is left to run."
        _ending = _Ending(runner, idle_s, force)
        _ending.start()
    return OUTCOMES[runner.kind]


class _Ending(threading.Thread):
    """Ends the kernel once no cell has run for `idle_s` seconds and no save or run is in progress.

    A kernel that stops inside its own cell races with its output: the reply and the last lines are lost, and the runner
    reports a dead kernel.
    """

    def __init__(self, runner: Runner, idle_s: float, force: bool):
        super().__init__(name="rloo-kit-ends-the-kernel", daemon=True)
        self._runner, self._idle_s, self._force = runner, idle_s, force
        self._executing = {threading.get_ident()}  # threads running a cell: the caller's, and JupyterLab's subshells
        self._last = time.monotonic()
        runner.shell.events.register("pre_execute", self._begin)
        runner.shell.events.register("post_execute", self._finish)

    def run(self) -> None:
        try:
            while not self._may_end():
                time.sleep(POLL_S)
            self._shut_down()
        except (ServerError, OSError, RuntimeError) as error:  # an exception in a thread would go unseen
            print(f"The kernel is not ended: {error}", flush=True)
        finally:
            self._runner.shell.events.unregister("pre_execute", self._begin)
            self._runner.shell.events.unregister("post_execute", self._finish)

    def _begin(self) -> None:
        self._executing.add(threading.get_ident())

    def _finish(self) -> None:
        self._executing.discard(threading.get_ident())
        self._last = time.monotonic()

    def _may_end(self) -> bool:
        idle_s = time.monotonic() - self._last
        # Large messages that a client has not fetched: ending now would lose them, or crash.
        garbage = sys.modules.get("zmq.utils.garbage")
        unsent = garbage is not None and len(garbage.gc.refs) > 0
        if self._executing or idle_s < self._idle_s or (unsent and idle_s < SLOW_CLIENT_S):
            return False
        if not self._force and (running_saves() or open_runs()):
            return False
        server = self._runner.server
        state = (server.ask("GET", self._runner.kernel_id) or {}).get("execution_state") if server else None
        return state in ("idle", None)  # None: the server no longer has it

    def _shut_down(self) -> None:
        if self._runner.server is not None:
            self._runner.server.ask("DELETE", self._runner.kernel_id)
            return
        # A shutdown request on the control channel, as any client sends it: the kernel finishes its work and exits 0.
        from jupyter_client.blocking import BlockingKernelClient  # installed wherever ipykernel is

        client = BlockingKernelClient()
        client.load_connection_info(self._runner.shell.kernel.parent.get_connection_info())
        client.start_channels(shell=False, iopub=False, stdin=False, hb=False, control=True)
        client.shutdown(reply=True, timeout=10)
        client.stop_channels()
