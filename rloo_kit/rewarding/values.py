"""Reads what a reward returned or raised: one number or None per completion, within float32; errors as short texts.

The worker imports this module."""

import inspect
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from rloo_kit.errors import excerpt, shorten

FLOAT32_MAX = 3.4028234663852886e38  # rewards are float32 in the loop; beyond it a number is infinity there
BEYOND = "beyond float32 (3.4e38)"
TEXTS = (str, bytes, bytearray)
EXCERPT = 60  # characters of a value, a prompt or a completion in a message
LONGEST_ERROR = 2000  # characters of an error's text


def read_result(result: Any, size: int) -> tuple[list[Any], str | None]:
    """The values a reward returned for `size` completions, and the problem if they are not a list of that length."""
    wanted = f"it must return a list of {size} rewards, one per completion"
    if isinstance(result, TEXTS):
        return [], f"it returned the text {show(result)}; {wanted}"
    if inspect.iscoroutine(result):
        result.close()
        return [], f"it returned a coroutine; {wanted}. Write the reward itself as async def, then it is awaited"
    found = f"it returned {type(result).__name__}; {wanted}"
    if isinstance(result, (Mapping, Set)) or not hasattr(result, "__len__"):
        return [], found
    try:
        values = list(result)
    except Exception:  # a tensor without dimensions, an object that cannot be iterated
        return [], found
    if len(values) != size:
        return [], f"it returned {len(values)} rewards for {size} completions; it must return one per completion"
    return values, None


def read_number(value: Any) -> tuple[float | None, str | None]:
    """A reward as a float or None, and the problem if there is one. A tensor or an array of one element is a number, a
    string never is."""
    beyond = f"it returned {show(value)}, which is {BEYOND}; a reward is finite, or None where it does not apply"
    try:
        number = _as_float(value)
    except OverflowError:
        return None, beyond
    except Exception:  # a conversion may raise anything
        return None, f"it returned {show(value)}; a reward is a number or None"
    if number is None or abs(number) <= FLOAT32_MAX:
        return number, None
    if number - number != 0.0:  # NaN or infinity
        return None, f"it returned {number}; a reward is finite, or None where it does not apply"
    return None, beyond


def weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """One completion's rewards combined (None: does not apply, NaN: failed), outside the trainer, which sums float32
    tensors (`gradient.advantages.combine_rewards`). None if a reward failed or none with a weight applies.

    >>> weighted_sum([1.0, None, 0.5], [1.0, 1.0, 2.0]), weighted_sum([1.0], [0.0])
    (2.0, None)
    """
    pairs = zip(values, weights, strict=True)
    terms = [value * weight for value, weight in pairs if value is not None and (weight or math.isnan(value))]
    total = math.fsum(terms) if terms else math.nan
    return total if math.isfinite(total) else None


def _as_float(value: Any) -> float | None:
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if isinstance(plain, TEXTS):
        raise TypeError("a text is not a number")
    return None if plain is None else float(plain)


def make_sendable(values: Sequence[Any]) -> list[float | str | None]:
    """`values` in built-in types, because the run cannot load the classes of the reward's module.

    Numbers become floats, anything else a short text."""
    return [_make_value_sendable(value) for value in values]


def _make_value_sendable(value: Any) -> float | str | None:
    try:
        return _as_float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    except Exception:
        return printable(str(value), EXCERPT) if isinstance(value, str) else show(value)


def overflowing(
    rewards_per_func: Sequence[Sequence[float]], weights: Sequence[float], names: Sequence[str]
) -> list[str]:
    """A message for each sample whose weighted sum is beyond float32, with its rewards and weights.

    Args:
        rewards_per_func: (samples, rewards), NaN where a reward does not apply. weights, names: (rewards,).
    """
    messages = []
    for index, row in enumerate(rewards_per_func):
        terms = [term for term in zip(names, row, weights, strict=True) if term[1] == term[1]]
        total, fits = 0.0, True
        for _, reward, weight in terms:
            total += reward * weight
            fits = fits and abs(total) <= FLOAT32_MAX
        if not fits:
            listed = ", ".join(f"{name} {reward:g} x {weight:g}" for name, reward, weight in terms)
            where = f"the weighted sum of the rewards of sample {index}"
            messages.append(f"{where} is {BEYOND}: {listed}")
    return messages


def show(value: Any) -> str:
    """The first characters of a value's repr; if it has none, its class."""
    return excerpt(value, EXCERPT)


def describe_error(error: BaseException, where: str = "") -> str:
    """An error's class and text, then `where`. A long text is cut; one that cannot be built is left out."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be made"
    return f"{printable(type(error).__name__, EXCERPT)}: {printable(text, LONGEST_ERROR // 2)}{where}"


def printable(text: str, longest: int = LONGEST_ERROR) -> str:
    """`text`, shortened and encodable as UTF-8."""
    return shorten(text, longest).encode("utf-8", "replace").decode()
