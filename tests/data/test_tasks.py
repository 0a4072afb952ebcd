"""Task families: problems that never repeat, right answers, mistakes at the rates asked for, a user's file."""

import random
import re
from pathlib import Path

import pytest

from rewards import answer_reward
from rloo_kit.config.model_names import FAMILIES
from rloo_kit.data import tasks
from rloo_kit.data.tasks import (
    NO_HABIT,
    Habit,
    demonstration,
    draw_problem,
    find_family,
    is_reserved,
    make_rows,
    worked_rows,
)
from rloo_kit.errors import ConfigError, DataError

ADDITIONS = [tasks.ADDITION, tasks.IN_THE_HEAD]
OWN = '''
from rloo_kit.data.tasks import Family, Habit


class Backward(Family):
    """abc> is answered with cba."""

    alphabet = "abcdefghijklmnopqrstuvwxyz>"
    habit = Habit(skip=0.5, guess=0.5)

    def draw(self, rng):
        return "".join(rng.choice("abcdefghij") for _ in range(4))

    def question(self, problem):
        return f"{problem}>"

    def work(self, problem, rng, slip=0.0):
        return "\\n".join(reversed(problem)), problem[::-1]


FAMILY = Backward()
'''
SORTINGS = "sort(63470)=sort(547938)=sort(06517)="  # the first of seed 0


def result_of(question: str) -> str:
    """The right answer to a family's question, worked out from its text alone."""
    if question.startswith("sort"):
        return "".join(sorted(re.findall(r"\d", question)))
    return str(eval(question.rstrip("=")))


@pytest.mark.parametrize("name", FAMILIES)
def test_gold_answers_are_right_and_the_verifier_takes_them(name):
    """A gold answer that the reward refuses makes a task that cannot be solved."""
    family, rng = find_family(name), random.Random(0)
    reward = answer_reward.with_(think_end_id=260)
    for row in make_rows(family, 300, 0, name):
        assert row["answer"] == result_of(row["prompt"]), row
    for _ in range(300):
        problem = family.draw(rng)
        text = demonstration(family, problem, rng, NO_HABIT)
        score = reward([family.question(problem)], [text], [[1, 260, 2]], answer=[family.answer(problem)])
        assert score == [1.0], text
        assert set(text) - set(family.alphabet) <= set("</think>\n")


@pytest.mark.parametrize("name", FAMILIES)
def test_no_problem_occurs_twice_and_none_of_a_run_is_in_the_cold_start(name):
    """Held-out accuracy says little about problems that the model was shown while it was built."""
    family, rng = find_family(name), random.Random(0)
    rows = make_rows(family, 2000, 1, name)
    assert len({row["prompt"] for row in rows}) == 2000
    shown = {family.question(draw_problem(family, rng, reserved=True)) for _ in range(1000)}
    assert not shown & {row["prompt"] for row in rows}


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
    family = tasks.ADDITION
    assert make_rows(family, 50, 3) == make_rows(family, 200, 3)[:50] != make_rows(family, 50, 4)
    plain = [{name: row[name] for name in ("prompt", "answer")} for row in worked_rows(family, 50, 3)]
    assert plain == make_rows(family, 50, 3)


def test_more_rows_than_problems_is_refused(monkeypatch):
    """Drawing until enough differ would never end."""
    with pytest.raises(DataError, match=r"10001 addition problems .* up to 10000 .*data.num_prompts"):
        make_rows(tasks.IN_THE_HEAD, 10_001)
    assert len(make_rows(tasks.IN_THE_HEAD, 10_000)) == 10_000
    monkeypatch.setattr(tasks.EASY, "max_rows", 10_000)
    with pytest.raises(DataError, match=r"9000 addition problems .* has about 2\d{3}: lower data.num_prompts"):
        make_rows(tasks.EASY, 9000)


def test_mistakes_come_at_their_rates_and_the_answer_follows_the_thinking():
    """An answer that ignored its thinking would teach that thinking does not matter."""
    rng, habit = random.Random(5), Habit(skip=0.3, slip=0.35, guess=0.5)
    skipped = wrong = digits = 0
    for _ in range(4000):
        text = demonstration(tasks.ADDITION, (123, 456), rng, habit)  # no carries: each digit is a column's
        work, answer = text.split("</think>\n\n")
        skipped += not work
        if work:
            columns = [line[-1] for line in work.splitlines()]
            assert answer == "".join(reversed(columns))
            wrong, digits = wrong + sum(a != b for a, b in zip(columns, "975", strict=True)), digits + 3
    assert skipped / 4000 == pytest.approx(0.3, abs=0.03)
    assert wrong / digits == pytest.approx(0.35, abs=0.03)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("FAMILY = Backward()", "", r"no FAMILY that is a rloo_kit.data.tasks.Family"),
        ('xyz>"', 'xyz"', r"add \['>'\] to alphabet"),
        ("problem[::-1]", 'problem[::-1] if rng.random() < 0.5 else "a"', r"has to come to one answer"),
        ("class Backward", "1 / 0\n\n\nclass Backward", "ZeroDivisionError: division by zero"),
        ("FAMILY = Backward()", "raise SystemExit(3)", "SystemExit: 3"),
        ('"\\n".join(reversed(problem)), problem[::-1]', 'problem + ">"', r"work\(\) has to return .*, not '[a-j]+>'"),
        ('f"{problem}>"', "7", r"question\(\) returns 7, which is not text"),
        ("    habit =", "    steps = 0\n    habit =", r"steps is 0; .* whole number from 1"),
        ("skip=0.5", "skip=7.5", r"Habit\(skip=7.5\): .* probability from 0 to 1"),
        ("Habit(skip=0.5, guess=0.5)", "0.5", r"habit is 0.5, not a rloo_kit.data.tasks.Habit"),
    ],
)
def test_a_broken_family_says_what_is_wrong(old, new, message, tmp_path):
    """The cold start would run for a minute, and end with a KeyError on a token."""
    assert old in OWN
    (tmp_path / "own.py").write_text(OWN.replace(old, new))
    with pytest.raises(ConfigError, match=rf"(?s)task family .*own.py: .*{message}") as caught:
        find_family(str(tmp_path / "own.py"))
    assert str(caught.value).count(str(tmp_path / "own.py")) == 1, "the path stood twice"


