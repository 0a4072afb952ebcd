"""Thinking that is closed at its budget: the rules for one completion, and both ways of running them."""

from math import isnan
from typing import Any

import pytest

from rloo_kit.errors import ConfigError
from rloo_kit.rollout.thinking_budget import (
    CLOSING_SENTENCE,
    Continued,
    Turn,
    close_ids_for,
    make_limits,
    think_then_answer,
)
from rloo_kit.rollout.types import Limits
from rloo_kit.think_tags import ThinkTags, bind_think_tags

CLOSE, END = 260, 258
LIMITS = Limits(
    max_completion_length=12, thinking_budget=4, answer_budget=3, close_ids=(7, CLOSE, 8), think_end_id=CLOSE
)
# what a model would write by itself -> (ids, span of what was forced)
CASES = {
    "runs over": ([1, 1, 1, 1, 2, 2, 2, 2], ([1, 1, 1, 1, 7, CLOSE, 8, 2, 2, 2], (4, 7))),
    "runs over and ends": ([1, 1, 1, 1, 2, END, 2], ([1, 1, 1, 1, 7, CLOSE, 8, 2, END], (4, 7))),
    "closes in time": ([1, CLOSE, 2, 2, 2, 2, 2], ([1, CLOSE, 2, 2, 2], None)),
    "closes with its last token": ([1, 1, 1, CLOSE, 2, 2, 2, 2], ([1, 1, 1, CLOSE, 2, 2, 2], None)),
    "closes twice": ([CLOSE, CLOSE, 2, 2, 2], ([CLOSE, CLOSE, 2, 2], None)),
    "ends while thinking": ([1, END, 1], ([1, END], None)),
    "ends with its last token": ([1, 1, 1, END, 1], ([1, 1, 1, END], None)),
}


class Script:
    """A model that writes what it is told to, prompt by prompt: prompt [n] has the n-th text."""

    def __init__(self, texts: list[list[int]], forced: int) -> None:
        self.texts, self.forced = texts, forced

    def extend(self, prefixes: list[list[int]], rooms: list[int], stop_ids: tuple[int, ...]) -> Continued:
        ids = []
        for prefix, room in zip(prefixes, rooms, strict=True):
            written = sum(token not in (7, 8) for token in prefix[1:])
            own = written - (1 if 7 in prefix else 0)  # a forced close is not the model's
            new: list[int] = []
            for token in self.texts[prefix[0]][own:][:room]:
                new.append(token)
                if token == END or token in stop_ids:
                    break
            ids.append(new)
        return Continued(ids, [[-1.0] * len(row) for row in ids])


def by_turns(text: list[int], limits: Limits) -> Turn:
    turn, position = Turn(limits, {END}), 0
    while not turn.finished:
        before = turn.forced
        turn.take(text[position], -1.0)
        position += turn.forced == before
    return turn


@pytest.mark.parametrize("name", CASES)
def test_both_ways_keep_the_same_rules(name: str) -> None:
    """Some engines force tokens between two of their own, some are called twice; a run that changed its engine
    must not change what a budget means."""
    text, (ids, forced) = CASES[name]
    turn = by_turns(text, LIMITS)
    twice = think_then_answer(Script([text], 3).extend, [[0]], LIMITS, {END})
    assert (turn.ids, turn.forced) == (ids, forced)
    assert (twice.completion_ids, twice.forced) == ([ids], [forced])
    assert twice.sampler_logps is not None and twice.thinking_forced == [forced is not None]
    for logps in (turn.logps, twice.sampler_logps[0]):
        span = range(*(forced or (0, 0)))
        assert [isnan(value) for value in logps] == [place in span for place in range(len(ids))]


@pytest.mark.parametrize("cap", [2, 4, 5, 6, 7, 8])
def test_the_cap_holds_in_any_case(cap: int) -> None:
    """A sentence forced beyond `max_completion_length` would not fit into the positions that were planned for."""
    limits = Limits(cap, 4, 3, (7, CLOSE, 8), CLOSE)
    text = [1, 1, 1, 1, 2, 2, 2, 2]
    turn = by_turns(text, limits)
    twice = think_then_answer(Script([text], 3).extend, [[0]], limits, {END})
    assert turn.ids == twice.completion_ids[0] == [1, 1, 1, 1, 7, CLOSE, 8, 2][:cap]
    assert turn.forced == twice.forced[0] == ((4, min(cap, 7)) if cap > 4 else None)


def test_without_a_budget_nothing_is_forced() -> None:
    """The limits of a run without a budget pass through the same code."""
    limits = Limits(5)
    text = [1, CLOSE, 1, 1, 1, 1]
    assert by_turns(text, limits).ids == text[:5]
    assert think_then_answer(Script([text], 0).extend, [[0]], limits, {END}).completion_ids == [text[:5]]


def test_the_close_is_the_tag_or_the_reports_sentence(tiny_tokenizer: Any) -> None:
    """The sentence is the one that Qwen3 was trained to answer after; another one is another distribution."""
    tags = bind_think_tags(tiny_tokenizer)
    assert close_ids_for(tiny_tokenizer, tags) == (CLOSE,)
    sentence = close_ids_for(tiny_tokenizer, tags, "sentence")
    assert tiny_tokenizer.decode(sentence) == CLOSING_SENTENCE
    assert sentence.count(CLOSE) == 1 and CLOSING_SENTENCE.endswith("now.\n</think>\n\n")


def test_limits_from_the_configuration(tiny_tokenizer: Any) -> None:
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
