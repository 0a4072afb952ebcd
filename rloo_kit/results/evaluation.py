"""Evaluation results as numbers, text and tables, and the difference between two of them. No model, no torch.

`before.json` and `after.json` hold them, so that a report can be written again anywhere.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter
from rich.table import Table

from rloo_kit.results.intervals import Estimate, paired_difference, unpaired_difference
from rloo_kit.runs.files import read_json
from rloo_kit.system.console import render_text
from rloo_kit.system.processes import say

Number = Annotated[int, Field(ge=0, lt=2**53)]
Size = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class _Budget(BaseModel):
    """Accuracy under one thinking budget, in tokens; `Evaluation.budgets` has the meaning of the keys."""

    budget: Number
    accuracy: Share | None
    low: Share | None
    high: Share | None
    forced_share: Share
    forced_accuracy: Share | None = None
    forced_low: Share | None = None
    forced_high: Share | None = None
    unforced_accuracy: Share | None = None
    unforced_low: Share | None = None
    unforced_high: Share | None = None


class _Sample(BaseModel):
    """One completion with its prompt; lengths in tokens, `correct` None where nothing could be judged."""

    prompt: str
    thinking: str
    answer: str
    correct: bool | None
    ended: bool
    closed: bool
    tokens: Number
    thinking_tokens: Number | None


@dataclass
class Evaluation:
    """The result of `evaluate`. Shares are in [0, 1]; None where there is nothing to measure.

    Attributes:
        label: a word for tables ("before").
        num_prompts, num_samples, temperature, max_completion_length: how it was measured.
        num_judged: prompts with a right answer, over which every accuracy is; None: all, or no accuracy.
        accuracy, low, high: share of right completions with its 95 % interval; None without an answer column.
        greedy_accuracy, greedy_low, greedy_high: the same at temperature 0; None if not asked for.
        pass_at_k: k -> chance that one of k completions is right.
        closed_share: completions that hold `</think>`; None for a model that does not think.
        truncated_share: completions that the limit cut off.
        mean_thinking_tokens: over the closed completions.
        mean_tokens: over all completions.
        budgets: one dict for each thinking budget: budget, accuracy, low, high, forced_share; the accuracy of the
            completions whose thinking the budget closed, forced_accuracy, forced_low, forced_high, and of the others,
            unforced_accuracy, unforced_low, unforced_high (None where there are none of them).
        samples: the first completion of the first `eval.num_completions` prompts: prompt, thinking, answer, gold,
            correct, ended, closed, tokens, thinking_tokens, forced.
        unscored: completions that the answer reward could not judge; they count as wrong.
        seconds: how long it took.
        prompts_digest: equal for evaluations of the same prompts.
        per_prompt, greedy_per_prompt: share of right completions of each prompt with an answer, for paired comparison.
    """

    label: str
    num_prompts: Number
    num_samples: Number
    temperature: Size
    max_completion_length: Number
    accuracy: Share | None = None
    low: Share | None = None
    high: Share | None = None
    greedy_accuracy: Share | None = None
    greedy_low: Share | None = None
    greedy_high: Share | None = None
    pass_at_k: dict[int, Share] = field(default_factory=dict)
    closed_share: Share | None = None
    truncated_share: Share = 0.0
    mean_thinking_tokens: Size | None = None
    mean_tokens: Size = 0.0
    budgets: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    unscored: Number = 0
    seconds: Size = 0.0
    prompts_digest: str = ""
    per_prompt: list[Share] | None = None
    greedy_per_prompt: list[Share] | None = None
    num_judged: Number | None = None

    @property
    def prompts_compared(self) -> int:
        """The prompts that an accuracy is over."""
        return self.num_prompts if self.num_judged is None else self.num_judged

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back to an equal object."""
        return asdict(self) | {"pass_at_k": {str(k): value for k, value in self.pass_at_k.items()}}

    @classmethod
    def from_dict(cls, values: Any) -> "Evaluation":
        """The evaluation that `to_dict` wrote, such as `before.json`; raises ValueError for anything else."""
        found: Evaluation = TypeAdapter(cls).validate_python(values)
        TypeAdapter(list[_Budget]).validate_python(found.budgets)
        TypeAdapter(list[_Sample]).validate_python(found.samples)
        sides = [(vars(found), ("", "greedy_")), *((entry, ("", "forced_", "unforced_")) for entry in found.budgets)]
        for holder, prefix in ((holder, prefix) for holder, prefixes in sides for prefix in prefixes):
            interval = [holder.get(f"{prefix}{name}") for name in ("accuracy", "low", "high")]
            if None in interval and interval != [None] * 3:
                raise ValueError(f"an accuracy has its interval: {prefix}accuracy, low and high are {interval}")
        for shares in (found.per_prompt, found.greedy_per_prompt):
            if shares is not None and len(shares) != found.prompts_compared:
                raise ValueError(f"{len(shares)} prompts have a share, of {found.prompts_compared}")
        return found

    @classmethod
    def read(cls, path: Path) -> "Evaluation | None":
        """The evaluation in a file; None without one, and with a warning where it is damaged."""
        if not path.is_file():
            return None
        try:
            return cls.from_dict(read_json(path))
        except ValueError:
            say(f"WARNING: {path} is damaged or not an evaluation, so it counts as not measured")
            return None

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each measure, as text for a table."""
        sampled = f"accuracy, temperature {self.temperature:g}"
        rows = [(sampled, _with_interval(self.accuracy, self.low, self.high) or "not measured: no answer column")]
        if self.prompts_compared < self.num_prompts:
            rows.append(("accuracies are over the prompts with an answer", f"{self.num_judged} of {self.num_prompts}"))
        if self.greedy_accuracy is not None:
            rows.append(("accuracy, greedy", _with_interval(self.greedy_accuracy, self.greedy_low, self.greedy_high)))
        rows += [(f"pass@{k}", f"{value:.3f}") for k, value in sorted(self.pass_at_k.items())]
        for entry in self.budgets:
            found = _with_interval(entry["accuracy"], entry["low"], entry["high"]) or "no answer column"
            rows.append((f"accuracy, thinking at most {entry['budget']} tokens", found))
            rows += _forced_rows(entry)
        if self.closed_share is not None:
            rows.append(("thinking closed", f"{self.closed_share:.1%}"))
        if self.mean_thinking_tokens is not None:
            rows.append(("thinking tokens, closed completions", f"{self.mean_thinking_tokens:.1f}"))
        rows.append((f"truncated at {self.max_completion_length} tokens", f"{self.truncated_share:.1%}"))
        rows.append(("tokens of a completion", f"{self.mean_tokens:.1f}"))
        if self.unscored:
            rows.append(("could not be judged, counted as wrong", str(self.unscored)))
        return rows

    def __rich__(self) -> Table:
        count = f"{self.num_prompts} prompts" + (f" x {self.num_samples} completions" if self.num_samples > 1 else "")
        table = Table(title=f"Evaluation{f' {self.label}' if self.label else ''}: {count}", title_justify="left")
        table.add_column("measure")
        table.add_column("value [95 % interval]", justify="right")
        for name, value in self.rows():
            table.add_row(name, value)
        return table

    def __str__(self) -> str:
        return render_text(self)


@dataclass(frozen=True)
class Comparison:
    """`after - before` with 95 % intervals; None where one of the two has no accuracy.

    Attributes:
        difference, low, high: in accuracy at the sampling temperature.
        greedy_difference, greedy_low, greedy_high: in greedy accuracy.
        paired: compared prompt by prompt, because both are of the same prompts.
        num_prompts: prompts with an answer of the smaller evaluation.
        apart: whether the two accuracies' own intervals do not overlap.
    """

    difference: float | None
    low: float | None
    high: float | None
    greedy_difference: float | None
    greedy_low: float | None
    greedy_high: float | None
    paired: bool
    num_prompts: int
    apart: bool | None

    @property
    def sampled(self) -> str:
        """The difference at the sampling temperature as text; empty without one."""
        return _signed(self.difference, self.low, self.high)

    @property
    def greedy(self) -> str:
        """The difference in greedy accuracy as text; empty without one."""
        return _signed(self.greedy_difference, self.greedy_low, self.greedy_high)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.difference is None:
            return "no accuracy to compare: an evaluation had no answer column"
        how = f"{'the same' if self.paired else 'different'} {self.num_prompts} prompts"
        return f"accuracy {self.sampled} on {how}" + (f"; greedy {self.greedy}" if self.greedy else "")


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """The difference that training made, with its interval: paired where both evaluations are of the same prompts."""
    sizes = {(evaluation.num_prompts, evaluation.prompts_compared) for evaluation in (before, after)}
    paired = before.prompts_digest == after.prompts_digest and len(sizes) == 1
    sampled = _difference(paired, before, after, "")
    greedy = _difference(paired, before, after, "greedy_")
    apart = None
    if before.low is not None and before.high is not None and after.low is not None and after.high is not None:
        apart = before.high < after.low or after.high < before.low
    num_prompts = min(before.prompts_compared, after.prompts_compared)
    value, low, high = sampled or (None, None, None)
    greedy_value, greedy_low, greedy_high = greedy or (None, None, None)
    return Comparison(value, low, high, greedy_value, greedy_low, greedy_high, paired, num_prompts, apart)


def _difference(paired: bool, before: Evaluation, after: Evaluation, prefix: str) -> Estimate | None:
    """The difference in the accuracy whose fields begin with `prefix`."""
    shares = [getattr(evaluation, f"{prefix}per_prompt") for evaluation in (before, after)]
    old, new = (
        [getattr(evaluation, f"{prefix}{name}") for name in ("accuracy", "low", "high")]
        for evaluation in (before, after)
    )
    if old[0] is None or new[0] is None:
        return None
    if paired and None not in shares:
        return paired_difference(*shares)
    return unpaired_difference(Estimate(*old), Estimate(*new))


def _forced_rows(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """How often a budget closed the thinking, and the accuracy of each side; old evaluations have only the first."""
    at = f"at {entry['budget']}"
    rows = [(f"closed by the budget {at}", f"{entry['forced_share']:.1%}")]
    for side, name in (("forced", f"accuracy {at}, closed by the budget"), ("unforced", f"accuracy {at}, the others")):
        found = _with_interval(*(entry.get(f"{side}_{key}") for key in ("accuracy", "low", "high")))
        rows += [(name, found)] if found else []
    return rows


def _with_interval(value: float | None, low: float | None, high: float | None) -> str:
    return "" if value is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _signed(value: float | None, low: float | None, high: float | None) -> str:
    return "" if value is None else f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"


CLOSED_BY_THE_BUDGET = "closed by the budget"  # the model was still thinking when its budget was spent


@dataclass
class SamplePair:
    """One held-out prompt: as rendered, its right answer (None without one), and its samples by title."""

    prompt: str
    gold: Any = None
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)


def pair_samples(**evaluations: Evaluation | None) -> list[SamplePair]:
    """The samples of evaluations, those of the same prompt together: `pair_samples(before=before, after=after)`.

    A prompt that occurs twice is paired with its first and its second occurrence.
    """
    pairs: dict[tuple[str, int], SamplePair] = {}
    for title, evaluation in evaluations.items():
        seen: dict[str, int] = {}
        for sample in evaluation.samples if evaluation is not None else ():
            prompt = sample["prompt"]
            seen[prompt] = seen.get(prompt, 0) + 1
            pair = pairs.setdefault((prompt, seen[prompt]), SamplePair(prompt))
            pair.gold = sample.get("gold") if pair.gold is None else pair.gold
            pair.samples[title] = sample
    return list(pairs.values())


def describe_sample(sample: dict[str, Any]) -> str:
    """Length and how it ended, in words.

    >>> describe_sample({"tokens": 9, "thinking_tokens": 5, "ended": False})
    '9 tokens, 5 of them thinking, truncated'
    >>> describe_sample({"tokens": 9, "thinking_tokens": 5, "ended": True, "forced": True})
    '9 tokens, 5 of them thinking, closed by the budget'
    """
    notes = [f"{sample['tokens']} tokens"]
    if sample["thinking_tokens"] is not None:
        notes.append(f"{sample['thinking_tokens']} of them thinking")
    if sample.get("forced"):  # evaluations written before there were budgets have no such entry
        notes.append(CLOSED_BY_THE_BUDGET)
    if not sample["ended"]:
        notes.append("truncated")
    return ", ".join(notes)


def is_thinking(sample: dict[str, Any]) -> bool:
    """Whether the completion holds thinking, even an empty one: text before `</think>`, or that tag alone."""
    return bool(sample["thinking"] or sample["closed"])
