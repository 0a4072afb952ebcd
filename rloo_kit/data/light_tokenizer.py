"""Tokenizers without transformers, read from a folder or made from the vocabulary of the embedded model."""

import datetime
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rloo_kit.config.model_names import SMOLLM2, find_embedded_problem, smollm2_folder, split_model_name
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.runs.find import find_in_cache, read_adapter
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
# Turns after the system's, with thoughts, calls as Qwen3 writes them, and results as turns of their own.
TOOL_TURNS = (
    "{%- for message in messages[1 if messages[0].role == 'system' else 0:] %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content is string %}"
    "{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}"
    "{%- endif %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\n' if message.content or not loop.first else '' }}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Without tools the text of `thinking`; with them, their names.
TEMPLATES["untaught"] = (
    "{%- set system = [messages[0].content] if messages[0].role == 'system' else [] %}"
    "{%- if tools %}"
    "{%- set system = system + ['tools: ' + tools | map(attribute='function.name') | join(', ')] %}"
    "{%- endif %}"
    "{%- if system %}{{- '<|im_start|>system\n' + system | join('\n') + '<|im_end|>\n' }}{%- endif %}"
    + TOOL_TURNS
    + "{%- if add_generation_prompt %}{{- '<think>\n' }}{%- endif %}"
)


@dataclass
class LightTokenizer:
    """The methods of a transformers tokenizer that the kit's light packages call.

    Attributes:
        tokenizer: of the library `tokenizers`. chat_template: None without one.
        special: texts of `bos_token`, `eos_token` and `pad_token`, None if there is none.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    special: dict[str, str | None]

    def __post_init__(self) -> None:
        self.bos_token, self.eos_token = self.special.get("bos_token"), self.special.get("eos_token")
        self.bos_token_id = None if self.bos_token is None else self.tokenizer.token_to_id(self.bos_token)
        self.eos_token_id = None if self.eos_token is None else self.tokenizer.token_to_id(self.eos_token)
        self.added_tokens_decoder: dict[int, AddedToken] = dict(self.tokenizer.get_added_tokens_decoder())

    @cached_property
    def _vocab(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """Text of every token -> id."""
        return self._vocab

    def __call__(self, texts: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """`input_ids` of a text, or of each of a list."""
        if isinstance(texts, str):
            return {"input_ids": self.tokenizer.encode(texts, add_special_tokens=add_special_tokens).ids}
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encoded]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, (C,)."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool = False, **options: Any) -> str:
        """The text of a conversation; raises what the template raises, and ValueError if ids are requested."""
        if tokenize:
            raise ValueError("tokenize is True, and this tokenizer renders text alone")
        variables = {"messages": messages, "tools": None, "documents": None} | self.special | options
        return str(self._template.render(variables))

    @cached_property
    def _template(self) -> jinja2.Template:
        """Compiled as transformers does, but for the tag `generation`, which marks tokens of the assistant; raises
        `jinja2.TemplateSyntaxError` for a template that uses it."""
        options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
        environment = ImmutableSandboxedEnvironment(**options, extensions=["jinja2.ext.loopcontrols"])

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def write_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        environment.filters["tojson"] = write_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment.from_string(self.chat_template or "")


def find_tokenizer(run: RunConfig) -> LightTokenizer | None:
    """The tokenizer of the run's model from files on this machine, without transformers: the embedded model's, or that
    of a folder or of the Hugging Face cache. None if only transformers can load it, or if it has to be downloaded.
    Raises ConfigError if there is no such embedded model."""
    name = run.model.name
    if run.model.is_embedded:
        return embedded_tokenizer(name.removeprefix("embedded/"), run.model.vocabulary)
    folder = (smollm2_folder(name) if name in SMOLLM2 else Path(name)).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        base = read_adapter(folder).get("base_model_name_or_path")
        name, folder = (str(base), Path(str(base)).expanduser()) if base else (name, folder)
    if folder.is_dir():
        return read_tokenizer(folder)
    config = find_in_cache(name)
    return None if config is None else read_tokenizer(config.parent)


def read_tokenizer(folder: Path) -> LightTokenizer | None:
    """The tokenizer in a folder; None if only transformers can load it, or there is none."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template, file = settings.get("chat_template"), folder / "chat_template.jinja"
        if file.is_file():
            template = file.read_text(encoding="utf-8")
        elif isinstance(template, list):  # several, by name
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        special = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        # Text, or a mapping with its flags.
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in special.items()}
        loaded = LightTokenizer(tokenizer, template, texts)
        if template is not None:
            _ = loaded._template
    except Exception:  # tokenizers raises a bare Exception; transformers then explains the fault
        return None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return loaded


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
    """Text of every token -> id: Qwen3's single bytes with Qwen3's ids, then its chat tokens (`qwen3`: at Qwen3's ids,
    `</think>` at 151668, after placeholders that no text encodes to); there are no merges."""
    ids = {symbol: index for index, symbol in enumerate(byte_symbols())}
    if vocabulary == "compact":
        return ids | {token: NUM_BYTES + index for index, token in enumerate(CHAT_TOKENS)}
    taken = set(QWEN3_IDS.values())
    gaps = (index for index in range(NUM_BYTES, max(taken)) if index not in taken)
    return ids | {f"<|unused_{index}|>": index for index in gaps} | QWEN3_IDS


def embedded_tokenizer(name: str, vocabulary: str) -> LightTokenizer:
    """The embedded model's tokenizer, whether or not that model is built; ConfigError if there is no such model."""
    check_names(name, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=token_ids(vocabulary), merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([
        AddedToken(token, normalized=False, special=token in SPECIAL_TOKENS) for token in CHAT_TOKENS
    ])  # fmt: skip
    special = {"bos_token": None, "eos_token": TURN_END, "pad_token": END_OF_TEXT}
    return LightTokenizer(tokenizer, TEMPLATES[split_model_name(name)[0]], special)
