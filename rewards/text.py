"""How a reward reads a completion: its token ids, its text, and where the thinking ends.

The ids decide whether and where the thinking was closed; text is read only for what ids cannot show, and is split at
the tag's spelling. A model may also spell the tag in ordinary tokens; then `decode` finds the real one, and without it
the first (or last) spelling counts.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any


class AssumedId(int):
    """A token id that nobody has set: a default, which the first batches may contradict."""


THINK_END_ID = AssumedId(151668)  # of Qwen3; Qwen3.5 has 248069, DeepSeek-R1-Distill-Qwen 151649
THINK_END = "</think>"
EOS_TOKEN_IDS = (151645, 151643)

Decode = Callable[[list[int]], str]


def refuse_assumed(name: str, end_id: int, completions: Iterable[Any], completion_ids: Iterable[Any]) -> None:
    """Raise ValueError if `end_id` is a default of the reward `name` that no completion has, although the texts of two
    or more have the tag; None is a row without a completion."""
    if not isinstance(end_id, AssumedId):
        return
    closed = sum(text is not None and THINK_END in as_text(text) for text in completions)
    if closed > 1 and not any(ids is not None and end_id in as_ids(ids) for ids in completion_ids):
        raise ValueError(
            f"{name}: think_end_id is {end_id}, the default and Qwen3's id of {THINK_END}, but {closed} completions "
            f"have {THINK_END} in their text and none has that id. Bind the tokenizer's own: "
            f"reward.with_(think_end_id=tokenizer.convert_tokens_to_ids('{THINK_END}')), if it has such a token"
        )


def as_ids(ids: Iterable[Any]) -> list[int]:
    """The ids of one completion as plain integers, from a list, a tuple, an array or a tensor.

    >>> as_ids((1, 2, 151668))
    [1, 2, 151668]
    """
    to_list = getattr(ids, "tolist", None)
    return [int(token) for token in (to_list() if to_list is not None else ids)]


def cut_turns(ids: list[int], mask: Iterable[Any] | None) -> list[list[int]]:
    """The model's turns: the maximal runs of ids whose mask is 1; without a mask all ids are one turn.

    >>> cut_turns([5, 6, 90, 91, 7], [1, 1, 0, 0, 1]), cut_turns([5, 6], None)
    ([[5, 6], [7]], [[5, 6]])
    """
    if mask is None:
        return [ids]
    runs = groupby(zip(ids, as_ids(mask), strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in run] for own, run in runs if own] or [[]]


def count_thinking(turns: list[list[int]], think_end_id: int) -> int | None:
    """Tokens before the first closing tag, summed over the turns; None if one of them never closes."""
    closed = all(think_end_id in turn for turn in turns)
    return sum(turn.index(think_end_id) for turn in turns) if closed else None


def as_text(completion: Any, *, last: bool = False) -> str:
    """The text of one completion: a string, or the assistant's messages of a conversational one (or only the `last` of
    them) joined by newlines.

    A message whose thinking a parser has moved to `reasoning_content` is joined again, tag included, so that
    both formats give the same text.

    >>> as_text([{"role": "assistant", "content": "so 4.</think>4"}])
    'so 4.</think>4'
    >>> as_text([{"role": "assistant", "reasoning_content": "so 4.", "content": "4"}])
    'so 4.</think>4'

    Raises:
        ValueError: neither a string nor a list of messages.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, dict):
        completion = [completion]
    if not isinstance(completion, (list, tuple)) or not all(isinstance(message, dict) for message in completion):
        raise ValueError(
            "a completion is a string or a list of messages with 'role' and 'content'; "
            f"found {type(completion).__name__}"
        )
    messages = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return "\n".join(_message_text(message) for message in messages[-1 if last else 0 :])


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):  # a list of parts, as multimodal templates write it
        content = "".join(part.get("text", "") for part in content)
    reasoning = message.get("reasoning_content")
    return f"{reasoning}{THINK_END}{content}" if reasoning else content


def split_at_tag(
    text: str, ids: list[int], think_end_id: int, *, last: bool, decode: Decode | None = None
) -> tuple[str, str] | None:
    """The text before and after the first (or `last`) closing tag; None if the ids contain no closing tag.

    A text without the spelling (the tag was dropped when decoding) cannot be split: it is returned as both parts,
    unless `decode` is given, which makes the parts from the ids.

    >>> split_at_tag("2+2?</think>4", [5, 151668, 6], 151668, last=False)
    ('2+2?', '4')
    """
    if think_end_id not in ids:
        return None
    spelled = text.count(THINK_END)
    if decode is not None and spelled != ids.count(think_end_id):
        cut = len(ids) - 1 - ids[::-1].index(think_end_id) if last else ids.index(think_end_id)
        return decode(ids[:cut]), decode(ids[cut + 1 :])
    if not spelled:
        return text, text
    before, _, after = text.rpartition(THINK_END) if last else text.partition(THINK_END)
    return before, after


def answer_text(
    text: str, ids: list[int], think_end_id: int, *, thinking: bool, decode: Decode | None = None
) -> str | None:
    """The model's answer, stripped: the text after the last closing tag; None if the thinking never closed.

    With `thinking` False (a model that never thinks) the whole completion is the answer.
    """
    if not thinking:
        return text.strip()
    parts = split_at_tag(text, ids, think_end_id, last=True, decode=decode)
    return None if parts is None else parts[1].strip()
