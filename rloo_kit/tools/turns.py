"""What a chat template makes of tools: their schemas in a prompt, and their results between two turns of the assistant.

A sampled turn is never rendered again. A result is rendered after a made-up turn with a call, and what follows that
turn's end token is its text.
"""

import json
import re
from functools import cached_property
from typing import Any

from rloo_kit.errors import ConfigError, DataError, excerpt
from rloo_kit.seams import FRAMED_IMAGE, IMAGE_REFERENCE
from rloo_kit.system.input_files import DEEPEST, is_deep
from rloo_kit.think_tags import THINK_END, THINK_START

Message = dict[str, Any]

TAGS = (THINK_START, THINK_END, "<tool_call>", "</tool_call>")  # which some tokenizers have as plain text
MARK = "rloo_question"  # the user's message in a prompt that is rendered to see what follows it

PROBE = {
    "type": "function",
    "function": {
        "name": "rloo_probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "A value."}}},
    },
}


class ToolFormat:
    """The form of tools in one chat template. Raises ConfigError if the template cannot render tools, calls or results,
    or renders earlier messages differently once a result follows.

    Args:
        tokenizer: the policy's.
        thinks: whether the model thinks before each answer.
        name: of the model, for errors. options: of the template, such as `enable_thinking`.
    """

    def __init__(self, tokenizer: Any, thinks: bool = False, name: str = "", **options: Any) -> None:
        self.tokenizer, self.name, self.options = tokenizer, name, options
        self._answer: Message = {"role": "assistant", "content": ""}
        if thinks:
            self._answer["reasoning_content"] = "rloo_thought"  # some templates treat a turn without it otherwise
        calling = self._answer | {"tool_calls": [make_call("rloo_probe", {"x": "rloo_value"})]}
        self._turns: list[Message] = [{"role": "user", "content": "?"}, calling]
        self._check()

    def _check(self) -> None:
        name = self.name or "this model"
        problem = ""
        try:
            prompt = self._render(self._turns[:1], tools=[PROBE], add_generation_prompt=True)
            calling = self._render(self._turns)
            whole = self._render(
                [*self._turns, {"role": "tool", "name": "rloo_probe", "content": "rloo_result"}],
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program that may raise anything
            problem = f"cannot render them: {type(error).__name__}: {error}"
        else:
            if "rloo_probe" not in prompt:
                problem = "leaves the tools out of the prompt"
            elif "rloo_probe" not in calling or "rloo_value" not in calling:
                problem = "leaves a turn's calls out"
            elif "rloo_result" not in whole:
                problem = "leaves a tool's result out"
            elif self._end not in calling or not whole.startswith(calling[: calling.rindex(self._end)]):
                problem = "is not prefix-preserving: it renders a turn differently once a result follows"
        if problem:
            raise ConfigError(
                f"rloo.tools are set, but the chat template of {name} {problem}. Set model.name to one whose template "
                "has tools (embedded/untaught, smollm2/tools, Qwen3), or remove rloo.tools and rloo.environment"
            )

    @property
    def _end(self) -> str:
        return str(self.tokenizer.eos_token)

    @cached_property
    def generation_prompt(self) -> str:
        """What the template puts in front of a turn of the assistant, from its header on."""
        asked = self._turns[:1]
        return self._render(asked, add_generation_prompt=True).removeprefix(self._render(asked))

    @property
    def example(self) -> tuple[str, list[dict[str, Any]]]:
        """A turn with its end token, and the calls in it."""
        return self.render_turn(self._turns[1]) + self._end, list(self._turns[1]["tool_calls"])

    def render_turn(self, turn: Message) -> str:
        """A turn of the assistant as the template writes it, after the generation prompt, without its end token."""
        asked, whole = self._turns[:1], self._render([self._turns[0], turn])
        start = self._render(asked, add_generation_prompt=True)
        rest = whole.removeprefix(start if whole.startswith(start) else self._render(asked))
        return rest[: rest.rindex(self._end)]

    def render_calls(self, calls: list[dict[str, Any]], content: str) -> str:
        """What the template writes for calls behind the `content` of a turn, which may be empty."""
        plain = self._answer | {"content": content}
        return self.render_turn(plain | {"tool_calls": calls}).removeprefix(self.render_turn(plain))

    def render_results(self, messages: list[Message]) -> str:
        """The text between the end token of a turn with calls and the first token of the next turn; `messages`: of
        tools, `{"role": "tool", "name", "content"}`, or a user's reply, without control tokens (`defuse`)."""
        is_reply = messages[0]["role"] != "tool"
        last = {"content": "?"} if is_reply else {"tool_calls": [make_call(str(messages[0]["name"]), {})]}
        turns = [self._turns[0], self._answer | last]
        ends = self._render(turns).count(self._end)
        whole = self._render([*turns, *messages], add_generation_prompt=True)
        return whole.split(self._end, ends)[-1]

    def observe(self, row: dict[str, Any], text: str, limit: int | None = None) -> Any:
        """The prompt of a row with `text`, from its environment's `reset`, as the end of the user's last message
        (known as `user_message` or `question`). Raises DataError if a rendered prompt does not end with that message,
        or becomes longer than `limit` tokens."""
        prompt, asked = row["prompt"], str(row.get("user_message") or row.get("question") or "")
        if not text:
            return prompt
        if not isinstance(prompt, str):
            last = max((number for number, message in enumerate(prompt) if message["role"] == "user"), default=-1)
            content = prompt[last]["content"]
            text = self._fuse(str(content), text)
            content = content + (text if isinstance(content, str) else [{"type": "text", "text": text}])
            return [*prompt[:last], prompt[last] | {"content": content}, *prompt[last:][1:]]
        tail, is_bare = self._follow(""), asked.endswith(prompt)  # bare: as it is given, of the family plain
        head = prompt.removesuffix(tail)
        spoken = re.sub(FRAMED_IMAGE, "", head).rstrip()  # the message is known without its images
        if not is_bare and not (prompt.endswith(tail) and spoken.endswith(asked.strip())):
            raise DataError(
                "the environment's reset returned a text, but the prompt does not end with the user's message as the "
                "chat template renders it: give the text in the prompt, and return None"
            )
        text = self._fuse(head, text)
        extended = head + (self._follow(text) if prompt.endswith(tail) else text)
        if limit is not None and (count := len(self.tokenizer(extended)["input_ids"])) > limit:
            problem = f"with what the environment's reset returned ({excerpt(text, 60)}) a prompt has {count} tokens"
            raise DataError(f"{problem}; the limit is data.max_prompt_length={limit}: raise it, or return less")
        return extended

    def _follow(self, text: str) -> str:
        """`text`, and what the template writes from there on, if a user's message ends with it."""
        asked = {"role": "user", "content": MARK + text}
        return self._render([asked], add_generation_prompt=True).partition(MARK)[2]

    def _fuse(self, before: str, text: str) -> str:
        """`text` without control tokens, those too that the end of `before` would begin."""
        text = self.defuse(text)
        return text if self.defuse(before + text) == self.defuse(before) + text else f" {text}"

    def defuse(self, text: str) -> str:
        """`text` in UTF-8, with a blank inside each of the tokenizer's added tokens and of TAGS: it contains none."""
        text = text.encode("utf-8", "replace").decode()
        for spelled in (*map(str, self.tokenizer.added_tokens_decoder.values()), *TAGS):
            if len(spelled) > 1 and spelled in text:
                text = text.replace(spelled, f"{spelled[0]} {spelled[1:]}")
        return re.sub(IMAGE_REFERENCE, r"< |image:\1|>", text)

    def fit(self, text: str, limit: int) -> str:
        """A result without control tokens, cut at `limit` tokens."""
        text = self.defuse(text)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= limit:
            return text
        return f"{self.tokenizer.decode(ids[:limit])} ... (cut: {limit} of {len(ids)} tokens)"

    def _render(self, messages: list[Message], **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **self.options, **options))


def check_call(call: Any) -> None:
    """Raise ValueError if `call` is none, or has what readers of JSON accept and files and processes do not: NaN, half
    a surrogate pair, deep nesting."""
    match call:
        case {"function": {"name": str(name), "arguments": dict()}} if name and not is_deep(call):
            json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
        case _:
            raise ValueError(f"a call is an object with a name and arguments, nested at most {DEEPEST} levels deep")


def make_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as chat templates read it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
