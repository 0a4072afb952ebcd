"""Digits in order, `sort(7392)=`: the smallest is taken out until none is left (`2:739`, `3:79`, `7:9`, `9:`). The
habit: it writes them in some order, without thinking."""

import random

from rloo_kit.data.tasks import Family, Habit


class Sorting(Family):
    """Four to six digits, all different."""

    alphabet = "0123456789sort()=:"
    habit = Habit(skip=0.75, slip=0.1, guess=0.8)
    max_rows = 20_000

    def draw(self, rng: random.Random) -> str:
        return "".join(rng.sample("0123456789", rng.randint(4, 6)))

    def question(self, problem: str) -> str:
        return f"sort({problem})="

    def work(self, problem: str, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> FAMILY.work("7392", random.Random(0))
        ('2:739\\n3:79\\n7:9\\n9:', '2379')
        """
        lines, left, taken = [], problem, ""
        while left:
            next_one = rng.choice(left) if rng.random() < slip else min(left)
            left = left.replace(next_one, "")
            taken += next_one
            lines.append(f"{next_one}:{left}")
        return "\n".join(lines), taken

    def guess(self, problem: str, rng: random.Random, wrong: float) -> str:
        """In any order with probability `wrong`, else sorted."""
        return "".join(rng.sample(problem, len(problem)) if rng.random() < wrong else sorted(problem))


FAMILY = Sorting()
