"""Find this user's Jupyter servers on this machine and query them about a kernel. A token is sent to a live server of
this user on the loopback interface, and nowhere else."""

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psutil

from rloo_kit.system.console import picture_controls

TIMEOUT_S = 10.0  # per request
EVERYWHERE = ("", "*", "0.0.0.0", "::")  # hostnames of a server that listens on all addresses


class ServerError(Exception):
    """The Jupyter server cannot be reached, or refuses."""


@dataclass(frozen=True)
class Server:
    """A Jupyter server: `url` with base_url and a trailing slash, its process, its token (may be empty).

    A server restarts a kernel whose process exits, but not one that it shut down itself.
    """

    url: str
    pid: int
    token: str = field(default="", repr=False)

    def ask(self, method: str, kernel_id: str) -> dict[str, Any] | None:
        """`GET` a kernel's model, whose `execution_state` is `idle`, `busy`, ..., or `DELETE` the kernel permanently.

        Returns:
            The response; None if the server has no such kernel.
        """
        import httpx  # jupyterlab needs it too

        headers = {"Authorization": f"token {self.token}"} if self.token else {}
        if not self.token and method != "GET":  # an open server requires its cross-site cookie, sent twice
            secret = os.urandom(16).hex()
            headers |= {"Cookie": f"_xsrf={secret}", "X-XSRFToken": secret}
        address = f"{self.url}api/kernels/{quote(kernel_id, safe='')}"
        try:  # no proxy, no redirect; any certificate is accepted on this machine
            answer = httpx.request(method, address, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=False)
            if answer.status_code == 404:
                return None
            return answer.raise_for_status().json() if answer.content else {}
        except (httpx.HTTPError, ValueError) as error:
            why = picture_controls(str(error).partition("\n")[0])[:200]
            raise ServerError(f"the server at {self.url} cannot be queried: {why}") from None


def find_servers(folders: Iterable[Path]) -> list[Server]:
    """This user's running servers on loopback, by their files in `folders` (Jupyter's runtime folders)."""
    try:
        from jupyter_server.serverapp import list_running_servers
    except ImportError:  # a kernel in an environment without JupyterLab
        return []
    found = (info for folder in sorted(folders) for info in list_running_servers(str(folder)))
    return [
        Server(url, info["pid"], info["token"])
        for info in found
        if _is_own(info["pid"]) and (url := _loopback_url(info))
    ]


def _is_own(pid: int) -> bool:
    try:
        return psutil.Process(pid).uids().real == os.getuid()
    except psutil.Error:
        return False


def _loopback_url(info: dict[str, Any]) -> str:
    """The server's address on this machine's loopback interface; "" if it does not listen there."""
    if info["hostname"] in EVERYWHERE:
        return f"{'https' if info['secure'] else 'http'}://127.0.0.1:{info['port']}{info['base_url']}"
    return info["url"] if is_loopback(urlsplit(info["url"]).hostname or "") else ""


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback.

    >>> [is_loopback(host) for host in ("localhost", "127.8.0.1", "::1", "10.0.0.1", "localhost.example.org")]
    [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
