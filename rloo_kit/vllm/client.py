"""Client of a vLLM server; it does not need vLLM. Token ids in, token ids and log-probabilities out.

Answers are not trusted: the type of every field and the fit with the request are checked.
Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.
"""

import math
import os
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rloo_kit.errors import RolloutServerError
from rloo_kit.rollout.engine import Sampling
from rloo_kit.rollout.types import WHOLE
from rloo_kit.system.console import picture_controls
from rloo_kit.system.environment import is_exposed, is_sendable
from rloo_kit.vllm.in_process import room_for_rank

LOAD_S = 600.0  # of an adapter
ANSWER_S = 3600.0  # of a completion, with its time in the server's queue
MOST_SHOWN = 500  # characters of an answer in a message
KEY_VARIABLE = "VLLM_API_KEY"
PROBE_TOKENS = 5
ROUNDING = 0.01  # how far above 0 a log-probability may be
RESUME = "read the server's log, restart it, and continue the run with --resume"
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
        ("LoRA is not enabled", "enable-lora", "enable_lora"),
        "LoRA is off: start the server with --enable-lora --max-lora-rank {room}",
    ),
    (
        ("Not Found", "Method Not Allowed"),
        "the server has no /v1/load_lora_adapter: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
        "environment and --enable-lora",
    ),
)


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


class VllmClient:
    """One server at http://host:port; thread-safe. `VLLM_API_KEY` is sent as the key; `say` gets a line if that is
    unencrypted. Every method raises `RolloutServerError` with the fix."""

    def __init__(self, url: str, say: Callable[[str], None] = print) -> None:
        self.url = url.rstrip("/")
        self._key = os.environ.get(KEY_VARIABLE, "")
        if not is_sendable(self._key):
            raise RolloutServerError(  # the HTTP library's error would print it
                f"{KEY_VARIABLE} has a line break, a space at an end or another character that no key has: set it to "
                "the key alone, on one line"
            )
        # A connection for each request: between threads, the pool may close an idle one that it has just given to a
        # request (https://github.com/encode/httpcore/issues/1110).
        headers = {"Connection": "close"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # an internet proxy does not reach a machine in the cluster
        )
        if self._key and is_exposed(self.url):
            say(f"rollout: {KEY_VARIABLE} and the completions go to {self.url} unencrypted; https hides them")

    def read_served(self) -> tuple[dict[str, str], int | None]:
        """Path of the base model by each of its names, and its limit for prompt and completion together, if known."""
        bases = [model for model in self._list_models() if not model.parent]
        lengths = [model.max_model_len for model in bases if model.max_model_len]
        return {model.id: model.root or model.id for model in bases}, min(lengths, default=None)

    def load_adapter(self, name: str, folder: str, rank: int) -> None:
        """Make the server load an adapter from a folder, as it sees it, under a new name: a reused one would find the
        other adapter's cached prefixes. `rank`: for the error message."""
        answer = self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, LOAD_S)
        if answer.status_code == 200:
            return
        text = self._beginning(answer)
        fixes = (fix for words, fix in REFUSALS if any(word in text for word in words))
        fix = next(fixes, "read its log").format(rank=rank, folder=folder, room=room_for_rank(rank))
        raise RolloutServerError(f"{self.url} does not take the adapter (status {answer.status_code}, {text}); {fix}")

    def unload_adapter(self, name: str) -> None:
        """Make the server unload an adapter; an unknown one is no error."""
        answer = self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_S)
        if answer.status_code not in (200, 404):
            problem = f"status {answer.status_code}: {self._beginning(answer)}"
            raise RolloutServerError(f"{self.url} does not unload the adapter {name} ({problem})")

    def complete(
        self, adapter: str, prompt_ids: list[int], limit: int, stop_ids: list[int], seed: int, sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        """The ids that continue a prompt, at most `limit`, up to and including the first stop id, and the
        log-probability of each, in nats."""
        body = {"max_tokens": limit, "temperature": sampling.temperature, "seed": seed, "stop_token_ids": stop_ids}
        body |= {"logprobs": 0, "return_token_ids": True, **sampling.filters.to_vllm()}  # of the sampled token only
        choice = self._complete(adapter, prompt_ids, body)
        ids, reason = choice.token_ids, picture_controls(str(choice.finish_reason))[:100]
        logps = choice.scores.token_logprobs if choice.scores is not None else None
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
                f"nor the limit explains (finish_reason {reason}): is --max-model-len too small? Else {RESUME}"
            )
        return ids, finite

    def find_logprobs_mode(self, adapter: str, prompt_ids: list[int], temperature: float) -> str:
        """Whether log-probabilities are those of the sampled distribution ("processed") or from before the temperature
        ("raw"), which is vLLM's default.

        At twice the temperature (above 0), the gap between the likeliest token and another one is halved if processed,
        unchanged if raw. Above 1, half of it and itself are compared: vLLM samples at 2 at most.
        """
        low = temperature if temperature <= 1 else temperature / 2
        body = {"max_tokens": 1, "logprobs": PROBE_TOKENS, "return_tokens_as_token_ids": True, **WHOLE.to_vllm()}
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
        if answer.status_code != 200:
            text, advice = self._beginning(answer), RESUME
            if "max_model_len" in text or "context length" in text:
                advice = "start the server with a larger --max-model-len, or lower rloo.max_completion_length"
            raise RolloutServerError(
                f"{self.url} refuses a completion of {len(prompt_ids)} + {body['max_tokens']} tokens at temperature "
                f"{body['temperature']:g} (status {answer.status_code}): {text}; {advice}"
            )
        return self._read(answer, _Completions).choices[0]

    def _list_models(self) -> list[_Model]:
        answer = self._ask("GET", "/v1/models")
        if answer.status_code == 401:
            raise RolloutServerError(f"{self.url} asks for a key: set {KEY_VARIABLE} in the environment")
        return self._read(answer, _Models).data

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, patience_s: float = 30.0
    ) -> httpx.Response:
        """One request; `patience_s`: how long the server may be silent."""
        try:
            return self._http.request(method, path, json=body, timeout=httpx.Timeout(30.0, read=patience_s))
        except httpx.RequestError as error:
            raise RolloutServerError(
                f"{self.url}{path} does not answer ({type(error).__name__}: {error}): start it (vllm serve ..., see "
                f"docs/rollout.md) or fix rollout.server_url; in a run, {RESUME}"
            ) from error

    def _read(self, answer: httpx.Response, form: type[AnyPart]) -> AnyPart:
        """The body as `form`."""
        try:
            return form.model_validate_json(answer.content)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            problem = picture_controls(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}")[:MOST_SHOWN]
            raise RolloutServerError(
                f"{answer.url} answers {self._beginning(answer)!r} (status {answer.status_code}, {problem}): is it a "
                "vLLM server?"
            ) from None

    def _beginning(self, answer: httpx.Response) -> str:
        """The beginning of the body, without the key, safe to print."""
        text = answer.content[: 4 * MOST_SHOWN].decode(errors="replace").strip()
        return picture_controls(text.replace(self._key, "(the key)") if self._key else text)[:MOST_SHOWN]
