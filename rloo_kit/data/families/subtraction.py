"""Column subtraction, `385-47=`: the columns from the right, a borrow marked by `-` in front of the digit (`5-7=-8`,
`8-4-1=3`, `3-0=3`). The habit: it takes the smaller digit from the larger one and never borrows."""

import random

from rloo_kit.data.families.addition import draw_number
from rloo_kit.data.tasks import Family, Habit

Pair = tuple[int, int]


class Subtraction(Family):
    """The smaller of two numbers of [10, 999] from the larger."""

    alphabet = "0123456789-="
    habit = Habit(slip=0.6)
    max_rows = 50_000

    def draw(self, rng: random.Random) -> Pair:
        first, second = draw_number(rng, 10, 999), draw_number(rng, 10, 999)
        return max(first, second), min(first, second)

    def question(self, problem: Pair) -> str:
        return f"{problem[0]}-{problem[1]}="

    def work(self, problem: Pair, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> FAMILY.work((385, 47), random.Random(0))
        ('5-7=-8\\n8-4-1=3\\n3-0=3', '338')
        """
        first, second = str(problem[0]), str(problem[1]).zfill(len(str(problem[0])))
        lines, digits, borrowed = [], "", 0
        for top, bottom in zip(reversed(first), reversed(second), strict=True):
            left = int(top) - int(bottom) - borrowed
            borrow = left < 0
            if borrow and rng.random() < slip:
                left, borrow = -left, False
            lines.append(f"{top}-{bottom}" + ("-1" if borrowed else "") + f"={'-' if borrow else ''}{left % 10}")
            digits, borrowed = f"{left % 10}{digits}", int(borrow)
        return "\n".join(lines), digits.lstrip("0") or "0"


FAMILY = Subtraction()
