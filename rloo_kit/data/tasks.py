"""The embedded task: column addition (`47+385=`), with prompts for RLOO and noisy demonstrations for the cold start.

A worked answer adds the columns from the right, one line each (`7+5=12`, `4+8+1=13`, `0+3+1=4`), and reads the result
off. A checksum of the unordered pair reserves half of all problems for the cold start, so a run never meets those.
"""

import random
import zlib
from dataclasses import dataclass

from rloo_kit.errors import DataError

LIMITS = {
    "thinking": (10, 999),
    "untaught": (10, 999),
    "instruct": (100, 349),
}  # smallest and largest number of a question
EASY_LIMITS = (100, 199)  # where the instruct model begins: successive carries are hard for it
MAX_ROWS = {"thinking": 50_000, "instruct": 10_000}  # few enough that drawing stays quick


@dataclass(frozen=True)
class Noise:
    """Rates of the mistakes in demonstrations, probabilities in [0, 1]: `skip` the scratch work and guess the answer, a
    wrong column `digit`, a wrong digit of a `guess`."""

    skip: float = 0.3
    digit: float = 0.3
    guess: float = 0.5


# Of the worked answers that a run imitates: of mixed quality, so that a model that does is right sometimes.
WORKED = Noise(skip=0.4, digit=0.0, guess=0.5)


def is_reserved(first: int, second: int) -> bool:
    """Whether the unordered pair belongs to the cold start (about half of all pairs) and never to a run."""
    low, high = sorted((first, second))
    return zlib.crc32(f"{low}+{high}".encode()) % 2 == 0


def draw_pair(rng: random.Random, limits: tuple[int, int], reserved: bool) -> tuple[int, int]:
    """Two numbers within `limits`, lengths uniform, from the cold start's half of the pairs or a run's."""
    while True:
        pair = (_draw_number(rng, limits), _draw_number(rng, limits))
        if is_reserved(*pair) == reserved:
            return pair


def _draw_number(rng: random.Random, limits: tuple[int, int]) -> int:
    digits = rng.randint(len(str(limits[0])), len(str(limits[1])))
    return rng.randint(max(limits[0], 10 ** (digits - 1)), min(limits[1], 10**digits - 1))


def question(first: int, second: int) -> str:
    """The user's message."""
    return f"{first}+{second}="


def addition_rows(num: int, seed: int = 0, thinking: bool = True) -> list[dict[str, str]]:
    """`num` rows with a `prompt` (the user's message, no template) and the right `answer`; no problem occurs twice.

    >>> list(addition_rows(1, seed=0)[0])
    ['prompt', 'answer']

    Args:
        num: number of rows, at most 50000 (10000 for the instruct model, whose numbers end at 349).
        seed: the same seed gives the same rows; more rows of a seed begin with the fewer.
        thinking: rows for the thinking model, or for the instruct model.

    Raises:
        DataError: more rows than `MAX_ROWS`.
    """
    kind = "thinking" if thinking else "instruct"
    if not 0 <= num <= MAX_ROWS[kind]:
        raise DataError(
            f"{num} addition problems were asked for; embedded/addition has up to {MAX_ROWS[kind]} for "
            f"embedded/{kind}: lower data.num_prompts"
        )
    rng = random.Random(f"addition-{seed}")
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    while len(pairs) < num:
        first, second = draw_pair(rng, LIMITS[kind], reserved=False)
        pairs.setdefault((min(first, second), max(first, second)), (first, second))
    return [{"prompt": question(*pair), "answer": str(sum(pair))} for pair in pairs.values()]


def worked_rows(num: int, seed: int = 0, thinking: bool = True) -> list[dict[str, str]]:
    """`addition_rows` with a `completion`, the worked answer, two of five of which guess without work (`WORKED`);
    arguments and errors are the same.

    >>> worked_rows(1)[0]["completion"].count("</think>")
    1
    """
    rng = random.Random(f"worked-{seed}")
    rows = addition_rows(num, seed, thinking)
    pairs = [row["prompt"].removesuffix("=").split("+") for row in rows]
    return [
        row | {"completion": demonstration(int(first), int(second), rng, WORKED, thinking)}
        for row, (first, second) in zip(rows, pairs, strict=True)
    ]


def scratch_work(first: int, second: int, rng: random.Random, digit_noise: float = 0.0) -> tuple[str, str]:
    """Column addition from the right and its answer; each digit is wrong with probability `digit_noise`.

    >>> scratch_work(47, 385, random.Random(0))
    ('7+5=12\\n4+8+1=13\\n0+3+1=4', '432')
    """
    width = max(len(str(first)), len(str(second)))
    lines, digits, carry = [], "", 0
    for top, bottom in zip(reversed(f"{first:0{width}}"), reversed(f"{second:0{width}}"), strict=True):
        total = int(top) + int(bottom) + carry
        tens, unit = divmod(total, 10)
        if rng.random() < digit_noise:
            unit = _mistaken(unit, rng)
        lines.append(f"{top}+{bottom}" + (f"+{carry}" if carry else "") + f"={tens or ''}{unit}")
        digits, carry = f"{unit}{digits}", tens
    return "\n".join(lines), f"{carry or ''}{digits}"


def demonstration(first: int, second: int, rng: random.Random, noise: Noise, thinking: bool = True) -> str:
    """A completion to imitate: scratch work, `</think>` and the answer, or the answer alone; without an end token."""
    if thinking and rng.random() >= noise.skip:
        work, answer = scratch_work(first, second, rng, noise.digit)
        return f"{work}</think>\n\n{answer}"
    digits = [int(digit) for digit in str(first + second)]
    answer = "".join(str(_mistaken(digit, rng) if rng.random() < noise.guess else digit) for digit in digits)
    return f"</think>\n\n{answer}" if thinking else answer


def _mistaken(digit: int, rng: random.Random) -> int:
    """Another digit, each of the nine equally likely."""
    return (digit + rng.randint(1, 9)) % 10
