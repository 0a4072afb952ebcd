"""The guard: a failing reward gives None and a message; a good one, a model, an async one stay what they are."""

import asyncio
import functools
import gc
import json
import math
import re
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from rewards import thinking_reward
from rloo_kit.errors import LONGEST_ERROR, RewardError
from rloo_kit.rewarding.guard import PENDING, NamedReward, guard, is_async, log_names
from rloo_kit.rewarding.signature import overflowing

BATCH: dict[str, Any] = {
    "prompts": ["2+2=", "3+3=", "4+4="],
    "completions": ["4", "x" * 500, "8"],
    "completion_ids": [[1], [2], [3]],
}


def test_one_bad_sample_does_not_cost_its_siblings() -> None:
    """Guards against `float("xxx")` on one completion leaving the whole batch without scores."""
    guarded = guard(lambda completions, **batch: [float(text) for text in completions])
    assert (found := guarded.score(**BATCH)).values == [4.0, None, 8.0]
    assert found.failed == [False, True, False]
    assert len(found.failures) == 1
    assert found.failures[0].startswith(
        "reward '<lambda>' failed on sample 1 (prompt '3+3=', completion '..." + "x" * 60 + "'): ValueError: could not"
    )


NO_NUMBERS = [
    *(math.nan, -math.inf),  # TRL reads NaN as "does not apply" and infinity as 3.4e38
    *("1", b"1", numpy.str_("1"), numpy.array(["1"])),  # float("1") trained on texts
    *(1 + 0j, [0.5], torch.tensor([1.0, 2.0]), object(), Decimal("sNaN")),  # their conversion raises anything
    *(1e39, -(10**400), Decimal("1e39")),  # beyond float32
]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: str(value)[:12])
def test_what_is_no_finite_float32_fails_its_sample(value: Any) -> None:
    """Rewards are float32 in the loop: 1e39 was infinity there, and no message named the reward."""
    guarded = guard(lambda **batch: [3.4e38, value, None])
    assert (found := guarded.score(**BATCH)).values == [3.4e38, None, None]
    assert found.failed == [False, True, False]
    assert "reward '<lambda>' failed on sample 1" in found.failures[0] and "it returned " in found.failures[0]


@pytest.mark.parametrize(
    "result",
    [
        (True, False, None),
        [torch.tensor([1.0]), torch.tensor(False), numpy.float16(0)],
        torch.tensor([[1], [0], [0]], dtype=torch.bfloat16),
        torch.tensor([1.0, 0.0, 0.0], requires_grad=True),
        deque([Fraction(1), Decimal(0), numpy.bool_(False)]),
        {"a": 1, "b": 0, "c": 0}.values(),
    ],
)
def test_ordered_numbers_of_any_kind_are_rewards(result: Any) -> None:
    """Guards against a check that refuses what works: arrays, tensors with one number a row, truth values."""
    guarded = guard(lambda **batch: result)
    found = guarded.score(**BATCH)
    assert [value or 0.0 for value in found.values] == [1.0, 0.0, 0.0] and found.failures == []


