"""Column addition, `47+385=`: the columns from the right, one line each (`7+5=12`, `4+8+1=13`, `0+3+1=4`), and the
result read off. The habit: it mostly answers without thinking."""

import random

from rloo_kit.data.tasks import Family, mistake

Pair = tuple[int, int]


def draw_number(rng: random.Random, low: int, high: int) -> int:
    """A number in [low, high], every number of digits equally likely."""
    digits = rng.randint(len(str(low)), len(str(high)))
    return rng.randint(max(low, 10 ** (digits - 1)), min(high, 10**digits - 1))


class Addition(Family):
    """Two numbers of [low, high]. A problem is an unordered pair: 47+385 and 385+47 are one."""

    alphabet = "0123456789+="

    def __init__(self, low: int, high: int, max_rows: int):
        self.low, self.high, self.max_rows = low, high, max_rows

    def draw(self, rng: random.Random) -> Pair:
        return draw_number(rng, self.low, self.high), draw_number(rng, self.low, self.high)

    def question(self, problem: Pair) -> str:
        return f"{problem[0]}+{problem[1]}="

    def identity(self, problem: Pair) -> str:
        return f"{min(problem)}+{max(problem)}"

    def work(self, problem: Pair, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> FAMILY.work((47, 385), random.Random(0))
        ('7+5=12\\n4+8+1=13\\n0+3+1=4', '432')
        """
        width = max(len(str(number)) for number in problem)
        rows = [reversed(f"{number:0{width}}") for number in problem]
        lines, digits, carry = [], "", 0
        for top, bottom in zip(*rows, strict=True):
            tens, unit = divmod(int(top) + int(bottom) + carry, 10)
            written = mistake(str(unit), rng) if rng.random() < slip else str(unit)
            lines.append(f"{top}+{bottom}" + (f"+{carry}" if carry else "") + f"={tens or ''}{written}")
            digits, carry = f"{written}{digits}", tens
        return "\n".join(lines), f"{carry or ''}{digits}"


FAMILY = Addition(10, 999, max_rows=50_000)
IN_THE_HEAD = Addition(100, 349, max_rows=10_000)  # of embedded/instruct, which answers at once
EASY = Addition(100, 199, max_rows=1_000)  # where that model starts: successive carries are hard for it
