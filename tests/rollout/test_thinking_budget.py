"""Thinking that is closed at its budget: the rules for one completion, token by token and in stretches."""

from math import isnan

import pytest

from rloo_kit.errors import ConfigError
from rloo_kit.rollout.thinking_budget import make_limits
from rloo_kit.rollout.types import CompletionState, Limits
from rloo_kit.think_tags import ThinkTags, bind_think_tags

CLOSE, END = 260, 258
LIMITS = Limits(
    max_completion_length=12, thinking_budget=4, answer_budget=3, close_ids=(7, CLOSE, 8), think_end_id=CLOSE
)
# what a model would write by itself -> (ids, spans of what was forced)
CASES = {
    "runs over": ([1, 1, 1, 1, 2, 2, 2, 2], ([1, 1, 1, 1, 7, CLOSE, 8, 2, 2, 2], [(4, 7)])),
    "runs over and ends": ([1, 1, 1, 1, 2, END, 2], ([1, 1, 1, 1, 7, CLOSE, 8, 2, END], [(4, 7)])),
    "closes in time": ([1, CLOSE, 2, 2, 2, 2, 2], ([1, CLOSE, 2, 2, 2], [])),
    "closes with its last token": ([1, 1, 1, CLOSE, 2, 2, 2, 2], ([1, 1, 1, CLOSE, 2, 2, 2], [])),
    "closes twice": ([CLOSE, CLOSE, 2, 2, 2], ([CLOSE, CLOSE, 2, 2], [])),
    "ends while thinking": ([1, END, 1], ([1, END], [])),
    "ends with its last token": ([1, 1, 1, END, 1], ([1, 1, 1, END], [])),
}


def token_by_token(text: list[int], limits: Limits) -> CompletionState:
    """As the engines that sample here: each token is taken when it is drawn."""
    state, position = CompletionState(limits, {END}), 0
    while not state.finished:
        before = [*state.forced]
        state.take(text[position], -1.0)
        position += state.forced == before
    return state


def in_stretches(text: list[int], limits: Limits) -> CompletionState:
    """As a server: so many tokens in one request, up to the ids that stop."""
    state, position, calls = CompletionState(limits, {END}), 0, 0
    while not state.finished:
        if state.next_forced is not None:
            state.take(-1, -1.0)
            continue
        room, stops = state.next_stretch
        calls += 1
        for token in text[position : position + room]:
            state.take(token, -1.0)
            position += 1
            if token in stops:
                break
    assert calls <= 2
    return state


@pytest.mark.parametrize("run", [token_by_token, in_stretches])
@pytest.mark.parametrize("name", CASES)
def test_both_ways_keep_the_same_rules(name, run):
    """A run that changed its engine must not change what a budget means."""
    text, (ids, forced) = CASES[name]
    state = run(text, LIMITS)
    assert (state.ids, state.forced) == (ids, forced)
    span = range(*(forced[0] if forced else (0, 0)))
    assert [isnan(value) for value in state.logps] == [place in span for place in range(len(ids))]


@pytest.mark.parametrize("run", [token_by_token, in_stretches])
@pytest.mark.parametrize("cap", [2, 4, 6, 8])
def test_the_cap_holds_in_any_case(cap, run):
    """A sentence forced beyond `max_completion_length` would not fit into the positions that were planned for."""
    state = run([1, 1, 1, 1, 2, 2, 2, 2], Limits(cap, 4, 3, (7, CLOSE, 8), CLOSE))
    assert state.ids == [1, 1, 1, 1, 7, CLOSE, 8, 2][:cap]
    assert state.forced == ([(4, min(cap, 7))] if cap > 4 else [])


def test_limits_from_the_configuration(tiny_tokenizer):
    """A budget that leaves no room for an answer would make every answer a truncated one, quietly."""
    tags = bind_think_tags(tiny_tokenizer)
    assert make_limits(tiny_tokenizer, tags, 100) == Limits(100)
    limits = make_limits(tiny_tokenizer, tags, 100, 60)
    assert limits == Limits(100, 60, None, (CLOSE,), CLOSE) and limits.answer_limit == 39
    with pytest.raises(ConfigError, match=r"rloo.thinking_budget \(60\) \+ 1 forced tokens \+ rloo.answer_budget \(50"):
        make_limits(tiny_tokenizer, tags, 100, 60, 50)
    with pytest.raises(ConfigError, match="set rloo.max_completion_length to 101 or more"):
        make_limits(tiny_tokenizer, tags, 100, 99)
    with pytest.raises(ConfigError, match="rloo.thinking_close is 'words'; it is one of tag, sentence"):
        make_limits(tiny_tokenizer, tags, 100, 9, close="words")
    with pytest.raises(ConfigError, match="the tokenizer has no </think>.*rloo.thinking_budget: null"):
        make_limits(tiny_tokenizer, ThinkTags(None, None), 100, 9)
