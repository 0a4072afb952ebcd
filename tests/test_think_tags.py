"""The ids of the thinking tags: from one place, and a tokenizer that disagrees with Qwen3 is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.errors import TokenizerError
from rloo_kit.think_tags import QWEN3_IDS, ThinkTags, answer_offset, bind_think_tags, span_offsets


def tokenizer(**changed: int) -> Any:
    vocabulary = QWEN3_IDS | {"<tool_response>": 151665} | {f"<{name}>": index for name, index in changed.items()}
    return SimpleNamespace(get_vocab=lambda: vocabulary)


@pytest.mark.parametrize(("tag", "true_id"), [("think", 151667), ("/think", 151668)])
def test_a_qwen3_tokenizer_with_the_tag_elsewhere_is_refused(tag: str, true_id: int) -> None:
    """A tokenizer saved after `add_tokens(["</think>"])` has the tag at the end: no completion would ever close."""
    with pytest.raises(TokenizerError, match=f"<{tag}> at id 151669; Qwen3 has it at {true_id}.*model.name"):
        bind_think_tags(tokenizer(**{tag: 151669}))


def test_each_tokenizer_says_itself_where_its_tags_are() -> None:
    """151668 decides every reward of Qwen3; the embedded model's compact vocabulary has others, a base model none."""
    assert bind_think_tags(tokenizer()) == ThinkTags(151667, 151668)
    compact = SimpleNamespace(get_vocab=lambda: {"<|im_start|>": 257, "<think>": 259, "</think>": 260})
    assert bind_think_tags(compact) == ThinkTags(259, 260)
    assert bind_think_tags(SimpleNamespace(get_vocab=dict)) == ThinkTags(None, None)
    # Qwen2.5 has the chat tokens at the same ids; tags that somebody added come next.
    qwen2 = QWEN3_IDS | {"<think>": 151665, "</think>": 151666}
    assert bind_think_tags(SimpleNamespace(get_vocab=lambda: qwen2)) == ThinkTags(151665, 151666)


class Letters:
    """A tokenizer whose ids below 128 are characters; 260 is `</think>`."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("</think>" if one == 260 else chr(one) for one in ids)


def ids_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("ids", "answer"),
    [
        ([*ids_of("ab"), 260, *ids_of("42")], "42"),
        ([*ids_of("a"), 260, *ids_of("b"), 260, *ids_of("42")], "42"),  # the last one, as answer_reward does
        ([*ids_of("a </think> b"), 260, *ids_of("42")], "42"),  # spelled in ordinary tokens before
        ([*ids_of("a"), 260, *ids_of("</think> 42")], "</think> 42"),  # and behind: the id decides
        (ids_of("a </think> b"), None),
    ],
)
def test_the_answer_begins_behind_the_last_tag_by_its_id(ids: list[int], answer: str | None) -> None:
    """Readers of rollouts have no tokenizer, and the text may spell the tag."""
    text = Letters().decode(ids, skip_special_tokens=True)
    start = answer_offset(text, ids, Letters(), ThinkTags(259, 260))
    assert (None if start is None else text[start:]) == answer
    assert answer_offset(text, ids, Letters(), ThinkTags(None, None)) is None


def test_forced_tokens_are_found_in_the_text() -> None:
    ids = [*ids_of("ab. Stop."), 260, *ids_of("42")]
    start, end = span_offsets((3, 10), ids, Letters())
    assert Letters().decode(ids, skip_special_tokens=True)[start:end] == " Stop.</think>"
    assert span_offsets((0, 1), [260], Letters()) == [0, 8]
