"""Validates a vLLM server's answers, which are not trusted: size, type of every field, and fit with the request.

Anything invalid raises `RolloutServerError` with a text that is safe to print.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rloo_kit.errors import RolloutServerError
from rloo_kit.system.console import picture_controls

POSITIVE = 0.01  # how far above 0 a log-probability may be by rounding
MOST_SHOWN = 500  # characters of a message
MOST_READ = 2**16  # bytes that are searched for a message


class _Part(BaseModel):
    """A part of an answer: fields with vLLM's types; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


Id = Annotated[int, Field(ge=0, lt=2**31)]


class _LogProbs(_Part):
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(_Part):
    token_ids: list[Id] | None = None
    prompt_token_ids: list[Id] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: _LogProbs | None = Field(None, alias="logprobs")


class Completions(_Part):
    choices: list[Choice] = Field(min_length=1)


class _Model(_Part):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class Models(_Part):
    data: list[_Model] = Field(min_length=1)


class _Message(_Part):
    message: Any = None


class _Failure(_Message):
    detail: Any = None
    error: Any = None


AnyPart = TypeVar("AnyPart", bound=_Part)


@dataclass(frozen=True)
class Answer:
    """A server's answer; `text` is its message, safe to print."""

    status: int
    body: bytes
    text: str


@dataclass(frozen=True)
class Continuation:
    """New ids after a prompt, the stop id included, and the log-probability of each, in nats."""

    ids: list[int]
    logps: list[float]


def read_answer(form: type[AnyPart], answer: Answer, url: str) -> AnyPart:
    """Parse the body of an answer from `url` as `form`."""
    try:
        return form.model_validate_json(answer.body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        problem = picture_controls(f"{where}: {fault['msg']}" if where else fault["msg"])[:MOST_SHOWN]
        raise RolloutServerError(f"{url} answers {answer.text!r} ({problem}): is it a vLLM server?") from None


def find_message(body: bytes, key: str) -> str:
    """The message of an answer, wherever this version of the server puts it: at most 500 characters, without control
    characters, and without the key if the server repeats it."""
    text = body[:MOST_READ].decode(errors="replace").strip()
    try:
        found = _Failure.model_validate_json(body[:MOST_READ])
        inner = _Message.model_validate(found.error) if isinstance(found.error, dict) else found
        text = str(inner.message or found.detail or text)
    except ValueError:
        pass
    if key:
        text = text.replace(key, "(the key)")
    return picture_controls(text)[:MOST_SHOWN]


def read_choice(url: str, choice: Choice, prompt_ids: list[int], limit: int, stop_ids: list[int]) -> Continuation:
    """A choice of the answer as ids and log-probabilities; raises if it does not fit the request."""
    ids, reason = choice.token_ids, choice.finish_reason
    if ids is None:
        raise RolloutServerError(f"{url} returns no token ids: it has to be vLLM 0.10.2 or newer")
    if choice.prompt_token_ids not in (prompt_ids, None):
        raise RolloutServerError(f"{url} continued a different prompt from the one sent: does it truncate prompts?")
    logps = choice.scores.token_logprobs if choice.scores is not None else None
    if logps is None or len(logps) != len(ids):
        raise RolloutServerError(f"{url} returns no log-probability for each of its {len(ids)} tokens")
    finite = [logp for logp in logps if logp is not None and math.isfinite(logp)]
    if len(finite) < len(logps):
        raise RolloutServerError(
            f"{url} sampled from logits that contain a NaN: the weights are broken (a learning rate too high?); "
            "resume from an earlier checkpoint with a lower rloo.learning_rate"
        )
    if max(finite, default=0.0) > POSITIVE:
        raise RolloutServerError(f"{url} returns {max(finite):g} as a log-probability, which is above 0: is it vLLM's?")
    stopped = bool(ids) and ids[-1] in stop_ids
    if not ids or (reason == "stop" and not stopped) or (reason == "length" and not stopped and len(ids) < limit):
        raise RolloutServerError(
            f"{url} ended a completion after {len(ids)} of at most {limit} tokens, which no stop id explains "
            f"(finish_reason {_short(reason)}, stop_reason {_short(choice.stop_reason)}): is --max-model-len too small?"
        )
    if reason not in ("stop", "length"):
        raise RolloutServerError(f"{url} broke off a completion (finish_reason {_short(reason)})")
    if len(ids) > limit or any(token in stop_ids for token in ids[:-1]):
        raise RolloutServerError(f"{url} went on after {limit} tokens or a stop id, where vLLM ends a completion")
    return Continuation(ids, finite)


def _short(value: int | str | None) -> str:
    return picture_controls(str(value))[:100]
