"""Frees memory in a process, and shuts down a notebook's kernel without losing work or output. Never imports torch."""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from rloo_kit.errors import SetupError
from rloo_kit.runs.files import running_saves, wait_for_saves
from rloo_kit.runs.folder import open_runs
from rloo_kit.system.gpu import GIB
from rloo_kit.system.memory import clear_last_error, resident_gib, trim_heap

POLL_S = 0.2
IDLE_S = 2.0  # without a running cell before the kernel is ended
REQUEST_S = 10.0  # longest wait for a Jupyter server's response
CLICK = "in JupyterLab: Kernel > Shut Down Kernel"
# Services that restart a kernel whose process exits; only their menus can stop it.
HOSTED = {
    "COLAB_RELEASE_TAG": "Colab would restart it; use Runtime > Disconnect and delete runtime",
    "KAGGLE_KERNEL_RUN_TYPE": "Kaggle would restart it; use Run > Stop session",
}
OUTCOMES = {
    "script": "This is no notebook: its process exits when the script does, or with exit.",
    "batch": "The runner of this notebook ends the kernel after the last cell.",
    "server": "The kernel ends when nothing is left to run, and stays down.",
    "kernel": "The kernel ends when nothing is left to run.",
}


def release_memory() -> None:
    """Free the objects that the last error's traceback keeps alive, garbage, and the allocators' caches; print the GiB
    in use before and after: on the GPU if torch has used one (allocator cache included), else in RAM.

    Delete the names of your models first: objects that a name (or a notebook's `Out[...]`) refers to stay. Afterwards a
    debugger no longer sees the last error's local variables.
    """
    torch = sys.modules.get("torch")
    cuda = torch.cuda if torch is not None and torch.cuda.is_initialized() else None  # any other call opens a context

    def held_gib() -> float | None:
        return resident_gib() if cuda is None else cuda.memory_reserved() / GIB

    before = held_gib()
    clear_last_error()
    gc.collect()
    if cuda is not None:
        cuda.empty_cache()
        cuda.ipc_collect()
    trim_heap()
    after = held_gib()
    if before is not None and after is not None:  # a system without /proc
        what = "memory" if cuda is None else "GPU memory"
        print(f"{what} held by this process: {before:.2f} GiB before, {after:.2f} after", flush=True)


def shutdown_kernel(wait_s: float = 600.0) -> None:
    """Free memory, and shut down the notebook's kernel unless its runner does.

    Safe as the last cell, in the middle (later cells still run, then the kernel ends), and twice. Waits up to `wait_s`
    seconds for running saves, and never ends a kernel that is training. docs/notebook.md has a table of the runners: a
    Jupyter server shuts the kernel down for good, papermill and nbconvert end it themselves, a script just goes on.

    Raises:
        SetupError: under a batch runner, which ends the kernel anyway, if work is unfinished after `wait_s`.
    """
    runner = find_runner()
    obstacle = _find_obstacle(runner, wait_s)
    if obstacle is not None and runner.kind == "batch":
        raise SetupError(
            f"{obstacle}, but the runner of this notebook ends the kernel after the last cell: join the thread in a "
            "cell before this one, or raise shutdown_kernel's wait_s"
        )
    if obstacle is not None:
        print(f"Kernel not shut down: {obstacle}. Call it again later, or {CLICK}.")
        return
    release_memory()
    if runner.kind == "foreign":
        outcome = f"The kernel is not ended: {runner.reason}"
    elif any(isinstance(thread, _Ending) for thread in threading.enumerate()):
        outcome = "The kernel is already set to end when nothing is left to run."
    else:
        outcome = OUTCOMES[runner.kind]
        if runner.kind in ("server", "kernel"):
            _Ending(runner).start()
    print(outcome, flush=True)


def _find_obstacle(runner: "Runner", wait_s: float) -> str | None:
    """Work that shutting down would lose. Waits for saves; for runs only if the runner ends the kernel anyway."""
    deadline = time.monotonic() + wait_s
    if running_saves():
        print(f"waiting until {_join(running_saves())} is saved", flush=True)
    if not wait_for_saves(wait_s):
        return f"{_join(running_saves())} is still being saved after {wait_s:g} s"
    if runner.kind == "script":
        return None
    while runner.kind == "batch" and open_runs() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return f"the run in {_join(open_runs())} is still training" if open_runs() else None


def _join(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))


# ------------------------------------------------------------------------------------------------ who runs this


class ServerError(Exception):
    """The Jupyter server must not be called, cannot be reached, or refuses."""


