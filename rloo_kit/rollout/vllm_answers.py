"""What a vLLM server answers: read as what was asked for, or refused with what to do about it.

An answer that does not fit its request would be trained on, so nothing is guessed: ids that are missing, a prompt that
was cut, an end that no stop explains are errors. Messages lie in other places and have other words from version to
version of the server; those that a switch of `vllm serve` mends are known by a word or two.

Left out: sending (`vllm_client`).
"""

import math
from dataclasses import dataclass
from typing import Any

import httpx

from rloo_kit.errors import RolloutServerError

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes


@dataclass(frozen=True)
class Continuation:
    """New ids after a prompt, the one that stopped them included, and the log-probability of each, in nats."""

    ids: list[int]
    logps: list[float]


def read_choice(
    url: str, choice: dict[str, Any], prompt_ids: list[int], limit: int, stop_ids: list[int]
) -> Continuation:
    """One of an answer's choices as ids and log-probabilities.

    Args:
        url: of the server, for errors. prompt_ids, limit, stop_ids: of the request.

    Raises:
        RolloutServerError: something that the request does not explain.
    """
    ids, reason = choice.get("token_ids"), choice.get("finish_reason")
    if not isinstance(ids, list):
        raise RolloutServerError(f"{url} returns no token ids: it has to be vLLM 0.10.2 or newer")
    if choice.get("prompt_token_ids", prompt_ids) not in (prompt_ids, None):
        raise RolloutServerError(f"{url} continued another prompt than it was given: does it cut prompts off?")
    logps = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(logps, list) or len(logps) != len(ids):
        raise RolloutServerError(f"{url} does not say how likely each of its {len(ids)} tokens was")
    if any(logp is None or math.isnan(logp) for logp in logps):
        raise RolloutServerError(
            f"{url} sampled from logits with a NaN in them: the weights are broken (a learning rate too "
            "high?); go on from an earlier checkpoint with a lower rloo.learning_rate"
        )
    stopped = bool(ids) and ids[-1] in stop_ids
    if not ids or (reason == "stop" and not stopped) or (reason == "length" and not stopped and len(ids) < limit):
        raise RolloutServerError(
            f"{url} ended a completion after {len(ids)} of at most {limit} tokens, which no stop id explains "
            f"(finish_reason {reason}, stop_reason {choice.get('stop_reason')}): is --max-model-len too small?"
        )
    if reason not in ("stop", "length"):
        raise RolloutServerError(f"{url} broke a completion off (finish_reason {reason})")
    return Continuation(ids, [float(logp) for logp in logps])


def read_json(url: str, answer: httpx.Response) -> dict[str, Any]:
    """The answer's body; `url` is for the error."""
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RolloutServerError(f"{url} answers {read_text(answer)!r}: is it a vLLM server?")
    return found


def explain_refusal(answer: httpx.Response, text: str, folder: str, rank: int) -> str:
    """Why an adapter was refused, and what to do.

    Args:
        text: what the server said. folder: that it was to read. rank: of the adapter.
    """
    needed = next((known for known in RANKS if known >= rank), rank)
    if "max_lora_rank" in text:
        return f"its rank is {rank} ({text}); start the server with --max-lora-rank {needed}"
    if "No adapter found" in text or "adapter_config.json" in text or "does not exist" in text:
        return (
            f"it does not see {folder} ({text}); set rollout.server_adapters to a folder that both machines see under "
            "the same path"
        )
    if "LoRA is not enabled" in text or "enable-lora" in text or "enable_lora" in text:
        return f"LoRA is off ({text}); start it with --enable-lora --max-lora-rank {needed}"
    if answer.status_code in (404, 405):
        return (
            f"it has no /v1/load_lora_adapter ({text}); start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
            "environment and --enable-lora"
        )
    return f"status {answer.status_code}, {text}"


def describe_loss(error: Exception) -> str:
    """Why there was no answer."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def read_text(answer: httpx.Response) -> str:
    """The message of an error, wherever this version of the server puts it; cut to a readable length."""
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
