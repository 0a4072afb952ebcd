"""A vLLM server over HTTP: wait for it, read what it serves, load an adapter, continue tokens. No vLLM needed here.

Token ids in, token ids and log-probabilities out. What may safely be repeated is, while the server does not answer.
`VLLM_API_KEY` is sent as the key. Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from rloo_kit.errors import RolloutServerError

START_S = 600.0  # a server that loads a large model needs minutes
LOAD_S = 600.0  # of an adapter
ANSWER_S = 3600.0  # of a completion, with its time in the server's queue
RETRY_S = 120.0  # for which a lost request is repeated
TRIED_AGAIN = (429, 502, 503, 504)  # busy, or a proxy in front of a server that restarts
PROBE_TOKENS = 5
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes

# vLLM takes what a request leaves out from the checkpoint's generation config, so every option is sent.
WHOLE_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class AdapterLostError(RolloutServerError):
    """The server does not know the adapter any more: it was restarted since."""


@dataclass(frozen=True)
class Continuation:
    """New ids after a prompt, the stop id included, and the log-probability of each, in nats."""

    ids: list[int]
    logps: list[float]


@dataclass(frozen=True)
class Served:
    """What a server serves.

    Attributes:
        bases: path of the base model by each of its names.
        max_tokens: limit for prompt and completion together; None if unknown.
        adapters: the folder of each adapter, by name.
    """

    bases: dict[str, str]
    max_tokens: int | None
    adapters: dict[str, str]


class VllmClient:
    """One server; thread-safe. Every method raises `RolloutServerError` with the fix.

    Args:
        url: http://host:port.
        start_s: how long to wait for a server that is not up yet. retry_s: how long to repeat a request.
        say: gets a line while the server is waited for.
    """

    def __init__(
        self,
        url: str,
        *,
        start_s: float = START_S,
        retry_s: float = RETRY_S,
        say: Callable[[str], None] = print,
    ) -> None:
        self.url = url.rstrip("/")
        self._start_s, self._retry_s, self._say = start_s, retry_s, say
        key = os.environ.get("VLLM_API_KEY")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,  # a proxy for the internet does not reach a machine of the cluster
        )

    def wait_until_up(self) -> None:
        """Return when `/health` answers with 200."""
        deadline = time.monotonic() + self._start_s
        pause, is_announced = 0.5, False
        while True:
            try:
                answer = self._http.get("/health", timeout=10.0)
                if answer.status_code == 200:
                    return
                problem = f"/health answers {answer.status_code}"
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

    def read_served(self) -> Served:
        """What `/v1/models` lists."""
        answer = self._send("GET", "/v1/models", None, 30.0)
        if answer.status_code == 401:
            raise RolloutServerError(f"{self.url} asks for a key: set VLLM_API_KEY in the environment")
        entries = _read_json(f"{self.url}/v1/models", answer).get("data")
        if answer.status_code != 200 or not isinstance(entries, list) or not entries:
            raise RolloutServerError(
                f"{self.url}/v1/models lists no models ({_read_text(answer)}): is it a vLLM server?"
            )
        bases = [entry for entry in entries if not entry.get("parent")]
        lengths = [entry["max_model_len"] for entry in bases if entry.get("max_model_len")]
        return Served(
            {entry["id"]: entry.get("root") or entry["id"] for entry in bases},
            min(lengths) if lengths else None,
            {entry["id"]: entry.get("root") or "" for entry in entries if entry.get("parent")},
        )

    def load_adapter(self, name: str, folder: str, rank: int) -> None:
        """Have the server load an adapter; one of that name that is loaded already counts as this one.

        Args:
            name: never used before: a reused name would find the other adapter's cached prefixes.
            folder: as the server sees it. rank: of the adapter, for the error.
        """
        answer = self._send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, LOAD_S)
        text = _read_text(answer)
        if answer.status_code == 200 or "has already been loaded" in text:  # the first answer was lost
            return
        raise RolloutServerError(
            f"{self.url} does not take the adapter: {_explain_refusal(answer, text, folder, rank)}"
        )

    def unload_adapter(self, name: str) -> None:
        """Have the server unload an adapter; an unknown one is no error."""
        answer = self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_S)
        if answer.status_code not in (200, 404):
            raise RolloutServerError(f"{self.url} does not unload the adapter {name}: {_read_text(answer)}")

    def complete(
        self, adapter: str, prompt_ids: list[int], limit: int, stop_ids: list[int], temperature: float, seed: int
    ) -> Continuation:
        """Continue a prompt up to and including the first stop id, from the whole distribution.

        Args:
            limit: of new tokens, at least 1. temperature: 0 takes the likeliest token. seed: of this completion.

        Raises:
            AdapterLostError: the server does not know `adapter`.
        """
        body = {
            "model": adapter,
            "prompt": prompt_ids,
            "max_tokens": limit,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": stop_ids,
            "ignore_eos": True,  # only `stop_ids` end a completion, not those of the server's files
            "logprobs": 0,  # of the sampled token only
            "return_token_ids": True,
            **WHOLE_DISTRIBUTION,
        }
        answer = self._send("POST", "/v1/completions", body, ANSWER_S)
        if answer.status_code == 404:
            raise AdapterLostError(f"{self.url} does not know the adapter {adapter} ({_read_text(answer)})")
        if answer.status_code != 200:
            text = _read_text(answer)
            advice = ""
            if "max_model_len" in text or "context length" in text:
                advice = "; start the server with a larger --max-model-len, or lower rloo.max_completion_length"
            raise RolloutServerError(
                f"{self.url} refuses a completion of {len(prompt_ids)} + {limit} tokens (status {answer.status_code}): "
                f"{text}{advice}"
            )
        choices = _read_json(f"{self.url}/v1/completions", answer).get("choices") or [{}]
        return _read_choice(self.url, choices[0], prompt_ids, limit, stop_ids)

    def find_logprobs_mode(self, adapter: str, prompt_ids: list[int], temperature: float) -> str:
        """Whether log-probabilities are of the sampled distribution ("processed") or precede the temperature ("raw").

        The second is vLLM's default. Two requests for one token show it: at twice the temperature (above 0) the gap
        between the likeliest and another token is halved, or unchanged.
        """
        gaps = []
        for heat in (temperature, 2 * temperature):
            body = {"model": adapter, "prompt": prompt_ids, "max_tokens": 1, "temperature": heat}
            body |= {"logprobs": PROBE_TOKENS, "ignore_eos": True, "return_tokens_as_token_ids": True}
            answer = self._send("POST", "/v1/completions", body | WHOLE_DISTRIBUTION, ANSWER_S)
            choices = _read_json(f"{self.url}/v1/completions", answer).get("choices") or [{}]
            found = ((choices[0].get("logprobs") or {}).get("top_logprobs") or [None])[0]
            if not found or len(found) < 2:
                raise RolloutServerError(f"{self.url} gives no log-probabilities ({_read_text(answer)}): is it vLLM's?")
            gaps.append(found)
        first, second = gaps
        likeliest = max(first, key=lambda token: first[token])
        others = [token for token in first if token != likeliest and token in second]
        if likeliest not in second or not others:  # the drawn token is listed too
            raise RolloutServerError(f"{self.url} gives two distributions for one prompt: is it reloading its model?")
        other = min(others, key=lambda token: first[token])
        ratio = (first[likeliest] - first[other]) / max(second[likeliest] - second[other], 1e-9)
        return "processed" if ratio > math.sqrt(2) else "raw"

    def _send(self, method: str, path: str, body: dict[str, Any] | None, patience_s: float) -> httpx.Response:
        """The server's answer; the request is repeated while the server is unreachable or busy."""
        deadline = time.monotonic() + self._retry_s
        pause = 0.25
        while True:
            try:
                answer = self._http.request(method, path, json=body, timeout=httpx.Timeout(30.0, read=patience_s))
                if answer.status_code not in TRIED_AGAIN:
                    return answer
                problem = f"status {answer.status_code}: {_read_text(answer)}"
            except httpx.ReadTimeout as error:
                raise RolloutServerError(f"{self.url}{path} did not answer within {patience_s:.0f} s") from error
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            if time.monotonic() + pause > deadline:
                raise RolloutServerError(
                    f"{self.url}{path} did not answer for {self._retry_s:.0f} s ({problem}): read the server's log, "
                    "restart it, and resume the run"
                )
            time.sleep(pause)
            pause = min(2 * pause, 10.0)


