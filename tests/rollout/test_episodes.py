"""Completions of several turns in the engines: a reply is inserted as it is, and rows that wait hold nobody up."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rloo_kit.rollout.types import Limits, split_turns
from tests.episodes import Echo
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
    """Every token has the log-probability of the whole sequence before it, the replies have none, and each row got its
    own reply."""
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
    """A killed run that is resumed meets its tools at other times: drawn from one stream in the order of the rows that
    happen to be live, its tokens would differ from those of the run that was not killed."""
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
