"""A real Jupyter server on loopback and a client that does what JupyterLab's page does: a session, and a web socket.

Not JupyterLab's own script, which needs a browser: the messages on the wire are the same.
"""

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from jupyter_client.session import Session
from jupyter_server.serverapp import list_running_servers
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from tests.notebooks.runners import LIMIT_S, PYTHON, environment, wait_until

# A server drops output beyond 1,000 messages or 1 MB a second, with a notice; the notebook here prints more than that.
NO_RATE_LIMITS = [
    "--ZMQChannelsWebsocketConnection.iopub_msg_rate_limit=1e9",
    "--ZMQChannelsWebsocketConnection.iopub_data_rate_limit=1e12",
]
XSRF = "00112233445566778899aabbccddeeff"  # of an open server's cookie, chosen here
# The institute's proxy would be asked for 127.0.0.1, and know nothing.
DEAD_PROXY = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


@dataclass
class JupyterServer:
    """One running server. `log` is the file with what it said, `mark` finds its processes and its kernels'."""

    process: subprocess.Popen
    url: str
    token: str
    log: Path
    mark: str
    folder: Path

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        if not self.token:
            headers = {"Cookie": f"_xsrf={XSRF}", "X-XSRFToken": XSRF}
        with httpx.Client(verify=False, trust_env=False, timeout=30) as client:
            return client.request(method, self.url + path, headers=headers, json=body).raise_for_status().json()

    def start_session(self, name: str) -> str:
        """A notebook's session, as JupyterLab starts one; returns the kernel's id."""
        body = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
        return self.ask("POST", "api/sessions", body)["kernel"]["id"]

    def run_all(self, kernel_id: str, cells: list[str]) -> str:
        """Send every cell at once and stay connected until the kernel is gone, for 30 s at most; returns the output."""
        return asyncio.run(asyncio.wait_for(self._run_all(kernel_id, cells), LIMIT_S))

    async def _run_all(self, kernel_id: str, cells: list[str]) -> str:
        session = Session(key=b"")
        url = f"{self.url}api/kernels/{kernel_id}/channels?session_id={session.session}".replace("http", "ws", 1)
        headers = {"Authorization": f"token {self.token}"} if self.token else {}
        request = HTTPRequest(url, headers=headers, validate_cert=False)
        channel = await websocket_connect(request, max_message_size=2**30)
        output: list[str] = []
        for code in cells:
            message = execute_request(session, code)
            await channel.write_message(json.dumps(message, default=str))
        last, missing = message["header"]["msg_id"], {"execute_reply", "idle"}
        while missing:
            message = json.loads(await channel.read_message())
            kind, content = message["header"]["msg_type"], message["content"]
            output += [content["text"]] if kind == "stream" else []
            output += content["traceback"] if kind == "error" else []
            if message["parent_header"].get("msg_id") == last:
                missing -= {kind, content.get("execution_state")}
        await asyncio.to_thread(wait_until, lambda: not self.kernels(), 30)
        channel.close()
        return "".join(output)

    def kernels(self) -> list[dict[str, Any]]:
        return self.ask("GET", "api/kernels")

    def answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return self.kernels() == []
        return False


def execute_request(session: Session, code: str) -> dict[str, Any]:
    """A cell as JupyterLab sends it: somebody is there to answer input()."""
    content = {"code": code.strip(), "silent": False, "store_history": True, "user_expressions": {}}
    message = session.msg("execute_request", content | {"allow_stdin": True, "stop_on_error": True})
    fields = {name: message[name] for name in ("header", "parent_header", "metadata", "content")}
    return fields | {"channel": "shell", "buffers": []}


@contextmanager
def jupyter_lab(folder: Path, *arguments: str, token: str = "", runtime: Path | None = None) -> Iterator[JupyterServer]:
    """`jupyter lab` without a browser; ended at the end, with all that it started.

    Args:
        folder: its root and its home. arguments: more of the command line's.
        token: what it asks for; empty: an open server. runtime: Jupyter's runtime folder, to be shared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [PYTHON.with_name("jupyter"), "lab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += ["--ServerApp.port=0", f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}"]
    command += [*NO_RATE_LIMITS, *arguments]
    log = folder / "server.log"
    with environment(folder) as (env, mark), log.open("w") as file:
        runtime = runtime or Path(env["JUPYTER_RUNTIME_DIR"])
        process = subprocess.Popen(
            [str(word) for word in command],
            **{"cwd": folder, "env": env | {"JUPYTER_RUNTIME_DIR": str(runtime)} | DEAD_PROXY},
            **{"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True},
        )

        def find() -> list[JupyterServer]:
            found = [info["url"] for info in list_running_servers(str(runtime)) if info["pid"] == process.pid]
            return [JupyterServer(process, url, token, log, mark, folder) for url in found]

        try:
            assert wait_until(lambda: any(server.answers() for server in find()), 60), log.read_text()
            yield find()[0]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def own_certificate(folder: Path) -> list[str]:
    """Arguments for https with a self-signed certificate; empty where there is no openssl to make one."""
    if shutil.which("openssl") is None:
        return []
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return [f"--ServerApp.certfile={certificate}", f"--ServerApp.keyfile={key}"]
