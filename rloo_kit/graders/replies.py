"""What a judge's reply says: the verdict that it ends with, or why it has none.

An answer may contain a verdict of its own, and judges quote answers. So only the JSON object that closes the reply
counts; `contains` says whether an answer has the verdict itself.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from rloo_kit.errors import excerpt

CUT = ("length", "max_tokens", "model_length", "content_filter", "abort", "error")  # `finish_reason` of several servers
_LIMITS = ("max_tokens", "max_completion_tokens")  # keys of a request
_TAG = r"(?:think|thinking|thoughts?|reasoning|reflection|analysis|scratchpad)"
_OPENED = re.compile(rf"(?:^|[.!?:])[ \t]*(?:<{_TAG}\b[^>]*>|\[THINK\]|<\|channel\|>analysis)", re.I | re.M)
_CLOSED = re.compile(rf"</{_TAG}>|\[/THINK\]|<\|channel\|>final", re.I)
# A token of a chat template, or a closing tag.
_LAST = re.compile(rf"(?:<[|｜][^<>]{{1,30}}[|｜]>|</(?!{_TAG}>)[\w:.-]{{1,30}}>|<end_of_turn>)\Z", re.I)
_AROUND = re.compile(r'[^\w{}\[\]"<>]*')  # a fence, bold text, a full stop
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')  # or a backslash that JSON does not have, as in LaTeX
_LAST_COMMA = re.compile(r",(\s*[}\]])")
_WITHIN = re.compile(r'(?:"\s*:|[\[{]|[}\]"]\s*,)\s*\Z')  # before a part of a larger object, which is broken
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+|,\d{1,2})?)(?:\s*(?:/|out of|of)\s*(\d+))?", re.I)
_TIES = ("tie", "neither", "both", "equal", "none")


def read_reply(choice: dict[str, Any], request: dict[str, Any]) -> str:
    """The text of a chat completion's first choice, of its reasoning only if there is no other; ValueError for a
    refusal, or an end by `finish_reason`, with the limit in `request`."""
    message, reason = choice["message"], str(choice.get("finish_reason")).lower()
    if reason in CUT:
        limits = [f"{name}, which is {request[name]}" for name in _LIMITS if request.get(name)] or ["max_tokens"]
        fix = "" if reason in CUT[3:] else f": raise options.{limits[0]}"
        raise ValueError(f"it was cut (finish_reason {reason}){fix}")
    texts = (_join(message.get(name)) for name in ("content", "reasoning_content", "reasoning"))
    if text := next(filter(str.strip, texts), ""):
        return text
    refusal = message.get("refusal")
    raise ValueError(f"it is a refusal: {excerpt(refusal)}" if refusal else f"it is empty (finish_reason {reason})")


def _join(content: Any) -> str:
    """The text of a message, also of one in parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    parts = [part for part in parts if isinstance(part, dict) and part.get("type", "text") in ("text", "output_text")]
    return "".join(str(part.get("text") or "") for part in parts)


def count_billed(body: dict[str, Any]) -> int:
    """The tokens that a call has cost by its `usage`; 0 if that is missing, or has no number."""
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counts = [usage.get(f"{name}_tokens") for name in ("total", "prompt", "completion")]
    total, *parts = (count if isinstance(count, int) and count > 0 else 0 for count in counts)
    return total or sum(parts)


def find_verdict(reply: str, name: str) -> Any:
    """The value of `name` in the JSON object that closes a reply, the outermost one that has it; ValueError if none
    does, it is in the thinking, or it gives `name` twice.

    Line breaks and single backslashes in its texts, a comma behind its last item, and a fence around it are read.

    >>> find_verdict('The answer says {"score": 9}. {"score": 7, "parts": [{"score": 2}]}', "score")
    7.0
    """
    text, before = reply, ""
    while text != before:
        before, text = text, _LAST.sub("", text[: len(text) - len(_AROUND.match(text[::-1])[0])])  # type: ignore[index]
    text = _LAST_COMMA.sub(r"\1", _ESCAPE.sub(lambda match: match[0] if match[1] else r"\\", text))
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
            return _value_of(name, None if is_open or _WITHIN.search(text, 0, start) else value, reply)
    return _value_of(name, None, reply)


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, its names in lower case. One that has a name twice may contain a quotation that closed its text."""
    lowered = {name.lower(): value for name, value in pairs}
    if len(lowered) < len(pairs):
        raise ValueError("a name occurs twice")
    return lowered


_DECODER = json.JSONDecoder(strict=False, parse_int=float, object_pairs_hook=_as_dict)


def _value_of(name: str, value: Any, reply: str) -> Any:
    """The value of `name` in an object, also one that is alone in a list or an object; else raises ValueError."""
    while not (isinstance(value, dict) and name in value):
        if not isinstance(value, dict | list) or len(value) != 1:
            raise ValueError(f"it does not end with JSON that has {name!r}: {excerpt(reply[-200:], 200)}")
        value = value[0] if isinstance(value, list) else next(iter(value.values()))
    return value[name]


def find_key(name: str) -> "re.Pattern[str]":
    """Finds `name` as a key of JSON, also with escapes in it."""
    letters = "".join(rf"(?:{letter}|\\u00(?:{ord(letter):02x}|{ord(letter.upper()):02x}))" for letter in name)
    return re.compile(rf'"({letters})"(?=\s*:)', re.IGNORECASE)


def contains(answer: str, name: str, verdict: Any, read: Callable[[Any], Any]) -> bool:
    """Whether an answer contains the verdict as JSON, or begins to write one, so that the judge may only quote it."""
    for match in find_key(name).finditer(answer):
        start = answer.index(":", match.end()) + 1
        start += len(answer[start:]) - len(answer[start:].lstrip())
        try:
            if read(_DECODER.raw_decode(answer, start)[0]) == verdict:
                return True
        except (ValueError, RecursionError):
            if answer[start : start + 1] in ("", '"', "[", "{"):
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
    ranking = [_choice(item) for item in value] if isinstance(value, list) else []
    if sorted(number or 0 for number in ranking) != [number + 1 for number in range(size)]:
        raise ValueError(f"the ranking is {excerpt(value)}, and not each of 1 to {size} once")
    return [int(number or 0) for number in ranking]


def read_better(value: Any) -> float:
    """1.0 if the first answer is better, 0.0 if the second is, 0.5 if neither. Raises ValueError for anything else."""
    choice = 0.0 if isinstance(value, str) and value.strip().lower() in _TIES else _choice(value)
    if choice not in (0.0, 1.0, 2.0):
        raise ValueError(f"better is {excerpt(value)}, and not 1, 2 or 0")
    return {0.0: 0.5, 1.0: 1.0, 2.0: 0.0}[choice]


def _as_number(value: Any, of: float) -> float | None:
    """A number, or a text that is one, alone or of `of`; else None."""
    if isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
        return float(match[1].replace(",", ".")) if match[2] is None or float(match[2]) == of else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _choice(value: Any) -> float | None:
    """The number of an answer, also in a text such as Answer 2; else None."""
    numbers = re.findall(r"\d+", value) if isinstance(value, str) else []
    return float(numbers[0]) if len(numbers) == 1 else _as_number(value, 0)
