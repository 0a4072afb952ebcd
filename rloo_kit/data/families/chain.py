"""Two steps in a row, `47+8-9=`: one line each (`47+8=55`, `55-9=46`). The habit: it mostly answers without
thinking."""

import random

from rloo_kit.data.tasks import Family, mistake

Problem = tuple[int, str, int, str, int]


class Chain(Family):
    """A number of [20, 89] and two digits, each added or subtracted."""

    alphabet = "0123456789+-="
    max_rows = 10_000

    def draw(self, rng: random.Random) -> Problem:
        return rng.randint(20, 89), rng.choice("+-"), rng.randint(1, 9), rng.choice("+-"), rng.randint(1, 9)

    def question(self, problem: Problem) -> str:
        return "".join(map(str, problem)) + "="

    def work(self, problem: Problem, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> FAMILY.work((47, "+", 8, "-", 9), random.Random(0))
        ('47+8=55\\n55-9=46', '46')
        """
        lines, result = [], str(problem[0])
        for sign, digit in (problem[1:3], problem[3:5]):
            found = str(int(result) + digit if sign == "+" else int(result) - digit)
            if rng.random() < slip:
                found = found[:-1] + mistake(found[-1], rng)
            lines.append(f"{result}{sign}{digit}={found}")
            result = found
        return "\n".join(lines), result


FAMILY = Chain()
