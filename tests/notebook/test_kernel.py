"""Releasing memory, recognising the runner, and the one Jupyter server that gets a token: against real sockets.

Figures on a GPU are for tests/on_gpu; real runners, and kernels that end, for tests/notebooks.
"""

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.errors import SetupError
from rloo_kit.notebook import kernel
from rloo_kit.notebook.kernel import Server, ServerError, find_runner, find_server
from rloo_kit.runs.files import saving
from tests.scripted_server import Scripted

TOKEN = "a-secret"


class Model:
    """Refers to itself, so only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_process_without_a_cuda_context_opens_none(monkeypatch: Any, capsys: Any) -> None:
    """Asking CUDA for its memory opens a context, which takes a few hundred MiB: worse than nothing."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))  # type: ignore[arg-type]
    kernel.release_memory()
    assert re.fullmatch(r"memory held by this process: [\d.]+ GiB before, [\d.]+ after\n", capsys.readouterr().out)


def test_what_the_last_error_holds_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a CUDA out-of-memory error the traceback kept the batch, and the next attempt had less memory still. A
    module that imported torch to free memory would take some."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def fails() -> None:
        model = Model()
        held.append(weakref.ref(model))
        try:
            raise KeyError("first")
        except KeyError as first:
            raise RuntimeError("second") from first

    held: list[weakref.ref[Model]] = []
    with pytest.raises(RuntimeError) as caught:
        fails()
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    assert held[0]() is not None
    kernel.release_memory()
    assert held[0]() is None and "torch" not in sys.modules
    assert str(caught.value) == "second" and str(caught.value.__cause__) == "'first'"
    names: dict[str, Any] = {}  # a cell's frame has the notebook's own names as its variables, which stay
    with pytest.raises(ZeroDivisionError) as of_a_cell:
        exec("policy = [1, 2, 3]\n1 / 0", names)
    monkeypatch.setattr(sys, "last_value", of_a_cell.value, raising=False)
    kernel.release_memory()
    assert names["policy"] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------ Jupyter's server


@pytest.fixture
def listen() -> Iterator[Callable[..., Scripted]]:
    """`listen(address, port)`: a server that has an idle kernel."""
    made: list[Scripted] = []

    def start(*arguments: Any) -> Scripted:
        made.append(Scripted(*arguments))
        made[-1].answer = lambda path: (200, {}, b'{"execution_state": "idle"}')
        return made[-1]

    yield start
    for server in made:
        server.stop()


@pytest.fixture
def started_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """`started_by(port, pid)`: the file of a server that started this kernel; returns the kernel's connection file."""

    def write(port: int, pid: int = os.getpid(), **changes: Any) -> Path:
        info = {"port": port, "base_url": "/", "secure": False, "token": TOKEN, "pid": pid, "hostname": "localhost"}
        (tmp_path / f"jpserver-{pid}.json").write_text(json.dumps(info | changes))
        monkeypatch.setenv("JPY_PARENT_PID", str(pid))
        return tmp_path / "kernel-an-id.json"

    return write


def test_only_a_process_that_listens_there_gets_the_token(started_by, listen):
    """`jupyter lab --ip=...` listens to everybody there, and this port may be another program's by now."""
    server = listen("127.0.0.1")
    found = find_server(started_by(server.port, base_url="/user/me/"))
    assert found is not None and found.url == f"http://127.0.0.1:{server.port}/user/me/api/kernels/an-id"
    assert found.ask("GET") == {"execution_state": "idle"}
    assert [headers["Authorization"] for headers in server.headers] == [f"token {TOKEN}"]
    with subprocess.Popen(["sleep", "60"]) as process:
        with pytest.raises(ServerError, match=f"does not listen on port {server.port} of 127.0.0.1"):
            find_server(started_by(server.port, process.pid))
        process.kill()
    with pytest.raises(ServerError, match="cannot be read: NoSuchProcess"):
        find_server(started_by(server.port, process.pid))
    assert len(server.headers) == 1


