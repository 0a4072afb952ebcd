"""Completions of several turns in the engines: a reply is inserted as it is, and rows that wait hold nobody up."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from rloo_kit.completion import split_turns
from rloo_kit.rollout.types import Limits
from rloo_kit.tools.episodes import ToolParser
from rloo_kit.tools.toolbox import Toolbox
from rloo_kit.tools.turns import ToolFormat
from tests.episodes import Echo, with_tools
from tests.rollout.models import (
    BUDGET,
    END_OF_TEXT,
    PROMPTS,
    THINK_END,
    TURN_END,
    adapted,
    check_logps,
    engine_for,
    lean,
    run_out_above,
)  # fmt: skip

LONG = Limits(40)


@pytest.fixture
def make_model(make_tiny_model: Callable[..., Any]) -> Callable[..., Any]:
    """A model with a trained adapter that often ends its turn."""

    def build(**config: Any) -> Any:
        model = make_tiny_model(0, tie_word_embeddings=False, initializer_range=0.3, **config)
        return adapted(lean(model, {END_OF_TEXT: 3.0, TURN_END: 4.0, THINK_END: 2.0}))

    return build


def sample(engine: Any, dialogue: Any, limits: Limits = LONG) -> Any:
    torch.manual_seed(3)
    return engine.sample([prompt for prompt in PROMPTS for _ in range(4)], limits, dialogue=dialogue)


@pytest.mark.parametrize("limits", [Limits(40), BUDGET], ids=["no budget", "budget"])
@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("name", ["native", "generate"])
def test_turns_continue_behind_their_replies(make_model, name, rows, limits):
    """Every token has the log-probability of the whole sequence before it; each row got its own reply."""
    model, dialogue = make_model(), Echo()
    found = sample(engine_for(model, name, rows=rows), dialogue, limits)
    check_logps(model, [prompt for prompt in PROMPTS for _ in range(4)], found)
    for number, (ids, context) in enumerate(zip(found.completion_ids, found.context, strict=True)):
        assert [ids[start:end] for start, end in context] == [
            [30 + number % 8, 31 + turn, 32] for turn in range(len(context))
        ]
        turns = split_turns(ids, context)
        assert all(turn[-1] in (TURN_END, END_OF_TEXT) for turn in turns[:-1]), "a turn that is cut has no reply"
        assert [turn for row, turn in dialogue.asked if row == number] == [
            turn for turn in turns if turn[-1:] in ([TURN_END], [END_OF_TEXT])
        ]
        assert len(ids) <= limits.max_completion_length
    assert {len(context) for context in found.context} >= {0, 2}


def test_what_is_sampled_does_not_depend_on_how_long_a_tool_takes(make_model):
    """A resumed run meets its tools at other times: drawn from one stream, its tokens would differ."""
    model = make_model()
    plain = sample(engine_for(model), Echo())
    slow = sample(engine_for(model), Echo(lambda number: 0.002 * (number * 7 % 11)))
    few = sample(engine_for(model, rows=3), Echo(lambda number: 0.001 * (number % 3)))
    assert plain.completion_ids == slow.completion_ids == few.completion_ids
    assert plain.context == slow.context


def test_rows_that_wait_do_not_hold_the_others(make_model):
    """One search that takes a second stopped the whole batch for a second, in each turn."""
    model = make_model()
    plain = sample(engine_for(model), Echo())
    slow = next(number for number, spans in enumerate(plain.context) if len(spans) == 2)
    others = len(plain.context) - 1

    class Held(Echo):
        """Answers the slow row's first turn once all others are done; a loop of rounds would wait for ever."""

        held: Any = None

        def ask(self, number: int, turn: list[int], turns: int) -> Any:
            reply = super().ask(number, turn, turns)
            if number != slow or turns:
                return reply
            self.held = Future()
            return self.held

        def release(self, done: int, total: int) -> None:
            if done == others and not self.held.done():
                self.held.set_result(0)

    dialogue = Held()
    torch.manual_seed(3)
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    found = engine_for(model).sample(prompts, LONG, on_progress=dialogue.release, dialogue=dialogue)
    assert found.completion_ids == plain.completion_ids
    assert [number for number, _ in dialogue.asked][-2:] == [slow, slow], "its later turns come last"


def test_memory_that_runs_out_between_turns(make_model, monkeypatch):
    """Rows continue from their tokens so far, in fewer rows at once; those that wait for a tool are not lost."""
    model = make_model(hidden_act="gelu")  # decoded by its modules
    whole = sample(engine_for(model), Echo())
    run_out_above(model, 6, [], monkeypatch, on_cpu=True, after=10)
    engine = engine_for(model, say=lambda line: None)
    found = sample(engine, Echo(lambda number: 0.002 * (number % 5)))
    assert engine.rows is not None and engine.rows <= 12
    assert found.completion_ids == whole.completion_ids


def test_no_room_for_a_reply_ends_the_completion(make_model):
    """A result that fills the rest of the completion leaves nothing to answer with."""
    found = sample(engine_for(make_model()), Echo(), Limits(8))
    assert all(len(ids) <= 8 for ids in found.completion_ids)
    for ids, context in zip(found.completion_ids, found.context, strict=True):
        assert not context or context[-1][1] < len(ids)


