"""A vLLM server over HTTP: is it there, what does it serve, take this adapter, continue these tokens.

Nothing of vLLM or CUDA is needed on this side. Token ids go in and come out, never text, and with each token its
log-probability; the adapter is handed over as a folder that the server reads (`/v1/load_lora_adapter`), so the base is
never merged. What may be sent twice without harm is sent again while the server does not answer.

Left out: chat, streaming, several servers behind one run (vLLM's own data parallelism is behind one address).
`VLLM_API_KEY` in the environment is sent as the key, which is also the name under which `vllm serve` reads it.

Source: vLLM's OpenAI-compatible server, https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html; LoRA at
run time, https://docs.vllm.ai/en/latest/features/lora.html.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from rloo_kit.errors import RolloutServerError
from rloo_kit.rollout.vllm_answers import (
    Continuation,
    describe_loss,
    explain_refusal,
    read_choice,
    read_json,
    read_text,
)

START_S = 600.0  # a server that loads a large model needs minutes
LOAD_S = 600.0  # of an adapter
ANSWER_S = 3600.0  # of a completion: its own time and that in the server's queue
RETRY_S = 120.0  # for which what was lost on the way is sent again
TRIED_AGAIN = (429, 502, 503, 504)  # busy, or a proxy in front of a server that restarts
PROBE_TOKENS = 5

# The checkpoint's generation config is vLLM's default for whatever a request leaves out: all is said.
WHOLE_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class AdapterLostError(RolloutServerError):
    """The server does not know the adapter (any more): it was started anew since the adapter was handed over."""


@dataclass(frozen=True)
class Served:
    """What a server serves.

    Attributes:
        bases: name and path of each base model; a server has one, under one or more names.
        max_tokens: prompt and completion together at most; None where it does not say.
        adapters: the folder of each adapter, by its name.
    """

    bases: dict[str, str]
    max_tokens: int | None
    adapters: dict[str, str]


class VllmClient:
    """One server. May be used by several threads at once.

    Args:
        url: http://host:port.
        start_s: how long a server that does not answer yet is waited for. retry_s: the same between two requests.
        say: gets a line while it is waited for the server.

    Every method raises `RolloutServerError` with what to do about it.
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
            trust_env=False,  # a proxy for the outside is no way to a machine of the cluster
        )

    def wait_until_up(self) -> None:
        """Return when `/health` answers with 200."""
        deadline = time.monotonic() + self._start_s
        pause, told = 0.5, False
        while True:
            try:
                answer = self._http.get("/health", timeout=10.0)
                if answer.status_code == 200:
                    return
                problem = f"/health answers {answer.status_code}"
            except httpx.TransportError as error:
                problem = describe_loss(error)
            if time.monotonic() + pause > deadline:
                raise RolloutServerError(
                    f"no vLLM server answers at {self.url} (waited {self._start_s:.0f} s; {problem}): start it (vllm "
                    "serve ..., see docs/15-rollout.md) or mend rollout.server_url"
                )
            if not told:
                self._say(f"rollout: waiting {self._start_s:.0f} s at most for the server at {self.url} ({problem})")
            told = True
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def read_served(self) -> Served:
        """What `/v1/models` lists."""
        answer = self._send("GET", "/v1/models", None, 30.0)
        if answer.status_code == 401:
            raise RolloutServerError(f"{self.url} asks for a key: put it into the environment as VLLM_API_KEY")
        cards = read_json(f"{self.url}/v1/models", answer).get("data")
        if answer.status_code != 200 or not isinstance(cards, list) or not cards:
            raise RolloutServerError(
                f"{self.url}/v1/models lists no models ({read_text(answer)}): is it a vLLM server?"
            )
        bases = [card for card in cards if not card.get("parent")]
        lengths = [card["max_model_len"] for card in bases if card.get("max_model_len")]
        return Served(
            {card["id"]: card.get("root") or card["id"] for card in bases},
            min(lengths) if lengths else None,
            {card["id"]: card.get("root") or "" for card in cards if card.get("parent")},
        )

    def load_adapter(self, name: str, folder: str, rank: int) -> None:
        """Have the server read an adapter. One of that name that is there already counts as this one.

        Args:
            name: under which completions ask for it; a name that was ever another adapter's would find that one's
                cached prefixes. folder: as the server sees it. rank: of the adapter, for the error.
        """
        answer = self._send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, LOAD_S)
        text = read_text(answer)
        if answer.status_code == 200 or "has already been loaded" in text:  # the answer to the first try got lost
            return
        raise RolloutServerError(f"{self.url} does not take the adapter: {explain_refusal(answer, text, folder, rank)}")

    def unload_adapter(self, name: str) -> None:
        """Have the server forget an adapter; one that it has forgotten already is no error."""
        answer = self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_S)
        if answer.status_code not in (200, 404):
            raise RolloutServerError(f"{self.url} does not let go of the adapter {name}: {read_text(answer)}")

    def complete(
        self, adapter: str, prompt_ids: list[int], limit: int, stop_ids: list[int], temperature: float, seed: int
    ) -> Continuation:
        """Continue a prompt up to and with the first id that stops, from the whole distribution.

        Args:
            limit: new tokens at most, at least 1. temperature: 0 takes the likeliest token. seed: of this completion.

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
            "ignore_eos": True,  # the ids that end a completion are those given, not those of the server's files
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            **WHOLE_DISTRIBUTION,
        }
        answer = self._send("POST", "/v1/completions", body, ANSWER_S)
        if answer.status_code == 404:
            raise AdapterLostError(f"{self.url} does not know the adapter {adapter} ({read_text(answer)})")
        if answer.status_code != 200:
            text = read_text(answer)
            advice = ""
            if "max_model_len" in text or "context length" in text:
                advice = "; start the server with a larger --max-model-len, or lower rloo.max_completion_length"
            raise RolloutServerError(
                f"{self.url} refuses a completion of {len(prompt_ids)} + {limit} tokens (status {answer.status_code}): "
                f"{text}{advice}"
            )
        choices = read_json(f"{self.url}/v1/completions", answer).get("choices") or [{}]
        return read_choice(self.url, choices[0], prompt_ids, limit, stop_ids)

    def find_logprobs_mode(self, adapter: str, prompt_ids: list[int], temperature: float) -> str:
        """Whether the server's log-probabilities are those that it samples from: "processed", or "raw" if not.

        vLLM says by default how likely a token was before the temperature. Two requests for one token tell it: the gap
        between the likeliest and another token is halved at twice the temperature, or stays.

        Args:
            temperature: above 0.
        """
        gaps = []
        for heat in (temperature, 2 * temperature):
            body = {"model": adapter, "prompt": prompt_ids, "max_tokens": 1, "temperature": heat}
            body |= {"logprobs": PROBE_TOKENS, "ignore_eos": True, "return_tokens_as_token_ids": True}
            answer = self._send("POST", "/v1/completions", body | WHOLE_DISTRIBUTION, ANSWER_S)
            choices = read_json(f"{self.url}/v1/completions", answer).get("choices") or [{}]
            found = ((choices[0].get("logprobs") or {}).get("top_logprobs") or [None])[0]
            if not found or len(found) < 2:
                raise RolloutServerError(f"{self.url} gives no log-probabilities ({read_text(answer)}): is it vLLM's?")
            gaps.append(found)
        first, second = gaps
        likeliest = max(first, key=lambda token: first[token])
        others = [token for token in first if token != likeliest and token in second]
        if likeliest not in second or not others:  # the drawn token stands beside the likeliest ones
            raise RolloutServerError(f"{self.url} gives two distributions for one prompt: is it reloading its model?")
        other = min(others, key=lambda token: first[token])
        ratio = (first[likeliest] - first[other]) / max(second[likeliest] - second[other], 1e-9)
        return "processed" if ratio > math.sqrt(2) else "raw"

    def _send(self, method: str, path: str, body: dict[str, Any] | None, patience_s: float) -> httpx.Response:
        """The server's answer; asked again for a while where it does not answer or is busy."""
        deadline = time.monotonic() + self._retry_s
        pause = 0.25
        while True:
            try:
                answer = self._http.request(method, path, json=body, timeout=httpx.Timeout(30.0, read=patience_s))
                if answer.status_code not in TRIED_AGAIN:
                    return answer
                problem = f"status {answer.status_code}: {read_text(answer)}"
            except httpx.ReadTimeout as error:
                raise RolloutServerError(f"{self.url}{path} did not answer within {patience_s:.0f} s") from error
            except httpx.TransportError as error:
                problem = describe_loss(error)
            if time.monotonic() + pause > deadline:
                raise RolloutServerError(
                    f"{self.url}{path} did not answer for {self._retry_s:.0f} s ({problem}): look at the server's log, "
                    "start it again, and resume the run"
                )
            time.sleep(pause)
            pause = min(2 * pause, 10.0)
