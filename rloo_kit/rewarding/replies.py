"""A worker's replies as JSON: numbers, texts and lists, never an object that runs code when it is read.

Numbers are exact (`repr`), NaN and infinity allowed. Both sides import this module, so no torch here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rloo_kit.rewarding.pipe import MAX_REPLY_BYTES, MalformedReply
from rloo_kit.rewarding.signature import Signature
from rloo_kit.rewarding.values import describe_error, printable, show

LOGS = ("log_extra", "log_metric")
NUMBERS = (int, float)


@dataclass(frozen=True)
class Rewards:
    """What a reward returned, in built-in types, and its calls of TRL's log functions: (function, name, value)."""

    values: list[Any]
    records: list[tuple[str, str, Any]]


@dataclass(frozen=True)
class Failure:
    """Why there are no rewards; `whole_batch` if scoring the samples one by one would not help."""

    text: str
    whole_batch: bool = False


def write_reply(call: int, content: Signature | Rewards | Failure | Any) -> bytes:
    """The reply to request number `call`; content that cannot be sent becomes a `Failure` that says why."""
    kind, body = "value", content
    if isinstance(content, (Signature, Rewards, Failure)):
        kind, body = type(content).__name__, vars(content)
    try:
        payload = json.dumps({"call": call, "kind": kind, "content": body}).encode()
    except Exception as error:
        return write_reply(call, Failure(f"the result cannot be sent: {describe_error(error)}"))
    if len(payload) > MAX_REPLY_BYTES:
        found = f"its rewards and what it logs have {len(payload):,} bytes"
        return write_reply(call, Failure(f"{found}; the limit is {MAX_REPLY_BYTES:,}: log less (log_extra)", True))
    return payload


def read_reply(payload: bytes, call: int) -> Signature | Rewards | Failure | Any:
    """The content of a reply to request number `call`; raises MalformedReply for anything else."""
    try:
        reply = json.loads(payload.decode())
    except (ValueError, RecursionError) as error:
        raise MalformedReply(f"it is not JSON ({describe_error(error)})") from None
    if not isinstance(reply, dict) or set(reply) != {"call", "kind", "content"} or reply["call"] != call:
        raise MalformedReply("it is not a reply to this call")
    content = reply["content"]
    try:
        if reply["kind"] == "Signature":
            return _read_signature(content)
        if reply["kind"] == "Rewards":
            return _read_rewards(content)
        if reply["kind"] == "Failure":
            _check(isinstance(content["text"], str) and isinstance(content["whole_batch"], bool))
            return Failure(printable(content["text"]), content["whole_batch"])
        _check(reply["kind"] == "value" and (content is None or isinstance(content, (*NUMBERS, str))))
        return content
    except (KeyError, TypeError, ValueError):
        raise MalformedReply("its fields are not those of a reply") from None


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError


def _read_signature(content: Any) -> Signature:
    _check(set(content) == {field.name for field in fields(Signature)})
    names = {name: tuple(content[name]) for name in ("required", "optional", "by_position")}
    flags: dict[str, Any] = {name: content[name] for name in ("anything", "in_worker")}
    _check(all(isinstance(name, str) for found in names.values() for name in found))
    _check(all(isinstance(flag, bool) for flag in flags.values()))
    return Signature(**flags | names)


def _read_rewards(content: Any) -> Rewards:
    values, records = content["values"], [tuple(record) for record in content["records"]]
    _check(isinstance(values, list) and all(value is None or isinstance(value, (*NUMBERS, str)) for value in values))
    for log, name, value in records:
        _check(log in LOGS and isinstance(name, str))
        _check(isinstance(value, list) if log == "log_extra" else isinstance(value, NUMBERS))
    return Rewards(values, records)


def make_plain(value: Any) -> Any:
    """`value` in the types of JSON: arrays and tensors as numbers and lists, anything else as its text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): make_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [make_plain(item) for item in value]
    to_list = getattr(value, "tolist", None)
    return make_plain(to_list()) if callable(to_list) else show(value)
