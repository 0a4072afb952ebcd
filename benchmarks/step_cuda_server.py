"""A vLLM server for the cell `whole-*-server`: on the GPU of the trainer, with the base in 16 bit and LoRA allowed.

The side's time is that of one GPU that does both, sampling and training, in turn; a GPU of the server's own is the
usual setting, and is not what is measured. Rehearsed, the stand-in of the client's tests answers from the tiny model.
Left out: several GPUs, vLLM's quantisation.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells
import checkpoints
import httpx
import reporting
import step_cuda_models as models
from step_workload import LORA

SHARE = 0.45  # of the GPU's memory, for the server
START_S = 240.0


@contextlib.contextmanager
def serving(workload: Any) -> Iterator[str]:
    """The address of a server of the cells' checkpoint, as long as the block runs."""
    checkpoint = checkpoints.find_checkpoint(models.size())
    if cells.rehearsing():
        with _stand_in(checkpoint) as url:
            yield url
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = reporting.ROOT / "outputs" / "cells" / "vllm_server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as sink:
        server = subprocess.Popen(
            serve_command(checkpoint, port, models.max_tokens(workload)),
            env=os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, server, log)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()


def serve_command(checkpoint: Path, port: int, tokens: int) -> list[str]:
    """`vllm serve` of this environment (docs/rollout.md has it for users)."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--enable-lora", "--max-lora-rank", str(LORA["r"]), "--max-loras", "1"]
    return command + ["--max-model-len", str(tokens), "--gpu-memory-utilization", str(SHARE), "--dtype", "bfloat16"]


def _wait(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    ends = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        if server.poll() is not None or time.monotonic() > ends:
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise OSError(f"the vLLM server did not start (exit code {server.poll()}):\n{tail}")
        time.sleep(1.0)


@contextlib.contextmanager
def _stand_in(checkpoint: Path) -> Iterator[str]:
    from transformers import AutoModelForCausalLM

    stand_in = reporting.load_file("tests/rollout/vllm_stand_in.py").StandIn
    server = stand_in(lambda: AutoModelForCausalLM.from_pretrained(checkpoint), name=str(checkpoint))
    try:
        yield server.url
    finally:
        server.stop()
