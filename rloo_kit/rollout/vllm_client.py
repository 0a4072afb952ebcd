"""Client of a vLLM server: wait for it, read what it serves, load an adapter, continue tokens. It does not need vLLM.

Token ids in, token ids and log-probabilities out. Requests that are safe to repeat are retried while the server does
not answer. Answers are not trusted: size and the type of every field are checked. `VLLM_API_KEY` is sent as the key.
Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.
"""

import ipaddress
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import httpx

from rloo_kit.config.checks import VLLM_RANKS
from rloo_kit.errors import RolloutServerError
from rloo_kit.rollout.types import WHOLE, Filters
from rloo_kit.rollout.vllm_answers import (
    Answer,
    Completions,
    Continuation,
    Models,
    find_message,
    read_answer,
    read_choice,
)

START_S = 600.0  # a server that loads a large model needs minutes
LOAD_S = 600.0  # of an adapter
ANSWER_S = 3600.0  # of a completion, with its time in the server's queue
RETRY_S = START_S  # how long a lost request is retried: a restarted server loads its model again
MOST_BYTES = 2**28  # of an answer; a completion of 100,000 tokens takes about 10 %
KEY_VARIABLE = "VLLM_API_KEY"
TRIED_AGAIN = (429, 502, 503, 504)  # busy, or a proxy in front of a server that restarts
ENGINE_DIED = "EngineCore encountered an issue"  # vLLM's EngineDeadError, with status 500: the server is about to exit
ABORTED = re.compile(rb'"finish_reason":\s*"abort"')  # how a server that shuts down may end a completion
PROBE_TOKENS = 5
NOT_PLAIN = ("DoRA", "Adapter bias", "modules_to_save")  # in vLLM's refusals of an adapter

# vLLM takes missing parameters from the checkpoint's generation config, so these are sent along with the filters.
NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0}


class AdapterLostError(RolloutServerError):
    """The server no longer knows the adapter, because it was restarted."""


class RequestStoppedError(RolloutServerError):
    """The request's `stop` was set."""


@dataclass(frozen=True)
class Served:
    """What a server serves.

    Attributes:
        bases: path of the base model by each of its names.
        max_tokens: limit for prompt and completion together; None if unknown.
    """

    bases: dict[str, str]
    max_tokens: int | None


