"""Task families: problems that never repeat, right answers, mistakes at the rates asked for."""

import io
import json
import random
import runpy
from collections import Counter
from pathlib import Path

import pytest

from rewards import answer_reward
from rloo_kit.config.model_names import FAMILIES
from rloo_kit.errors import DataError
from rloo_kit.tasks import families
from rloo_kit.tasks.families import demonstration, draw_problem, find_family, is_reserved, make_rows, worked_rows

WRITTEN = [name for name in FAMILIES if not find_family(name).picture_tokens]
ADDITIONS = [families.ADDITION, families.IN_THE_HEAD]
FIRST = {  # of seed 0
    "addition": "841+27=13+784=401+923=",
    "checked_addition": "29+87=69+87=65+713=",
}


def result_of(question: str) -> str:
    """The right answer to a family's question, worked out from its text alone."""
    return str(eval(question.rpartition(":")[2].rstrip("=")))


@pytest.mark.parametrize("name", WRITTEN)
def test_gold_answers_are_right_and_the_verifier_takes_them(name):
    """A gold answer that the reward refuses makes a task that cannot be solved."""
    family, rng = find_family(name), random.Random(0)
    reward = answer_reward.with_(think_end_id=260)
    for row in make_rows(family, 300, 0, name):
        assert row["answer"] == result_of(row["prompt"]), row
    for _ in range(300):
        problem = family.draw(rng)
        text = demonstration(family, problem, rng, families.NO_HABIT)
        score = reward([family.question(problem)], [text], [[1, 260, 2]], answer=[family.answer(problem)])
        assert score == [1.0], text
        assert set(text) - set(family.alphabet) <= set("</think>\n")


@pytest.mark.parametrize("name", WRITTEN)
def test_no_problem_occurs_twice_and_none_of_a_run_is_in_the_cold_start(name):
    """Held-out accuracy says little about problems that the model was shown while it was built."""
    family, rng = find_family(name), random.Random(0)
    rows = make_rows(family, 2000, 1, name)
    assert len({row["prompt"] for row in rows}) == 2000
    shown = {family.question(draw_problem(family, rng, reserved=True)) for _ in range(1000)}
    assert not shown & {row["prompt"] for row in rows}


def count_coloured_cells(file: bytes, asked: str) -> int:
    """Cells of a picture with a shape of the colour, from its pixels alone."""
    from PIL import Image

    image, tint = Image.open(io.BytesIO(file)), families.SHAPES.colours[asked]
    corners = [(column, row) for row in range(0, 64, 16) for column in range(0, 64, 16)]
    cells = [[image.getpixel((x + i, y + j)) for i in range(16) for j in range(16)] for x, y in corners]
    return sum(any(max(map(abs, map(int.__sub__, pixel, tint))) <= 25 for pixel in cell) for cell in cells)


def test_the_answer_is_in_the_picture_and_not_in_the_question():
    """A question that gives its answer away trains a model that never looks, and images swapped would cost nothing."""
    rows = make_rows(families.SHAPES, 1500, 1, "shapes")
    assert all(str(count_coloured_cells(row["image"], row["prompt"][:-1])) == row["answer"] for row in rows[:200])
    counts = Counter((row["prompt"], row["answer"]) for row in rows)
    assert len(counts) == 30 and max(counts.values()) < 2 * min(counts.values()), "near uniform for each question"


def test_pictures_repeat_themselves_and_differ_from_those_of_the_cold_start():
    """Held-out accuracy says little about pictures that the model was shown while it was built."""
    family, rng = families.SHAPES, random.Random(0)
    rows = make_rows(family, 500, 1, "shapes")
    assert rows[:50] == make_rows(family, 50, 1, "shapes") and len({row["image"] for row in rows}) == 500
    drawn = [draw_problem(family, rng, reserved=True) for _ in range(500)]
    assert all(is_reserved(family, problem) for problem in drawn)
    shown = {family.picture(problem).tobytes() for problem in drawn}
    assert not shown & {family.picture(problem).tobytes() for problem in families.draw_problems(family, 500, 1)}
    assert 0.4 < sum(is_reserved(family, family.draw(rng)) for _ in range(1000)) / 1000 < 0.6


