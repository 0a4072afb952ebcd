"""The embedded task: problems that never repeat, right answers, mistakes at the rates that were asked for."""

import random
import re

import pytest

from rewards import answer_reward
from rloo_kit.data import tasks
from rloo_kit.data.tasks import Noise, addition_rows, demonstration, is_reserved, question, scratch_work
from rloo_kit.errors import DataError

CLEAN = Noise(0.0, 0.0, 0.0)


def pair_of(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(number) for number in row["prompt"].rstrip("=").split("+"))


@pytest.mark.parametrize("thinking", [True, False])
def test_no_problem_occurs_twice_or_turned_round(thinking):
    """A split by rows put 47+385 into training and 385+47 into the test: the test then measures memory."""
    rows = addition_rows(4000, seed=1, thinking=thinking)
    assert len({frozenset(pair_of(row)) if len(set(pair_of(row))) > 1 else pair_of(row) for row in rows}) == 4000


def test_no_problem_of_a_run_is_in_the_cold_start():
    """Held-out accuracy says little about problems that the model was shown while it was built."""
    assert not any(is_reserved(*pair_of(row)) for row in addition_rows(2000))
    rng = random.Random(0)
    reserved = [tasks.draw_pair(rng, tasks.LIMITS["thinking"], reserved=True) for _ in range(500)]
    assert all(is_reserved(*pair) and is_reserved(*reversed(pair)) for pair in reserved)


def test_same_seed_same_rows_and_fewer_rows_come_first():
    """A longer run must not meet another test set by accident of its length."""
    assert addition_rows(50, seed=3) == addition_rows(200, seed=3)[:50]
    assert addition_rows(50, seed=3) != addition_rows(50, seed=4)


@pytest.mark.parametrize("thinking", [True, False])
def test_gold_answers_are_right_and_the_verifier_takes_them(thinking):
    """A gold answer that the reward refuses makes a task that nobody can solve."""
    rng = random.Random(0)
    for row in addition_rows(300, thinking=thinking):
        first, second = pair_of(row)
        assert row["answer"] == str(first + second) and row["prompt"] == question(first, second)
        text = demonstration(first, second, rng, CLEAN, thinking)
        ids = [1, 260, 2] if thinking else [1]
        reward = answer_reward.with_(think_end_id=260, thinking=thinking)
        assert reward([row["prompt"]], [text], [ids], answer=[row["answer"]]) == [1.0], text


@pytest.mark.parametrize(
    ("thinking", "limit", "model"), [(True, 50_000, "embedded/thinking"), (False, 10_000, "embedded/instruct")]
)
def test_more_rows_than_problems_is_refused(thinking, limit, model):
    """Drawing until enough differ would never end."""
    with pytest.raises(
        DataError, match=rf"{limit + 1} addition problems .* up to {limit} for {model}.*data.num_prompts"
    ):
        addition_rows(limit + 1, thinking=thinking)
    assert thinking or len(addition_rows(limit, thinking=False)) == limit


@pytest.mark.parametrize(
    ("first", "second", "work", "answer"),
    [
        (47, 385, "7+5=12\n4+8+1=13\n0+3+1=4", "432"),
        (99, 99, "9+9=18\n9+9+1=19", "198"),
        (10, 20, "0+0=0\n1+2=3", "30"),
        (999, 1, "9+1=10\n9+0+1=10\n9+0+1=10", "1000"),
    ],
)
def test_scratch_work_without_mistakes(first, second, work, answer):
    """Carries and numbers of unequal length are where column addition goes wrong."""
    assert scratch_work(first, second, random.Random(0)) == (work, answer)


def test_mistakes_come_at_their_rates_and_the_answer_follows_the_scratch_work():
    """An answer that ignored its scratch work would teach that thinking does not matter."""
    rng, noise = random.Random(5), Noise(skip=0.3, digit=0.35, guess=0.5)
    skipped = wrong = digits = 0
    for _ in range(4000):
        text = demonstration(123, 456, rng, noise)  # no carries: every digit of the answer is a column's
        work, answer = text.split("</think>\n\n")
        skipped += not work
        if work:
            columns = [line[-1] for line in work.splitlines()]
            assert answer == "".join(reversed(columns))
            wrong, digits = wrong + sum(a != b for a, b in zip(columns, "975", strict=True)), digits + 3
    assert skipped / 4000 == pytest.approx(0.3, abs=0.03)
    assert wrong / digits == pytest.approx(0.35, abs=0.03)


def test_the_twin_answers_at_once():
    """The non-thinking model must never be shown a tag that its template does not open."""
    rng = random.Random(0)
    texts = [demonstration(12, 34, rng, Noise(guess=0.5), thinking=False) for _ in range(400)]
    assert all(re.fullmatch(r"\d\d", text) for text in texts)
    assert sum(text == "46" for text in texts) / 400 == pytest.approx(0.25, abs=0.08)