class VllmClient:
    """One server; thread-safe. Every method raises `RolloutServerError` with the fix.

    Args:
        url: http://host:port.
        start_s: how long to wait for a server that is not up yet. retry_s: how long to retry a request.
        say: gets a line while waiting for the server.
    """

    def __init__(
        self, url: str, *, start_s: float = START_S, retry_s: float = RETRY_S, say: Callable[[str], None] = print
    ) -> None:
        self.url = url.rstrip("/")
        self._start_s, self._retry_s, self._say = start_s, retry_s, say
        self._key = _read_key()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Accept-Encoding": "identity"} | headers,  # no compression, so `MOST_BYTES` bounds what is decoded
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,  # an internet proxy does not reach a machine in the cluster
            follow_redirects=False,  # the key would be sent along
        )
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._opening = threading.Lock()
        if self._key and is_exposed(self.url):
            say(f"rollout: {KEY_VARIABLE} and the completions go to {self.url} unencrypted; https hides them")

    def wait_until_up(self) -> None:
        """Block until `/health` answers with 200."""
        deadline = time.monotonic() + self._start_s
        pause, is_announced = 0.5, False
        while True:
            try:
                answer = self._ask("GET", "/health", None, 10.0)
                if answer.status == 200:
                    return
                problem = f"/health answers {answer.status}"
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            if time.monotonic() + pause > deadline:
                raise RolloutServerError(
                    f"no vLLM server answers at {self.url} (waited {self._start_s:.0f} s; {problem}): start it (vllm "
                    "serve ..., see docs/rollout.md) or fix rollout.server_url"
                )
            if not is_announced:
                self._say(f"rollout: waiting {self._start_s:.0f} s at most for the server at {self.url} ({problem})")
            is_announced = True
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def has_lost(self, adapter: str) -> bool:
        """Whether requests in flight for `adapter` will never be answered: the server accepts no connection, reports
        that its engine died, or does not list the adapter because it was restarted. A busy server has lost nothing."""
        try:
            if self._ask("GET", "/health", None, 10.0).status == 503:
                return True
            answer = self._ask("GET", "/v1/models", None, 10.0)
            if answer.status != 200:
                return False
            return adapter not in {model.id for model in read_answer(Models, answer, f"{self.url}/v1/models").data}
        except httpx.ConnectError:
            return True
        except (httpx.TransportError, RolloutServerError):
            return False

    def hang_up(self) -> None:
        """Close the connections of all requests in flight, so that vLLM aborts them. Those whose `stop` is set raise
        `RequestStoppedError`, the others are retried."""
        with self._opening:
            sockets = list(self._sockets)
        for each in sockets:
            _shut(each)

    def read_served(self) -> Served:
        """What `/v1/models` lists."""
        answer = self._send("GET", "/v1/models", None, 30.0)
        if answer.status == 401:
            raise RolloutServerError(f"{self.url} asks for a key: set {KEY_VARIABLE} in the environment")
        if answer.status != 200:
            raise RolloutServerError(f"{self.url}/v1/models lists no models ({answer.text}): is it a vLLM server?")
        bases = [model for model in read_answer(Models, answer, f"{self.url}/v1/models").data if not model.parent]
        lengths = [model.max_model_len for model in bases if model.max_model_len]
        return Served({model.id: model.root or model.id for model in bases}, min(lengths) if lengths else None)

    def load_adapter(self, name: str, folder: str, rank: int) -> None:
        """Make the server load an adapter; a loaded adapter of that name counts as this one.

        Args:
            name: never used before: a reused name would find the other adapter's cached prefixes.
            folder: as the server sees it. rank: of the adapter, for the error message.
        """
        answer = self._send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, LOAD_S)
        if answer.status == 200 or "has already been loaded" in answer.text:  # an earlier answer was lost
            return
        raise RolloutServerError(f"{self.url} does not take the adapter: {_explain_refusal(answer, folder, rank)}")

    def unload_adapter(self, name: str) -> None:
        """Make the server unload an adapter; an unknown one is no error."""
        answer = self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_S)
        if answer.status not in (200, 404):
            raise RolloutServerError(f"{self.url} does not unload the adapter {name}: {answer.text}")

    def complete(
        self,
        adapter: str,
        prompt_ids: list[int],
        limit: int,
        stop_ids: list[int],
        temperature: float,
        seed: int,
        stop: threading.Event | None = None,
        filters: Filters = WHOLE,
    ) -> Continuation:
        """Continue a prompt up to and including the first stop id.

        Args:
            limit: on new tokens, at least 1. temperature: 0 is greedy decoding. seed: of this completion.
            stop: set by another thread, before `hang_up`, when the completion is no longer needed.
            filters: truncate the sampled distribution.

        Raises:
            AdapterLostError: the server does not know `adapter`. RequestStoppedError: see `stop`.
        """
        body = {
            "model": adapter,
            "prompt": prompt_ids,
            "max_tokens": limit,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": stop_ids,
            "ignore_eos": True,  # only `stop_ids` end a completion, not the end ids in the server's files
            "logprobs": 0,  # of the sampled token only
            "return_token_ids": True,
            **asdict(filters),
            **NO_PENALTIES,
        }
        answer = self._send("POST", "/v1/completions", body, ANSWER_S, stop)
        if answer.status == 404:
            raise AdapterLostError(f"{self.url} does not know the adapter {adapter} ({answer.text})")
        if answer.status != 200:
            advice = ""
            if "max_model_len" in answer.text or "context length" in answer.text:
                advice = "; start the server with a larger --max-model-len, or lower rloo.max_completion_length"
            raise RolloutServerError(
                f"{self.url} refuses a completion of {len(prompt_ids)} + {limit} tokens (status {answer.status}): "
                f"{answer.text}{advice}"
            )
        choice = read_answer(Completions, answer, f"{self.url}/v1/completions").choices[0]
        return read_choice(self.url, choice, prompt_ids, limit, stop_ids)

    def find_logprobs_mode(self, adapter: str, prompt_ids: list[int], temperature: float) -> str:
        """Whether log-probabilities are those of the sampled distribution ("processed") or from before the temperature
        ("raw"), which is vLLM's default.

        It sends two requests for one token. At twice the temperature (above 0), the gap between the likeliest token and
        another one is halved if processed, unchanged if raw. Above 1, the pair is half of `temperature` and
        `temperature`, because vLLM samples at 2 at most.
        """
        gaps = []
        low = temperature if temperature <= 1 else temperature / 2
        for heat in (low, 2 * low):
            body = {"model": adapter, "prompt": prompt_ids, "max_tokens": 1, "temperature": heat}
            body |= {"logprobs": PROBE_TOKENS, "ignore_eos": True, "return_tokens_as_token_ids": True}
            answer = self._send("POST", "/v1/completions", body | asdict(WHOLE) | NO_PENALTIES, ANSWER_S)
            if answer.status != 200:
                raise RolloutServerError(
                    f"{self.url} refuses one token at temperature {heat:g}, by which its log-probabilities are checked "
                    f"(status {answer.status}): {answer.text}"
                )
            logprobs = read_answer(Completions, answer, f"{self.url}/v1/completions").choices[0].scores
            found = ((logprobs and logprobs.top_logprobs) or [None])[0]
            if not found or len(found) < 2:
                raise RolloutServerError(f"{self.url} gives no log-probabilities ({answer.text}): is it vLLM's?")
            gaps.append(found)
        first, second = gaps
        likeliest = max(first, key=lambda token: first[token])
        others = [token for token in first if token != likeliest and token in second]
        if likeliest not in second or not others:  # the drawn token is listed too
            raise RolloutServerError(f"{self.url} gives two distributions for one prompt: is it reloading its model?")
        other = min(others, key=lambda token: first[token])
        ratio = (first[likeliest] - first[other]) / max(second[likeliest] - second[other], 1e-9)
        return "processed" if ratio > math.sqrt(2) else "raw"

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        patience_s: float,
        stop: threading.Event | None = None,
    ) -> Answer:
        """The server's answer; the request is retried while the server is unreachable, busy or restarting."""
        stop = threading.Event() if stop is None else stop
        deadline: float | None = None  # counts from the first failure: a completion may take an hour
        pause = 0.25
        while not stop.is_set():
            try:
                answer = self._ask(method, path, body, patience_s, stop)
                is_down = answer.status in TRIED_AGAIN or (answer.status == 500 and ENGINE_DIED in answer.text)
                if not is_down and not ABORTED.search(answer.body):
                    return answer
                problem = f"status {answer.status}: {answer.text}" if is_down else "finish_reason abort"
            except httpx.ReadTimeout as error:
                raise RolloutServerError(f"{self.url}{path} did not answer within {patience_s:.0f} s") from error
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            deadline = time.monotonic() + self._retry_s if deadline is None else deadline
            if time.monotonic() + pause > deadline and not stop.is_set():
                raise RolloutServerError(
                    f"{self.url}{path} did not answer for {self._retry_s:.0f} s ({problem}): read the server's log, "
                    "restart it, and resume the run"
                )
            stop.wait(pause)
            pause = min(2 * pause, 10.0)
        raise RequestStoppedError(f"the request to {self.url}{path} was stopped")

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        patience_s: float,
        stop: threading.Event | None = None,
    ) -> Answer:
        """One request; raises httpx.TransportError if there is no answer, and RolloutServerError for a redirect or an
        answer above `MOST_BYTES`."""

        def on_event(event: str, found: dict[str, Any]) -> None:
            """Callback of the HTTP library: registers an opened connection, which `hang_up` may close."""
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                opened = found["return_value"].get_extra_info("socket")
                with self._opening:
                    self._sockets.add(opened)
                if stop is not None and stop.is_set():  # `hang_up` came earlier
                    _shut(opened)

        deadline = time.monotonic() + patience_s
        timeout = httpx.Timeout(min(30.0, patience_s), read=patience_s)
        content = bytearray()
        more = {"trace": on_event}
        with self._http.stream(method, path, json=body, timeout=timeout, extensions=more) as response:
            if 300 <= response.status_code < 400:
                raise RolloutServerError(
                    f"{self.url}{path} redirects (status {response.status_code}), and no redirect is followed, because "
                    f"{KEY_VARIABLE} would go along: set rollout.server_url to the address of the server itself"
                )
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise RolloutServerError(
                        f"{self.url}{path} answers more than {MOST_BYTES} bytes: is rollout.server_url a vLLM server?"
                    )
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer does not end")
        found = bytes(content)
        return Answer(response.status_code, found, find_message(found, self._key))


