"""The Jupyter server that started this kernel: finding it, and asking it to shut the kernel down.

A server restarts a kernel whose process merely ends; one that it shut down itself stays down. Servers write their
address and token into Jupyter's runtime folder, where their kernels' connection files lie too; those files are read
here, because a kernel's environment often has no `jupyter_server`, which would read them as `list_running_servers`.
Left out: servers on a Unix socket, and servers with a password and no token.
"""

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INFO_FILES = ("jpserver-*.json", "nbserver-*.json")  # Jupyter server, and Notebook 6
TIMEOUT_S = 10.0
_WILDCARDS = ("", "*", "0.0.0.0", "::")


class ServerError(Exception):
    """The server did not answer as hoped; for this package's own use."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: its address, base_url included, with a slash at the end.
        pid: its process. token: what it takes as authorization; may be empty.
    """

    url: str
    pid: int
    token: str = field(default="", repr=False)

    def execution_state(self, kernel_id: str) -> str | None:
        """`idle`, `busy`, `starting`, ... of a kernel; None where the server has no such kernel.

        Raises:
            ServerError: it cannot be reached, or does not let us in.
        """
        try:
            return str(self._ask("GET", kernel_id).get("execution_state"))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise ServerError(f"the server at {self.url} answered {error.code} {error.reason}") from error
        except (OSError, ValueError) as error:
            raise ServerError(f"the server at {self.url} cannot be asked: {error}") from error

    def shut_down(self, kernel_id: str) -> None:
        """Shut a kernel down for good.

        Raises:
            ServerError: it did not do so.
        """
        try:
            self._ask("DELETE", kernel_id)
        except (OSError, ValueError) as error:  # an HTTPError is an OSError
            raise ServerError(f"the server at {self.url} did not shut it down: {error}") from error

    def _ask(self, method: str, kernel_id: str) -> Any:
        headers = {"Authorization": f"token {self.token}"} if self.token else {}
        if not self.token and method != "GET":  # an open server wants its cross-site cookie, sent twice
            secret = os.urandom(16).hex()
            headers |= {"Cookie": f"_xsrf={secret}", "X-XSRFToken": secret}
        request = urllib.request.Request(f"{self.url}api/kernels/{kernel_id}", headers=headers, method=method)
        with _opener().open(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read() or b"{}")


def find_servers(folders: Iterable[Path]) -> list[Server]:
    """The servers that left their address in one of `folders`, running or not; the newest first."""
    files = {file for folder in folders for pattern in INFO_FILES for file in folder.glob(pattern)}
    servers = []
    for file in sorted(files, key=_modified, reverse=True):
        try:
            servers.append(_read(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError):  # half written, or gone by now
            continue
    return servers


def _read(info: dict[str, Any]) -> Server:
    url = str(info["url"])
    if info.get("hostname") in _WILDCARDS:  # it listens everywhere; the machine's name may not be known to itself
        url = f"{'https' if info.get('secure') else 'http'}://127.0.0.1:{info['port']}{info.get('base_url', '/')}"
    token = info.get("token") or os.environ.get("JUPYTERHUB_API_TOKEN", "")
    return Server(url.rstrip("/") + "/", int(info["pid"]), token)


def _opener() -> urllib.request.OpenerDirector:
    """No proxy, and any certificate: the address is this machine's, from a file that only this user can write."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
