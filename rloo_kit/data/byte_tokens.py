"""The vocabulary and the chat templates of the embedded model's tokenizer: Qwen3's single bytes, with Qwen3's ids, and
its chat tokens; no merges.

The vocabulary `compact` puts the chat tokens right after the bytes; `qwen3` puts them at Qwen3's ids (`</think>` at
151668), with placeholders in between that no text encodes to.
"""

from rloo_kit.config.model_names import find_embedded_problem
from rloo_kit.errors import ConfigError
from rloo_kit.think_tags import QWEN3_IDS, THINK_END, THINK_START

NUM_BYTES = 256
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, THINK_START, THINK_END)
SPECIAL_TOKENS = CHAT_TOKENS[:3]  # the thinking tags are added tokens, but not special, as in Qwen3
ROWS = {"compact": 320, "qwen3": 151936}  # rows of the embedding: a multiple of 64, for the kernels

_TURNS = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
)
TEMPLATES = {
    "thinking": _TURNS + "{{- '<think>\\n' }}{%- endif %}",  # the completion has only </think>, as with Thinking-2507
    "instruct": _TURNS + "{%- endif %}",
}
TEMPLATES["untaught"] = TEMPLATES["thinking"]


def byte_symbols() -> list[str]:
    """The 256 printable characters that stand for bytes in a byte-level BPE, sorted; the index is the id in Qwen3."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(point) for point in printable] + [chr(256 + shift) for shift in range(NUM_BYTES - len(printable))]


def check_names(name: str, vocabulary: str) -> None:
    """Raises ConfigError if there is no such embedded model (`thinking`, `thinking@sorting`) or vocabulary."""
    if problem := find_embedded_problem(name):
        raise ConfigError(problem)
    if vocabulary not in ROWS:
        raise ConfigError(f"model.vocabulary is '{vocabulary}'; the embedded model has {' and '.join(ROWS)}")


def token_ids(vocabulary: str) -> dict[str, int]:
    """Text of every token -> id: the bytes, then the chat tokens (`qwen3`: at Qwen3's ids, after placeholders)."""
    ids = {symbol: index for index, symbol in enumerate(byte_symbols())}
    if vocabulary == "compact":
        return ids | {token: NUM_BYTES + index for index, token in enumerate(CHAT_TOKENS)}
    taken = set(QWEN3_IDS.values())
    gaps = (index for index in range(NUM_BYTES, max(taken)) if index not in taken)
    return ids | {f"<|unused_{index}|>": index for index in gaps} | QWEN3_IDS