@dataclass(frozen=True)
class Server:
    """The Jupyter server that started this kernel; it restarts a kernel that exits, but not one that it shut down.
    `url`: the kernel's address in the server's API. `token`: may be empty."""

    url: str
    token: str = field(default="", repr=False)

    def ask(self, method: str) -> dict[str, Any] | None:
        """`GET` the kernel's model, whose `execution_state` is `idle`, `busy`, ..., or `DELETE` the kernel permanently.
        None if the server has no such kernel."""
        import httpx

        headers = {"Authorization": f"token {self.token}"} if self.token else {}
        if not self.token and method != "GET":  # an open server requires its cross-site cookie, sent twice
            secret = os.urandom(16).hex()
            headers |= {"Cookie": f"_xsrf={secret}", "X-XSRFToken": secret}
        try:  # no proxy, no redirect; any certificate is accepted on this machine
            reply = httpx.request(method, self.url, headers=headers, timeout=REQUEST_S, trust_env=False, verify=False)
            if reply.status_code == 404:
                return None
            if not reply.is_success:
                raise ServerError(f"the server at {self.url} answered {method} with {reply.status_code}")
            return reply.json() if reply.content else {}
        except (httpx.HTTPError, ValueError) as error:  # whose text may contain the token
            raise ServerError(f"the server at {self.url} cannot be queried: {type(error).__name__}") from None


def find_server(connection_file: Path) -> Server | None:
    """The Jupyter server that started this kernel; None if another program did. Raises ServerError if that process does
    not listen on its port on 127.0.0.1; nobody else gets the token.

    Its file is next to the kernel's. It is read here because `jupyter_server.serverapp.list_running_servers` deletes
    the files of servers on other machines that share the folder, and a kernel's environment often lacks it.
    """
    pid = os.environ.get("JPY_PARENT_PID", "")
    file = next(connection_file.parent.glob(f"*server-{pid}.json"), None) if pid.isdigit() else None
    if file is None:
        return None
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
        connections = psutil.Process(int(pid)).net_connections("tcp")
        places = {place.laddr for place in connections if place.status == psutil.CONN_LISTEN}
        port, scheme = info["port"], "https" if info["secure"] else "http"
        if not places & {("127.0.0.1", port), ("0.0.0.0", port), ("::", port)}:
            raise ServerError(f"the process {pid} of {file} does not listen on port {port} of 127.0.0.1")
        kernel_id = connection_file.stem.removeprefix("kernel-")
        return Server(f"{scheme}://127.0.0.1:{port}{info['base_url']}api/kernels/{kernel_id}", info["token"])
    except (OSError, ValueError, LookupError, psutil.Error) as error:
        raise ServerError(f"{file} or its process cannot be read: {type(error).__name__}") from None


@dataclass(frozen=True)
class Runner:
    """What runs this process: a script, or IPython without a kernel; papermill, nbclient or nbconvert, which end the
    kernel themselves (`batch`); a Jupyter server that responds; another owner of a `kernel`; one that would restart the
    kernel and cannot be queried (`foreign`)."""

    kind: Literal["script", "batch", "server", "kernel", "foreign"]
    shell: Any = None
    server: Server | None = None
    reason: str = ""  # of `foreign`: why the kernel cannot be shut down from here, and what to click


def find_runner() -> Runner:
    """The runner of this process; asks the Jupyter server that started the kernel whether it still has it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    kernel: Any = getattr(shell, "kernel", None)
    if not hasattr(getattr(kernel, "parent", None), "get_connection_info"):  # none, or one inside another program
        return Runner("script", shell)
    request = kernel.get_parent("shell") or {}
    if request.get("content", {}).get("allow_stdin", True) is False:  # input() would get no answer
        return Runner("batch", shell)
    for name, reason in HOSTED.items():
        if name in os.environ:
            return Runner("foreign", shell, reason=reason)
    try:
        server = find_server(Path(kernel.parent.abs_connection_file))
        if server is not None and server.ask("GET") is not None:
            return Runner("server", shell, server)
    except ServerError as error:
        return Runner("foreign", shell, reason=f"{error}; {CLICK}")
    if server is None and "JPY_SESSION_NAME" in os.environ:
        return Runner("foreign", shell, reason=f"its Jupyter server, which would restart it, was not found; {CLICK}")
    return Runner("kernel", shell)


# ------------------------------------------------------------------------------------------------ the end


class _Ending(threading.Thread):
    """Ends the kernel once no cell has run for `IDLE_S` seconds and no save or run is in progress.

    A kernel that stops inside its own cell races with its output: the reply and the last lines are lost, and the runner
    reports a dead kernel.
    """

    def __init__(self, runner: Runner):
        super().__init__(name="rloo-kit-ends-the-kernel", daemon=True)
        self._runner = runner
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

    def _begin(self) -> None:
        self._executing.add(threading.get_ident())

    def _finish(self) -> None:
        self._executing.discard(threading.get_ident())
        self._last = time.monotonic()

    def _may_end(self) -> bool:
        if self._executing or time.monotonic() - self._last < IDLE_S or running_saves() or open_runs():
            return False
        server = self._runner.server
        state = (server.ask("GET") or {}).get("execution_state") if server else None
        return state in ("idle", None)  # None: the server no longer has it

    def _shut_down(self) -> None:
        if self._runner.server is not None:
            self._runner.server.ask("DELETE")
            return
        # A shutdown request on the control channel, as any client sends it: the kernel finishes its work and exits 0.
        from jupyter_client.blocking import BlockingKernelClient  # installed wherever ipykernel is

        client = BlockingKernelClient()
        client.load_connection_info(self._runner.shell.kernel.parent.get_connection_info())
        client.start_channels(shell=False, iopub=False, stdin=False, hb=False, control=True)
        client.shutdown(reply=True, timeout=10)
        client.stop_channels()
