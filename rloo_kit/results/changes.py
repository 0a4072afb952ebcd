"""What training changed: the difference between two evaluations with its interval, and the evaluations during training,
of which one was the best. No model, no torch."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rloo_kit.results.evaluation import (
    ACCURACIES,
    SHARES,
    THINKING,
    Evaluation,
    describe_sample,
    digest_prompt,
    is_thinking,
    name_of,
    named_sides,
    number_repeats,
    pair_samples,
    rewards_differ,
    says_nothing,
    setting_differences,
    shared_measures,
)
from rloo_kit.results.intervals import Measured, mean_of_prompts, paired_difference, unpaired_difference
from rloo_kit.results.pages import show_text
from rloo_kit.results.samples import bare_prompt, fit_page, list_steps
from rloo_kit.runs.files import is_count, read_object, read_rows

EXACTLY = 0.1  # a difference of shares below this is shown with a decimal
RIGHT = 0.5  # share of a prompt's completions from which it counts as right
# Kinds of prompts, regressions first: right or wrong; if the reward leads, the change of the prompt's mean reward.
KINDS = (
    "broken", "still wrong", "fixed", "still right", "reward fell", "reward rose", "reward the same", "wrong", "right",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """`after - before` of a measure (one of MEASURES, or a reward) with its `name_of`. If paired, everything is of the
    prompts that both measured; else the two means are each evaluation's own."""

    measure: str
    name: str
    before: Measured
    after: Measured
    difference: Measured
    paired: bool

    @property
    def is_reward(self) -> bool:
        """Whether it is a reward, which may be any number, and not a share."""
        return self.measure not in (*SHARES, THINKING)

    @property
    def rose(self) -> bool:
        """Whether the interval is above 0."""
        return self.difference.low > 0

    @property
    def fell(self) -> bool:
        """Whether the interval is below 0."""
        return self.difference.high < 0

    def to_dict(self) -> dict[str, Any]:
        """The numbers for JSON; `low` and `high` are of the difference, `value`."""
        sides = {"measure": self.measure, "before": self.before.value, "after": self.after.value}
        difference = dict(zip(("value", "low", "high"), self.difference.ends, strict=True))
        return sides | difference | {"prompts": self.difference.count, "name": self.name}

    def __str__(self) -> str:
        """For example: Accuracy rose from 26 % to 93 % (+67 points, 95 % CI 64 to 70, 1,000 held-out prompts)."""
        kind = "" if self.name.endswith("reward") else "reward "
        name = f"The held-out {kind}{self.name}" if self.is_reward else self.name.capitalize()
        verb = "rose" if self.rose else "fell" if self.fell else "went"
        unit = "" if self.is_reward else " %"
        ends = f"from {self._text(self.before.value)}{unit} to {self._text(self.after.value)}{unit}"
        return f"{name} {verb} {ends} ({self._by(*self.difference.ends)})"

    def describe_lead(self) -> str:
        """The lead of one run over another after training, as a positive number whichever is ahead."""
        value, low, high = self.difference.ends
        if value < 0:
            low, high = -high, -low
        return f"{self.name} {self._by(abs(value), low, high)}"

    def _by(self, value: float, low: float, high: float) -> str:
        points = "" if self.is_reward else " points"
        interval = f"95 % CI {self._text(low)} to {self._text(high)}"
        return f"{self._text(value, '+')}{points}, {interval}, {self.difference.count:,} held-out prompts"

    def _text(self, value: float, sign: str = "") -> str:
        if self.is_reward:
            return f"{value:{sign}.2f}"
        return f"{100 * value:{sign}.{0 if abs(self.difference.value) >= EXACTLY else 1}f}"


def change_of(measure: str, before: Evaluation, after: Evaluation) -> Change | None:
    """The change of `Evaluation.measure(measure)`, paired if possible; None if one of the two lacks it, or the rewards
    were edited in between."""
    old, new = before.measure(measure), after.measure(measure)
    if old is None or new is None or (measure not in (*SHARES, THINKING) and rewards_differ(before, after)):
        return None
    both = list(pair_means(before, after, measure).values())
    if both and old.low != old.high:  # else it is so by definition: the win rate before training
        sizes = [1, 1] if measure.startswith(("greedy", "win")) else [before.num_samples, after.num_samples]
        first, second = zip(*both, strict=True)
        old, new = mean_of_prompts(first, sizes[0]), mean_of_prompts(second, sizes[1])
        difference = paired_difference(first, second, math.lcm(*sizes))
    else:
        difference = unpaired_difference(old, new)
    return Change(measure, name_of(measure, before, after), old, new, difference, paired=bool(both))