BROKEN = {  # what stands in <tool_call>, as JSON, and words of what the model reads
    "1,200 open brackets": ('{"name": "f", "arguments": {"x": ' + "[" * 1200, "cursion"),
    "1,200 brackets": ('{"name": "f", "arguments": {"x": ' + "[" * 1200 + "]" * 1200 + "}}", "cursion"),
    "200 brackets": ('{"name": "f", "arguments": {"x": ' + "[" * 200 + "]" * 200 + "}}", "nested at most 100 levels"),
    "200 objects": ('{"name": "f", "arguments": ' + '{"x": ' * 200 + "1" + "}" * 201, "nested at most 100 levels"),
    "half a pair": ('{"name": "f", "arguments": {"x": ["\\ud83d"]}}', "surrogates not allowed"),
    "half a pair in a key": ('{"name": "f", "arguments": {"\\ud83d": 1}}', "surrogates not allowed"),
    "half a pair in the name": ('{"name": "\\udc00", "arguments": {}}', "surrogates not allowed"),
    "NaN": ('{"name": "f", "arguments": {"x": {"y": NaN}}}', "not JSON compliant"),
    "infinity": ('{"name": "f", "arguments": {"x": [1e400]}}', "not JSON compliant"),
    "5,000 digits": ('{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}", "4300 digits"),
    "a list": ('["f", {}]', "a call is an object with a name and arguments"),
    "arguments in a list": ('{"name": "f", "arguments": [1]}', "a call is an object with a name and arguments"),
    "arguments as text": ('{"name": "f", "arguments": "{}"}', "a call is an object with a name and arguments"),
    "no arguments": ('{"name": "f"}', "a call is an object with a name and arguments"),
    "a number as the name": ('{"name": 1, "arguments": {}}', "a call is an object with a name and arguments"),
    "no name": ('{"name": "", "arguments": {"messages": []}}', "a call is an object with a name and arguments"),
    "null": ("null", "a call is an object with a name and arguments"),
    "nothing": ("", "could not parse"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_call_that_nothing_can_take_is_unreadable(tiny_tokenizer, case):
    """A repeated bracket was a RecursionError, half a surrogate pair and a call without a name were calls."""
    text, words = BROKEN[case]
    parser = ToolParser(ToolFormat(with_tools(tiny_tokenizer), True))
    message, problem = parser.read(
        parser.tokenizer(f"</think>\n\n<tool_call>\n{text}\n</tool_call><|im_end|>")["input_ids"]
    )
    assert "tool_calls" not in message and message["content"] and words in problem, problem
    pickle.dumps(message), message["content"].encode()


def show(
    text: str, count: int = 1, both: int | str = 0, maybe: str | None = None, many: list[str] = []  # noqa: B006
) -> str:  # fmt: skip
    """Show.

    Args:
        text: a.
        count: b.
        both: c.
        maybe: d.
        many: e.
    """
    return repr((text, count, both, maybe, *many))


XML = [  # the text of each parameter, what the turn has, what the tool gets
    ({"text": "12345"}, {"text": "12345"}, "('12345', 1, 0, None)"),
    ({"text": "00123", "count": "007"}, {"text": "00123", "count": 7}, "('00123', 7, 0, None)"),
    ({"text": "1.50", "count": "3.0"}, {"text": "1.50", "count": "3.0"}, "('1.50', 3, 0, None)"),
    ({"text": "[1]", "many": '["1", "b"]'}, {"text": "[1]", "many": ["1", "b"]}, "('[1]', 1, 0, None, '1', 'b')"),
    ({"text": "NaN", "both": "007"}, {"text": "NaN", "both": "007"}, "('NaN', 1, '007', None)"),
    ({"text": "true", "maybe": "null"}, {"text": "true", "maybe": None}, "('true', 1, 0, None)"),
    ({"text": "null", "maybe": "1e400"}, {"text": "null", "maybe": "1e400"}, "('null', 1, 0, '1e400')"),
    ({"text": "x", "many": "[" * 1200}, None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("given", "read", "got"), XML, ids=lambda one: str(one)[:30])
def test_calls_in_xml_are_read_by_the_tools_hints(tiny_tokenizer, given, read, got):
    """Qwen3.5 writes parameters without types, and 12345 for a text was a number, 1.50 was 1.5."""
    tokenizer, toolbox = with_tools(tiny_tokenizer), Toolbox.of([show], None)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3_5_nothink_training.jinja").read_text()
    parser = ToolParser(ToolFormat(tokenizer), toolbox.schemas)
    written = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in given.items())
    turn = f"<tool_call>\n<function=show>\n{written}</function>\n</tool_call><|im_end|>"
    message, problem = parser.read(tokenizer(turn, add_special_tokens=False)["input_ids"])
    if read is None:
        assert "cursion" in problem
        return
    assert message["tool_calls"][0]["function"]["arguments"] == read
    toolbox.reset([0], [{}])
    for arguments in (read, given):
        if given.get("maybe") != "null":
            assert toolbox.call(0, [("show", arguments)]).result()[0].content == got
