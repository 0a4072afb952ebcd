"""What a reward accepts and what it returned: it is called with these names only; one number or None per completion.

The worker process imports this module, so neither torch nor pydantic here.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rloo_kit.errors import RewardError, excerpt, printable

FLOAT32_MAX = 3.4028234663852886e38  # rewards are float32 in the loop; beyond it a number is infinity there
BEYOND = "beyond float32 (3.4e38)"
TEXTS = (str, bytes, bytearray)
EXCERPT = 60  # characters of a value, a prompt or a completion in a message


def read_result(result: Any, size: int) -> tuple[list[Any], str | None]:
    """The values a reward returned for `size` completions, and the problem if they are not a list of that length."""
    wanted = f"it must return a list of {size} rewards, one per completion"
    if isinstance(result, TEXTS):
        return [], f"it returned the text {excerpt(result, EXCERPT)}; {wanted}"
    if inspect.iscoroutine(result):
        result.close()
        return [], f"it returned a coroutine; {wanted}. Write the reward itself as async def, then it is awaited"
    problem = f"it returned {type(result).__name__}; {wanted}"
    if isinstance(result, (Mapping, Set)) or not hasattr(result, "__len__"):
        return [], problem
    try:
        values = list(result)
    except Exception:  # a tensor without dimensions, an object that cannot be iterated
        return [], problem
    if len(values) != size:
        return [], f"it returned {len(values)} rewards for {size} completions; it must return one per completion"
    return values, None


def read_number(value: Any) -> tuple[float | None, str | None]:
    """A reward as a float or None, and the problem if there is one. A tensor or an array of one element is a number, a
    string never is; an error in place of a value is the problem."""
    if isinstance(value, RewardError):
        return None, str(value)
    finite = "a reward is finite, or None where it does not apply"
    beyond = f"it returned {excerpt(value, EXCERPT)}, which is {BEYOND}; {finite}"
    try:
        number = _as_float(value)
    except OverflowError:
        return None, beyond
    except Exception:  # a conversion may raise anything
        return None, f"it returned {excerpt(value, EXCERPT)}; a reward is a number or None"
    if number is None or abs(number) <= FLOAT32_MAX:
        return number, None
    if number - number != 0.0:  # NaN or infinity
        return None, f"it returned {number}; {finite}"
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
    """`values` in built-in types, because the run cannot load the classes of the reward's module: numbers become
    floats, anything else a short text."""
    sendable: list[float | str | None] = []
    for value in values:
        try:
            sendable.append(_as_float(value))
        except OverflowError:
            sendable.append(float("inf") if value > 0 else float("-inf"))
        except Exception:
            sendable.append(printable(str(value), EXCERPT) if isinstance(value, str) else excerpt(value, EXCERPT))
    return sendable


def overflowing(
    rewards_per_func: Sequence[Sequence[float]], weights: Sequence[float], names: Sequence[str]
) -> list[str]:
    """A message for each sample whose weighted sum is beyond float32, with its rewards and weights. `rewards_per_func`:
    (samples, rewards), NaN where a reward does not apply."""
    messages = []
    for index, row in enumerate(rewards_per_func):
        terms = [term for term in zip(names, row, weights, strict=True) if term[1] == term[1]]
        sums = accumulate(reward * weight for _, reward, weight in terms)
        if not all(abs(total) <= FLOAT32_MAX for total in sums):
            listed = ", ".join(f"{name} {reward:g} x {weight:g}" for name, reward, weight in terms)
            where = f"the weighted sum of the rewards of sample {index}"
            messages.append(f"{where} is {BEYOND}: {listed}")
    return messages


CONVENTION = ("prompts", "completions", "completion_ids")  # in the order of TRL's call
PASSED = (*CONVENTION, "trainer_state", "log_extra", "log_metric")
# Columns that only some runs have: when, and the keys.
IN_SOME_RUNS = {
    "thinking_forced": "with a thinking budget (rloo.thinking_budget)",
    **dict.fromkeys(("completion_mask", "turns"), "in a run with tools (rloo.tools, rloo.environment)"),
    "environments": "with an environment (rloo.environment)",
}
NOT_PASSED = ("prompt", "completion")  # columns of a dataset that TRL does not pass on

# Argument names common in other training loops, and what they are called here (`question`: in the data of a run).
MEANT = {
    **dict.fromkeys(("text", "texts", "response", "responses", "output", "outputs", "generations"), "completions"),
    **dict.fromkeys(("query", "queries", "question", "questions", "problem", "problems"), "question"),
    **dict.fromkeys(("solution", "solutions", "ground_truth", "target", "gold", "label", "answers"), "answer"),
    **dict.fromkeys(("ids", "tokens", "token_ids", "output_ids", "response_ids"), "completion_ids"),
}


@dataclass(frozen=True)
class Signature:
    """The names that a reward can be called with.

    Attributes:
        required, optional: parameters without and with a default. by_position: required ones that take no keyword.
        anything: every other name too (`**columns`, or Python cannot inspect it).
        in_worker: the function runs in a worker, which gets no `trainer_state`.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    by_position: tuple[str, ...] = ()
    anything: bool = False
    in_worker: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.required + self.optional

    def select(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The part of `batch` that the reward accepts."""
        return batch if self.anything else {name: value for name, value in batch.items() if name in self.names}


def read_signature(reward: Any) -> Signature:
    """The signature of a function, method, partial or callable object; an object of the kit may declare its own.

    A decorator that takes `*args, **kwargs` is seen through if it uses `functools.wraps`.
    """
    declared = getattr(reward, "signature", None)
    if isinstance(declared, Signature):
        return declared
    try:
        parameters = list(inspect.signature(reward, follow_wrapped=False).parameters.values())
        if {p.kind for p in parameters} == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            parameters = list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError):
        return Signature(anything=True)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        by_position=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty),
        anything=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def takes_two(function: Callable[..., Any]) -> bool:
    """Whether `function` can be called with two positional arguments; True if Python cannot inspect it."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def check_signature(name: str, signature: Signature, columns: Iterable[str] | None = None) -> None:
    """Raise RewardError, with the fix, for a reward that cannot be called with TRL's names and `columns` (None: not
    known)."""
    problem = find_problem(signature, None if columns is None else set(columns))
    if problem is not None:
        raise RewardError(f"reward '{name}' cannot be called: {problem}")


def find_problem(signature: Signature, columns: Collection[str] | None) -> str | None:
    """Why a call cannot work, in words; None if it can. `columns` may include TRL's names; None: not known."""
    if signature.by_position:
        return (
            f"it takes '{signature.by_position[0]}' by position only, and rewards are called with keywords "
            "(completions=...). Remove the / from its parameters; wrap a built-in in a function"
        )
    passed = [name for name in PASSED if not (signature.in_worker and name == "trainer_state")]
    further = None if columns is None else sorted({*columns} - {*PASSED, *NOT_PASSED})

    def may_be_column(name: str) -> bool:
        return name not in (*PASSED, *NOT_PASSED) if further is None else name in further

    for name in signature.required:
        if name not in passed and not may_be_column(name):
            return _describe_missing(name, signature, passed, further)
    if signature.anything or any(name in CONVENTION or may_be_column(name) for name in signature.names):
        return None
    return (
        f"it takes {', '.join(signature.names) or 'nothing'}, none of what a reward judges: {', '.join(CONVENTION)}"
        f"{_describe_columns(further)}. Add a parameter completions"
    )


def _describe_missing(name: str, signature: Signature, passed: list[str], further: list[str] | None) -> str:
    if name in IN_SOME_RUNS:
        return f"it requires '{name}', which is a column only {IN_SOME_RUNS[name]}. Give it a default: {name}=None"
    if name in PASSED:
        hint = "; a worker process gets none."
        fix = "Give it a default, or pass the function itself in reward_funcs"
    else:
        meant = MEANT.get(name)
        if meant not in (*passed, *(further or ())):
            meant = "prompts" if meant == "question" else None
        hint = f"; did you mean '{meant}'?" if meant else nearest(name, [*passed, *(further or ())], cutoff=0.75)
        in_params = "set it in the reward's params, " if signature.in_worker else ""
        fix = f"Rename the parameter, give it a default, {in_params}or add the column to the dataset"
    if name in NOT_PASSED:
        fix = "Rename the parameter"
    return (
        f"it requires '{name}', which is not passed{hint or '.'} Passed: {', '.join(passed)}"
        f"{_describe_columns(further)}. {fix}"
    )


def _describe_columns(further: list[str] | None) -> str:
    if further is None:
        return " and the dataset's columns"
    return f" and the dataset's columns ({', '.join(further)})" if further else "; the dataset has no further columns"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """`; did you mean '...'?` with the known name closest to `name`; empty if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{matches[0]}'?" if matches else ""
