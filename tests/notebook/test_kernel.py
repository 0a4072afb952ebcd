"""Releasing memory, recognising the runner, and asking a Jupyter server (here a small one of the test's own).

Figures on a GPU are for tests/on_gpu, real runners and servers for tests/notebooks.
"""

import gc
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.errors import SetupError
from rloo_kit.notebook import kernel
from rloo_kit.notebook.jupyter_server import Server, ServerError, find_servers
from rloo_kit.notebook.kernel import find_runner
from rloo_kit.runs import files
from rloo_kit.runs.files import saving


class Model:
    """Refers to itself, so only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_and_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imported torch to free memory would take some."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    gc.disable()
    try:
        model = weakref.ref(Model())
        assert model() is not None
        kernel.release_memory()
        assert model() is None
    finally:
        gc.enable()
    assert "torch" not in sys.modules


def test_the_figures_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before and after in GiB, allocator's cache included; the device itself is faked here."""
    held = [3 * 2**30]
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        memory_reserved=lambda: held[0],
        empty_cache=lambda: held.__setitem__(0, 2**29),
        ipc_collect=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert kernel.release_memory() == kernel.Released(3.0, 0.5)
    assert capsys.readouterr().out == "GPU memory held by this process: 3.00 GiB before, 0.50 after\n"
    kernel.release_memory(verbose=False)
    assert capsys.readouterr().out == ""


def test_a_process_without_a_cuda_context_opens_none(monkeypatch: Any, capsys: Any) -> None:
    """Asking CUDA for its memory opens a context, which takes a few hundred MiB: worse than nothing."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))  # type: ignore[arg-type]
    released = kernel.release_memory()
    assert released is not None and released.device == "cpu"
    expected = f"memory held by this process: {released.before_gib:.2f} GiB before, {released.after_gib:.2f} after\n"
    assert capsys.readouterr().out == expected


def test_what_the_last_error_holds_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a CUDA out-of-memory error the traceback kept the batch, and the next attempt had less memory still."""

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
    kernel.release_memory(verbose=False)
    assert held[0]() is None
    assert str(caught.value) == "second" and str(caught.value.__cause__) == "'first'"


def test_the_names_of_a_failed_cell_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell's frame has the notebook's own names as its variables: clearing it must not clear those."""
    names: dict[str, Any] = {}
    with pytest.raises(ZeroDivisionError) as caught:
        exec("policy = [1, 2, 3]\n1 / 0", names)
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    kernel.release_memory(verbose=False)
    assert names["policy"] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------ the runner


@pytest.fixture
def in_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`in_kernel(allow_stdin=True)`: this process takes itself for a kernel; with `kernel=None` for IPython alone."""
    for name in ("JPY_SESSION_NAME", "JPY_PARENT_PID", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))

    def pretend(allow_stdin: bool = True, **attributes: Any) -> None:
        app = SimpleNamespace(get_connection_info=dict, abs_connection_file=str(tmp_path / "kernel-an-id.json"))
        request = {"content": {"allow_stdin": allow_stdin}}
        one = SimpleNamespace(parent=app, get_parent=lambda channel: request)
        shell = SimpleNamespace(**{"kernel": one} | attributes)
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


def test_a_server_that_refuses_is_only_an_obstacle_where_it_started_the_kernel(in_kernel, monkeypatch, tmp_path):
    """A second server with a password must not keep the kernel of a script of one's own."""
    in_kernel()
    file = tmp_path / "jpserver-77.json"
    file.write_text(json.dumps({"url": "http://127.0.0.1:9/", "hostname": "127.0.0.1", "pid": os.getpid()}))
    file.chmod(0o600)
    assert find_runner().kind == "kernel"
    monkeypatch.setenv("JPY_PARENT_PID", str(os.getpid()))
    found = find_runner()
    assert found.kind == "foreign"
    assert found.reason.startswith("the server at http://127.0.0.1:9/ cannot be queried")
    assert found.reason.endswith("in JupyterLab: Kernel > Shut Down Kernel")


# ------------------------------------------------------------------------------------------------ Jupyter's server