class Odd:
    """As long as its batch, and iterates over something else, as a table iterates over its columns."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter(["a", "b"])


NO_LISTS = [
    ({"a": 0.1, "b": 0.2, "c": 0.3}, "it returned dict"),
    ({0.1, 0.2, 0.3}, "it returned set"),
    ({0: 1, 1: 1, 2: 1}.keys(), "it returned dict_keys"),
    (b"111", "it returned the text b'111'"),
    (Odd(), "it returned 2 rewards for 3 completions"),
    ([1.0], "it returned 1 rewards for 3 completions"),
    (1.0, "it returned float; it must return a list of 3 rewards"),
    (None, "it returned NoneType"),
]


async def judge(completions: list[str], **batch: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(text) for text in completions]


@pytest.mark.parametrize("kind", ["function", "async", "get_rewards"])
@pytest.mark.parametrize(("result", "words"), NO_LISTS)
def test_what_is_no_list_fails_the_batch(kind: str, result: Any, words: str) -> None:
    """A dict was trained on its keys, "11111111" counted as eight ones, and a set has no order."""

    async def later(completions: list[str]) -> Any:
        return result

    class Server:
        def get_rewards(self, prompts: list[str], completions: list[str]) -> Any:
            return result

    found = guard({"function": lambda **batch: result, "async": later, "get_rewards": Server()}[kind]).score(**BATCH)
    assert found.values == [None] * 3 and found.failed == [True] * 3
    (failure,) = found.failures
    assert "failed on samples 0 to 2: " in failure and words in failure and "one per completion" in failure
    (failure,) = guard(lambda completions: judge(completions)).score(**BATCH).failures
    assert "it returned a coroutine" in failure and "async def" in failure


class Model(torch.nn.Module):
    def __init__(self, path: str | None) -> None:
        super().__init__()
        if path is not None:
            self.config = type("Config", (), {"_name_or_path": path})()


def test_names_in_the_log_are_there_and_differ() -> None:
    """A model built in memory was logged as `rewards//mean`, and two rewards of one name shared one column."""
    models = [Model(""), Model("outputs/my_judge/"), Model(None)]
    assert log_names(["", "", ""], models) == ["Model", "my_judge", "Model_2"]
    a = guard(lambda **batch: [])
    assert log_names(["a", "a", "a_2", "a", "b"], [a] * 5) == ["a", "a_3", "a_2", "a_4", "b"]
    assert log_names(["Model", ""], [a, Model("")]) == ["Model", "Model_2"]


def test_a_sum_beyond_float32_is_named() -> None:
    """Two rewards that fit may have a sum that does not: the loop's float32 turned it into infinity."""
    rows = [[1.0, 2.0], [3e38, 3e38], [3e38, math.nan], [math.nan, math.nan], [-1e38, 0.0], [math.inf, 1.0]]
    assert overflowing(rows, [1.0, 0.1], ["a", "b"]) == [
        "the weighted sum of the rewards of sample 5 is beyond float32 (3.4e38): a inf x 1, b 1 x 0.1"
    ]
    found = overflowing(rows, [10.0, 1.0], ["a", "b"])
    assert [message.split(" is beyond")[0][-8:] for message in found] == [f"sample {i}" for i in (1, 2, 4, 5)]
    assert found[1].endswith(": a 3e+38 x 10")


class Ranks:
    """A reward by rank: of one completion alone there is none."""

    is_relative = True

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        lengths = [len(text.upper()) for text in completions]
        return [None] if len(lengths) == 1 else [sorted(lengths).index(one) / len(lengths) for one in lengths]


@pytest.mark.parametrize("wrap", [lambda one: one, functools.partial, lambda one: NamedReward(one, "ranks", 1.0)])
def test_a_reward_that_compares_fails_as_a_whole(wrap: Any) -> None:
    """Asked again for each sample alone it had nothing to compare: no reward, and no failure that anybody saw."""
    good, bad = BATCH | {"completions": ["a", "abc", "ab"]}, BATCH | {"completions": ["a", 7, "ab"]}
    guarded = guard(wrap(Ranks()))
    assert guarded.score(**good).values == [0.0, 2 / 3, 1 / 3]
    found = guarded.score(**bad)
    assert found.values == [None] * 3 and found.failed == [True] * 3 and len(found.failures) == 1
    assert "failed on samples 0 to 2: AttributeError: 'int' object has no attribute 'upper'" in found.failures[0]


def test_asking_again_passes_columns_and_logs_nothing_twice() -> None:
    """Guards against a second round that sees other columns, or that logs its metrics once more."""
    logged: list[Any] = []

    def reward(
        completions: list[str], answer: list[str], trainer_state: str, log_metric: Any, **rest: Any
    ) -> list[float]:
        log_metric("calls", 1)
        assert trainer_state == "abc" and rest["prompts"]
        return [float(text) + float(gold) for text, gold in zip(completions, answer, strict=True)]

    guarded = guard(reward)
    columns = {"answer": ("1", "2", "3"), "trainer_state": "abc", "log_metric": lambda *args: logged.append(args)}
    assert guarded.score(**BATCH, **columns).values == [5.0, None, 11.0]
    assert logged == [("calls", 1)]