def pair_means(before: Evaluation, after: Evaluation, name: str) -> dict[Any, tuple[float, float]]:
    """Both means of each prompt that both measured, by prompt; empty if they share less than half of the smaller one's:
    all prompts then say more. Evaluations without a digest of each prompt share all or none."""
    whole = before.prompt_digests is None or after.prompt_digests is None

    def by_prompt(one: Evaluation) -> dict[Any, float | None]:
        """The mean of each prompt, by its digest (or that of all) and the number of earlier ones."""
        measured = one.measure(name)
        if measured is None or measured.per_prompt is None:
            return {}
        digests = one.prompt_digests or [""] * len(measured.per_prompt)
        pairs = list(zip(digests, measured.per_prompt, strict=True))
        if name in ACCURACIES:
            pairs = [(digest, mean) for digest, mean in pairs if mean is not None]  # the prompts with an answer
        keys = number_repeats((one.prompts_digest, len(pairs)) if whole else digest for digest, _ in pairs)
        return dict(zip(keys, (mean for _, mean in pairs), strict=True))

    old, new = by_prompt(before), by_prompt(after)
    shared = [key for key in old if key in new]
    if 2 * len(shared) < min(len(old), len(new)):
        return {}
    return {key: (a, b) for key in shared if (a := old[key]) is not None and (b := new[key]) is not None}


@dataclass(frozen=True)
class Comparison:
    """What changed between two evaluations: `changes` by measure, the deciding one first, without an accuracy that says
    nothing and a reward that repeats it; `made_differently`: settings that make the means incomparable, in words."""

    changes: dict[str, Change]
    made_differently: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.changes:
            return "nothing to compare: at least one evaluation has neither an accuracy nor a reward"
        lead, *_ = self.changes.values()
        parts = [f"{change.name} {change.difference:+.3f}" for change in self.changes.values()]
        parts[0] += f" on {'the same' if lead.paired else 'different'} {lead.difference.count} prompts"
        parts += [f"but made differently: {', '.join(self.made_differently)}"] if self.made_differently else []
        return "; ".join(parts)


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """The difference between two evaluations, with intervals; paired on the prompts that both measured."""
    leading = next(iter(shared_measures(before, after)), "accuracy").removeprefix("greedy_")
    hidden = ACCURACIES if says_nothing(before, after) else ()
    names = dict.fromkeys([leading, "accuracy", "win_rate", "reward", f"greedy_{leading}"])
    found = {name: change_of(name, before, after) for name in names if name not in hidden}
    changes = {name: change for name, change in found.items() if change is not None}
    accuracy, reward = changes.get("accuracy"), changes.get("reward")
    if leading != "reward" and accuracy and reward and accuracy.difference.ends == reward.difference.ends:
        del changes["reward"]
    return Comparison(changes, tuple(setting_differences(before, after)))


@dataclass
class Changes:
    """Counts of prompts of each kind, by measure ("greedy", "temperature 1"); the prompts with samples, for the page's
    script, regressions first; the total of held-out prompts."""

    counts: dict[str, dict[str, int]]
    prompts: list[dict[str, Any]]
    total: int

    def describe(self) -> list[str]:
        """A sentence for each measure."""
        return [
            f"Prompt by prompt ({name}): {', '.join(f'{count:,} {kind}' for kind, count in counts.items())}."
            for name, counts in self.counts.items()
        ]


def find_changes(before: Evaluation | None, after: Evaluation | None) -> Changes:
    """The changes on the prompts that both evaluations measured; if there is only one, its results."""
    measured = [one for one in (before, after) if one is not None]
    if not measured:
        return Changes({}, [], 0)
    counts: dict[str, dict[str, int]] = {}
    kinds: dict[Any, str] = {}
    if before is not None and after is not None:
        shared = [name for name in shared_measures(before, after) if name != "win_rate"]
        leading, greedy, sampled = "accuracy", "greedy", f"temperature {after.temperature:g}"
        if "reward" in shared[:1]:
            leading, greedy, sampled = "reward", "greedy reward", "reward"
        kinds = _kinds(before, after, leading)
        for title, by_prompt in ((greedy, _kinds(before, after, f"greedy_{leading}")), (sampled, kinds)):
            if numbers := Counter(by_prompt.values()):
                counts[title] = {kind: numbers[kind] for kind in KINDS if kind in numbers}
    return Changes(counts, _prompts(before, after, kinds), max(one.num_prompts for one in measured))


