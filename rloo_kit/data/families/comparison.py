"""The largest of three numbers, `max(471,385,409)=`: the larger of two stays (`471>385`, `471>409`). The habit: it
names one of them without comparing."""

import random

from rloo_kit.data.families.addition import draw_number
from rloo_kit.data.tasks import Family, Habit

Numbers = tuple[int, int, int]


class Comparison(Family):
    """Three different numbers of [10, 999]."""

    alphabet = "0123456789max(),=<>"
    habit = Habit(skip=0.75, slip=0.15, guess=0.9)
    max_rows = 50_000

    def draw(self, rng: random.Random) -> Numbers:
        low, high = rng.choice(((10, 99), (100, 999)))
        numbers: set[int] = set()
        while len(numbers) < 3:
            numbers.add(draw_number(rng, low, high))
        first, second, third = rng.sample(sorted(numbers), 3)
        return first, second, third

    def question(self, problem: Numbers) -> str:
        return f"max({problem[0]},{problem[1]},{problem[2]})="

    def work(self, problem: Numbers, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> FAMILY.work((385, 471, 409), random.Random(0))
        ('385<471\\n471>409', '471')
        """
        lines, best = [], problem[0]
        for number in problem[1:]:
            larger = (best > number) != (rng.random() < slip)
            lines.append(f"{best}{'>' if larger else '<'}{number}")
            best = best if larger else number
        return "\n".join(lines), str(best)

    def guess(self, problem: Numbers, rng: random.Random, wrong: float) -> str:
        """Any of the three with probability `wrong`, else the largest."""
        return str(rng.choice(problem) if rng.random() < wrong else max(problem))


FAMILY = Comparison()
