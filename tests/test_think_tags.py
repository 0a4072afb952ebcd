"""The ids of the thinking tags: from one place, and a tokenizer that disagrees with Qwen3 is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.errors import TokenizerError
from rloo_kit.think_tags import QWEN3_IDS, ThinkTags, bind_think_tags


def tokenizer(**changed: int) -> Any:
    vocabulary = QWEN3_IDS | {f"<{name}>": index for name, index in changed.items()}
    return SimpleNamespace(get_vocab=lambda: vocabulary)


def test_qwen3_has_its_tags_at_its_ids() -> None:
    """151668 decides every reward of the kit."""
    assert bind_think_tags(tokenizer()) == ThinkTags(151667, 151668)


@pytest.mark.parametrize(("tag", "true_id"), [("think", 151667), ("/think", 151668)])
def test_a_qwen3_tokenizer_with_the_tag_elsewhere_is_refused(tag: str, true_id: int) -> None:
    """A tokenizer saved after `add_tokens(["</think>"])` has the tag at the end: no completion would ever close."""
    with pytest.raises(TokenizerError, match=f"<{tag}> at id 151669; Qwen3 has it at {true_id}.*model.name"):
        bind_think_tags(tokenizer(**{tag: 151669}))


def test_any_other_tokenizer_says_itself_where_its_tags_are() -> None:
    """The embedded model's compact vocabulary has them in its 320 rows; a base model has none."""
    compact = SimpleNamespace(get_vocab=lambda: {"<|im_start|>": 257, "<think>": 259, "</think>": 260})
    assert bind_think_tags(compact) == ThinkTags(259, 260)
    assert bind_think_tags(SimpleNamespace(get_vocab=dict)) == ThinkTags(None, None)
