"""A Jupyter server's file is not trusted, and a token goes to no other host: tested against real sockets."""

import http.client
import json
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.notebook.jupyter_server import CLOCK_S, Server, ServerError, find_servers

TOKEN = "of-the-hub-and-secret"
CASES = int(os.environ.get("RLOO_KIT_FUZZ_CASES", "500"))


class Recorder:
    """A server that keeps the headers of every request and answers `status`, `headers` and `body`."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []
        self.status, self.headers, self.body = 200, {}, b'{"execution_state": "idle"}'
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                recorder.seen.append(dict(self.headers))
                self.send_response(recorder.status)
                for name, value in recorder.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(recorder.body)

            do_DELETE = do_GET

            def log_message(self, *_: Any) -> None:
                """Tests have enough to read."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def recorders() -> Iterator[Callable[[], Recorder]]:
    made: list[Recorder] = []

    def make() -> Recorder:
        made.append(Recorder())
        return made[-1]

    yield make
    for recorder in made:
        recorder.stop()


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single-user server of JupyterHub at port 8888 and /user/me/."""
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", TOKEN)
    monkeypatch.setenv("JUPYTERHUB_SERVICE_URL", "http://0.0.0.0:8888/user/me/")
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/me/")


def write(folder: Path, **changes: Any) -> Path:
    info = {"url": "http://127.0.0.1:8888/user/me/", "hostname": "127.0.0.1", "port": 8888, "base_url": "/user/me/"}
    file = folder / f"jpserver-{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps(info | {"pid": os.getpid(), "token": "", "secure": False} | changes))
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_redirect_is_followed(recorders, status, method):
    """urllib carries the Authorization header to the address that a redirect names."""
    first, second = recorders(), recorders()
    first.status, first.headers = status, {"Location": f"http://127.0.0.1:{second.port}/"}
    with pytest.raises(ServerError, match=str(status)):
        Server(f"http://127.0.0.1:{first.port}/", os.getpid(), TOKEN).ask(method, "an-id")
    assert [headers["Authorization"] for headers in first.seen] == [f"token {TOKEN}"]
    assert not second.seen


def test_the_hubs_token_goes_to_the_server_of_its_variables_alone(tmp_path, monkeypatch):
    """It opens the user's account; a server of one's own on another port, or another service's, has no use for it."""
    write(tmp_path)
    write(tmp_path, url="http://127.0.0.1:8889/user/me/")
    write(tmp_path, url="http://127.0.0.1:8888/user/somebody/")
    write(tmp_path, url="http://127.0.0.1:8888/")
    assert [server.token for server in find_servers([tmp_path])] == [TOKEN, "", "", ""]
    monkeypatch.setenv("JUPYTERHUB_SERVICE_URL", "")
    assert [server.token for server in find_servers([tmp_path])] == [TOKEN, TOKEN, "", ""], "the prefix is known"
    monkeypatch.delenv("JUPYTERHUB_SERVICE_PREFIX")
    assert [server.token for server in find_servers([tmp_path])] == ["", "", "", ""]


def test_only_this_machine_is_asked_unless_the_hub_names_another(tmp_path, monkeypatch):
    """A file that names evil.example got the token sent there, and so did one whose address merely looks local."""
    outside = ["http://evil.example:8888/user/me/", "http://10.0.0.9:8888/user/me/", "http://127.0.0.1.evil.example/",
               "http://127.0.0.1:8888@evil.example:8888/user/me/", "http://169.254.169.254/"]  # fmt: skip
    for url in outside:
        write(tmp_path, url=url, hostname="somewhere", token="of-the-file")
    for server in find_servers([tmp_path]):
        with pytest.raises(ServerError, match="loopback"):
            server.ask("GET", "an-id")
    assert len(find_servers([tmp_path])) == len(outside)
    monkeypatch.setenv("JUPYTERHUB_SERVICE_URL", "http://10.0.0.9:8888/user/me/")
    assert [server.url for server in find_servers([tmp_path]) if not server.refusal] == [outside[1]]


def test_the_address_is_rebuilt_from_its_parts(tmp_path):
    """Two readers of one odd address disagree on its host: what is asked is what was looked at."""
    for url in (
        r"http://evil.example\@127.0.0.1:7/",
        "http://me:pass@127.0.0.1:7/a b/",
        "http://[::1]:7/x/\r\nHost: y",
    ):
        write(tmp_path, url=url)
    assert [server.url for server in find_servers([tmp_path])] == [
        "http://127.0.0.1:7/", "http://127.0.0.1:7/a%20b/", "http://[::1]:7/x/Host%3A%20y/".replace("%3A", ":"),
    ]  # fmt: skip


def test_a_file_that_others_could_have_written_is_skipped(tmp_path):
    """A shared runtime folder, as /tmp is, takes files of everybody."""
    for mode in (0o620, 0o602, 0o666):
        write(tmp_path).chmod(mode)
    assert not find_servers([tmp_path])
    if os.getuid() == 0:
        os.chown(write(tmp_path), 12345, -1)
        assert not find_servers([tmp_path])
    os.mkfifo(tmp_path / "jpserver-pipe.json")
    (tmp_path / "jpserver-folder.json").mkdir()
    write(tmp_path)
    assert len(find_servers([tmp_path])) == 1


