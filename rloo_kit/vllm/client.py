"""Client of a vLLM server; it does not need vLLM. Token ids in, token ids and log-probabilities out.

Answers are not trusted: size, the type of every field and the fit with the request are checked.
Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar
from weakref import WeakSet

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rloo_kit.errors import RolloutServerError
from rloo_kit.rollout.engine import Sampling
from rloo_kit.rollout.types import WHOLE
from rloo_kit.system.console import picture_controls
from rloo_kit.system.environment import is_exposed, is_sendable
from rloo_kit.vllm.in_process import room_for_rank

START_S = 600.0  # a server that loads a large model needs minutes
LOAD_S = 600.0  # of an adapter
ANSWER_S = 3600.0  # of a completion, with its time in the server's queue
MOST_BYTES = 2**28  # of an answer; a completion of 100,000 tokens takes about 10 %
MOST_SHOWN = 500  # characters of an answer in a message
KEY_VARIABLE = "VLLM_API_KEY"
GONE = (429, 502, 503, 504)  # the engine died, or a proxy in front of a server that is busy or restarts
ENGINE_DIED = "EngineCore encountered an issue"  # vLLM's EngineDeadError, with status 500: the server is about to exit
PROBE_TOKENS = 5
ROUNDING = 0.01  # how far above 0 a log-probability may be
# vLLM takes missing parameters from the checkpoint's generation config, so these are sent along with the filters.
NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
REFUSALS = (  # words in vLLM's refusal of an adapter, and the fix
    (("max_lora_rank",), "its rank is {rank}: start the server with --max-lora-rank {room}"),
    (
        ("No adapter found", "adapter_config.json", "does not exist"),
        "the server does not see {folder}: set rollout.server_adapters to a folder that both machines see under the "
        "same path",
    ),
    (
        ("DoRA", "Adapter bias", "modules_to_save"),
        "it is not a plain LoRA: vLLM takes one with use_dora=False, bias='none' and no modules_to_save; change the "
        "LoraConfig, or set rollout.engine=auto",
    ),
    (
        ("LoRA is not enabled", "enable-lora", "enable_lora"),
        "LoRA is off: start the server with --enable-lora --max-lora-rank {room}",
    ),
    (
        ("Not Found", "Method Not Allowed"),
        "the server has no /v1/load_lora_adapter: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
        "environment and --enable-lora",
    ),
)


class ServerLostError(RolloutServerError):
    """A request has no answer, or no whole one: the server went down, or was restarted without the adapter."""


class _Part(BaseModel):
    """A part of an answer: fields with vLLM's types; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


_Id = Annotated[int, Field(ge=0, lt=2**31)]


class _LogProbs(_Part):
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(_Part):
    token_ids: list[_Id] | None = None
    prompt_token_ids: list[_Id] | None = None
    finish_reason: str | None = None
    scores: _LogProbs | None = Field(None, alias="logprobs")


class _Completions(_Part):
    choices: list[_Choice] = Field(min_length=1)


class _Model(_Part):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class _Models(_Part):
    data: list[_Model] = Field(min_length=1)


AnyPart = TypeVar("AnyPart", bound=_Part)


@dataclass(frozen=True)
class _Answer:
    """`text` is the body's beginning, safe to print."""

    url: str
    status: int
    body: bytes
    text: str

    def read(self, form: type[AnyPart]) -> AnyPart:
        """The body as `form`."""
        try:
            return form.model_validate_json(self.body)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            problem = picture_controls(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}")[:MOST_SHOWN]
            raise RolloutServerError(f"{self.url} answers {self.text!r} ({problem}): is it a vLLM server?") from None


