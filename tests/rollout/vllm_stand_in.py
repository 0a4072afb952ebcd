"""A stand-in for a vLLM server: real sockets, a real tiny model, the adapter read from the folder that it is given.

It answers as vLLM's sources do (status, place of the message), refuses what vLLM refuses, and writes down every request
in order. It samples token by token without a cache, so an adapter that was not loaded, a prompt that was changed
on the way or a temperature that was dropped shows in the log-probabilities.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from rloo_kit.rollout.types import Filters
from tests.rollout.models import kept_logps

TURN_END = 258
# What a request for a completion may hold, and has to: vLLM takes what is missing from the checkpoint's own config.
WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
                      "frequency_penalty": 0.0}  # fmt: skip
COMPLETION_KEYS = {"model", "prompt", "max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "logprobs",
                   "return_token_ids", *WHOLE_DISTRIBUTION}  # fmt: skip


class Refusal(Exception):
    def __init__(self, status: int, message: str, is_route: bool = False) -> None:
        self.status, self.message, self.is_route = status, message, is_route


class _Server(ThreadingHTTPServer):
    request_queue_size = 512  # a rollout's connections come all at once
    daemon_threads = True


class StandIn:
    """Serve `make_base()` at `url` until `stop()`.

    Attributes:
        requests: (path, body) of every POST, in order of arrival.
        loaded: folder of each adapter, by name.
        max_lora_rank, max_model_len, allows_updates, lora_enabled, logprobs_mode: as the switches of `vllm serve`.
        failures: answers given before anything is done: (path, status or "drop", message), each once.
        tamper: changes an answer to a completion before it is sent.
    """

    def __init__(self, make_base: Callable[[], Any], name: str = "tiny") -> None:
        self.make_base, self.name = make_base, name
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.loaded: dict[str, str] = {}
        self.models: dict[str, Any] = {}
        self.max_lora_rank, self.max_model_len, self.max_loras = 16, 512, 1
        self.allows_updates = self.lora_enabled = True
        self.logprobs_mode = "raw"
        self.key: str | None = None
        self.failures: list[tuple[str, Any, str]] = []
        self.tamper: Callable[[dict[str, Any]], None] = lambda choice: None
        self.most_at_once = self._at_once = 0
        self._stopped = False  # connections that are kept alive outlast the socket that listens
        self._lock, self._count_lock = threading.RLock(), threading.Lock()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stand_in.handle(self, None)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                stand_in.handle(self, json.loads(self.rfile.read(length)))

            def log_message(self, *_: Any) -> None:
                """Tests have enough to read."""

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._stopped = True
        self.server.shutdown()
        self.server.server_close()

    def posted(self, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests to `path`, in order."""
        return [body for where, body in self.requests if where == path]

    def handle(self, request: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        with self._count_lock:
            if body is not None:
                self.requests.append((request.path, body))
            failure = next((entry for entry in self.failures if entry[0] == request.path), None)
            if failure is not None:
                self.failures.remove(failure)
        if self._stopped or (failure is not None and failure[1] == "drop"):
            request.close_connection = True
            request.connection.close()
            return
        try:
            if failure is not None:
                raise Refusal(failure[1], failure[2])
            is_open = self.key is None or not request.path.startswith("/v1")
            if not is_open and request.headers.get("Authorization") != f"Bearer {self.key}":
                raise Refusal(401, "Unauthorized")
            status, answer = 200, self.answer(request.path, body)
        except Refusal as refusal:
            status = refusal.status
            error = {"message": refusal.message, "type": "Error", "param": None, "code": status}
            answer = {"detail": refusal.message} if refusal.is_route else {"error": error}
        content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def answer(self, path: str, body: dict[str, Any] | None) -> Any:
        if body is None:
            if path == "/health":
                return ""
            assert path == "/v1/models", path
            gpus = [{"id": self.name, "root": self.name, "parent": None, "max_model_len": self.max_model_len}]
            return {"data": gpus + [{"id": n, "root": f, "parent": self.name} for n, f in self.loaded.items()]}
        routes = {"/v1/completions": self.complete}
        if self.allows_updates:
            routes |= {"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload}
        if path not in routes:
            raise Refusal(404, "Not Found", is_route=True)
        return routes[path](body)

    def load(self, body: dict[str, Any]) -> str:
        assert set(body) == {"lora_name", "lora_path"}, body
        name, folder = body["lora_name"], body["lora_path"]
        with self._lock:
            if name in self.loaded:
                raise Refusal(400, f"The lora adapter '{name}' has already been loaded. If you want to load ...")
            if not self.lora_enabled:
                raise Refusal(500, "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora ...")
            if not (Path(folder) / "adapter_config.json").exists():
                raise Refusal(404, f"Loading lora {name} failed: No adapter found for {folder}")
            rank = json.loads((Path(folder) / "adapter_config.json").read_text())["r"]
            if rank > self.max_lora_rank:
                raise Refusal(500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}.")
            if len(self.models) == self.max_loras:  # vLLM drops the oldest one without a word
                self.models.pop(next(iter(self.models)))
            with torch.random.fork_rng(devices=[]):  # the random numbers are those of the trainer in this process
                self.models[name] = PeftModel.from_pretrained(self.make_base(), folder).merge_and_unload().eval()
            self.loaded[name] = folder
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: dict[str, Any]) -> str:
        assert set(body) == {"lora_name"}, body
        name = body["lora_name"]
        with self._lock:
            if name not in self.loaded:
                raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
            if self.models.pop(name, None) is None:
                raise Refusal(500, f"Failed to remove lora adapter '{name}' from the engine.")
            del self.loaded[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._count_lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            with self._lock:
                return self._complete(body)
        finally:
            with self._count_lock:
                self._at_once -= 1

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, room, heat = body["prompt"], body["max_tokens"], body["temperature"]
        if body["model"] not in self.models:
            raise Refusal(404, f"The model `{body['model']}` does not exist.")
        if not 0 <= heat <= 2:
            raise Refusal(400, f"temperature must be in [0, 2], got {heat}. (parameter=temperature, value={heat})")
        if len(prompt) + room > self.max_model_len:
            raise Refusal(400, f"This model's maximum context length is {self.max_model_len} tokens. However, ...")
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        ids: list[int] = []
        logps: list[float] = []
        tops: list[dict[str, float]] = []
        stops = body.get("stop_token_ids", [])
        filters = Filters(**{field.name: body[field.name] for field in fields(Filters)})
        with torch.no_grad():
            while len(ids) < room and not (ids and ids[-1] in stops):
                logits = self.models[body["model"]](input_ids=torch.tensor([prompt + ids])).logits[0, -1]
                spread = kept_logps(logits, filters, heat or 1.0)
                said = spread if self.logprobs_mode == "processed" else logits.log_softmax(-1)
                token = int(torch.multinomial(spread.exp(), 1, generator=generator)) if heat else int(logits.argmax())
                best = said.topk(max(body["logprobs"], 1)).indices.tolist()
                tops.append({f"token_id:{other}": float(said[other]) for other in (token, *best)})
                ids.append(token)
                logps.append(float(said[token]))
        stopped = ids[-1] in stops
        choice: dict[str, Any] = {
            "index": 0, "text": "?", "finish_reason": "stop" if stopped else "length",
            "stop_reason": ids[-1] if stopped else None,
            "logprobs": {"token_logprobs": logps, "tokens": ["?"] * len(ids), "top_logprobs": tops},
        }  # fmt: skip
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        self.tamper(choice)
        return {"id": "cmpl-1", "model": body["model"], "choices": [choice], "usage": {}}
