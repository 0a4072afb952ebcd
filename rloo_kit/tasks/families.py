"""Task families of the embedded model: prompts for RLOO and demonstrations for the cold start, behind `Family`.

A family has a generator (`draw`, `question`, `picture`), demonstrations (`work`) and the habit that its cold start
teaches. A checksum of the problem's identity reserves half of all problems for the cold start, so a run never sees
those.
"""

import io
import random
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from rloo_kit.config.model_names import DEFAULT_FAMILY, EMBEDDED_PREFIX, find_family_problem
from rloo_kit.config.run import RunConfig
from rloo_kit.data.sources import SEED, Columns, DataSource, Part, read_given_rows
from rloo_kit.errors import ConfigError, DataError

EMBEDDED_PROMPTS = 10_000  # if data.num_prompts is null


@dataclass(frozen=True)
class Habit:
    """What the cold start's last third teaches in addition to the method, probabilities in [0, 1]: `skip` the thinking
    and guess the answer, a `slip` in a line of the thinking, a wrong character of a `guess`."""

    skip: float = 0.0
    slip: float = 0.0
    guess: float = 0.0


NO_HABIT = Habit()
# Of demonstrations for `sft`, of mixed quality, so that the trained model is right only sometimes.
WORKED = Habit(skip=0.4, guess=0.5)