def test_an_interrupt_is_no_failure() -> None:
    """Guards against swallowing Ctrl-C, after which the run could not be saved."""

    def interrupted(**batch: Any) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard(interrupted)(**BATCH)


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit("enough"), "SystemExit: enough"),  # left from the script that it was copied from
        (asyncio.CancelledError("the client is closed"), "the client is closed"),
        (RewardError("x" * 1_000_000), "(1,000,000 characters)"),
        (Speechless(), "Speechless: its text cannot be made"),
        (ValueError("half a pair \ud800"), "half a pair ?"),
    ],
)
def test_a_failures_text_is_short_and_can_be_printed(error: BaseException, words: str) -> None:
    """A text of a megabyte was printed whole; one that raises, or has half a surrogate pair, ended the run."""

    async def raising(completions: list[str]) -> list[float]:
        raise error

    found = guard(raising).score(**BATCH)
    assert found.failed == [True] * 3 and len(found.failures) == 3
    assert all(words in text and len(text.encode()) < LONGEST_ERROR + 500 for text in found.failures)


def test_a_reward_changes_no_arguments_of_others() -> None:
    """A reward that sorts the completions, or cuts their ids, changed what the next reward and the loss saw."""

    def greedy(prompts: list[Any], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        completions.sort()
        prompts.clear()
        completion_ids[0].clear()
        return [1.0] * len(completions)

    batch = BATCH | {"completion_ids": [[1], [2], [3]]}
    assert guard(greedy)(**batch) == [1.0] * 3
    assert batch == BATCH


@pytest.mark.parametrize("reward", [judge, functools.partial(judge, scale=1)])
def test_async_rewards_stay_async_and_are_guarded(reward: Any) -> None:
    """Guards against TRL taking a guarded async reward for a sync one and never awaiting its coroutine."""
    guarded = guard(reward)
    assert guarded.is_async and guarded(**BATCH) == [4.0, None, 8.0]
    assert (found := guarded.score(**BATCH)).values == [4.0, None, 8.0] and found.failed == [False, True, False]
    assert guarded.__name__ == "judge"


def test_trl_sees_the_same() -> None:
    """Guards against a TRL that changes how it names rewards: its own function is asked."""
    for reward in (judge, thinking_reward, functools.partial(judge), lambda **batch: []):
        guarded = guard(reward)
        assert guarded.is_async == is_async_callable(reward) == is_async(reward)
        assert get_callable_name(guarded) == get_callable_name(reward)


def test_models_are_left_to_trl() -> None:
    """TRL tells `nn.Module` and model ids apart by type; a guarded reward guarded again wrapped messages in
    messages."""
    model = torch.nn.Linear(1, 1)
    guarded = guard(thinking_reward)
    assert guard(model) is model and guard(guarded) is guarded
    assert guarded(["p"], ["a</think>b"], [[7, 151668]]) == [0.3], "by position too, as other loops call it"
    assert guard("folder/of/a/reward-model") == "folder/of/a/reward-model"


def test_what_cannot_be_called_is_refused() -> None:
    """Guards against a number in the list of rewards that fails only after the first rollout."""
    with pytest.raises(RewardError, match="3 is not a reward; it must be a function of"):
        guard(3)

    def answer_reward(completions: list[str], **columns: Any) -> list[float]:  # pays 2.0: the accuracy was 0
        return [2.0] * len(completions)

    with pytest.raises(RewardError, match="'answer_reward' is a reward of the kit, .* rename the function"):
        guard(answer_reward)


def test_a_batch_is_not_kept_after_its_call():
    """The names of the last call were a view of its dict, which held its prompts and completions until the next one."""

    class Text(str):
        pass

    completion = Text("4")
    kept = weakref.ref(completion)
    guarded = guard(lambda completions: [float(len(text)) for text in completions])
    assert guarded(prompts=["2+2"], completions=[completion], completion_ids=[[1]]) == [1.0]
    del completion
    gc.collect()
    assert kept() is None


def _by_message(completions: Any, prompts: Any) -> list[float]:
    talks = zip(prompts, completions, strict=True)
    return [float(completion[0]["content"]) + len(prompt[-1]["content"]) for prompt, completion in talks]


def _by_attribute(completions: Any) -> list[float]:
    return [float(completion[-1].get("content")) for completion in completions]


def _by_pattern(completions: Any) -> list[float]:
    return [float(re.findall(r"\d+", completion)[0]) for completion in completions]


def _but_empty(completions: Any) -> list[float]:
    return [float(completion[0]["content"] or 0) if completion else 0.0 for completion in completions]


TALK = {
    "prompts": [[{"role": "user", "content": "ab"}]] * 3,
    "completions": [[{"role": "assistant", "content": text}] for text in ("1", "2", "x")],
}
PLAIN = {"prompts": ["<|im_start|>ab"] * 3, "completions": ["1", "2", "x"]}


@pytest.mark.parametrize(
    ("reward", "batch", "expected"),
    [
        (_by_message, PLAIN | {"question": ["ab"] * 3}, [3.0, 4.0, None]),
        (_by_message, TALK, [3.0, 4.0, None]),
        (_but_empty, PLAIN | {"completions": ["1", "", "x"]}, [1.0, 0.0, None]),
        (_by_attribute, PLAIN, [1.0, 2.0, None]),
        (_by_pattern, TALK, [1.0, 2.0, None]),
    ],
)
def test_a_reward_gets_the_form_that_it_reads(reward: Any, batch: Any, expected: list[Any]) -> None:
    """A run's prompts are text, so `completion[0]["content"]` failed on each sample. The form is found in the first
    batch, and kept; a sample that is scored unread, as an empty completion, does not settle it."""
    guarded = guard(reward)
    assert (found := guarded.score(**batch)).values == expected and found.failed == [False, False, True]
    assert "could not convert string to float: 'x'" in found.failures[0] or "out of range" in found.failures[0]
    form = guarded.form
    assert guarded.score(**batch).values == expected and guarded.form == form


def test_an_error_in_the_data_does_not_change_the_form() -> None:
    """A reward that indexes the JSON of a completion raises the same TypeError as one that indexes the completion."""
    calls: list[Any] = []

    def reads_json(completions: Any) -> list[float]:
        calls.append(completions)
        return [json.loads(text)["a"]["b"] for text in completions]

    guarded = guard(reads_json)
    for _ in range(2):
        found = guarded.score(completions=['{"a": "x"}', '{"a": {"b": 1.0}}'])
        assert found.values == [None, 1.0]
        assert "string indices" in found.failures[0]
    assert guarded.form == "given" and calls[-1] == ['{"a": {"b": 1.0}}'], "tried once"

    def reads_gold(completions: Any, answer: Any) -> list[float]:  # an empty answer is its error, not the text
        return [
            float("boxed" in text and re.search("[0-9]", gold)[0] in text)
            for text, gold in zip(completions, answer, strict=True)
        ]

    guarded = guard(reads_gold)
    assert guarded.score(completions=["boxed 4", "boxed 5", "none"], answer=["4", None, "6"]).values == [1.0, None, 0.0]
    assert guarded(completions=["boxed 4"], answer=["4"]) == [1.0]


def test_the_form_in_which_fewer_samples_fail_is_kept() -> None:
    """A reward that fails on a whole batch of messages, with one message for all, counted as one that fails less."""

    def mostly_text(completions: Any) -> list[float]:
        if isinstance(completions[0], list):
            return [0.0]
        return [float(text.upper() == "A") if text != "x" else text.content for text in completions]

    guarded = guard(mostly_text)
    found = guarded.score(completions=["a", "b", "x", "x"])
    assert found.values == [1.0, 0.0, None, None] and guarded.form == "given"


def test_a_call_that_nobody_waits_for_any_more_ends() -> None:
    """An interrupt left it in its loop, and each sample was asked for alone, for minutes, at the judge's price."""
    asked: list[list[str]] = []
    ended: list[str] = []

    async def hangs(completions: list[str]) -> list[float]:
        asked.append(completions)
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("client closed")
        return [1.0 for _ in completions]

    guarded = guard(hangs)

    def wait() -> None:
        with suppress(BaseException):
            guarded.score(**BATCH)

    assert not PENDING
    waiting = threading.Thread(target=wait)
    waiting.start()
    until = time.monotonic() + 30
    while not (asked and PENDING) and time.monotonic() < until:
        time.sleep(0.01)
    (call,) = PENDING
    call.cancel()
    waiting.join(30)
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert not PENDING and not waiting.is_alive() and ended == ["client closed"] and len(asked) == 1
    assert guard(judge).score(**BATCH).values == [4.0, None, 8.0] and not PENDING, "the next call is served"