class VllmClient:
    """One server; thread-safe. `VLLM_API_KEY` is sent as the key. Every method raises `RolloutServerError` with the
    fix; `ServerLostError` if it got no answer.

    Args:
        url: http://host:port.
        start_s: how long to wait for a server that is not up yet.
        say: gets a line while waiting for the server.
    """

    def __init__(self, url: str, *, start_s: float = START_S, say: Callable[[str], None] = print) -> None:
        self.url, self._start_s, self._say = url.rstrip("/"), start_s, say
        self._key = os.environ.get(KEY_VARIABLE, "")
        if not is_sendable(self._key):
            raise RolloutServerError(  # the HTTP library's error would print it
                f"{KEY_VARIABLE} has a line break, a space at an end or another character that no key has: set it to "
                "the key alone, on one line"
            )
        headers = {"Accept-Encoding": "identity"}  # no compression, so `MOST_BYTES` bounds what is decoded
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
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
        deadline, pause = time.monotonic() + self._start_s, 0.5
        while True:
            try:
                answer = self._ask("GET", "/health", patience_s=10.0)
                if answer.status == 200:
                    return
                problem = f"/health answers {answer.status}"
            except ServerLostError as error:
                problem = str(error)
            if time.monotonic() + pause > deadline:
                raise RolloutServerError(
                    f"no vLLM server answers at {self.url} (waited {self._start_s:.0f} s; {problem}): start it (vllm "
                    "serve ..., see docs/rollout.md) or fix rollout.server_url"
                )
            if pause == 0.5:
                self._say(f"rollout: waiting {self._start_s:.0f} s at most for the server at {self.url} ({problem})")
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def check_holds(self, adapter: str) -> None:
        """Raise ServerLostError if requests in flight for `adapter` will never be answered: the server is down, not
        only busy, or was restarted and does not list it."""
        try:
            served = {model.id for model in self._list_models()}
        except RolloutServerError as error:
            cause = error.__cause__
            if isinstance(cause, httpx.TransportError) and not isinstance(cause, httpx.TimeoutException):
                raise
            return
        if adapter not in served:
            raise ServerLostError(f"{self.url} was restarted, and no longer has the adapter {adapter}")

    def hang_up(self) -> None:
        """Lose all requests in flight, so that vLLM aborts them."""
        with self._opening:
            sockets = list(self._sockets)
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it; closing would not

    def read_served(self) -> tuple[dict[str, str], int | None]:
        """Path of the base model by each of its names, and its limit for prompt and completion together, if known."""
        bases = [model for model in self._list_models() if not model.parent]
        lengths = [model.max_model_len for model in bases if model.max_model_len]
        return {model.id: model.root or model.id for model in bases}, min(lengths, default=None)

    def load_adapter(self, name: str, folder: str, rank: int) -> None:
        """Make the server load an adapter; a loaded adapter of that name counts as this one.

        Args:
            name: never used before: a reused name would find the other adapter's cached prefixes.
            folder: as the server sees it. rank: of the adapter, for the error message.
        """
        answer = self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, LOAD_S)
        if answer.status == 200 or "has already been loaded" in answer.text:  # an earlier answer was lost
            return
        fixes = (fix for words, fix in REFUSALS if any(word in answer.text for word in words))
        fix = next(fixes, "read its log").format(rank=rank, folder=folder, room=room_for_rank(rank))
        raise RolloutServerError(f"{self.url} does not take the adapter (status {answer.status}, {answer.text}); {fix}")

    def unload_adapter(self, name: str) -> None:
        """Make the server unload an adapter; an unknown one is no error."""
        answer = self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_S)
        if answer.status not in (200, 404):
            raise RolloutServerError(f"{self.url} does not unload the adapter {name}: {answer.text}")

    def complete(
        self, adapter: str, prompt_ids: list[int], limit: int, stop_ids: list[int], seed: int, sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        """The ids that continue a prompt, at most `limit`, up to and including the first stop id, and the
        log-probability of each, in nats."""
        body = {"max_tokens": limit, "temperature": sampling.temperature, "seed": seed, "stop_token_ids": stop_ids}
        body |= {"logprobs": 0, "return_token_ids": True, **asdict(sampling.filters)}  # of the sampled token only
        choice = self._complete(adapter, prompt_ids, body)
        ids, reason = choice.token_ids, picture_controls(str(choice.finish_reason))[:100]
        logps = choice.scores.token_logprobs if choice.scores is not None else None
        if reason == "abort":  # how a server that shuts down may end a completion
            raise ServerLostError(f"{self.url} broke off a completion (finish_reason abort)")
        if ids is None:
            raise RolloutServerError(f"{self.url} returns no token ids: it has to be vLLM 0.10.2 or newer")
        if choice.prompt_token_ids not in (prompt_ids, None):
            raise RolloutServerError(f"{self.url} continued a different prompt from the one sent: does it truncate it?")
        if logps is None or len(logps) != len(ids):
            raise RolloutServerError(f"{self.url} returns no log-probability for each of its {len(ids)} tokens")
        finite = [logp for logp in logps if logp is not None and math.isfinite(logp)]
        if len(finite) < len(logps):
            raise RolloutServerError(
                f"{self.url} sampled from logits that contain a NaN: the weights are broken (a learning rate too "
                "high?); resume from an earlier checkpoint with a lower rloo.learning_rate"
            )
        if max(finite, default=0.0) > ROUNDING:
            raise RolloutServerError(f"{self.url} returns a log-probability of {max(finite):g}, above 0: is it vLLM's?")
        end = next((place for place, token in enumerate(ids, 1) if token in stop_ids), limit)
        if not ids or len(ids) != min(end, limit) or reason not in ("stop", "length"):
            raise RolloutServerError(
                f"{self.url} ended a completion after {len(ids)} of at most {limit} tokens, which neither a stop id "
                f"nor the limit explains (finish_reason {reason}): is --max-model-len too small?"
            )
        return ids, finite

    def find_logprobs_mode(self, adapter: str, prompt_ids: list[int], temperature: float) -> str:
        """Whether log-probabilities are those of the sampled distribution ("processed") or from before the temperature
        ("raw"), which is vLLM's default.

        At twice the temperature (above 0), the gap between the likeliest token and another one is halved if processed,
        unchanged if raw. Above 1, half of it and itself are compared: vLLM samples at 2 at most.
        """
        low = temperature if temperature <= 1 else temperature / 2
        body = {"max_tokens": 1, "logprobs": PROBE_TOKENS, "return_tokens_as_token_ids": True, **asdict(WHOLE)}
        tops: list[dict[str, float]] = []
        for heat in (low, 2 * low):
            scores = self._complete(adapter, prompt_ids, body | {"temperature": heat}).scores
            tops.append(((scores and scores.top_logprobs) or [None])[0] or {})
        first, second = tops
        likeliest = max(first, key=lambda token: first[token], default=None)
        others = [token for token in first if token != likeliest and token in second]
        if likeliest not in second or not others:  # the drawn token is listed too
            raise RolloutServerError(
                f"{self.url} gives no two tokens with log-probabilities at two temperatures: is it vLLM, and not "
                "reloading its model?"
            )
        other = min(others, key=lambda token: first[token])
        ratio = (first[likeliest] - first[other]) / max(second[likeliest] - second[other], 1e-9)
        return "processed" if ratio > math.sqrt(2) else "raw"

    def _complete(self, adapter: str, prompt_ids: list[int], body: dict[str, Any]) -> _Choice:
        """The first choice of a completion; `ignore_eos`: no end id of the server's own files ends it."""
        body = {"model": adapter, "prompt": prompt_ids, "ignore_eos": True, **NO_PENALTIES, **body}
        answer = self._ask("POST", "/v1/completions", body, ANSWER_S)
        if answer.status == 404:
            raise ServerLostError(f"{self.url} does not know the adapter {adapter} ({answer.text})")
        if answer.status != 200:
            advice = ""
            if "max_model_len" in answer.text or "context length" in answer.text:
                advice = "; start the server with a larger --max-model-len, or lower rloo.max_completion_length"
            raise RolloutServerError(
                f"{self.url} refuses a completion of {len(prompt_ids)} + {body['max_tokens']} tokens at temperature "
                f"{body['temperature']:g} (status {answer.status}): {answer.text}{advice}"
            )
        return answer.read(_Completions).choices[0]

    def _list_models(self) -> list[_Model]:
        answer = self._ask("GET", "/v1/models")
        if answer.status == 401:
            raise RolloutServerError(f"{self.url} asks for a key: set {KEY_VARIABLE} in the environment")
        if answer.status != 200:
            raise RolloutServerError(f"{answer.url} lists no models ({answer.text}): is it a vLLM server?")
        return answer.read(_Models).data

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, patience_s: float = 30.0) -> _Answer:
        """One request; `patience_s`: how long the server may be silent."""
        url = f"{self.url}{path}"
        content = bytearray()
        timeout, more = httpx.Timeout(30.0, read=patience_s), {"trace": self._remember}
        try:
            with self._http.stream(method, path, json=body, timeout=timeout, extensions=more) as response:
                for chunk in response.iter_raw():
                    content += chunk
                    if len(content) > MOST_BYTES:
                        raise RolloutServerError(
                            f"{url} answers more than {MOST_BYTES} bytes: is rollout.server_url a vLLM server?"
                        )
        except httpx.TransportError as error:
            raise ServerLostError(f"{url} does not answer ({type(error).__name__}: {error})") from error
        text = content[: 4 * MOST_SHOWN].decode(errors="replace").strip()
        text = picture_controls(text.replace(self._key, "(the key)") if self._key else text)[:MOST_SHOWN]
        status = response.status_code
        if 300 <= status < 400:
            raise RolloutServerError(
                f"{url} redirects (status {status}), and no redirect is followed, because {KEY_VARIABLE} would go "
                "along: set rollout.server_url to the address of the server itself"
            )
        if status in GONE or (status == 500 and ENGINE_DIED in text):
            raise ServerLostError(f"{url} answers with status {status}: {text}")
        return _Answer(url, status, bytes(content), text)

    def _remember(self, event: str, info: dict[str, Any]) -> None:
        """Callback of the HTTP library: registers an opened connection, which `hang_up` may shut down."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._opening:
                self._sockets.add(info["return_value"].get_extra_info("socket"))
