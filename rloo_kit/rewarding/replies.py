"""What a judge's reply says: the verdict that it ends with, or why it has none.

An answer may contain a verdict of its own, and judges quote answers. So only the JSON object that closes the reply
counts, and never a verdict that one of the answers contains.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rloo_kit.errors import excerpt

CUT = ("length", "max_tokens", "model_length", "content_filter")  # values of `finish_reason`, by several servers
_LIMITS = ("max_tokens", "max_completion_tokens")  # keys of a request
_TAG = r"(?:think|thinking|thought|reasoning|reflection)"
_OPENED, _CLOSED = (
    re.compile(rf"^[ \t]*[<\[]{_TAG}\b[^>\]]*[>\]]", re.I | re.M),
    re.compile(rf"[<\[]/{_TAG}[>\]]", re.I),
)
_SPECIAL, _AROUND = re.compile(r"<\|\w+\|>|</s>"), " \t\r\n`*."  # tokens of a server's template; a fence, bold text
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')  # or a backslash that JSON does not have, as in LaTeX
_LAST_COMMA = re.compile(r",(\s*[}\]])")
_WITHIN = re.compile(r'(?:"\s*:|[\[{]|[}\]"]\s*,)\s*\Z')  # before a part of a larger object, which is broken
_NUMBER = re.compile(r"([+-]?\d+(?:[.,]\d+)?)(?:\s*(?:/|out of)\s*(\d+))?", re.I)


def read_reply(choice: dict[str, Any], request: dict[str, Any]) -> str:
    """The text of a chat completion's first choice; that of its reasoning only if there is no other.

    Raises:
        ValueError: a refusal, or an end by `finish_reason`, with the limit in `request`.
    """
    message, reason = choice["message"], choice.get("finish_reason")
    if reason in CUT:
        limits = [f"{name}, which is {request[name]}" for name in _LIMITS if request.get(name)] or ["max_tokens"]
        fix = "" if reason == "content_filter" else f": raise options.{limits[0]}"
        raise ValueError(f"it was cut (finish_reason {reason}){fix}")
    texts = (_join(message.get(name)) for name in ("content", "reasoning_content", "reasoning"))
    if text := next(filter(str.strip, texts), ""):
        return text
    refusal = message.get("refusal")
    raise ValueError(f"it is a refusal: {excerpt(refusal)}" if refusal else f"it is empty (finish_reason {reason})")


def _join(content: Any) -> str:
    """The text of a message, also of one in parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def count_tokens(body: Any) -> int:
    """The tokens that a call has cost by its `usage`; 0 if that is missing, or has no number."""
    usage = body.get("usage") if isinstance(body, dict) else None
    counts = (
        [usage.get(f"{name}_tokens") for name in ("total", "prompt", "completion")] if isinstance(usage, dict) else []
    )
    total, *parts = (one if isinstance(one, int) and one > 0 else 0 for one in counts or [0])
    return total or sum(parts)


def find_verdict(reply: str, name: str) -> Any:
    """The value of `name` in the JSON object that closes a reply, the outermost one that has it.

    Line breaks and single backslashes in its texts, a comma behind its last item, and a fence around it are read.

    >>> find_verdict('The answer says {"score": 9}. {"score": 7, "parts": [{"score": 2}]}', "score")
    7

    Raises:
        ValueError: the reply does not end with such an object, has it in its thinking, or gives `name` twice.
    """
    text = _as_json(_SPECIAL.sub("", reply).rstrip(_AROUND))
    for start in (opened.start() for opened in re.finditer(r"[{\[]", text)):
        try:
            value, end = _DECODER.raw_decode(text, start)
        except RecursionError:  # so would the next ones
            break
        except ValueError:
            continue
        if end == len(text):
            thinking = [opened.end() for opened in _OPENED.finditer(text, 0, start)]
            is_open = thinking and not _CLOSED.search(text, thinking[-1], start)
            return _outermost([] if is_open or _WITHIN.search(text, 0, start) else [value], name, reply)
    return _outermost([], name, reply)


def _as_json(text: str) -> str:
    return _LAST_COMMA.sub(r"\1", _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", text))


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, its names in lower case. One that has a name twice may contain a quotation that closed its text."""
    found = {name.strip().lower(): value for name, value in pairs}
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_as_dict)


def _outermost(level: list[Any], name: str, reply: str) -> Any:
    """The value of `name` in the outermost objects that have it, if it is one; else raises ValueError."""
    while level:
        level = [one for part in level for one in (part if isinstance(part, list) else [part])]
        found = [part[name] for part in level if isinstance(part, dict) and name in part]
        if found and all(one == found[0] for one in found):
            return found[0]
        level = [] if found else [one for part in level if isinstance(part, dict) for one in part.values()]
    raise ValueError(f"it does not end with JSON that has {name!r} once: {excerpt(reply[-200:], 200)}")


def contains(answer: str, name: str, verdict: Any, read: Callable[[Any], Any]) -> bool:
    """Whether an answer contains the verdict, written as JSON, so that the judge may only quote it."""
    plain = _as_json(re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), answer))
    for found in re.finditer(rf'"\s*{name}\s*"\s*:\s*', plain, re.I):
        with suppress(ValueError, RecursionError):
            if read(_DECODER.raw_decode(plain, found.end())[0]) == verdict:
                return True
    return False


def read_score(value: Any, low: float, high: float) -> float:
    """A score: a number, or a text such as 8 or 8/10. Raises ValueError if it is none, or not on the scale."""
    score = _as_number(value, high)
    if score is None or not low <= score <= high:
        raise ValueError(f"the score is {excerpt(value)}, and the scale is {low:g} to {high:g}")
    return score


def read_ranking(value: Any, size: int) -> list[int]:
    """The numbers of so many answers, the best first. Raises ValueError if one is missing."""
    ranking = [_as_number(one) for one in value] if isinstance(value, list) else []
    if sorted(one or 0 for one in ranking) != [one + 1 for one in range(size)]:
        raise ValueError(f"the ranking is {excerpt(value)}, and not each of 1 to {size} once")
    return [int(one or 0) for one in ranking]


def read_better(value: Any) -> float:
    """1.0 if the first answer is better, 0.0 if the second is, 0.5 if neither. Raises ValueError for anything else."""
    better = {0.0: 0.5, 1.0: 1.0, 2.0: 0.0}.get(-1.0 if (number := _as_number(value)) is None else number)
    if better is None:
        raise ValueError(f"better is {excerpt(value)}, and not 1, 2 or 0")
    return better


def _as_number(value: Any, of: float | None = None) -> float | None:
    """A number, or a text that is one, alone or of `of`; else None."""
    if isinstance(value, str) and (found := _NUMBER.fullmatch(value.strip())):
        return float(found[1].replace(",", ".")) if found[2] is None or float(found[2]) == of else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