def of_problems(*problems: str) -> str:
    """The text of a family that draws these alone."""
    return OWN.replace('"".join(rng.choice("abcdefghij") for _ in range(4))', f"rng.choice({list(problems)})")


def test_a_family_without_problems_in_one_half_is_refused(tmp_path):
    """Every draw was of the other half, and the program drew for ever. Six problems are a task too."""
    (tmp_path / "own.py").write_text(of_problems("abcd"))
    with pytest.raises(ConfigError, match=r"own.py: .* draws gave no problem of (a run's|the cold start's) half"):
        find_family(str(tmp_path / "own.py"))
    one = tasks.Addition(10, 10, max_rows=5)
    with pytest.raises(DataError, match=r"draws gave no problem of .* half: draw\(\)"):
        draw_problem(one, random.Random(0), reserved=not is_reserved(one, (10, 10)))
    six = ("abcd", "bcda", "cdab", "dabc", "abdc", "badc")
    (tmp_path / "own.py").write_text(of_problems(*six))
    family = find_family(str(tmp_path / "own.py"))
    left = [is_reserved(family, problem) for problem in six].count(False)
    assert len(make_rows(family, left, 0, "own.py")) == left
    with pytest.raises(DataError, match=rf"7 own.py problems .* has about {left}: lower data.num_prompts"):
        make_rows(family, 7, 0, "own.py")


def test_a_file_draws_the_same_problems_however_it_is_named(tmp_path):
    """`./own.py` and `own.py` seeded two different sets, so a run used from elsewhere had another test set."""
    (tmp_path / "own.py").write_text(OWN)
    family = find_family(str(tmp_path / "own.py"))
    rows = [make_rows(family, 20, 3, name) for name in ("own.py", "./own.py", str(tmp_path / "own.py"))]
    assert rows[0] == rows[1] == rows[2] != make_rows(family, 20, 3, "other.py")
    built_in = "".join(row["prompt"] for row in make_rows(find_family("sorting"), 3, 0, "sorting"))
    assert built_in == SORTINGS, "a run of a built-in family would train on other problems"


def test_the_family_in_the_docs_is_one(tmp_path):
    """An example that does not load is the first thing that somebody copies."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "embedded.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "FAMILY" in block)
    (tmp_path / "backward.py").write_text(code)
    family = find_family(str(tmp_path / "backward.py"))
    assert make_rows(family, 500, 0, "backward")[0]["answer"] and family.answer("abcde") == "edcba"


def test_the_family_in_configs_asks_as_the_library_does():
    """A model built for other words would be trained on prompts that it cannot read."""
    pytest.importorskip("reasoning_gym", reason="make reasoning-gym has not been run")
    import reasoning_gym

    family = find_family(str(Path(__file__).resolve().parents[2] / "configs" / "families" / "chain_sum.py"))
    rows = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=3, max_digits=3, size=300, seed=1
    )
    for row in rows:
        first, sign, second = row["question"].removesuffix(" =").split()[-3:]
        problem = (int(first), sign, int(second))
        assert (family.question(problem), family.answer(problem)) == (row["question"], row["answer"])
        assert set(row["question"]) <= set(family.alphabet)


def test_a_family_of_the_users_own(tmp_path, monkeypatch):
    """A second task meant a cold start of one's own on private modules."""
    (tmp_path / "backward.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    family = find_family("backward.py")
    assert make_rows(family, 1, 0, "backward")[0]["prompt"].endswith(">")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_family("backward.py", tmp_path / "run.yaml").answer("abcd") == "dcba"
    with pytest.raises(ConfigError, match=r"no file backward.py; looked for as /.*backward.py"):
        find_family("backward.py")
    for name in ("~no-such-user/x.py", "a" * 5000 + ".py", "a\0.py"):
        with pytest.raises(ConfigError):
            find_family(name)