def _read_choice(
    url: str, choice: dict[str, Any], prompt_ids: list[int], limit: int, stop_ids: list[int]
) -> Continuation:
    """A choice of the answer as ids and log-probabilities; raises where it does not fit the request's arguments."""
    ids, reason = choice.get("token_ids"), choice.get("finish_reason")
    if not isinstance(ids, list):
        raise RolloutServerError(f"{url} returns no token ids: it has to be vLLM 0.10.2 or newer")
    if choice.get("prompt_token_ids", prompt_ids) not in (prompt_ids, None):
        raise RolloutServerError(f"{url} continued another prompt than it was given: does it truncate prompts?")
    logps = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(logps, list) or len(logps) != len(ids):
        raise RolloutServerError(f"{url} returns no log-probability for each of its {len(ids)} tokens")
    if any(logp is None or math.isnan(logp) for logp in logps):
        raise RolloutServerError(
            f"{url} sampled from logits that hold a NaN: the weights are broken (a learning rate too high?); "
            "resume from an earlier checkpoint with a lower rloo.learning_rate"
        )
    stopped = bool(ids) and ids[-1] in stop_ids
    if not ids or (reason == "stop" and not stopped) or (reason == "length" and not stopped and len(ids) < limit):
        raise RolloutServerError(
            f"{url} ended a completion after {len(ids)} of at most {limit} tokens, which no stop id explains "
            f"(finish_reason {reason}, stop_reason {choice.get('stop_reason')}): is --max-model-len too small?"
        )
    if reason not in ("stop", "length"):
        raise RolloutServerError(f"{url} aborted a completion (finish_reason {reason})")
    return Continuation(ids, [float(logp) for logp in logps])


