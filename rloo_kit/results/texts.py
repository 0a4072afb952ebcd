"""Texts of completions for a report: split into thinking and answer, cut to fit the page, without chat markup."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rloo_kit.results.pages import show_text
from rloo_kit.system.console import plain_prompt
from rloo_kit.think_tags import THINK_END, THINK_START, opens_thinking

MISSING = object()
Segments = list[list[Any]]  # texts, each with whether the budget forced it


def plain(prompt: Any) -> str:
    """A prompt without chat markup, from a rendered text or from a list of messages in TRL's format."""
    if isinstance(prompt, list):
        return show_text(
            "\n".join(f"{one.get('role')}: {one.get('content')}" for one in prompt if isinstance(one, dict))
        )
    return show_text(plain_prompt(str(prompt)))


def split_row(row: Mapping[str, Any], end_id: int | None) -> tuple[Segments, str, bool]:
    """The thinking in segments, the answer, and whether the two could be separated, for a rollout's row.

    Args:
        end_id: the id of `</think>`, for rows of older runs without `answer_start`: the text is split at its last tag,
            if it has as many tags as the ids.
    """
    text = text_of(row)
    start = row.get("answer_start", MISSING)
    if start is MISSING:
        closings = row["completion_ids"].count(end_id) if end_id is not None else 0
        if text.count(THINK_END) != closings:
            return [], text, False
        start = text.rindex(THINK_END) + len(THINK_END) if closings else None
    if not isinstance(start, int):
        opened = opens_thinking(str(row["prompt"])) or text.lstrip().startswith(THINK_START)
        return ([[_bare(text), False]], "", True) if opened else ([], text.strip(), True)
    thinking, answer = text[:start].removesuffix(THINK_END), text[start:].strip()
    span = row.get("forced_chars")
    if not (isinstance(span, list) and len(span) == 2 and all(isinstance(end, int) for end in span)):
        return [[_bare(thinking), False]], answer, True
    first, last = (min(max(end, 0), start) for end in span)
    parts = [[_bare(text[:first]), False], [text[first:last].strip(), True], [text[last:start].strip(), False]]
    return [part for part in parts if part[0]], answer, True


def find_end_id(row: Mapping[str, Any]) -> int | None:
    """The id of `</think>`, read from a row of an older run: the id after the thinking of a closed completion."""
    place, ids = row.get("thinking_tokens"), row["completion_ids"]
    return ids[place] if row.get("closed") and isinstance(place, int) and 0 <= place < len(ids) else None


def text_of(row: Mapping[str, Any]) -> str:
    """The completion's text; TRL stores it as a message if the prompt is one."""
    text = row.get("completion")
    if isinstance(text, list):
        text = text[-1].get("content") if text and isinstance(text[-1], dict) else ""
    return text if isinstance(text, str) else ""


def longest_that_fits(lengths: Iterable[int], room: int) -> int:
    """The largest common length limit under which all texts fit into `room` characters.

    >>> longest_that_fits([10, 20, 300], room=90), longest_that_fits([10, 20], room=90)
    (60, 90)
    """
    rest, ordered = room, sorted(lengths)
    for place, length in enumerate(ordered):
        if length * (len(ordered) - place) > rest:
            return rest // (len(ordered) - place)
        rest -= length
    return room


def cut_middle(text: str, limit: int) -> str:
    """A long text without its middle: at most `limit` characters, plus a note in place of the rest.

    >>> cut_middle("abcdefgh", 4)
    'ab\\n[... 4 characters left out ...]\\ngh'
    """
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]}\n[... {len(text) - limit:,} characters left out ...]\n{text[len(text) - tail :]}"


def cut_parts(parts: Sequence[str], limit: int) -> list[str]:
    """Several texts of one completion, cut to `limit` characters in all; the last one, the answer, is cut last."""
    kept: list[str] = []
    for part in reversed(parts):
        kept.append(cut_middle(part, limit) if limit > 0 else ("[...]" if part else ""))
        limit -= len(part)
    return kept[::-1]


def _bare(thinking: str) -> str:
    return thinking.strip().removeprefix(THINK_START).strip()