def _kinds(before: Evaluation, after: Evaluation, name: str) -> dict[tuple[str, int], str]:
    """The kind of each prompt that both measured, by its digest and the number of earlier ones."""
    both = pair_means(before, after, name)
    if name in ACCURACIES:
        kinds = "still wrong", "fixed", "broken", "still right"
        return {key: kinds[2 * (old >= RIGHT) + (new >= RIGHT)] for key, (old, new) in both.items()}
    moved = {key: "fell" if new < old else "rose" if new > old else "the same" for key, (old, new) in both.items()}
    return {key: f"reward {how}" for key, how in moved.items()}


def _prompts(
    before: Evaluation | None, after: Evaluation | None, kinds: dict[tuple[str, int], str]
) -> list[dict[str, Any]]:
    sides = named_sides(before, after)
    pairs = pair_samples(**{name: replace(side, samples=side.all_samples) for name, side in sides.items()})
    texts = iter(fit_page([_texts(sample) for pair in pairs for sample in pair.samples.values()])[0])
    found = []
    for key, pair in zip(number_repeats(digest_prompt(pair.prompt) for pair in pairs), pairs, strict=True):
        last = list(pair.samples.values())[-1]
        kind = kinds.get(key) or {True: "right", False: "wrong"}.get(last["correct"])
        entry: dict[str, Any] = {"prompt": bare_prompt(pair.prompt), "kind": kind}
        entry |= {} if pair.gold is None else {"gold": show_text(pair.gold)}
        for name, sample in pair.samples.items():
            *steps, thinking, answer = next(texts)
            notes = describe_sample(sample)
            if sample["correct"] is None and sample.get("reward") is not None:
                notes = f"reward {sample['reward']:.3g}, {notes}"
            entry[name] = {"answer": answer, "correct": sample["correct"], "notes": notes}
            if is_thinking(sample):
                entry[name]["thinking"] = thinking
            if steps:
                entry[name]["steps"] = list(zip((kind for kind, _ in list_steps(sample["turns"])), steps, strict=True))
        found.append(entry)
    order = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(found, key=lambda entry: order.get(entry["kind"], len(order)))


def _texts(sample: dict[str, Any]) -> list[str]:
    """All that a completion says, in order."""
    return [*(text for _, text in list_steps(sample.get("turns", ()))), sample["thinking"], sample["answer"]]


EVALUATIONS, BEST = "evaluations.jsonl", "best"  # in the run's folder
RECORD = "evaluation.json"  # in BEST: the evaluation of its weights


@dataclass(frozen=True)
class HeldOut:
    """One evaluation during training, with its optimizer step (0: before the first)."""

    step: int
    evaluation: Evaluation


class HeldOutHistory:
    """Evaluations in order, each compared with the best before it; better is a higher mean of the measure.

    Args:
        measure: the deciding measure, a name for `Evaluation.measure`.
        patience: evaluations in a row without a new best until `is_over`; None: never.

    Attributes:
        best: the first with the highest mean; value: the newest mean; None before any was measured.
        since: number of evaluations after it.
    """

    def __init__(self, measure: str, patience: int | None) -> None:
        self.measure, self.patience = measure, patience
        self.best: HeldOut | None = None
        self.value: float | None = None
        self.since = 0

    @property
    def is_over(self) -> bool:
        """Whether the patience is exhausted."""
        return self.patience is not None and self.since >= self.patience

    @property
    def best_value(self) -> float | None:
        """The best one's mean."""
        return None if self.best is None else self.best.evaluation.value(self.measure)

    def observe(self, found: HeldOut, was_best: bool | None = None) -> bool:
        """Add the next evaluation and return whether it is the new best (`was_best`: the decision at its time; None:
        decide now). One that measured nothing does not count."""
        value, best = found.evaluation.value(self.measure), self.best_value
        if value is None:
            return False
        self.value = value
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
        measured = found.evaluation.measure(self.measure)
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
