"""Episodes for tests: a chat template with tools on the tiny tokenizer, and an engine whose turns are scripted."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rloo_kit.rollout.types import Call, Engine, Sampling

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

    def read(self, number: int, reply: int, room: int) -> list[int]:
        context = [30 + number % 8, 31 + reply, 32]
        return context if len(context) < room else []