def test_the_process_of_the_file_lives_and_is_the_one_that_wrote_it(tmp_path):
    """A server that was killed leaves its file; by now its port, or its number, may be somebody else's."""
    with subprocess.Popen(["sleep", "60"]) as process:
        file = write(tmp_path, pid=process.pid)
        assert [server.pid for server in find_servers([tmp_path])] == [process.pid]
        before = file.stat().st_mtime - CLOCK_S - 10
        os.utime(file, (before, before))
        assert not find_servers([tmp_path]), "the process began after the file was written"
        os.utime(file)
        assert len(find_servers([tmp_path])) == 1
        process.kill()
    assert not find_servers([tmp_path])
    if os.getuid() == 0:
        with subprocess.Popen(["sleep", "60"], user=12345, cwd="/") as process:
            write(tmp_path, pid=process.pid)
            assert not find_servers([tmp_path]), "of another user"
            process.kill()


MALFORMED = {
    "list": b"[]", "text": b'"x"', "null": b"null", "half": b'{"url": "http://', "empty": b"",
    "not UTF-8": b'{"url": "\xff"}',
    "deep": b'{"a":' * 100_000, "brackets": b"[" * 100_000, "huge": b'{"a": "' + b"x" * 2**21 + b'"}',
    "long integer": b'{"pid": ' + b"9" * 100_000 + b"}", "other": b'{"a": 1}',
}  # fmt: skip
FIELDS: dict[str, list[Any]] = {
    "url": [3, None, [], "", "x", "http://[", "http://127.0.0.1:x/", "http://127.0.0.1:99999/", "file:///etc/passwd"],
    "pid": ["x", None, [], {}, -1, 0, True, 1.5, 10**30, 2**31],
    "port": [None, "8888", -1, 10**9, []],
    "base_url": [3, None, [], {}],
    "token": [3, [], {"a": 1}, True],
    "hostname": [3, None, [], {}],
    "secure": ["x", [], {}],
}


def test_a_malformed_file_is_skipped(tmp_path):
    """`[]`, a url that is a number or a port that is null ended shutdown_kernel with a TypeError."""
    for name, content in MALFORMED.items():
        file = tmp_path / f"jpserver-{name}.json"
        file.write_bytes(content)
        file.chmod(0o600)
    for name, values in FIELDS.items():
        for value in values:
            write(tmp_path, **{"hostname": "" if name in ("port", "base_url") else "127.0.0.1", name: value})
    for server in find_servers([tmp_path]):
        assert server.url.startswith(("http://127.0.0.1", "https://127.0.0.1")) and server.pid == os.getpid()


def test_files_with_bytes_changed(tmp_path):
    """RLOO_KIT_FUZZ_CASES=10000 is the long search."""
    generator = random.Random(14)
    whole = write(tmp_path).read_bytes()
    file = tmp_path / "jpserver-x.json"
    found = 0
    for _ in range(CASES):
        content = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(len(content))
            content[place : place + generator.randint(0, 3)] = generator.randbytes(generator.randint(0, 3))
        file.write_bytes(content)
        file.chmod(0o600)
        for server in find_servers([tmp_path]):
            found += 1
            assert server.refusal or server.url.startswith(("http://127.", "http://localhost", "http://[::1]"))
    assert found > CASES, "the whole file is always one"


ANSWERS = [b"[]", b"[1]", b"null", b"3", b'"x"', b"{", b"\xff", b"[" * 100_000, b"<html>", b'{"a": "' + b"x" * 2**21]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_a_malformed_answer_is_the_servers_error(recorders, answer):
    """A thread that waits for the end of the kernel died of it without a word."""
    recorder = recorders()
    recorder.body = answer
    with pytest.raises(ServerError, match="cannot be queried"):
        Server(f"http://127.0.0.1:{recorder.port}/", os.getpid(), TOKEN).ask("GET", "an-id")


def test_the_token_is_in_no_error(recorders):
    """http.client's own error reads: Invalid header value b'token ...'."""
    recorder = recorders()
    for token in (f"{TOKEN}\n", f"{TOKEN}\r\nX: y", f"{TOKEN}ü"):
        with pytest.raises(ServerError) as caught:
            Server(f"http://127.0.0.1:{recorder.port}/", os.getpid(), token).ask("GET", "an-id")
        assert TOKEN not in str(caught.value) + repr(caught.value.__context__)
    assert not recorder.seen
    assert TOKEN not in repr(Server("http://127.0.0.1/", 1, TOKEN))


def test_what_is_no_http_is_the_servers_error():
    """An SSH server on that port answers, and not in HTTP; that is no OSError."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            connection.recv(2**16)
            connection.sendall(b"SSH-2.0-x\x1b[2J\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ServerError, match="cannot be queried") as caught:
            Server(f"http://127.0.0.1:{listening.getsockname()[1]}/", os.getpid(), TOKEN).ask("GET", "an-id")
    assert "\x1b" not in str(caught.value)
    assert issubclass(http.client.BadStatusLine, http.client.HTTPException)
