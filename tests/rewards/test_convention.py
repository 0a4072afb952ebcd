"""What all rewards share: TRL's calling convention, both completion formats, any container of ids, their imports."""

import ast
import asyncio
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rewards
from rewards import Reward, answer_reward, length_reward, thinking_reward

ALL = [value for value in vars(rewards).values() if isinstance(value, Reward)]
END, EOS = 151668, 151645
TEXTS = ["why so long a thought? " * 3 + "</think>4", "no tag", "a</think>b</think>5"]
IDS = [[7] * 31 + [END, 19, EOS], [7, 8], [64, END, 65, END, 20]]
ANSWERS = ["4", "4", None]


def to_tensor(ids: list[int]) -> Any:
    import torch

    return torch.tensor(ids)


def to_array(ids: list[int]) -> Any:
    import numpy

    return numpy.array(ids)


def call(reward: Reward, completions: Any = None, ids: Any = None) -> list[float | None]:
    return reward(
        prompts=["p"] * 3,
        completions=TEXTS if completions is None else completions,
        completion_ids=IDS if ids is None else ids,
        answer=ANSWERS,
        trainer_state=object(),
        log_extra=print,
        log_metric=print,
    )


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: reward.__name__)
@pytest.mark.parametrize("convert", [tuple, to_array, to_tensor, lambda ids: list(to_tensor(ids))])
def test_ids_in_any_container_give_the_same(reward: Reward, convert: Callable[[list[int]], Any]) -> None:
    """Guards against `151668 in tensor` and `tensor.index`: TRL passes lists, other loops pass tensors."""
    assert call(reward, ids=[convert(ids) for ids in IDS]) == call(reward)


def test_a_matrix_of_ids_is_read_by_rows() -> None:
    """Guards against the truth value of an array: a batch may come as one matrix."""
    ids = [[7] * 10 + [END], [7] * 11]
    expected = [0.7, -1.0]
    for convert in (to_tensor, to_array):
        assert thinking_reward(completions=["a</think>", "b"], completion_ids=convert(ids)) == expected


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: reward.__name__)
def test_conversational_completions_give_the_same(reward: Reward) -> None:
    """Guards against rewards that only know strings: TRL passes messages when the prompts are conversations."""
    messages = [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert call(reward, completions=messages) == call(reward)


def test_thinking_that_a_parser_moved_aside_is_read() -> None:
    """Guards against response schemas that split the thinking off: the same completion earns the same."""
    split = [[{"role": "assistant", "reasoning_content": "why? so", "content": "4"}]]
    batch: dict[str, Any] = {"completion_ids": [[7] * 31 + [END, 19]], "answer": ["4"]}
    assert thinking_reward(completions=split, **batch) == [1.1]
    assert answer_reward(completions=split, **batch) == [1.0]


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: reward.__name__)
def test_shape_and_values(reward: Reward) -> None:
    """Guards against a reward that drops a sample or returns something other than floats and None."""
    values = call(reward)
    assert len(values) == 3
    assert all(value is None or type(value) is float for value in values)
    assert reward(prompts=[], completions=[], completion_ids=[], answer=[]) == []


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: reward.__name__)
def test_trl_can_name_it_await_it_not_and_pickle_it(reward: Reward) -> None:
    """Guards against TRL's inspection: metrics are named by `__name__`, and a sync reward must not look async."""
    assert vars(rewards)[reward.__name__] is reward
    assert not asyncio.iscoroutinefunction(reward) and not asyncio.iscoroutinefunction(reward.__call__)
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_what_is_missing_is_said() -> None:
    """Guards against a trainer that passes no ids: an AttributeError on None would not say what to do."""
    with pytest.raises(ValueError, match="thinking_reward needs completion_ids, one per completion, as TRL"):
        thinking_reward(prompts=["p"], completions=["a"])
    with pytest.raises(ValueError, match="thinking_reward got 2 completions, 1 completion_ids"):
        thinking_reward(completions=["a", "b"], completion_ids=[[1]])
    with pytest.raises(ValueError, match="a completion is a string or a list of messages.*found int"):
        length_reward(completions=[3])


def test_a_sample_without_what_the_reward_reads_is_not_judged() -> None:
    """Guards against a crash on one odd sample: None in, None out."""
    assert thinking_reward(completions=["a</think>b", None], completion_ids=[None, [7, END]]) == [None, None]


def test_only_the_standard_library_is_imported_and_regular_expressions_for_answers_only(repository: Path) -> None:
    """Guards against rewards growing dependencies, and against tags found by patterns instead of ids."""
    files = sorted((repository / "rewards").glob("**/*.py"))
    assert files
    for file in files:
        roots = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            roots |= {alias.name.partition(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and node.level != 1:  # relative: the folder works under any name
                roots.add((node.module or "").partition(".")[0])
        patterns = {"fnmatch"} if file.name == "answer.py" else {"re", "fnmatch"}  # answers have no ids
        assert roots <= sys.stdlib_module_names - patterns, f"{file.name} imports {roots}"


IMPOSSIBLE = [
    ("answer_reward", {"find": "regex"}, "find is 'regex'.*whole, boxed"),
    ("thinking_reward", {"min_tokens": -1}, "min_tokens is -1; it must be a whole number of at least 0"),
    ("thinking_reward", {"min_tokens": 40}, "full_tokens is 30; it must be a whole number of at least 40"),
    ("thinking_reward", {"think_end_id": True}, "think_end_id is True"),
    ("thinking_budget_reward", {"min_tokens": 9, "max_tokens": 3}, "max_tokens is 3; .* whole number of at least 9"),
    ("missing_eos_penalty", {"penalty": 0}, "penalty is 0; it must be a finite number above 0"),
    ("missing_eos_penalty", {"eos_token_ids": ()}, "eos_token_ids is ..; it must be a list of token ids, at least one"),
    ("repetition_penalty", {"penalty": -1.0}, "penalty is -1.0; it must be a fin"),
    ("soft_overlong_penalty", {"max_completion_length": 10, "cache_tokens": 11}, "must not exceed .*_length, 10"),
    *(
        (reward, {"forced_counts_as_closed": "no"}, "forced_counts_as_closed is 'no'; it must be true or false")
        for reward in ("thinking_reward", "thinking_budget_reward", "think_format_reward")
    ),
]


@pytest.mark.parametrize(("reward", "params", "words"), IMPOSSIBLE)
def test_impossible_parameters_are_refused(reward: str, params: dict[str, Any], words: str) -> None:
    """Guards against a typing error that would compare the whole text, bands that are never reached, a penalty that
    rewards, and `"no"`, which is true."""
    with pytest.raises(ValueError, match=words):
        vars(rewards)[reward].with_(**params)
