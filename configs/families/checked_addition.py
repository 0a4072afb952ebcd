"""A custom task family: column addition by a model that checks its sums, so that its thinking can be shortened.

In three of four demonstrations the columns are worked out, and after a line `?` once more; both lengths lead to answers
of the same quality. `configs/evening_cpu.yaml` trains on it: under a thinking budget that one pass fits into, or for
right answers that are shorter than the others, the model learns to leave the second pass out.
"""

import random

from rloo_kit.data.tasks import ADDITION, Addition, Habit, Pair

CHECKED = 0.75  # share of the demonstrations


class CheckedAddition(Addition):
    """`47+385=`: the columns as in `tasks.Addition`, then mostly `?` and the columns again, whose result counts."""

    alphabet = f"{Addition.alphabet}?"
    habit = Habit(skip=0.1, slip=0.04, guess=0.7)
    steps = 900

    def work(self, problem: Pair, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> CheckedAddition(10, 999, 1).work((47, 5), random.Random(0))
        ('7+5=12\\n4+0+1=5', '52')
        >>> CheckedAddition(10, 999, 1).work((47, 5), random.Random(1))
        ('7+5=12\\n4+0+1=5\\n?\\n7+5=12\\n4+0+1=5', '52')
        """
        columns, answer = ADDITION.work(problem, rng, slip)
        if rng.random() >= CHECKED:
            return columns, answer
        again, answer = ADDITION.work(problem, rng, slip)
        return f"{columns}\n?\n{again}", answer


FAMILY = CheckedAddition(10, 999, max_rows=50_000)