def info(folder: Path, name: str, **changes: object) -> None:
    base = {"url": "http://127.0.0.1:1/", "hostname": "127.0.0.1", "port": 1, "base_url": "/", "secure": False}
    (folder / name).write_text(json.dumps(base | {"pid": os.getpid(), "token": "right"} | changes))
    (folder / name).chmod(0o600)


@pytest.fixture
def server_of_something_else() -> Iterator[str]:
    """The address of a server that answers every request with 501."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_server_that_does_not_answer_says_why(server_of_something_else: str) -> None:
    """Without a token (a password alone) there is no way in; the person has to click, and has to know it."""
    for url, reason in (
        (server_of_something_else, "501 Unsupported"),
        ("http://127.0.0.1:9/", "cannot be queried"),
        ("http+unix://%2Ftmp%2Fsocket/", "cannot be queried"),
    ):
        for method in ("GET", "DELETE"):
            with pytest.raises(ServerError, match=reason):
                Server(url, 4, "").ask(method, "an-id")


def test_the_token_is_not_printed() -> None:
    """A traceback in a shared notebook would hand the server to every reader."""
    assert "secret" not in repr(Server("http://127.0.0.1:1/", 4, "secret"))


def test_servers_are_read_from_the_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written file and those of other programs are skipped; base_url and https survive a wildcard address."""
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "of-the-hub")
    monkeypatch.setenv("JUPYTERHUB_SERVICE_URL", "http://127.0.0.1:7/user/me/")
    info(tmp_path, "jpserver-1.json", url="http://localhost:8888/lab", hostname="localhost")
    info(tmp_path, "nbserver-2.json", url="https://host.example:8889/user/me/", hostname="0.0.0.0", port=8889)
    info(tmp_path, "jpserver-3.json", url="http://127.0.0.1:7/user/me/", token="")
    info(tmp_path, "jpserver-6.json", hostname="*", port=443, base_url="/user/me/", secure=True)
    info(tmp_path, "kernel-4.json")
    (tmp_path / "jpserver-5.json").write_text('{"url": "http://')
    found = {(server.url, server.token) for server in find_servers([tmp_path, tmp_path / "nowhere"])}
    assert found == {
        ("http://localhost:8888/lab/", "right"),
        ("http://127.0.0.1:8889/", "right"),
        ("http://127.0.0.1:7/user/me/", "of-the-hub"),
        ("https://127.0.0.1:443/user/me/", "right"),
    }


# ------------------------------------------------------------------------------------------------ no work is lost


def test_a_save_that_takes_too_long_keeps_the_kernel(in_kernel: Any, capsys: Any, tmp_path: Path) -> None:
    """A batch runner ends its kernel after the last cell, so there the cell has to fail aloud."""
    with saving(tmp_path / "adapter"):
        in_kernel()
        kernel.shutdown_kernel(wait_s=0.05)
        printed = capsys.readouterr().out
        assert f"Kernel not shut down: {tmp_path / 'adapter'}" in printed and "shutdown_kernel(force=True)" in printed
        in_kernel(allow_stdin=False)
        with pytest.raises(SetupError, match=r"adapter .* after 0.05 s.* raise shutdown_kernel's wait_s"):
            kernel.shutdown_kernel(wait_s=0.05)
        kernel.shutdown_kernel(force=True)
    assert kernel.OUTCOMES["batch"] in capsys.readouterr().out


def test_checkpoints_are_listed_with_their_run(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    """One line a run; a checkpoint that was rotated away is no place to look."""
    monkeypatch.setitem(sys.modules, "IPython", None)  # type: ignore[arg-type]
    monkeypatch.setattr(files, "_saved", {})
    for name in ("checkpoints/checkpoint-2", "checkpoints/checkpoint-4", "adapter"):
        with saving(tmp_path / "run" / name):
            (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "checkpoint-2").rmdir()
    kernel.shutdown_kernel()
    assert f"saved in {tmp_path / 'run'}: checkpoints/checkpoint-4, adapter\n" in capsys.readouterr().out
