"""What a reward accepts: it is called with these names only, and refused if the call can never work.

The worker process imports this module, so neither torch nor pydantic here.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from rloo_kit.errors import RewardError

CONVENTION = ("prompts", "completions", "completion_ids")  # in the order of TRL's call
PASSED = (*CONVENTION, "trainer_state", "log_extra", "log_metric")
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
        """All that can be given by name."""
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
        parameters = _parameters(reward, follow_wrapped=False)
        if {parameter.kind for parameter in parameters} == {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        }:
            parameters = _parameters(reward, follow_wrapped=True)
    except (TypeError, ValueError):
        return Signature(anything=True)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        by_position=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty),
        anything=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _parameters(function: Any, *, follow_wrapped: bool) -> list[inspect.Parameter]:
    return list(inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values())


def takes_two(function: Callable[..., Any]) -> bool:
    """Whether `function` can be called with two positional arguments; True if Python cannot inspect it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def check_signature(name: str, signature: Signature, columns: Iterable[str] | None = None) -> None:
    """Refuse a reward that cannot be called with TRL's names and these columns; None: the columns are not known.

    Raises:
        RewardError: names the reward, the parameter, what is passed, and the fix.
    """
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
    if name == "thinking_forced":
        return (
            "it requires 'thinking_forced', which is a column only with a thinking budget (rloo.thinking_budget). "
            "Give it a default: thinking_forced=None"
        )
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
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{found[0]}'?" if found else ""
