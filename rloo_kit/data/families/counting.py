"""How often a letter occurs, `count(c,acbbcadc)=`: a tally after each letter (`a0c1b1b1c2a2d2c3`). The habit: it
mostly answers without thinking."""

import random

from rloo_kit.data.tasks import Family, Habit

Problem = tuple[str, str]


class Counting(Family):
    """One of the letters a to d, in eight of them."""

    alphabet = "0123456789abcdount(),="
    habit = Habit(skip=0.75, slip=0.1, guess=0.8)
    steps = 1000
    max_rows = 20_000

    def draw(self, rng: random.Random) -> Problem:
        return rng.choice("abcd"), "".join(rng.choice("abcd") for _ in range(8))

    def question(self, problem: Problem) -> str:
        return f"count({problem[0]},{problem[1]})="

    def work(self, problem: Problem, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> FAMILY.work(("c", "acbbcadc"), random.Random(0))
        ('a0c1b1b1c2a2d2c3', '3')
        """
        wanted, letters = problem
        tally, written = 0, ""
        for letter in letters:
            tally += letter == wanted and not rng.random() < slip
            written += f"{letter}{tally}"
        return written, str(tally)


FAMILY = Counting()