def test_a_kernel_that_no_server_started(started_by, monkeypatch, tmp_path):
    """`jupyter_client` is the parent of its kernels too, and a console's has none; a half-written file is no server."""
    connection_file = started_by(1)
    (tmp_path / f"jpserver-{os.getpid()}.json").write_text('{"port": ')
    with pytest.raises(ServerError, match="jpserver-.*cannot be read: JSONDecodeError"):
        find_server(connection_file)
    for pid in ("1", "", "*"):
        monkeypatch.setenv("JPY_PARENT_PID", pid)
        assert find_server(connection_file) is None


def test_what_is_no_jupyter_is_the_servers_error(listen):
    """A thread that waits for the end died of it. A redirect's address would get the token, and so would every reader
    of the HTTP library's error: Illegal header value b'token ...'."""
    server, other = listen(), listen()
    for status, headers, body, error in (
        (200, {}, b"{", "cannot be queried: JSONDecodeError"),
        (200, {"Content-Length": "x"}, b"", "cannot be queried: RemoteProtocolError"),
        (302, {"Location": other.url}, b"", "answered GET with 302"),
    ):
        server.answer = lambda path, answer=(status, headers, body): answer
        with pytest.raises(ServerError, match=error):
            Server(server.url, TOKEN).ask("GET")
    assert not other.requests
    with pytest.raises(ServerError, match="cannot be queried: ConnectError"):
        Server("http://127.0.0.1:9/").ask("DELETE")
    with pytest.raises(ServerError, match="cannot be queried") as caught:
        Server(server.url, f"{TOKEN}\n").ask("GET")
    assert TOKEN not in str(caught.value) and TOKEN not in repr(Server("http://127.0.0.1/", TOKEN))


# ------------------------------------------------------------------------------------------------ the runner


@pytest.fixture
def in_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`in_kernel(allow_stdin=True)`: this process takes itself for a kernel."""
    for name in ("JPY_SESSION_NAME", "JPY_PARENT_PID", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)

    def pretend(allow_stdin: bool = True) -> None:
        app = SimpleNamespace(get_connection_info=dict, abs_connection_file=str(tmp_path / "kernel-an-id.json"))
        request = {"content": {"allow_stdin": allow_stdin}}
        shell = SimpleNamespace(kernel=SimpleNamespace(parent=app, get_parent=lambda channel: request))
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]

    return pretend


def test_a_kernel_that_would_come_back_is_left_alone(in_kernel: Any, monkeypatch: Any, capsys: Any) -> None:
    """A server restarts a kernel whose process ended; its user believed it was gone."""
    in_kernel()
    for variable, fix in (("COLAB_RELEASE_TAG", "Runtime > Disconnect"), ("JPY_SESSION_NAME", "Shut Down Kernel")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "x")
            kernel.shutdown_kernel()
        printed = capsys.readouterr().out
        assert "The kernel is not ended: " in printed and fix in printed


def test_the_runner_by_the_servers_answer(in_kernel, started_by, listen):
    """Without a token (a password alone) there is no way in; the person has to click, and has to know it."""
    in_kernel()
    assert find_runner().kind == "kernel"
    server = listen()
    started_by(server.port)
    assert find_runner().kind == "server"
    server.answer = lambda path: (404, {}, b"")
    assert find_runner().kind == "kernel", "the server has it no longer"
    server.answer = lambda path: (403, {}, b"")
    found = find_runner()
    assert found.kind == "foreign"
    assert found.reason.endswith("answered GET with 403; in JupyterLab: Kernel > Shut Down Kernel")
    in_kernel(allow_stdin=False)
    assert find_runner().kind == "batch"


# ------------------------------------------------------------------------------------------------ no work is lost


def test_a_save_that_takes_too_long_keeps_the_kernel(in_kernel: Any, capsys: Any, tmp_path: Path) -> None:
    """A batch runner ends its kernel after the last cell, so there the cell has to fail aloud."""
    with saving(tmp_path / "adapter"):
        in_kernel()
        kernel.shutdown_kernel(wait_s=0.05)
        printed = capsys.readouterr().out
        assert f"Kernel not shut down: {tmp_path / 'adapter'}" in printed and "Shut Down Kernel" in printed
        in_kernel(allow_stdin=False)
        with pytest.raises(SetupError, match=r"adapter .* after 0.05 s.* raise shutdown_kernel's wait_s"):
            kernel.shutdown_kernel(wait_s=0.05)
