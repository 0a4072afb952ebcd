"""Episodes: completions that call tools for several turns.

A turn that has ended is parsed by transformers; its calls are made in the tools' processes while other completions are
sampled; the results are rendered as the chat template does and tokenized alone. No sampled id changes.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rloo_kit.completion import Episode, split_turns
from rloo_kit.data.chat import detect_family, thinks
from rloo_kit.errors import ConfigError, RewardError
from rloo_kit.tools.toolbox import Result, Toolbox
from rloo_kit.tools.turns import Message, ToolFormat, check_call

if TYPE_CHECKING:
    from rloo_kit.rollout.types import Rollout


class ToolParser:
    """Reads turns; picks the tokenizer's response template: its own, TRL's for a known chat template, or Qwen's.

    Raises ConfigError if none reads a call back that the chat template has written."""

    def __init__(self, form: ToolFormat, schemas: Sequence[dict[str, Any]] = ()) -> None:
        from trl.chat_template_utils import add_response_schema, qwen3_5_template, qwen3_template

        self.form, self.tokenizer, self._schemas = form, form.tokenizer, list(map(_typed, schemas))
        self._prefix = self.tokenizer(form.generation_prompt, add_special_tokens=False)["input_ids"]
        given = getattr(self.tokenizer, "response_template", None)
        if given is None:
            with suppress(ValueError):  # not a template that TRL knows
                add_response_schema(self.tokenizer)
        candidates = [getattr(self.tokenizer, "response_template", None), qwen3_template, qwen3_5_template]
        for template in filter(None, candidates):
            self.tokenizer.response_template = template
            turn, calls = form.example
            written = self.tokenizer(turn, add_special_tokens=False)["input_ids"]
            self._template = deepcopy(template)
            content_args = [part.get("content_args", {}) for part in self._template["fields"].values()]
            # XML has no types; read as JSON, 00123 is a text and 12345 a number
            parsers = [options.pop("value_parser", None) for options in content_args]
            self._tools = self._schemas if any(parsers) else None
            if self.read(written)[0].get("tool_calls") == calls:
                return
        self.tokenizer.response_template = given
        raise ConfigError(
            f"the calls that the chat template of {form.name or 'this model'} writes cannot be read "
            "back: give the tokenizer a response_template (transformers, chat response parsing), or use Qwen3"
        )

    def read(self, ids: list[int]) -> tuple[Message, str]:
        """A turn (C,) as a message, and what is wrong with its calls; "" if nothing is."""
        as_written = {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        try:
            message = dict(self.tokenizer.parse_response(ids, self._template, prefix=self._prefix, tools=self._tools))
            for call in message.get("tool_calls") or []:
                check_call(call)
        except Exception as error:  # a parser raises what it likes: json a RecursionError for a thousand brackets
            return as_written, str(error).replace("\n", " ")
        message["content"] = str(message.get("content") or "").removesuffix(self.tokenizer.eos_token)
        return message, ""


def _typed(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema without the arguments that may be text or another type."""
    function = schema["function"]
    arguments = function["parameters"]["properties"].items()
    kept = {name: arg for name, arg in arguments if arg.get("type") == "string" or "string" not in arg.get("type", ())}
    return {"function": {"name": function["name"], "parameters": {"properties": kept}}}


@dataclass(frozen=True)
class ToolUse:
    """What a batch of episodes is made with; `limits`: `run.rloo` or an `RLOOConfig`."""

    toolbox: Toolbox
    parser: ToolParser
    limits: Any

    def begin(self, rows: Sequence[dict[str, Any]]) -> "Episodes":
        """Start an episode for each row of the dataset."""
        return Episodes(self, rows)


def make_tool_use(toolbox: Toolbox, tokenizer: Any, limits: Any, model_name: str = "", **options: Any) -> ToolUse:
    """What completions may call, for `complete`; `limits`: `run.rloo` or an `RLOOConfig`; `options`: of the chat
    template, such as `enable_thinking`. The tokenizer gets a response template. Raises ConfigError if the chat template
    has no tools, or its calls cannot be read."""
    family = detect_family(tokenizer, model_name)
    form = ToolFormat(tokenizer, thinks(family, options.get("enable_thinking")), model_name, **options)
    return ToolUse(toolbox, ToolParser(form, toolbox.schemas), limits)


