"""Thinking budgets: at the budget the closing ids are forced, and the model answers within an answer budget.

A completion that ends inside its thinking is left as is. Sources: docs/rollout.md.
"""

from dataclasses import replace
from typing import Any

from rloo_kit.errors import ConfigError
from rloo_kit.rollout.types import Limits
from rloo_kit.think_tags import THINK_END, ThinkTags

# The Qwen3 report's instruction for a spent budget, with the blank line that its chat template puts before an answer.
CLOSING_SENTENCE = (
    "Considering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    f"{THINK_END}\n\n"
)


def close_ids_for(tokenizer: Any, tags: ThinkTags, close: str = "tag") -> tuple[int, ...]:
    """The ids that close thinking: `</think>` alone ("tag"), or with the Qwen3 report's sentence ("sentence").

    Raises:
        ConfigError: no `</think>`, or not one token in the sentence; `close` is neither of the two.
    """
    if tags.end_id is None:
        raise ConfigError(
            "a thinking budget is set, but the tokenizer has no </think>, so there is no thinking to close. "
            "Set rloo.thinking_budget: null, and in a run's file eval.thinking_budgets: []"
        )
    if close == "tag":
        return (tags.end_id,)
    if close != "sentence":
        raise ConfigError(f"rloo.thinking_close is {close!r}; it is one of tag, sentence")
    ids = tuple(tokenizer(CLOSING_SENTENCE, add_special_tokens=False)["input_ids"])
    if ids.count(tags.end_id) != 1:
        raise ConfigError(
            f"the tokenizer does not encode </think> in the closing sentence as its id {tags.end_id}. Set "
            "rloo.thinking_close: tag"
        )
    return ids


def make_limits(
    tokenizer: Any,
    tags: ThinkTags,
    max_completion_length: int,
    thinking_budget: int | None = None,
    answer_budget: int | None = None,
    close: str = "tag",
) -> Limits:
    """The limits of a rollout, from the keys of `rloo`.

    Raises:
        ConfigError: a budget for a tokenizer without `</think>`, or one that leaves no token for an answer.
    """
    if thinking_budget is None:
        return Limits(max_completion_length)
    close_ids = close_ids_for(tokenizer, tags, close)
    needed = thinking_budget + len(close_ids) + (answer_budget or 1)
    if needed > max_completion_length:
        raise ConfigError(
            f"rloo.thinking_budget ({thinking_budget}) + {len(close_ids)} forced tokens + rloo.answer_budget "
            f"({answer_budget or 'at least 1'}) is more than rloo.max_completion_length = {max_completion_length}. "
            f"Lower rloo.thinking_budget, or set rloo.max_completion_length to {needed} or more"
        )
    return Limits(max_completion_length, thinking_budget, answer_budget, close_ids, tags.end_id)


def limits_of(section: Any, tokenizer: Any, tags: ThinkTags) -> Limits:
    """The limits of a run's rollouts; `section`: `run.rloo` or an `RLOOConfig`. Raises as `make_limits`."""
    budgets = section.thinking_budget, section.answer_budget, section.thinking_close
    return make_limits(tokenizer, tags, section.max_completion_length, *budgets)


def make_budget_limits(
    tokenizer: Any,
    tags: ThinkTags,
    max_completion_length: int,
    thinking_budget: int,
    answer_budget: int | None = None,
    close: str = "tag",
    has_turns: bool = False,
) -> Limits:
    """The limits for a thinking budget that is to be measured: it may exceed `max_completion_length`, which then counts
    only for what is left to answer (at least 1 token; `answer_budget` in its place). `has_turns`: the budgets are a
    turn's, and `max_completion_length` is the whole episode's.

    Raises:
        ConfigError: a value out of range, or a tokenizer without `</think>`.
    """
    if thinking_budget < 0:
        raise ConfigError(f"thinking_budget is {thinking_budget}; it has to be 0 or more tokens")
    if answer_budget is not None and answer_budget < 1:
        raise ConfigError(f"answer_budget is {answer_budget}; it has to be at least 1")
    close_ids = close_ids_for(tokenizer, tags, close)
    limits = Limits(max_completion_length, thinking_budget, answer_budget, close_ids, tags.end_id)
    length = thinking_budget + len(close_ids) + limits.answer_limit
    longest = max(length, max_completion_length) if has_turns else length
    return replace(limits, max_completion_length=longest, answer_budget=limits.answer_limit)
