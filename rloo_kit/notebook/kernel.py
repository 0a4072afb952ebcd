"""Releases memory in a living process, and ends a notebook's kernel without losing work or output. Never imports
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
SLOW_CLIENT_S = 60.0  # longest wait for a client to fetch large outputs, once the kernel is idle
CLICK = "in JupyterLab: Kernel > Shut Down Kernel"
# Services that restart a kernel whose process ends; only their menus end it.
HOSTED = {
    "COLAB_RELEASE_TAG": "Colab restarts it at once; there: Runtime > Disconnect and delete runtime",
    "KAGGLE_KERNEL_RUN_TYPE": "Kaggle restarts it at once; there: Run > Stop session",
}
OUTCOMES = {
    "script": "This is a script: its process ends with it.",
    "terminal": "This process is yours to end: exit",
    "batch": "The runner of this notebook ends the kernel after the last cell.",
    "server": "The kernel ends when nothing is left to run, and stays ended.",
    "kernel": "The kernel ends when nothing is left to run.",
}


@dataclass(frozen=True)
class Released:
    """GiB held before and after: on the GPU (the allocator's cache included), or of RAM."""

    before_gib: float
    after_gib: float
    device: str = "cuda"  # or "cpu": resident memory


def release_memory(verbose: bool = True) -> Released | None:
    """Release what the last error's traceback holds, garbage, and the allocators' caches.

    Delete the names of your models first: what a name (or `Out[...]` of a notebook) refers to stays. Afterwards a
    debugger no longer sees the local variables of the last error.

    Args:
        verbose: print one line with the GiB held before and after.

    Returns:
        Memory of the GPU where torch has used one, else the process's resident memory; None on systems without /proc.
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
    """Release memory, print where the files are, and end the notebook's kernel where nothing else ends it.

    Safe as the last cell, in the middle (later cells still run, then the kernel ends), and twice. It waits for running
    saves and never ends a kernel that trains a run.

    | run by | what happens |
    |---|---|
    | a script, IPython in a terminal | memory is released; the process ends when you end it |
    | papermill, nbclient, nbconvert, `jupyter execute` | memory is released; the runner ends the kernel |
    | a Jupyter server (JupyterLab) | once the kernel is idle the server is asked to shut it down, and it stays down |
    | another owner of a kernel (`jupyter_client`, VS Code, a console) | once idle, a shutdown request to the kernel |

    Args:
        force: do not look at saves and runs.
        wait_s: longest wait for running saves, in seconds.
        idle_s: seconds without a running cell before the kernel is ended.

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
    _print_saved()
    print(_end_when_idle(runner, idle_s, force), flush=True)


def _find_obstacle(runner: "Runner", wait_s: float) -> str | None:
    """The work that ending the kernel would lose. Waits for saves; for runs only where the kernel ends in any case."""
    deadline = time.monotonic() + wait_s
    if running_saves():
        print(f"waiting until {_join(running_saves())} is saved", flush=True)
    if not wait_for_saves(wait_s):
        return f"{_join(running_saves())} is still being saved after {wait_s:g} s"
    if runner.kind in ("script", "terminal"):
        return None
    while runner.kind == "batch" and open_runs() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return f"the run in {_join(open_runs())} goes on" if open_runs() else None


def _print_saved() -> None:
    """One line for each folder in which this process saved something that still exists."""
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
        kind: `script`; `terminal`: IPython without a kernel; `batch`: papermill, nbclient, nbconvert, which end their
            kernel themselves; `server`: a Jupyter server that answers; `kernel`: another owner of a kernel; `foreign`:
            one that would restart the kernel and cannot be asked.
        reason: of `foreign`: why the kernel cannot be ended from here, and what to click.
    """

    kind: Literal["script", "terminal", "batch", "server", "kernel", "foreign"]
    shell: Any = None
    kernel_id: str = ""
    server: Server | None = None
    reason: str = ""


def find_runner() -> Runner:
    """The runner of this process; asks this user's Jupyter servers whose kernel it is."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return Runner("script")
    kernel: Any = getattr(shell, "kernel", None)
    if not hasattr(getattr(kernel, "parent", None), "get_connection_info"):  # none, or one inside another program
        return Runner("terminal", shell)
    request = kernel.get_parent("shell") or {}
    if request.get("content", {}).get("allow_stdin", True) is False:  # nobody is there to answer input()
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
    """Start the thread that ends the kernel, where it has to be ended from here; returns what will happen."""
    global _ending
    if runner.kind == "foreign":
        return f"The kernel is not ended: {runner.reason}"
    if runner.kind in ("server", "kernel"):
        if _ending is not None and _ending.is_alive():
            return "The kernel is about to end already, when nothing is left to run."
        _ending = _Ending(runner, idle_s, force)
        _ending.start()
    return OUTCOMES[runner.kind]


class _Ending(threading.Thread):
    """Ends the kernel once no cell has run for `idle_s` seconds and no save or run goes on.

    A kernel that stops inside the cell that asks for it races with its own output: the reply and the last lines are
    lost, and the runner reports it dead.
    """

    def __init__(self, runner: Runner, idle_s: float, force: bool):
        super().__init__(name="rloo-kit-ends-the-kernel", daemon=True)
        self._runner, self._idle_s, self._force = runner, idle_s, force
        self._executing = {threading.get_ident()}  # threads that run a cell: the caller's, and JupyterLab's subshells
        self._last = time.monotonic()
        runner.shell.events.register("pre_execute", self._begin)
        runner.shell.events.register("post_execute", self._finish)

    def run(self) -> None:
        try:
            while not self._may_end():
                time.sleep(POLL_S)
            self._shut_down()
        except (ServerError, OSError, RuntimeError) as error:  # raised in a thread, nobody would see it
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
        # Large messages that a client has not fetched yet: a kernel that ends now loses them, or crashes.
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
        # A shutdown request on the control channel, as any client sends: the kernel finishes its work and exits with 0.
        from jupyter_client.blocking import BlockingKernelClient  # installed wherever ipykernel is

        client = BlockingKernelClient()
        client.load_connection_info(self._runner.shell.kernel.parent.get_connection_info())
        client.start_channels(shell=False, iopub=False, stdin=False, hb=False, control=True)
        client.shutdown(reply=True, timeout=10)
        client.stop_channels()