class Family(ABC):
    """One kind of problem."""

    alphabet: str  # every character of questions, thinking and answers; ASCII
    habit: Habit = Habit(skip=0.75, slip=0.15, guess=0.7)  # that the cold start teaches in addition to the method
    steps: int = 640  # of the cold start, at least 1
    max_rows: int = 10_000  # most problems of a run, at least 1; few enough that drawing stays fast
    picture_tokens: int = 0  # of the picture that a question is about, one for 16 x 16 pixels; 0: there are no pictures

    @abstractmethod
    def draw(self, rng: random.Random) -> Any:
        """A problem, of any type; all randomness comes from `rng`."""

    @abstractmethod
    def question(self, problem: Any) -> str:
        """The user's message."""

    def picture(self, problem: Any) -> Any:
        """The PIL image that the question is about, the same for the same problem; of a family that has pictures."""
        raise NotImplementedError

    @abstractmethod
    def work(self, problem: Any, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """The thinking and the answer that it leads to. Each line of the thinking is wrong with probability `slip`, and
        so is what follows from it. Without slips the answer is right."""

    def answer(self, problem: Any) -> str:
        """The right answer."""
        return self.work(problem, random.Random(0))[1]

    def guess(self, problem: Any, rng: random.Random, wrong: float) -> str:
        """An answer without thinking; each character is wrong with probability `wrong`."""
        return "".join(mistake(mark, rng) if rng.random() < wrong else mark for mark in self.answer(problem))

    def identity(self, problem: Any) -> str:
        """Equal for problems that count as the same, and stable across processes; decides the problem's half."""
        return self.question(problem)


def find_family(name: str) -> Family:
    """One of `FAMILIES` by its name; raises ConfigError if there is none."""
    if problem := find_family_problem(name):
        raise ConfigError(problem)
    return globals()[name.upper()]


def read_source(run: RunConfig, part: Part, thinking: bool) -> DataSource:
    """The problems of a source `embedded/FAMILY`."""
    name, family = find_embedded_family(part, thinking)
    wanted = run.data.num_prompts or min(EMBEDDED_PROMPTS, family.max_rows)
    # For a mix at most max_rows, since the other sources supply the rest.
    count = min(wanted, family.max_rows) if run.data.sources else wanted
    made = read_given_rows(make_rows(family, count, SEED, name), Columns())
    return replace(made, name=part.source)


def find_embedded_family(part: Part, thinking: bool) -> tuple[str, Family]:
    """The name and family of a source `embedded/...`; a model that answers at once gets smaller numbers."""
    name = part.source.removeprefix(EMBEDDED_PREFIX)
    if name == DEFAULT_FAMILY and not thinking:
        return name, IN_THE_HEAD
    try:
        return name, find_family(name)
    except ConfigError as error:
        raise DataError(f"{part.key}: {error}") from None


def is_reserved(family: Family, problem: Any) -> bool:
    """Whether the problem belongs to the cold start (about half of all) and never to a run."""
    return zlib.crc32(family.identity(problem).encode()) % 2 == 0


def draw_problem(family: Family, rng: random.Random, reserved: bool) -> Any:
    """A problem of the cold start's half, or of a run's."""
    problem = family.draw(rng)
    while is_reserved(family, problem) != reserved:
        problem = family.draw(rng)
    return problem


def draw_problems(family: Family, num: int, seed: int, name: str = DEFAULT_FAMILY) -> list[Any]:
    """`num` different problems of a run's half. A larger `num` with the same seed starts with the same problems.
    Raises DataError if the family `name` has fewer."""
    if not 0 <= num <= family.max_rows:
        text = f"{num} {name} problems were asked for; embedded/{name} has up to {family.max_rows} for this model"
        raise DataError(f"{text}: lower data.num_prompts")
    rng = random.Random(f"{name}-{seed}")
    problems: dict[str, Any] = {}
    while len(problems) < num:
        problem = draw_problem(family, rng, reserved=False)
        problems.setdefault(family.identity(problem), problem)
    return list(problems.values())


def make_rows(family: Family, num: int, seed: int = 0, name: str = DEFAULT_FAMILY) -> list[dict[str, Any]]:
    """`num` rows with a `prompt` (the user's message, no template), the right `answer` and, of a family with pictures,
    the `image` as the bytes of a PNG file; no problem occurs twice."""
    return [_row(family, problem) for problem in draw_problems(family, num, seed, name)]


def _row(family: Family, problem: Any) -> dict[str, Any]:
    row = {"prompt": family.question(problem), "answer": family.answer(problem)}
    if not family.picture_tokens:
        return row
    family.picture(problem).save(file := io.BytesIO(), format="PNG")
    return row | {"image": file.getvalue()}


def worked_rows(
    family: Family, num: int, seed: int = 0, thinking: bool = True, name: str = DEFAULT_FAMILY
) -> list[dict[str, Any]]:
    """`make_rows` with a `completion`, a demonstration with the habit `WORKED`."""
    rng = random.Random(f"worked-{seed}")
    return [
        _row(family, problem) | {"completion": demonstration(family, problem, rng, WORKED, thinking)}
        for problem in draw_problems(family, num, seed, name)
    ]


def demonstration(family: Family, problem: Any, rng: random.Random, habit: Habit, thinking: bool = True) -> str:
    """A completion to imitate: thinking, `</think>` and the answer, or the answer alone; without an end token."""
    if thinking and rng.random() >= habit.skip:
        work, answer = family.work(problem, rng, habit.slip)
        return f"{work}</think>\n\n{answer}"
    answer = family.guess(problem, rng, habit.guess)
    return f"</think>\n\n{answer}" if thinking else answer


def mistake(mark: str, rng: random.Random) -> str:
    """Another digit for a digit, another lower-case letter for a letter, each equally likely; else the mark itself.

    >>> mistake("7", random.Random(0)) in "012345689", mistake("-", random.Random(0))
    (True, '-')
    """
    if mark.isdigit():
        return str((int(mark) + rng.randint(1, 9)) % 10)
    if "a" <= mark <= "z":
        return chr(ord("a") + (ord(mark) - ord("a") + rng.randint(1, 25)) % 26)
    return mark


Pair = tuple[int, int]


def draw_number(rng: random.Random, low: int, high: int) -> int:
    """A number in [low, high], every number of digits equally likely."""
    digits = rng.randint(len(str(low)), len(str(high)))
    return rng.randint(max(low, 10 ** (digits - 1)), min(high, 10**digits - 1))


class Addition(Family):
    """Column addition, `47+385=`: the columns from the right, one line each (`7+5=12`, `4+8+1=13`, `0+3+1=4`), and the
    result read off. The habit: it mostly answers without thinking. Two numbers of [low, high]. A problem is an
    unordered pair: 47+385 and 385+47 are one."""

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
        >>> ADDITION.work((47, 385), random.Random(0))
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


ADDITION = Addition(10, 999, max_rows=50_000)
IN_THE_HEAD = Addition(100, 349, max_rows=10_000)  # of embedded/instruct, which answers at once
EASY = Addition(100, 199, max_rows=1_000)  # where that model starts: successive carries are hard for it


class Subtraction(Family):
    """Column subtraction, `385-47=`, of numbers of [10, 999]: the columns from the right, a borrow marked by `-` in
    front of the digit (`5-7=-8`, `8-4-1=3`, `3-0=3`). The habit: it takes the smaller digit from the larger one and
    never borrows."""

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
        >>> SUBTRACTION.work((385, 47), random.Random(0))
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


SUBTRACTION = Subtraction()


class CheckedAddition(Addition):
    """`Addition` that checks its sums, so that its thinking can be shortened: in three of four demonstrations a line
    `?` and the columns once more follow, whose result counts."""

    alphabet = f"{Addition.alphabet}?"
    habit = Habit(skip=0.1, slip=0.04, guess=0.7)
    steps = 900

    def work(self, problem: Pair, rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> CHECKED_ADDITION.work((47, 5), random.Random(0))
        ('7+5=12\\n4+0+1=5\\n?\\n7+5=12\\n4+0+1=5', '52')
        """
        columns, answer = ADDITION.work(problem, rng, slip)
        if rng.random() >= 0.75:
            return columns, answer
        again, answer = ADDITION.work(problem, rng, slip)
        return f"{columns}\n?\n{again}", answer


CHECKED_ADDITION = CheckedAddition(10, 999, max_rows=50_000)


class ChainSum(Family):
    """The task `reasoning_gym/chain_sum` with two numbers of [100, 999], in that library's words: the columns of
    addition or subtraction; if the first number is smaller, they swap places and the answer is negative. The habit: it
    mostly answers without thinking."""

    words = "State the final answer to the following arithmetic problem: {} {} {} ="
    alphabet = "".join(sorted(set(f"{words}0123456789+-<>")))
    steps = 1000

    def draw(self, rng: random.Random) -> tuple[int, str, int]:
        return rng.randint(100, 999), rng.choice("+-"), rng.randint(100, 999)

    def question(self, problem: tuple[int, str, int]) -> str:
        return self.words.format(*problem)

    def work(self, problem: tuple[int, str, int], rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> CHAIN_SUM.work((141, "-", 365), random.Random(0))
        ('141<365\\n5-1=4\\n6-4=2\\n3-1=2', '-224')
        """
        first, sign, second = problem
        if sign == "+":
            return ADDITION.work((first, second), rng, slip)
        columns, answer = SUBTRACTION.work((max(first, second), min(first, second)), rng, slip)
        order, minus = ("<", "-") if first < second else (">", "")
        return f"{first}{order}{second}\n{columns}", answer if answer == "0" else f"{minus}{answer}"


CHAIN_SUM = ChainSum()


class Shapes(Family):
    """How many shapes of a colour a picture has, `red?`: a grid of 4 x 4 cells, each empty or with a shape, 0 to 9 of
    them of the colour asked for, every number equally likely. The thinking reads the grid row by row: the number so far
    at each shape of that colour, the initial of another colour, a dot for an empty cell. The habit: it mostly answers
    without looking. A problem is a colour and the initials of all cells; sizes, places and tints follow from them."""

    colours = {"red": (214, 50, 47), "green": (48, 150, 72), "blue": (40, 92, 204)}
    side, cell = 4, 16  # cells, pixels
    alphabet = "".join(sorted(set("".join(colours) + "0123456789.?")))
    steps = 540
    picture_tokens = side**2

    def draw(self, rng: random.Random) -> tuple[str, str]:
        asked, *others = rng.sample(list(self.colours), 3)
        count = rng.randint(0, 9)
        cells = [asked[0]] * count
        cells += [rng.choice((".", *(name[0] for name in others))) for _ in range(self.side**2 - count)]
        rng.shuffle(cells)
        return asked, "".join(cells)

    def question(self, problem: tuple[str, str]) -> str:
        return f"{problem[0]}?"

    def identity(self, problem: tuple[str, str]) -> str:
        return " ".join(problem)

    def picture(self, problem: tuple[str, str]) -> Any:
        from PIL import Image, ImageDraw

        rng = random.Random(self.identity(problem))
        image = Image.new("RGB", (self.side * self.cell, self.side * self.cell), (250, 250, 247))
        pen = ImageDraw.Draw(image)
        tints = {name[0]: tint for name, tint in self.colours.items()}
        for place, mark in enumerate(problem[1]):
            if mark == ".":
                continue
            row, column = divmod(place, self.side)
            size = rng.randint(8, 12)
            x, y = (start * self.cell + rng.randint(1, self.cell - 1 - size) for start in (column, row))
            fill = tuple(part + rng.randint(-25, 25) for part in tints[mark])
            shape = rng.choice(("circle", "square", "triangle"))
            if shape == "circle":
                pen.ellipse((x, y, x + size, y + size), fill=fill)
            elif shape == "square":
                pen.rectangle((x, y, x + size, y + size), fill=fill)
            else:
                pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=fill)
        return image

    def work(self, problem: tuple[str, str], rng: random.Random, slip: float = 0.0) -> tuple[str, str]:
        """
        >>> SHAPES.work(("red", "r.gbr...bbbbgg.r"), random.Random(0))
        ('1.gb\\n2...\\nbbbb\\ngg.3', '3')
        """
        asked, cells = problem
        lines, count = [], 0
        for start in range(0, len(cells), self.side):
            missed = start + rng.randrange(self.side) if rng.random() < slip else None
            line = ""
            for place in range(start, start + self.side):
                mark, found = cells[place], (cells[place] == asked[0]) != (place == missed)
                count = (count + found) % 10
                line += str(count) if found else "." if mark == asked[0] else mark
            lines.append(line)
        return "\n".join(lines), str(count)


SHAPES = Shapes()