def _read_json(url: str, answer: httpx.Response) -> dict[str, Any]:
    """The answer's body."""
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RolloutServerError(f"{url} answers {_read_text(answer)!r}: is it a vLLM server?")
    return found


def _explain_refusal(answer: httpx.Response, text: str, folder: str, rank: int) -> str:
    """Why an adapter (`folder`, `rank`) was refused, from the server's message, and the fix."""
    needed = next((known for known in RANKS if known >= rank), rank)
    if "max_lora_rank" in text:
        return f"its rank is {rank} ({text}); start the server with --max-lora-rank {needed}"
    if "No adapter found" in text or "adapter_config.json" in text or "does not exist" in text:
        return (
            f"it does not see {folder} ({text}); set rollout.server_adapters to a folder that both machines see "
            "under the same path"
        )
    if "LoRA is not enabled" in text or "enable-lora" in text or "enable_lora" in text:
        return f"LoRA is off ({text}); start it with --enable-lora --max-lora-rank {needed}"
    if answer.status_code in (404, 405):
        return (
            f"it has no /v1/load_lora_adapter ({text}); start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
            "environment and --enable-lora"
        )
    return f"status {answer.status_code}, {text}"


def _read_text(answer: httpx.Response) -> str:
    """The message of an error, wherever this version of the server puts it, at most 500 characters."""
    try:
        found = answer.json()
    except ValueError:
        found = None
    if isinstance(found, dict):
        error = found.get("error")
        message = error.get("message") if isinstance(error, dict) else found.get("message") or found.get("detail")
        if message:
            return str(message)[:500]
    return answer.text.strip()[:500]
