"""Which program runs this process, and so who ends it: a script, a terminal, a batch runner, a Jupyter server, ..."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rloo_kit.notebook.kernel_server import Server, ServerError, find_servers

Kind = Literal["script", "terminal", "batch", "server", "kernel", "foreign"]

# Services that give a process of theirs a new kernel at once; their menus alone end it.
_HOSTED = {
    "COLAB_RELEASE_TAG": "Colab starts a new one at once; there: Runtime > Disconnect and delete runtime",
    "KAGGLE_KERNEL_RUN_TYPE": "Kaggle starts a new one at once; there: Run > Stop session",
}
_CLICK = "in JupyterLab: Kernel > Shut Down Kernel"


@dataclass(frozen=True)
class Runner:
    """Who runs this process.

    Attributes:
        kind: `script`; `terminal`: IPython without a kernel; `batch`: papermill, nbclient, nbconvert, which end their
            kernel themselves; `server`: a Jupyter server that can be asked; `kernel`: another owner of a kernel;
            `foreign`: one that would start the kernel anew, and cannot be asked.
        shell: IPython's shell, or None.
        kernel_id: the kernel's name at its server.
        server: the server, for that kind.
        reason: for `foreign`: why it cannot be ended from here, and what to click.
    """

    kind: Kind
    shell: Any = None
    kernel_id: str = ""
    server: Server | None = None
    reason: str = ""


def find_runner() -> Runner:
    """Look around; asks the Jupyter servers of this user whose kernel this is."""
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
    return _owner(shell, Path(kernel.parent.abs_connection_file))


def _owner(shell: Any, connection_file: Path) -> Runner:
    kernel_id = connection_file.stem.removeprefix("kernel-")
    refusal = next((reason for name, reason in _HOSTED.items() if name in os.environ), "")
    servers = find_servers({connection_file.parent, _runtime_folder()})
    for server in sorted(servers, key=lambda server: server.pid not in _parents()):  # the likely one first
        try:
            if server.execution_state(kernel_id) is not None:
                return Runner("server", shell, kernel_id, server)
        except ServerError as error:
            if server.pid in _parents():
                refusal = refusal or f"{error}; {_CLICK}"
    if not servers and "JPY_SESSION_NAME" in os.environ:
        refusal = refusal or f"its Jupyter server was not found, and would start it anew; {_CLICK}"
    return Runner("foreign", shell, kernel_id, None, refusal) if refusal else Runner("kernel", shell, kernel_id)


def _runtime_folder() -> Path:
    from jupyter_core.paths import jupyter_runtime_dir  # there wherever ipykernel is

    return Path(jupyter_runtime_dir())


def _parents() -> set[int]:
    """Who started this process: the parent, and what jupyter_client wrote down."""
    noted = os.environ.get("JPY_PARENT_PID", "")
    return {os.getppid()} | ({int(noted)} if noted.isdigit() else set())
