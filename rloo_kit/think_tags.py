"""The token IDs of the thinking tags, bound here and nowhere else.

A tokenizer with Qwen3's vocabulary must have `</think>` at 151668, by which every reward decides; any other (the
embedded model's compact one) has its own. Source: `tokenizer_config.json` of the Qwen3 checkpoints.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rloo_kit.errors import TokenizerError

THINK_START = "<think>"
THINK_END = "</think>"
QWEN3_IDS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    THINK_START: 151667,
    THINK_END: 151668,
}


@dataclass(frozen=True)
class ThinkTags:
    """IDs of the thinking tags; None where the tokenizer has no such token (a model that never thinks)."""

    start_id: int | None
    end_id: int | None


def bind_think_tags(tokenizer: Any) -> ThinkTags:
    """The IDs of `<think>` and `</think>` in `tokenizer` (anything with `get_vocab()`). Raises TokenizerError if it has
    Qwen3's chat tokens at Qwen3's IDs, but its thinking tags elsewhere."""
    vocab = tokenizer.get_vocab()
    tags = ThinkTags(vocab.get(THINK_START), vocab.get(THINK_END))
    if vocab.get("<|im_end|>") == QWEN3_IDS["<|im_end|>"] and "<tool_response>" in vocab:  # not in Qwen2.5's
        for token, found in ((THINK_START, tags.start_id), (THINK_END, tags.end_id)):
            if found is not None and found != QWEN3_IDS[token]:
                raise TokenizerError(
                    f"the tokenizer has Qwen3's chat tokens, but {token} at id {found}; Qwen3 has it at "
                    f"{QWEN3_IDS[token]}. Load the tokenizer of the checkpoint itself (model.name), unedited."
                )
    return tags


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a thought, so that the completion begins there and holds `</think>` alone.

    >>> opens_thinking("<|im_start|>assistant <think> "), opens_thinking("<|im_start|>assistant <think> </think> ")
    (True, False)
    """
    return prompt.rstrip().endswith(THINK_START)


def split_thinking(ids: list[int], tokenizer: Any, tags: ThinkTags, opened: bool) -> tuple[str, str]:
    """Thinking and answer of a completion, (C,), as text, split at the last `</think>` by ID, as `answer_reward` does.

    Without `</think>` it is all thinking if it holds `<think>` or the prompt `opened` the thinking (`opens_thinking`),
    else all answer.
    """
    if tags.end_id is not None and tags.end_id in ids:
        end = _after_last(tags.end_id, ids)
        thinking, answer = ids[: end - 1], ids[end:]
    elif opened or (tags.start_id is not None and tags.start_id in ids):
        thinking, answer = ids, []
    else:
        thinking, answer = [], ids
    if tags.start_id in thinking[:1]:
        thinking = thinking[1:]
    return _decode(thinking, tokenizer).strip(), _decode(answer, tokenizer).strip()


def count_thinking(turns: list[list[int]], end_id: int | None) -> int:
    """Tokens of the thinking of a completion's turns: of each those before its first `</think>`, or all of a turn that
    never closes, so that truncation does not make thoughts look short."""
    return sum(ids.index(end_id) if end_id in ids else len(ids) for ids in turns)


def count_closing(ids: list[int], forced: Iterable[tuple[int, int]], end_id: int | None) -> int:
    """Forced tokens before `</think>`: a closing sentence, which `count_thinking` counts but the model did not think.

    >>> count_closing([5, 5, 8, 8, 9, 4], [(2, 5)], end_id=9)
    2
    """
    spans = [ids[start:end] for start, end in forced]
    return sum(span.index(end_id) if end_id in span else len(span) for span in spans)


def answer_offset(text: str, ids: list[int], tokenizer: Any, tags: ThinkTags) -> int | None:
    """Where the answer begins in a completion's text (`ids`, (C,), decoded without special tokens), in characters:
    behind the last `</think>` by ID; None without one."""
    if tags.end_id is None or tags.end_id not in ids:
        return None
    count = ids.count(tags.end_id)
    if text.count(THINK_END) == count:  # every tag of the text is one by ID, so that nothing has to be decoded
        return text.rindex(THINK_END) + len(THINK_END)
    return min(len(_decode(ids[: _after_last(tags.end_id, ids)], tokenizer)), len(text))


def span_offsets(span: tuple[int, int], ids: list[int], tokenizer: Any) -> list[int]:
    """Start and end in a completion's text, in characters, of `span`: (start, end) in its tokens `ids`, (C,)."""
    start = len(_decode(ids[: span[0]], tokenizer))
    return [start, start + len(_decode(ids[span[0] : span[1]], tokenizer))]


def _after_last(end_id: int, ids: list[int]) -> int:
    return len(ids) - ids[::-1].index(end_id)


def _decode(ids: list[int], tokenizer: Any) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
