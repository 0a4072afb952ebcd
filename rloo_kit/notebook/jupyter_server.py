"""Find this user's Jupyter servers on this machine (in Jupyter's runtime folders) and query them about a kernel.

A server's file is not trusted: it may be stale, or another user's. A token is sent only to this machine, or to the
address in JupyterHub's variables.
"""

import http.client
import ipaddress
import json
import os
import ssl
import stat
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psutil

from rloo_kit.system.console import picture_controls

TIMEOUT_S = 10.0  # per request
MOST_BYTES = 2**20  # of a response or a server's file
CLOCK_S = 60.0  # tolerated difference between the clocks of files and processes
EVERYWHERE = ("", "*", "0.0.0.0", "::")  # hostnames of a server that listens on all addresses


class ServerError(Exception):
    """The Jupyter server cannot be reached, must not be queried, or refuses."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect, because urllib would send the token along."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Server:
    """A Jupyter server: `url` with base_url and a trailing slash, its process, its token (may be empty), and why it
    must not be queried (or "").

    A server restarts a kernel whose process exits, but not one that it shut down itself.
    """

    url: str
    pid: int
    token: str = field(default="", repr=False)
    refusal: str = ""

    def ask(self, method: str, kernel_id: str) -> dict[str, Any] | None:
        """`GET` a kernel's model, whose `execution_state` is `idle`, `busy`, ..., or `DELETE` the kernel permanently.

        Returns:
            The response; None if the server has no such kernel.
        """
        if self.refusal:
            raise ServerError(self.refusal)
        if not self.token.isascii() or not self.token.isprintable():  # http.client would print it in its error
            raise ServerError(f"the token of the server at {self.url} cannot be sent in a request")
        headers = {"Authorization": f"token {self.token}"} if self.token else {}
        if not self.token and method != "GET":  # an open server requires its cross-site cookie, sent twice
            secret = os.urandom(16).hex()
            headers |= {"Cookie": f"_xsrf={secret}", "X-XSRFToken": secret}
        try:
            address = f"{self.url}api/kernels/{quote(kernel_id, safe='')}"
            request = urllib.request.Request(address, headers=headers, method=method)
            with _opener(self.url).open(request, timeout=TIMEOUT_S) as response:
                answer = json.loads(response.read(MOST_BYTES) or b"{}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise ServerError(
                f"the server at {self.url} answered {method} with {error.code} {_short(error.reason)}"
            ) from None
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise ServerError(f"the server at {self.url} cannot be queried: {_short(error)}") from None
        if not isinstance(answer, dict):
            raise ServerError(f"the server at {self.url} cannot be queried: {method} returned no JSON object")
        return answer


def _short(found: object) -> str:
    return picture_controls(str(found))[:200]


def _opener(url: str) -> urllib.request.OpenerDirector:
    """No proxy, no redirects; any certificate is accepted on this machine."""
    context = ssl.create_default_context()
    if is_loopback(urlsplit(url).hostname or ""):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    https = urllib.request.HTTPSHandler(context=context)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect(), https)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback.

    >>> [is_loopback(host) for host in ("localhost", "127.8.0.1", "::1", "10.0.0.1", "localhost.example.org")]
    [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_servers(folders: Iterable[Path]) -> list[Server]:
    """This user's running servers with a file in one of `folders` (Jupyter's runtime folders). Reads the files itself,
    because a kernel's environment often lacks `jupyter_server` and its `list_running_servers`."""
    if os.name != "posix":  # the owners of files and processes are only looked up on POSIX
        return []
    files = (
        file for folder in folders for name in ("jp", "nb") for file in sorted(folder.glob(f"{name}server-*.json"))
    )
    return [server for file in files if (server := _read_server(file)) is not None]


def _read_server(file: Path) -> Server | None:
    """The server that a file describes; None if the file is not private to this user, is malformed, or is stale."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:  # a pipe with that name would block
            status = os.fstat(stream.fileno())
            private = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
            info = json.loads(stream.read(MOST_BYTES)) if private else None
        if not isinstance(info, dict) or not _is_running(info.get("pid"), status.st_mtime):
            return None
        url, refusal = _address(info)
        token = info.get("token") or _hub_token(url)
        return Server(url, info["pid"], token, refusal) if isinstance(token, str) else None
    except (OSError, ValueError, RecursionError):  # half written, from another program, or already gone
        return None


def _is_running(pid: Any, written_s: float) -> bool:
    """Whether the process that wrote a file is alive and this user's; a later process with its number is not."""
    if type(pid) is not int or pid <= 0:
        return False
    try:
        process = psutil.Process(pid)
        return process.uids().real == os.getuid() and process.create_time() < written_s + CLOCK_S
    except (psutil.Error, OverflowError):
        return False


def _address(info: dict[str, Any]) -> tuple[str, str]:
    """The address to query, built from checked parts, and why it must not be queried (or "")."""
    url = info["url"] if isinstance(info.get("url"), str) else ""
    parts = urlsplit(url)
    scheme, host, port, path = parts.scheme, parts.hostname or "", parts.port, parts.path
    if info.get("hostname") in EVERYWHERE:  # reach it on loopback
        scheme, host = "https" if info.get("secure") else "http", "127.0.0.1"
        port, path = info.get("port"), info.get("base_url", "/")
    if scheme not in ("http", "https") or not host or not isinstance(path, str):
        raise ValueError(f"no address: {scheme}")
    if port is not None and (type(port) is not int or not 0 < port < 2**16):
        raise ValueError("no port")
    netloc = f"[{host}]" if ":" in host else host
    path = quote(path.strip("/"), safe="/%~@:")
    found = f"{scheme}://{netloc}{'' if port is None else f':{port}'}/{path}{'/' if path else ''}"
    if is_loopback(host) or host == (_hub_address().hostname or ""):
        return found, ""
    return found, f"the server at {found} listens on an address that is not this machine's loopback"


def _hub_address() -> Any:
    """Where JupyterHub's single-user server listens (JUPYTERHUB_SERVICE_URL), split into parts."""
    try:
        parts = urlsplit(os.environ.get("JUPYTERHUB_SERVICE_URL", ""))
        parts.port  # noqa: B018 (raises if it is invalid)
        return parts
    except ValueError:
        return urlsplit("")


def _hub_token(url: str) -> str:
    """JupyterHub's token if the server is the one in its variables; "" for any other."""
    hub, found = _hub_address(), urlsplit(url)
    prefix = hub.path or os.environ.get("JUPYTERHUB_SERVICE_PREFIX", "")
    is_same = bool(prefix) and prefix.strip("/") == found.path.strip("/") and hub.port in (None, 0, found.port)
    return os.environ.get("JUPYTERHUB_API_TOKEN", "") if is_same else ""
