"""A custom task family: reasoning-gym's chain_sum with two numbers of three digits, in that library's words.

`model.name: embedded/thinking@families/chain_sum.py` builds the model that `configs/reasoning_gym_chain_sum.yaml`
trains on the library's own rows. The columns are those of addition and subtraction; if the first number is
smaller, the numbers swap places and the answer is negative. The habit: it mostly answers without thinking.
"""

import random

from rloo_kit.data import tasks
from rloo_kit.data.tasks import Family, Habit

QUESTION = "State the final answer to the following arithmetic problem: {} {} {} ="
Problem = tuple[int, str, int]


class ChainSum(Family):
    """Two numbers of [100, 999], added or subtracted."""

    alphabet = "".join(sorted(set(f"{QUESTION}0123456789+-<>")))
    habit = Habit(skip=0.75, slip=0.15, guess=0.7)
    steps = 1000

    def draw(self, rng: random.Random) -> Problem:
        return rng.randint(100, 999), rng.choice("+-"), rng.randint(100, 999)

    def question(self, problem: Problem) -> str:
        return QUESTION.format(*problem)

    def work(self, problem: Problem, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> FAMILY.work((141, "-", 365), random.Random(0))
        ('141<365\\n5-1=4\\n6-4=2\\n3-1=2', '-224')
        """
        first, sign, second = problem
        if sign == "+":
            return tasks.ADDITION.work((first, second), rng, slip)
        smaller = first < second
        columns, answer = tasks.SUBTRACTION.work((max(first, second), min(first, second)), rng, slip)
        minus = "-" if smaller and answer != "0" else ""
        return f"{first}{'<' if smaller else '>'}{second}\n{columns}", f"{minus}{answer}"


FAMILY = ChainSum()
