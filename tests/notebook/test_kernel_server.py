"""Finding the Jupyter server of a kernel and asking it, against a small server of the test's own; real ones are in
tests/notebooks."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rloo_kit.notebook.kernel_server import Server, ServerError, find_servers


class Handler(BaseHTTPRequestHandler):
    """Has the kernel `mine`, wants the token `right`, and refuses to shut down `stubborn`."""

    seen: list[tuple[str, str]] = []

    def answer(self) -> None:
        self.seen.append((self.command, self.path))
        name = self.path.rpartition("/")[2]
        if self.headers["Authorization"] != "token right":
            self.send_error(403)
        elif self.command == "DELETE":
            self.send_response(500 if name == "stubborn" else 204)
            self.end_headers()
        elif name in ("mine", "stubborn"):
            body = json.dumps({"id": name, "execution_state": "busy"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send_error(404)

    do_GET = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    Handler.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def info(folder: Path, name: str, **changes: object) -> None:
    base = {"url": "http://127.0.0.1:1/", "hostname": "127.0.0.1", "port": 1, "base_url": "/", "secure": False}
    (folder / name).write_text(json.dumps(base | {"pid": 4, "token": "right"} | changes))


def test_a_server_is_asked_for_its_kernel(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the institute's would be asked for 127.0.0.1, and know nothing."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = Server(f"http://127.0.0.1:{port}/user/me/", 4, "right")
    assert server.execution_state("mine") == "busy"
    assert server.execution_state("other") is None
    server.shut_down("mine")
    assert Handler.seen[-1] == ("DELETE", "/user/me/api/kernels/mine")


def test_a_server_that_does_not_answer_says_why(port: int) -> None:
    """Without a token (a password alone) there is no way in; the person has to click, and has to know it."""
    url = f"http://127.0.0.1:{port}/"
    with pytest.raises(ServerError, match="answered 403 Forbidden"):
        Server(url, 4, "wrong").execution_state("mine")
    with pytest.raises(ServerError, match="did not shut it down: HTTP Error 500"):
        Server(url, 4, "right").shut_down("stubborn")
    with pytest.raises(ServerError, match="cannot be asked"):
        Server("http://127.0.0.1:9/", 4).execution_state("mine")
    with pytest.raises(ServerError, match="cannot be asked"):
        Server("http+unix://%2Ftmp%2Fsocket/", 4).execution_state("mine")


def test_the_token_is_not_printed() -> None:
    """A traceback in a shared notebook would hand the server to every reader."""
    assert "secret" not in repr(Server("http://127.0.0.1:1/", 4, "secret"))


def test_servers_are_read_from_the_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is half written, and those of other programs, are passed over."""
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "of-the-hub")
    info(tmp_path, "jpserver-1.json", url="http://localhost:8888/lab", hostname="localhost")
    info(tmp_path, "nbserver-2.json", url="https://host.example:8889/user/me/", hostname="0.0.0.0", port=8889)
    info(tmp_path, "jpserver-3.json", url="http://127.0.0.1:7/", token="")
    info(tmp_path, "kernel-4.json")
    (tmp_path / "jpserver-5.json").write_text('{"url": "http://')
    found = {(server.url, server.token) for server in find_servers([tmp_path, tmp_path / "nowhere"])}
    assert found == {
        ("http://localhost:8888/lab/", "right"),
        ("http://127.0.0.1:8889/", "right"),  # one that listens everywhere is reached here
        ("http://127.0.0.1:7/", "of-the-hub"),
    }


def test_a_base_url_and_https_survive_a_wildcard_address(tmp_path: Path) -> None:
    """`--ip 0.0.0.0` with a certificate, behind a path: the usual server in a container."""
    info(tmp_path, "jpserver-1.json", hostname="*", port=443, base_url="/user/me/", secure=True)
    assert [server.url for server in find_servers([tmp_path])] == ["https://127.0.0.1:443/user/me/"]