def _shut(connection: socket.socket) -> None:
    """Shut a connection down, which also wakes a thread that is reading from it; closing it would not."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def is_exposed(url: str) -> bool:
    """Whether others on the network could read requests to `url`: plain http to an address that is not private.

    >>> [is_exposed(f"http://{host}:8000") for host in ("localhost", "node1", "[::1]", "10.0.0.7", "8.8.8.8", "a.org")]
    [False, False, False, False, True, True]
    >>> is_exposed("https://a.org")
    False
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "http":
        return False
    try:
        return not ipaddress.ip_address(host).is_private
    except ValueError:  # a name; one without a dot is in this network
        return "." in host and not host.endswith((".local", ".internal", ".localhost"))


def _read_key() -> str:
    """The key, or "". A key that no header can carry is refused here: the HTTP client's error would print it."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise RolloutServerError(
            f"{KEY_VARIABLE} has a line break, a space at an end or another character that no key has: set it to the "
            "key alone, on one line"
        )
    return key


def _explain_refusal(answer: Answer, folder: str, rank: int) -> str:
    """Why an adapter (`folder`, `rank`) was refused, from the server's message, and the fix."""
    text = answer.text
    needed = next((known for known in VLLM_RANKS if known >= rank), rank)
    if "max_lora_rank" in text:
        return f"its rank is {rank} ({text}); start the server with --max-lora-rank {needed}"
    if "No adapter found" in text or "adapter_config.json" in text or "does not exist" in text:
        return (
            f"it does not see {folder} ({text}); set rollout.server_adapters to a folder that both machines see "
            "under the same path"
        )
    if any(word in text for word in NOT_PLAIN):
        return (
            f"it is not a plain LoRA ({text}); vLLM takes one with use_dora=False, bias='none' and no modules_to_save: "
            "change the LoraConfig, or set rollout.engine=auto"
        )
    if "LoRA is not enabled" in text or "enable-lora" in text or "enable_lora" in text:
        return f"LoRA is off ({text}); start it with --enable-lora --max-lora-rank {needed}"
    if answer.status in (404, 405):
        return (
            f"it has no /v1/load_lora_adapter ({text}); start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
            "environment and --enable-lora"
        )
    return f"status {answer.status}, {text}"
