"""`python -m rloo_kit.notebook.papermill IN OUT ...`: papermill with its options, and safe ports for the kernel.

By default a kernel gets ports that the system has just assigned and released. Until the kernel listens on one, the
system may assign it to another kernel or to any outgoing connection, and the kernel dies before its first cell. The
system never assigns ports below its own range.
"""

import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
FIRST_PORT = 10_000
GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux: first and last port that the system assigns
USUAL_FIRST = 32_768  # Linux's default; macOS starts at 49,152
TRIES = 200


def choose_ports(number: int) -> list[int]:
    """At most `number` free loopback ports outside the range that the system assigns."""
    end = int(GIVEN_OUT.read_text().split()[0]) if GIVEN_OUT.exists() else USUAL_FIRST
    choice = range(FIRST_PORT, max(end, FIRST_PORT))
    free: list[int] = []
    for port in random.SystemRandom().sample(choice, min(TRIES, len(choice))):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            free.append(port)
    return free[:number]


def main() -> None:
    from jupyter_client import KernelManager
    from papermill.cli import papermill
    from papermill.engines import NBClientEngine, papermill_engines
    from traitlets.config import Config

    class OwnPortsEngine(NBClientEngine):
        """papermill's own engine; Jupyter chooses any ports that `choose_ports` does not find."""

        @classmethod
        def execute_managed_notebook(cls, *args: Any, **options: Any) -> Any:
            ports = zip((f"{name}_port" for name in CHANNELS), choose_ports(len(CHANNELS)), strict=False)
            # With cached ports, Jupyter would choose all of them.
            manager: dict[str, Any] = {"cache_ports": False, **dict(ports)}
            if "transport_encryption" in KernelManager.class_traits():  # newer ipykernels warn about plain text
                manager["transport_encryption"] = "auto"
            return super().execute_managed_notebook(*args, config=Config({"KernelManager": manager}), **options)

    papermill_engines.register(None, OwnPortsEngine)
    papermill()


if __name__ == "__main__":
    main()
