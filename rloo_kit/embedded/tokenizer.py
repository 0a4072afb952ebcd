"""The embedded model's tokenizer; vocabulary and templates are in `data.light_tokenizer`."""

from typing import Any

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from rloo_kit.config.embedded import split_model_name
from rloo_kit.data.light_tokenizer import (
    CHAT_TOKENS,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TEMPLATES,
    TURN_END,
    check_names,
    token_ids,
)


def build_tokenizer(name: str = "thinking", vocabulary: str = "compact") -> Any:
    """A `Qwen2Tokenizer` for the embedded model `name` (thinking, instruct, thinking@sorting) and `vocabulary` (compact
    or qwen3); raises ConfigError for any other.

    `<think>` and `</think>` are added tokens but not special, as in Qwen3: `skip_special_tokens=True` keeps them.
    """
    check_names(name, vocabulary)
    tokenizer = Qwen2Tokenizer(
        vocab=token_ids(vocabulary),
        merges=[],
        unk_token=None,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    for special in (True, False):
        chosen = [token for token in CHAT_TOKENS if (token in SPECIAL_TOKENS) is special]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in chosen])
    tokenizer.chat_template = TEMPLATES[split_model_name(name)[0]]
    return tokenizer
