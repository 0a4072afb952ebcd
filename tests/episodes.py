"""Episodes for tests: a chat template with tools on the tiny tokenizer, and an engine whose turns are scripted."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rloo_kit.rollout.engine import Call, Engine, Sampling

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}{{- tool.function.name + ' ' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
END, THINK_END = 258, 260


def with_tools(tokenizer: Any) -> Any:
    """A copy of the tiny tokenizer whose template renders tools."""
    import copy

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


def call(name: str, **arguments: Any) -> str:
    """A turn that calls a tool, as text without its end token."""
    import json

    return f"</think>\n\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Scripted(Engine):
    """Samples turn by turn what a script says, with made-up log-probabilities; in one thread.

    Args:
        tokenizer: encodes the turns. script: for each row its turns as texts; an end token follows each.
    """

    name = "scripted"

    def __init__(self, tokenizer: Any, script: list[list[str]]) -> None:
        super().__init__("the turns are given", Sampling(1.0, (END, 256)))
        self._turns = [
            [[*tokenizer(turn, add_special_tokens=False)["input_ids"], END] for turn in turns] for turns in script
        ]

    def _finish(self, call: Call) -> None:
        for number in call.order:
            state, turn = call.states[number], 0
            while not state.finished:
                for token in self._turns[number % len(self._turns)][turn]:
                    while state.next_forced is not None:
                        state.take(state.next_forced, math.nan)
                    if state.finished:
                        break
                    state.take(token, -2.0 - 0.01 * len(state.ids))
                turn += 1
                call.ask_and_wait(state)


class Echo:
    """A dialogue that answers the first turns of a completion with some ids, each after a delay.

    Args:
        delay_s: by the completion's number. turns: how many are answered.
    """

    def __init__(self, delay_s: Callable[[int], float] = lambda number: 0.0, turns: int = 2) -> None:
        self._delay_s, self._turns = delay_s, turns
        self.asked: list[tuple[int, list[int]]] = []

    def ask(self, number: int, turn: list[int], turns: int) -> "Future[int] | None":
        self.asked.append((number, turn))
        if turns >= self._turns:
            return None
        reply: Future[int] = Future()
        threading.Timer(self._delay_s(number), reply.set_result, [turns]).start()
        return reply

    def read(self, number: int, reply: "Future[int]", room: int) -> list[int]:
        context = [30 + number % 8, 31 + reply.result(), 32]
        return context if len(context) < room else []


CALLS = (call("add", a=2, b=3).removeprefix("</think>\n\n"), call("fail").removeprefix("</think>\n\n"))


def calling_tokenizer(tokenizer: Any) -> Any:
    """The tiny tokenizer with tools, in which two whole calls are one token each: 261 adds, 262 fails. A random model
    samples them now and then."""
    from tokenizers import AddedToken

    tokenizer = with_tools(tokenizer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in CALLS])
    return tokenizer


def calling_model(make_tiny_model: Callable[..., Any], bias: dict[int, float] | None = None) -> Any:
    """A random model that leans to some ids, by one dimension of the residual stream that no layer changes."""
    import torch

    model = make_tiny_model(0, tie_word_embeddings=False, initializer_range=0.3)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 20.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        for token, value in (bias or {END: 1.6, THINK_END: 1.8, 261: 1.8, 262: 1.6}).items():
            model.lm_head.weight[token] = 0.0
            model.lm_head.weight[token, 0] = value
    return model
