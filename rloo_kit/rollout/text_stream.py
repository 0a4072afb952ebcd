"""The text of a completion while it grows, split into thinking and answer by token ids."""

from collections.abc import Callable
from typing import Any

from rloo_kit.think_tags import ThinkTags

MOST_HELD = 64  # tokens held back while the text ends in an incomplete character, which has up to four bytes
THINKING, ANSWER = "thinking", "answer"


class TextStream:
    """Calls `on_text(part, text)` as soon as a text is final; `part` is "thinking" or "answer".

    The joined texts of a part equal what `split_thinking` gives for the whole completion, unless the completion closes
    its thinking twice (here the part changes at the first `</think>`) or has `MOST_HELD` tokens in a row that form no
    character.

    Args:
        opened: whether the prompt has opened the thinking.
    """

    def __init__(self, tokenizer: Any, tags: ThinkTags, opened: bool, on_text: Callable[[str, str], None]) -> None:
        self._tokenizer, self._tags, self._on_text = tokenizer, tags, on_text
        self._part, self._is_closed = THINKING if opened else ANSWER, False
        self._taken = 0  # ids of the completion
        self._begin_part()

    def feed(self, ids: list[int]) -> None:
        """Take the completion's ids so far."""
        for place in range(self._taken, len(ids)):
            token = ids[place]
            ends, starts = token == self._tags.end_id, token == self._tags.start_id
            if not self._is_closed and (ends or (starts and (place == 0 or self._part == ANSWER))):
                self._is_closed = ends
                self.close()
                self._part = ANSWER if ends else THINKING
                self._begin_part()
            else:
                self._ids.append(token)
                self._decode(is_last=False)
        self._taken = max(self._taken, len(ids))

    def close(self) -> None:
        """Emit what was held back: bytes that never became a character."""
        self._decode(is_last=True)

    def _begin_part(self) -> None:
        self._ids: list[int] = []  # of the part; decoded with context, because a tokenizer drops leading blanks
        self._known = 0  # the first of them, already emitted
        self._shown = False
        self._blanks = ""  # trailing whitespace, emitted once something follows

    def _decode(self, is_last: bool) -> None:
        before, text = (
            str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
            for ids in (self._ids[: self._known], self._ids)
        )
        is_whole = not text.endswith("\ufffd") or len(self._ids) - self._known >= MOST_HELD
        if not is_last and not is_whole:
            return
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        text = self._blanks + text[len(before) :]
        text = text if self._shown else text.lstrip()
        rest = text.rstrip()
        self._blanks = text[len(rest) :]
        if rest:
            self._shown = True
            self._on_text(self._part, rest)
