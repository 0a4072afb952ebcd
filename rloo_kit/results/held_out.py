"""Evaluations during training: which was the best, and whether the run should stop. No model, no torch.

Everything follows from the rows of `evaluations.jsonl`, so a resumed run continues where it stopped.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.results.changes import change_of
from rloo_kit.results.evaluation import Evaluation, name_of
from rloo_kit.results.intervals import Measured
from rloo_kit.runs.files import is_count, read_object, read_rows

EVALUATIONS, BEST = "evaluations.jsonl", "best"  # in the run's folder
RECORD = "evaluation.json"  # in BEST: the evaluation of its weights


@dataclass(frozen=True)
class HeldOut:
    """One evaluation during training, with its optimizer step (0: before the first)."""

    step: int
    evaluation: Evaluation

    def measure(self, name: str) -> Measured | None:
        """See `Evaluation.measure`."""
        return self.evaluation.measure(name)


class HeldOutHistory:
    """Evaluations in order, each compared with the best before it; better is a higher mean of the measure.

    Args:
        measure: the deciding measure, a name for `Evaluation.measure`.
        patience: evaluations in a row without a new best until `is_over`; None: never.

    Attributes:
        best: the first with the highest mean; None before any was measured.
        since: number of evaluations after it.
    """

    def __init__(self, measure: str, patience: int | None) -> None:
        self.measure, self.patience = measure, patience
        self.best: HeldOut | None = None
        self.last: HeldOut | None = None
        self.since = 0

    @property
    def is_over(self) -> bool:
        """Whether the patience is exhausted."""
        return self.patience is not None and self.since >= self.patience

    @property
    def value(self) -> float | None:
        """The newest mean; None before the first."""
        return None if self.last is None else self.last.evaluation.value(self.measure)

    @property
    def best_value(self) -> float | None:
        """The best one's mean."""
        return None if self.best is None else self.best.evaluation.value(self.measure)

    def observe(self, found: HeldOut, was_best: bool | None = None) -> bool:
        """Add the next evaluation and return whether it is the new best. One that measured nothing does not count.

        Args:
            was_best: the decision at the time of the evaluation; None: decide now.
        """
        value, best = found.evaluation.value(self.measure), self.best_value
        if value is None:
            return False
        self.last = found
        if best is None or (value > best if was_best is None else was_best):
            self.best, self.since = found, 0
            return True
        self.since += 1
        return False

    def compare_with_best(self, found: HeldOut) -> Measured | None:
        """The difference of `found` from the best; None without a best."""
        change = None if self.best is None else change_of(self.measure, self.best.evaluation, found.evaluation)
        return None if change is None else change.difference

    def describe(self, found: HeldOut, against: Measured | None) -> str:
        """One line about `found`, already observed; `against`: `compare_with_best` before it was."""
        measured = found.measure(self.measure)
        if measured is None:
            return f"held-out at step {found.step}: {self.measure} could not be measured, so it does not count"
        text = f"held-out at step {found.step}: {name_of(self.measure, found.evaluation)} {measured}"
        if against is not None:
            text += f", {against:+.3f} against the best before"
        assert self.best is not None
        if self.best is found:
            return text if against is None else f"{text}; the best so far"
        of = "" if self.patience is None else f" of {self.patience}"
        best = f"{self.best_value:.3f} at step {self.best.step}"
        return f"{text}; no new best for {self.since}{of} (best {best})"


def read_evaluations(folder: Path, run: str, every: bool = False) -> list[dict[str, Any]]:
    """The rows of `evaluations.jsonl` that the run with the id `run` wrote, in step order, without damaged ones; unless
    `every`, only those by the inputs of the last one: edited rewards have another scale."""
    mine = [row for row in read_rows(folder / EVALUATIONS) if row.get("run", "") == run and _parse(row) is not None]
    mine.sort(key=lambda row: row["step"])
    return mine if every else [row for row in mine if row.get("inputs") in (None, mine[-1].get("inputs"))]


def parse_evaluations(rows: Iterable[dict[str, Any]]) -> list[HeldOut]:
    """The evaluations in rows."""
    return [found for row in rows if (found := _parse(row)) is not None]


def _parse(row: dict[str, Any]) -> HeldOut | None:
    if not is_count(row.get("step")) or not isinstance(row.get("measure"), str):
        return None
    try:
        return HeldOut(row["step"], Evaluation.from_dict(row.get("evaluation")))
    except ValueError:
        return None


def read_best_step(folder: Path, run: str) -> int | None:
    """The step of the weights in `best/`; None if it has none of this run."""
    record = read_object(folder / BEST / RECORD)
    return record["step"] if record.get("run", "") == run and is_count(record.get("step")) else None