class Episodes:
    """The dialogue of one batch of completions with the run's tools; see `Dialogue`.

    Attributes:
        prompts: of the rows, with what the environments answered to `reset(**row)`; raises as `ToolFormat.observe`.
        episodes: one for each row.
    """

    def __init__(self, use: ToolUse, rows: Sequence[dict[str, Any]]) -> None:
        self.toolbox, self.parser, self.limits = use.toolbox, use.parser, use.limits
        self.episodes = [Episode() for _ in rows]
        started = self.toolbox.reset(range(len(rows)), rows)
        form, limit = self.parser.form, self.toolbox.max_prompt_length
        self.prompts = [form.observe(row, result.content, limit) for row, result in zip(rows, started, strict=True)]
        for episode, result in zip(self.episodes, started, strict=True):
            if result.kind == "failed":
                episode.calls.append(("reset", result.kind))
                episode.failures.append(result.detail)
        self._asked: dict[int, tuple[list[str], list[tuple[str, Result]]] | None] = {}  # by row: the calls' names, and
        # those that are refused; None for a turn that the environment answers
        self._lock = threading.Lock()  # a tokenizer is not safe in threads

    def ask(self, number: int, turn: list[int], turns: int) -> "Future[Any] | None":
        """Make the calls of a turn that has ended."""
        episode = self.episodes[number]
        with self._lock:
            message, problem = self.parser.read(turn)
        episode.messages.append(message)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        if not calls and not problem and not self.toolbox.responds:
            return None
        if turns + 1 >= self.limits.max_turns:
            episode.cut = "max_turns" if calls or problem else None
            return None
        if not calls and not problem:
            self._asked[number] = None
            return self.toolbox.ask(number, "respond", [*episode.messages])
        left = max(0, self.limits.max_tool_calls - len(episode.calls))
        limit = Result(f"error: no call is left; the limit is {self.limits.max_tool_calls}", "invalid")
        unread = Result(f"error: the call cannot be read: {problem}", "invalid")
        refused = [("unknown", unread)] if problem else [(name, limit) for name, _ in calls[left:]]
        self._asked[number] = [name for name, _ in calls[:left]], refused
        return self.toolbox.call(number, calls[:left])

    def read(self, number: int, reply: "Future[Any]", room: int) -> list[int]:
        """The ids that the results, or an environment's own messages, take in the completion."""
        episode, asked = self.episodes[number], self._asked.pop(number)
        try:
            answer = reply.result()
        except RewardError as error:  # of `respond`: the calls of tools return their errors
            episode.calls.append(("respond", "failed"))
            episode.failures.append(str(error))
            return []
        if asked is None:
            messages = [message | {"content": str(message.get("content") or "")} for message in answer]
        else:
            results = [*zip(asked[0], answer, strict=True), *asked[1]]
            defuse = self.parser.form.defuse
            messages = [{"role": "tool", "name": defuse(name), "content": result.content} for name, result in results]
            episode.calls += [(name, result.kind) for name, result in results]
            episode.failures += [result.detail for _, result in results if result.kind == "failed"]
        if not messages:
            return []
        with self._lock:
            for message in messages:
                message["content"] = self.parser.form.fit(message["content"], self.limits.tool_result_tokens)
            text = self.parser.form.render_results(messages)
            ids = list(self.parser.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) >= room:
            episode.cut = "length"
            return []
        episode.messages += messages
        return ids

    def finish(self, rollout: "Rollout") -> list[Episode]:
        """The episodes, with the message of a last turn that was cut off and so was not parsed."""
        for episode, ids, spans in zip(self.episodes, rollout.completion_ids, rollout.context, strict=True):
            written = sum(message["role"] == "assistant" for message in episode.messages)
            if written <= len(spans):
                last = split_turns(ids, spans)[-1]
                content = self.parser.tokenizer.decode(last, skip_special_tokens=True)
                episode.messages.append({"role": "assistant", "content": content})
        return self.episodes
