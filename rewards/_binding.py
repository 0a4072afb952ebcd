"""A reward with its parameters bound: a frozen dataclass whose fields are the parameters.

TRL calls a reward as `reward(prompts=..., completions=..., completion_ids=..., **columns)` and logs it by `__name__`;
`Reward.__call__` is that convention, `score` judges one completion, `with_` copies with other parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from .text import as_ids, as_text, cut_turns, refuse_assumed


@dataclass(frozen=True)
class Sample:
    """One completion as `score` sees it.

    In a run with tools it is an episode of several turns: `text` is that of the last one, and `ids` include the results
    of the tools; `turns` has the model's own.

    Attributes:
        answer: the value of the `answer` column.
        forced: whether the thinking budget closed its thinking (the column `thinking_forced`).
        mask: 0 for each token of a tool result, else 1 (the column `completion_mask`, in runs with tools).
    """

    text: str = ""
    ids: list[int] | None = None
    answer: Any = None
    forced: bool = False
    mask: Sequence[int] | None = None

    @property
    def token_ids(self) -> list[int]:
        """The ids; empty if the reward did not ask for them."""
        return self.ids or []

    @property
    def turns(self) -> list[list[int]]:
        """The ids that the model wrote, one list per turn; without tools all ids are one turn."""
        return cut_turns(self.token_ids, self.mask)

    @property
    def turns_with_text(self) -> list[tuple[str, list[int]]]:
        """The turns, each after its text, which is "" for all but the last: only `decode` can read those."""
        *earlier, last = self.turns
        return [*(("", turn) for turn in earlier), (self.text, last)]


class Reward:
    """Base class: reads a batch and calls `score` for each completion.

    `needs` names the arguments that the reward reads. A missing argument is an error. A sample whose value is None gets
    None: the reward does not apply to it.
    """

    __name__: ClassVar[str] = "reward"
    needs: ClassVar[tuple[str, ...]] = ("completions", "completion_ids")

    def score(self, sample: Sample) -> float | None:
        """The reward of one completion; None if the reward does not apply."""
        raise NotImplementedError

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        completion_ids: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Rewards of a batch, one per completion, None if the reward does not apply.

        Args:
            prompts: not read; part of the calling convention.
            completions: strings or lists of messages.
            completion_ids: token ids of each completion, unpadded, the end token included; lists, tuples, arrays or
                tensors.
            columns: the other columns of the dataset, one value per completion, and whatever else the trainer passes;
                they include `thinking_forced` if the run has a thinking budget, `completion_mask` if it has tools.

        Raises:
            ValueError: a required argument was not passed, two arguments differ in length, or the texts show that the
                default `think_end_id` is not this tokenizer's.
        """
        given = {"completions": completions, "completion_ids": completion_ids, "answer": columns.get("answer")}
        needed = [self._require(name, given[name], columns) for name in self.needs]
        lengths = {name: len(values) for name, values in zip(self.needs, needed, strict=True)}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise ValueError(f"{self.__name__} got {counts}; it needs one of each per completion")
        if completions is not None and completion_ids is not None:
            end_id = getattr(self, "think_end_id", 0) if getattr(self, "thinking", True) else 0
            refuse_assumed(self.__name__, end_id, completions, completion_ids)
        forced = self._read_column("thinking_forced", columns, len(needed[0]))
        masks = self._read_column("completion_mask", columns, len(needed[0]))
        rows = zip(zip(*needed, strict=True), forced, masks, strict=True)
        return [self._score_row(dict(zip(self.needs, row, strict=True)), *rest) for row, *rest in rows]

    def with_(self, **params: Any) -> Self:
        """A copy of this reward with other parameters."""
        return replace(self, **params)  # type: ignore[type-var]

    def _require(self, name: str, values: Any, columns: dict[str, Any]) -> Any:
        if values is not None:
            return values
        if name == "answer":
            found = ", ".join(sorted(columns)) or "none"
            raise ValueError(
                f"{self.__name__} needs a column 'answer' next to the prompts (data.answer_column names its source); "
                f"columns found: {found}"
            )
        raise ValueError(f"{self.__name__} needs {name}, one per completion, as TRL's trainers pass them; found none")

    def _read_column(self, name: str, columns: dict[str, Any], count: int) -> Any:
        values = columns.get(name)
        if values is not None and len(values) != count:
            raise ValueError(
                f"{self.__name__} got {count} completions, {len(values)} {name}; it needs one of each per completion"
            )
        return [None] * count if values is None else values

    def _score_row(self, row: dict[str, Any], forced: Any, mask: Any) -> float | None:
        if any(value is None for value in row.values()):
            return None
        text = as_text(row["completions"], last=mask is not None) if "completions" in row else ""
        ids = as_ids(row["completion_ids"]) if "completion_ids" in row else None
        return self.score(Sample(text, ids, row.get("answer"), bool(forced), mask))


def check_int(name: str, value: Any, low: int, *, none_allowed: bool = False) -> None:
    """Raise ValueError unless `value` is a whole number of at least `low`."""
    if none_allowed and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {low}")


def check_bool(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")


def check_ids(name: str, values: Any) -> None:
    """Raise ValueError unless `values` is a list of token ids, at least one."""
    is_group = isinstance(values, (list, tuple, set, frozenset)) and len(values) > 0
    if not is_group or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise ValueError(f"{name} is {values!r}; it must be a list of token ids, at least one")
