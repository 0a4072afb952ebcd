"""Ending a kernel from inside, once nothing runs in it any more.

A kernel that stops in the middle of the cell that asks for it races with its own output: the reply and the last lines
are lost, and the runner calls it dead. So a thread waits until no cell has run for a while, and only then asks: the
Jupyter server where there is one, else the kernel itself, on its control channel, as any client would.
"""

import sys
import threading
import time
from typing import Any

from rloo_kit.notebook.kernel_server import ServerError
from rloo_kit.notebook.runner import Runner
from rloo_kit.runs import files as saves
from rloo_kit.runs import run_dir

POLL_S = 0.2
SLOW_CLIENT_S = 60.0  # how long large output may take to leave the kernel, once it is idle

_WORDS = {
    "script": "This is a script: its process ends with it.",
    "terminal": "This process is yours to end: exit",
    "batch": "The runner of this notebook ends the kernel after the last cell.",
    "server": "The kernel ends when nothing is left to run, and stays ended.",
    "kernel": "The kernel ends when nothing is left to run.",
}

_ending: "_Ending | None" = None


def end_when_idle(runner: Runner, idle_s: float, force: bool) -> str:
    """Start the thread that ends the kernel, where it has to be ended from here; returns what will happen, in words."""
    global _ending
    if runner.kind == "foreign":
        return f"The kernel is not ended: {runner.reason}"
    if runner.kind in ("server", "kernel"):
        if _ending is not None and _ending.is_alive():
            return "The kernel is about to end already, when nothing is left to run."
        _ending = _Ending(runner, idle_s, force)
        _ending.start()
    return _WORDS[runner.kind]


class _Ending(threading.Thread):
    """Waits until the kernel has been idle for `idle_s` seconds and no work goes on in threads, and ends it."""

    def __init__(self, runner: Runner, idle_s: float, force: bool):
        super().__init__(name="rloo-kit-ends-the-kernel", daemon=True)
        self._runner, self._idle_s, self._force = runner, idle_s, force
        self._executing = {threading.get_ident()}  # threads that run a cell: the caller's, and JupyterLab's subshells
        self._last = time.monotonic()
        self._listeners = {"pre_execute": self._begin, "post_execute": self._finish}
        for event, listener in self._listeners.items():
            runner.shell.events.register(event, listener)

    def run(self) -> None:
        try:
            while not self._may_end():
                time.sleep(POLL_S)
            self._shut_down()
        except (ServerError, OSError, RuntimeError) as error:  # in a thread of its own nobody else would hear of it
            print(f"The kernel is not ended: {error}", flush=True)
        finally:
            for event, listener in self._listeners.items():
                self._runner.shell.events.unregister(event, listener)

    def _begin(self) -> None:
        self._executing.add(threading.get_ident())

    def _finish(self) -> None:
        self._executing.discard(threading.get_ident())
        self._last = time.monotonic()

    def _may_end(self) -> bool:
        idle_s = time.monotonic() - self._last
        if self._executing or idle_s < self._idle_s or (_unsent_messages() and idle_s < SLOW_CLIENT_S):
            return False
        if not self._force and (saves.running_saves() or run_dir.open_runs()):
            return False
        server = self._runner.server
        return server is None or server.execution_state(self._runner.kernel_id) in ("idle", None)

    def _shut_down(self) -> None:
        server = self._runner.server
        if server is None:
            _request_shutdown(self._runner.shell.kernel.parent.get_connection_info())
        else:
            server.shut_down(self._runner.kernel_id)


def _unsent_messages() -> int:
    """Large messages that some client of the kernel has not taken yet; pyzmq keeps them until they are sent.

    A kernel that ends with some of them loses them after a second, or crashes: their memory goes before their sender.
    """
    garbage = sys.modules.get("zmq.utils.garbage")
    return 0 if garbage is None else len(garbage.gc.refs)


def _request_shutdown(connection: Any) -> None:
    """A shutdown request to the kernel with these ports and this key: it finishes what it does, and exits with 0."""
    from jupyter_client.blocking import BlockingKernelClient  # there wherever ipykernel is

    client = BlockingKernelClient()
    client.load_connection_info(connection)
    client.start_channels(shell=False, iopub=False, stdin=False, hb=False, control=True)
    client.shutdown(reply=True, timeout=10)
    client.stop_channels()