def test_a_cell_misread_is_one_shape_more_or_less():
    """An answer that ignored its thinking would teach that looking does not matter."""
    problem, rng = ("red", "r.gbr...bbbbgg.r"), random.Random(3)
    found = [families.SHAPES.work(problem, rng, slip=0.5) for _ in range(200)]
    for thinking, answer in found:
        digits = [int(mark) for mark in thinking if mark.isdigit()]
        assert digits == list(range(1, len(digits) + 1)) and answer == str(len(digits)), thinking
        assert list(map(len, thinking.split("\n"))) == [4, 4, 4, 4]
    assert 0.0 < sum(answer == "3" for _, answer in found) / 200 < 0.5


@pytest.mark.parametrize("family", ADDITIONS)
def test_an_addition_turned_round_is_the_same(family):
    """A split by rows put 47+385 into training and 385+47 into the test: the test then measures memory."""
    pairs = [frozenset(row["prompt"].rstrip("=").split("+")) for row in make_rows(family, 4000, 1)]
    assert len(set(pairs)) == 4000
    assert all(
        is_reserved(family, (first, second)) == is_reserved(family, (second, first))
        for first, second in (family.draw(random.Random(seed)) for seed in range(200))
    )


def test_same_seed_same_rows_and_fewer_rows_come_first():
    """A longer run must not meet another test set by accident of its length."""
    family = families.ADDITION
    assert make_rows(family, 50, 3) == make_rows(family, 200, 3)[:50] != make_rows(family, 50, 4)
    plain = [{name: row[name] for name in ("prompt", "answer")} for row in worked_rows(family, 50, 3)]
    assert plain == make_rows(family, 50, 3)


def test_more_rows_than_problems_is_refused():
    """Drawing until enough differ would never end: every family has as many as it says."""
    with pytest.raises(DataError, match=r"10001 addition problems .* up to 10000 .*data.num_prompts"):
        make_rows(families.IN_THE_HEAD, 10_001)
    for family in (families.IN_THE_HEAD, families.EASY, *map(find_family, FAMILIES)):
        assert len(families.draw_problems(family, family.max_rows, 0)) == family.max_rows


def test_mistakes_come_at_their_rates_and_the_answer_follows_the_thinking():
    """An answer that ignored its thinking would teach that thinking does not matter."""
    rng, habit = random.Random(5), families.Habit(skip=0.3, slip=0.35, guess=0.5)
    skipped = wrong = digits = 0
    for _ in range(4000):
        text = demonstration(families.ADDITION, (123, 456), rng, habit)  # no carries: each digit is a column's
        work, answer = text.split("</think>\n\n")
        skipped += not work
        if work:
            columns = [line[-1] for line in work.splitlines()]
            assert answer == "".join(reversed(columns))
            wrong, digits = wrong + sum(a != b for a, b in zip(columns, "975", strict=True)), digits + 3
    assert skipped / 4000 == pytest.approx(0.3, abs=0.03)
    assert wrong / digits == pytest.approx(0.35, abs=0.03)


def test_a_family_draws_the_same_problems_as_ever():
    """A run of a built-in family would train on other problems, and its held-out ones would be others."""
    for name, first in FIRST.items():
        assert "".join(row["prompt"] for row in make_rows(find_family(name), 3, 0, name)) == first


def test_the_sums_in_words_are_asked_as_the_library_asks():
    """A model built for other words would be trained on prompts that it cannot read."""
    pytest.importorskip("reasoning_gym", reason="make reasoning-gym has not been run")
    import reasoning_gym

    family = families.CHAIN_SUM
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}
    for row in reasoning_gym.create_dataset("chain_sum", **options, size=300, seed=1):
        first, sign, second = row["question"].removesuffix(" =").split()[-3:]
        problem = (int(first), sign, int(second))
        assert (family.question(problem), family.answer(problem)) == (row["question"], row["answer"])
        assert set(row["question"]) <= set(family.alphabet)


def test_the_rows_of_the_calculator_are_written(tmp_path):
    """`configs/tools_calculator.yaml` reads them; most demonstrations estimate, which is no right answer."""
    script = tmp_path / "sums.py"
    script.write_text((Path(__file__).parents[2] / "configs" / "tools" / "sums.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 12_000
    assert all(row["answer"] == result_of(row["prompt"]) for row in rows)
    called = [row for row in rows if row["completion"][0].get("tool_calls")]
    assert len(called) / len(rows) == pytest.approx(0.4, abs=0.02)
    assert all(row["completion"][-1]["content"] == row["answer"] for row in called)
