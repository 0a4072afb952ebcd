"""From a prompt to the text that the model reads: the chat template, applied once, for the model's family.

Families: `thinking` (the model always thinks; most templates end the prompt with an open `<think>`), `hybrid` (the
template takes `enable_thinking`), `instruct` (neither), `plain` (no template). Sources: the templates of Qwen3,
Qwen3.5, DeepSeek-R1's distillations, SmolLM3 and DeepSeek-V3.1.
"""

import ast
import json
import re
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rloo_kit.config.model_names import always_thinks
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError, DataError, excerpt
from rloo_kit.think_tags import THINK_END, THINK_START, opens_thinking

FAMILIES = ("thinking", "hybrid", "instruct", "plain")
ROLES = ("system", "user", "assistant", "tool")
THINK_TAGS = (THINK_START, THINK_END)
# An assistant turn with thinking: at the start, closed once, opened there or by the template.
_THOUGHT = re.compile(rf"\A\s*(?:{THINK_START})?((?!</?think>).)*{THINK_END}", re.DOTALL)
# What Unicode displays as nothing (default ignorable), and control characters other than white space.
_INVISIBLE = re.compile(
    "[\0-\b\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
_PUNCTUATION = re.compile(r"(?<![?!.。؟])((?<=[\d)]|\b[a-z])!+(?!!))?[?!.。؟]*(?=[\s<\[]|$)")  # at an end; 5! stays
# A text that is a whole conversation, as JSON or as Python prints it.
_TALK = re.compile(
    r"""\[?\s*\{(?=.*["'](content|value)["']\s*:)"""
    r""".*["'](role|from)["']\s*:\s*["'](system|user|human|assistant|gpt|tool)["'].*\}\s*\]?""",
    re.DOTALL,
)
_PROBE = [{"role": "user", "content": "1+1?"}]

Message = dict[str, Any]


def detect_family(tokenizer: Any, name: str = "") -> str:
    """One of `FAMILIES`, by what the tokenizer's chat template does with a short question; raises DataError if it
    fails. The name (or folder) decides only if the template neither opens nor closes the thinking in the prompt."""
    if not getattr(tokenizer, "chat_template", None):
        return "plain"
    if _apply(tokenizer, _PROBE, enable_thinking=False) != _apply(tokenizer, _PROBE, enable_thinking=True):
        return "hybrid"
    prompt = _apply(tokenizer, _PROBE)
    return "thinking" if opens_thinking(prompt) or (always_thinks(name) and not _closes(prompt)) else "instruct"


def resolve_family(tokenizer: Any, name: str, family: str = "auto", enable_thinking: bool | None = None) -> str:
    """The family to render prompts for: `family`, or the template's own for "auto"; `plain` is always allowed. Raises
    ConfigError if `family` or `enable_thinking` contradicts the template, or if the template thinks only when asked to
    (Qwen3.5-0.8B) and `enable_thinking` is None."""
    default = detect_family(tokenizer, name)
    wanted = default if family == "auto" else family
    if wanted not in FAMILIES:
        raise ConfigError(f"model.family is {family!r}; it must be auto or one of {', '.join(FAMILIES)}")
    prompt = _apply(tokenizer, _PROBE) if tokenizer.chat_template else ""
    open_question = {wanted, default} == {"thinking", "instruct"} and not opens_thinking(prompt) and not _closes(prompt)
    if wanted not in (default, "plain") and not open_question:
        does = {
            "thinking": f"the tokenizer's chat template opens {THINK_START} in the prompt",
            "hybrid": "the tokenizer's chat template takes enable_thinking",
            "instruct": f"the tokenizer's chat template neither opens {THINK_START} nor takes enable_thinking",
            "plain": "the tokenizer has no chat template",
        }[default]
        raise ConfigError(
            f"model.family is {wanted!r}, but {does} (model.name: {name}). Set "
            f"model.family: {default} or auto, or load the tokenizer of the checkpoint."
        )
    if wanted != "hybrid" and enable_thinking is not None and enable_thinking != (wanted == "thinking"):
        raise ConfigError(
            f"model.enable_thinking is {str(enable_thinking).lower()}, but this model's family is {wanted!r} and "
            "cannot be switched: its template does not read enable_thinking. Remove model.enable_thinking."
        )
    if wanted == "hybrid" and enable_thinking is None and prompt == _apply(tokenizer, _PROBE, enable_thinking=False):
        raise ConfigError(
            f"model.enable_thinking is not set, and the chat template of {name} thinks only when asked to: its prompt "
            f"ends in {prompt[-24:]!r}. Set model.enable_thinking: true to train it with thinking, false without"
        )
    return wanted


def thinks(family: str, enable_thinking: bool | None = None) -> bool:
    """Whether a completion starts with thinking that it has to close."""
    return family == "thinking" or (family == "hybrid" and enable_thinking is not False)


def family_of(run: RunConfig, tokenizer: Any) -> tuple[str, bool]:
    """The family of a run's model (`resolve_family`), and whether it thinks."""
    family = resolve_family(tokenizer, run.model.name, run.model.family, run.model.enable_thinking)
    return family, thinks(family, run.model.enable_thinking)


def template_options(run: RunConfig) -> dict[str, bool]:
    """The options with which a run's chat template is rendered."""
    thinking = run.model.enable_thinking
    return {} if thinking is None else {"enable_thinking": thinking}


def check_budget(run: RunConfig, family: str) -> None:
    """Refuse a thinking budget for a model that does not think: `</think>` would be forced into its answers."""
    if run.rloo.thinking_budget is not None and not thinks(family, run.model.enable_thinking):
        raise ConfigError(
            f"rloo.thinking_budget is {run.rloo.thinking_budget}, but this model does not think (family {family}, "
            f"model.enable_thinking {run.model.enable_thinking}): set rloo.thinking_budget=null"
        )


def parse_conversation(prompt: Any) -> Any:
    """The messages of a conversation that is stored as text, JSON or Python's; anything else as it is."""
    if isinstance(prompt, str) and _TALK.fullmatch(prompt.strip()):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                return read(prompt.strip())
    return prompt


def render_prompt(
    tokenizer: Any,
    prompt: str | list[Message],
    family: str,
    enable_thinking: bool | None = None,
    system_prompt: str | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The text that the model reads for one prompt, including the generation prompt: `tokenizer(text)`, with its
    defaults, turns it into the template's own ids, with at most one BOS.

    Args:
        prompt: a text, or messages `{"role", "content"}`, the last one not the assistant's.
        family: one of `FAMILIES`. enable_thinking: for `hybrid` only; None for the template's default.
        system_prompt: prepended unless the prompt has a system message. tools: schemas of what the model may call.

    Raises DataError if the prompt is empty or of another type, contains the tokenizer's control tokens (a template was
    applied already) or thinking tags outside an assistant's turn, cannot be rendered by the template, or if one of its
    messages switches the thinking on or off against the run.
    """
    if isinstance(prompt, str) and not prompt.strip():
        raise DataError("the prompt is empty")
    if family == "plain":
        if system_prompt:
            raise ConfigError(
                "data.system_prompt is set, but model.family is 'plain', which applies no chat template. Write it into "
                "the prompts, or use a model with a chat template."
            )
        if not isinstance(prompt, str):
            raise DataError(
                f"the prompt is a {type(prompt).__name__}, but model.family is 'plain', which applies no chat "
                "template: give the prompt as text, without images, or use a model with a chat template"
            )
        return _without_bos(tokenizer, refuse_surrogates(prompt, "the prompt"))
    messages = as_messages(prompt, system_prompt)
    if not hasattr(tokenizer, "vision") and any(isinstance(message["content"], list) for message in messages):
        raise DataError(
            "the prompt has an image, and the model is loaded without a vision tower: set model.vision=true (Qwen3.5), "
            "name a vision model in model.name (Qwen3-VL), or remove the images"
        )
    _refuse_control_tokens(tokenizer, messages)
    options = {} if family != "hybrid" or enable_thinking is None else {"enable_thinking": enable_thinking}
    text = _apply(tokenizer, messages, **options, **({"tools": tools} if tools else {}))
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    wanted, rendered = (re.sub(r"\s|/(no_)?think\b", "", part) for part in (system, text))  # a switch may be taken out
    if wanted not in rendered:
        problem = "the tokenizer's chat template leaves the system message out"
        raise DataError(f"{problem}: write it into the prompts (and set data.system_prompt: null)")
    if thinks(family, enable_thinking):
        switched = "answer at once" if _closes(text) else ""
    else:  # by a template that closes the thinking of other prompts
        is_open = bool(options) and not _closes(text) and _closes(_apply(tokenizer, _PROBE, **options))
        switched = "think" if is_open else ""
    if switched:
        whole = f", or set model.enable_thinking: {str(switched == 'think').lower()} for the whole run"
        raise DataError(
            f"the rendered prompt ends in {text[-24:]!r}: the model would {switched} here, against the rest of the run "
            f"(family {family}, model.enable_thinking {enable_thinking}). A system prompt with /think or /no_think "
            f"does that: remove it{whole if family == 'hybrid' else ''}"
        )
    return _without_bos(tokenizer, refuse_surrogates(text, "the rendered prompt"))


def prompt_identity(text: str) -> str:
    """What distinguishes rendered prompts for a split: the words, without case, Unicode form, invisible characters,
    white space and the punctuation that ends a sentence."""
    text = re.sub("[²³¹\u2070-\u207f]+", r"^\g<0>", _INVISIBLE.sub("", text))  # 2³ is 2^3, not 23
    if not text.isascii():  # as Unicode's caseless matching does
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    text = " ".join(_PUNCTUATION.sub(r"\1", text.casefold()).split())
    return re.sub(r" (?=[<\[])|(?<=[>\]]) ", "", text)  # next to a template's tokens


def _apply(tokenizer: Any, messages: list[Message], **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    except Exception as error:  # a template is a program that may raise anything
        problem = f"the tokenizer's chat template cannot render roles {[message['role'] for message in messages]}"
        raise DataError(f"{problem}: {type(error).__name__}: {error}") from error


def _closes(prompt: str) -> bool:
    """Whether a rendered prompt ends behind a thought, so that the completion is an answer."""
    return prompt.rstrip().endswith(THINK_END)


def as_messages(prompt: Any, system_prompt: str | None = None) -> list[Message]:
    """A prompt as messages, the system prompt first; raises DataError as `render_prompt`."""
    if isinstance(prompt, str):
        if _TALK.fullmatch(prompt.strip()):
            problem = "the prompt is a conversation as text that is neither JSON nor Python"
            raise DataError(f"{problem}; write that column with json.dumps")
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(
            f"the prompt is {'an empty list' if prompt == [] else f'of type {type(prompt).__name__}'}; it must be "
            'text or a list of messages like {"role": "user", "content": "..."}'
        )
    messages = []
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            wanted = '{"role": ..., "content": ...}'
            raise DataError(f"message {number} of the prompt must be {wanted}, found {excerpt(message)}")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(f"message {number} has the role {excerpt(role)}; it must be one of {', '.join(ROLES)}")
        has_images = isinstance(content, list) and any(
            isinstance(part, dict) and part.get("type") == "image" for part in content
        )
        if not isinstance(content, str) and not has_images:
            problem = f"a content of type {type(content).__name__}"
            raise DataError(f"message {number} of the prompt has {problem}; it must be text")
        if not has_images and not content.strip():
            raise DataError(f"message {number} of the prompt is empty")
        messages.append({key: value for key, value in message.items() if value is not None})  # Arrow fills absent keys
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "the conversation ends with the assistant's own message; the model must write that one. Remove it "
            "(and keep it in the answer column if it is the gold answer)"
        )
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def refuse_surrogates(text: str, what: str) -> str:
    """The text; refuses half of a UTF-16 pair, which JSON can contain (`"\\ud83d"`) and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        raise DataError(f"{what} contains {half} at character {error.start}, half of a surrogate pair") from error
    return text


def _refuse_control_tokens(tokenizer: Any, messages: list[Message]) -> None:
    """A control token in a message means a template applied twice, or a text that ends its own turn. A thinking tag
    becomes the token that rewards and budgets go by, so a user's text could close a thought that was never opened."""
    added = [(str(token), token.special) for token in tokenizer.added_tokens_decoder.values()]
    special = [text for text, is_special in added if is_special and text not in THINK_TAGS]
    tags = [text for text, _ in added if text in THINK_TAGS]
    for message in messages:
        role = message["role"]
        for key, text in _texts_of(message):
            where = f"the {role} message" + ("" if key == "content" else f"'s {key}")
            for token in special:
                if token in text:
                    problem = f"{where} contains the tokenizer's control token {token}"
                    fix = "Give the bare text or the messages, or set model.family: plain for rendered prompts"
                    raise DataError(f"{problem}: a chat template seems to be applied already. {fix}")
            rest = _THOUGHT.sub("", text) if role == "assistant" and key == "content" else text
            for tag in tags:
                if tag in rest:
                    raise DataError(
                        f"{where} contains {tag}, which the tokenizer reads as the token that opens or closes the "
                        "model's own thinking. Remove it, or rewrite it (think tag); only an assistant's turn "
                        f"may contain thinking, before its answer: {THINK_START}...{THINK_END}answer"
                    )


def _texts_of(message: Message) -> Iterator[tuple[str, str]]:
    """Every text of a message that a template may render, with the key of the message that it is in."""
    for key, value in message.items():
        left, seen = [value], set()
        while left:
            item = left.pop()
            if isinstance(item, str):
                yield str(key), item
            elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
                seen.add(id(item))
                left.extend([*item.keys(), *item.values()] if isinstance(item, dict) else item)


def _without_bos(tokenizer: Any, text: str) -> str:
    """`text` without its leading BOS, if the tokenizer would add another one."""
    bos = tokenizer.bos_token
    if not bos or not text.startswith(bos):
        return text
    adds_its_own = tokenizer(bos)["input_ids"][:2] == [tokenizer.bos_token_id] * 2
    return text[len(bos) :] if adds_its_own else text
