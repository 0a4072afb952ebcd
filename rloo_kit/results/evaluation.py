"""Evaluation results as numbers, text and tables, and the difference between two of them. No model, no torch.

They are stored in `before.json` and `after.json`, so that a report can be rebuilt on any machine.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter
from rich.table import Table

from rloo_kit.data.answers import EXACT
from rloo_kit.results.intervals import (
    Estimate,
    mean_of_prompts,
    paired_difference,
    paired_mean_difference,
    unpaired_difference,
)
from rloo_kit.runs.files import read_json
from rloo_kit.system.console import render_text
from rloo_kit.system.processes import say

Number = Annotated[int, Field(ge=0, lt=2**53)]
Size = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
MEASURES = ("accuracy", "greedy_accuracy", "reward", "greedy_reward")
ACCURACIES = MEASURES[:2]


def leading_measure(has_accuracy: bool, judged_by: str | None, has_reward: bool) -> str:
    """The deciding measure: "accuracy" where a reward of the run compares answers, else "reward" if there is one."""
    return "reward" if has_reward and (not has_accuracy or judged_by == EXACT) else "accuracy"


class Measured(NamedTuple):
    """A mean over prompts with its interval (None: open), and the mean of each prompt (None: nothing was scored).
    Without the prompts' means it cannot be compared prompt by prompt."""

    value: float
    low: float | None
    high: float | None
    per_prompt: list[float | None] | None


class _RewardMean(BaseModel):
    """One reward's mean, without its weight; see `Evaluation.rewards`."""

    mean: Finite
    low: Finite | None
    high: Finite | None
    per_prompt: list[Finite | None]


class _Budget(BaseModel):
    """Accuracy under one thinking budget, in tokens; `Evaluation.budgets` documents the keys."""

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
    """One completion with its prompt; lengths in tokens, `correct` None if no reward of the run judged it."""

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
    """The result of `evaluate`. Shares are in [0, 1]; None means that there was nothing to measure.

    Attributes:
        label: a word for tables ("before").
        num_prompts, num_samples, temperature, max_completion_length: how it was measured.
        num_judged: prompts with a reference answer, over which accuracies are means; None: all, or no accuracy.
        accuracy, low, high: share of right completions with its 95 % interval; None without answers to compare with.
        judged_by: the run's reward that judged them, or EXACT; None without an accuracy, and in old files.
        greedy_accuracy, greedy_low, greedy_high: the same at temperature 0; None if not asked for.
        pass_at_k: k -> probability that one of k completions is right.
        closed_share: completions that contain `</think>`; None for a model that does not think.
        truncated_share: completions that reached the limit.
        mean_thinking_tokens: over the closed completions.
        mean_tokens: over all completions.
        budgets: one dict per thinking budget: budget, accuracy, low, high, forced_share; the accuracy of the
            completions whose thinking the budget closed, forced_accuracy, forced_low, forced_high, and of the others,
            unforced_accuracy, unforced_low, unforced_high (None if there are none).
        samples: the first completion of the first `eval.num_completions` prompts: prompt, thinking, answer, gold,
            correct, ended, closed, tokens, thinking_tokens, forced, reward (the weighted sum).
        more_samples: the same for later prompts, for the report.
        unscored: completions that the answer reward could not judge; they count as wrong.
        seconds: duration.
        prompts_digest: equal for evaluations of the same prompts.
        prompt_digests: of each prompt, to pair two evaluations that share only some; None in old ones.
        unjudged: indices of the prompts without an answer.
        per_prompt, greedy_per_prompt: share of right completions of each prompt with an answer, for paired comparison.
        reward, reward_low, reward_high: the weighted sum of the run's rewards, like the metric `reward`: a mean over
            prompts with its 95 % interval; None if nothing was scored. Old evaluations of one prompt have no interval.
        reward_per_prompt: its mean over the scored completions of each prompt; None without any.
        rewards: each reward's own mean by name: mean, low, high, per_prompt.
        reward_unscored: completions without a weighted sum, because a reward failed on them or none applied.
        sources: digest of the users' rewards as they were; edited ones are not compared. Empty without any.
        greedy_reward: the weighted sum at temperature 0, with the same keys; empty if not asked for, or accuracy leads.
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
    more_samples: list[dict[str, Any]] = field(default_factory=list)
    unscored: Number = 0
    seconds: Size = 0.0
    prompts_digest: str = ""
    per_prompt: list[Share] | None = None
    greedy_per_prompt: list[Share] | None = None
    num_judged: Number | None = None
    reward: Finite | None = None
    reward_low: Finite | None = None
    reward_high: Finite | None = None
    reward_per_prompt: list[Finite | None] | None = None
    rewards: dict[str, dict[str, Any]] = field(default_factory=dict)
    reward_unscored: Number = 0
    judged_by: str | None = None
    greedy_reward: dict[str, Any] = field(default_factory=dict)
    prompt_digests: list[str] | None = None
    unjudged: list[Number] = field(default_factory=list)
    sources: str = ""

    @property
    def leading(self) -> str:
        """The measure that decides, "accuracy" or "reward"."""
        return leading_measure(self.accuracy is not None, self.judged_by, self.reward is not None)

    @property
    def prompts_compared(self) -> int:
        """The number of prompts that an accuracy averages over."""
        return self.num_prompts if self.num_judged is None else self.num_judged

    def measure(self, name: str) -> Measured | None:
        """One of MEASURES, or one reward by name; None if it was not measured."""
        of_reward = self.greedy_reward if name == "greedy_reward" else self.rewards.get(name, {})
        found: dict[str, tuple[Any, ...]] = {
            name: tuple(of_reward.get(key) for key in ("mean", "low", "high", "per_prompt")),
            "accuracy": (self.accuracy, self.low, self.high, self.per_prompt),
            "greedy_accuracy": (self.greedy_accuracy, self.greedy_low, self.greedy_high, self.greedy_per_prompt),
            "reward": (self.reward, self.reward_low, self.reward_high, self.reward_per_prompt),
        }
        return None if found[name][0] is None else Measured(*found[name])

    def take_rewards(self, total: list[list[float | None]], single: dict[str, list[list[float | None]]]) -> None:
        """Fill in the mean rewards.

        Args:
            total: the weighted sum for each completion of each prompt; None if it is not scored.
            single: the same for each reward, by name.
        """
        self.reward_unscored = sum(value is None for values in total for value in values)
        for sample, values in zip([*self.samples, *self.more_samples], total, strict=False):
            sample["reward"] = values[0]
        found = _average(total, self.num_samples)
        if found is not None:
            self.reward, self.reward_low, self.reward_high = found[:3]
            self.reward_per_prompt = found.per_prompt
        entries = {name: mean_reward(values, self.num_samples) for name, values in single.items()}
        self.rewards = {name: entry for name, entry in entries.items() if entry}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` restores an equal object."""
        return asdict(self) | {"pass_at_k": {str(k): value for k, value in self.pass_at_k.items()}}

    @classmethod
    def from_dict(cls, values: Any) -> "Evaluation":
        """The evaluation from `to_dict`, such as `before.json`; raises ValueError for anything else."""
        found: Evaluation = TypeAdapter(cls).validate_python(values)
        TypeAdapter(list[_Budget]).validate_python(found.budgets)
        TypeAdapter(list[_Sample]).validate_python([*found.samples, *found.more_samples])
        for name, entry in found.rewards.items():
            found.rewards[name] = _RewardMean.model_validate(entry).model_dump()
        sides = [(vars(found), ("", "greedy_")), *((entry, ("", "forced_", "unforced_")) for entry in found.budgets)]
        for holder, prefix in ((holder, prefix) for holder, prefixes in sides for prefix in prefixes):
            interval = [holder.get(f"{prefix}{name}") for name in ("accuracy", "low", "high")]
            if None in interval and interval != [None] * 3:
                raise ValueError(f"an accuracy needs its interval: {prefix}accuracy, low and high are {interval}")
        for shares in (found.per_prompt, found.greedy_per_prompt):
            if shares is not None and len(shares) != found.prompts_compared:
                raise ValueError(f"{len(shares)} of {found.prompts_compared} prompts have a share")
        if found.greedy_reward:
            found.greedy_reward = _RewardMean.model_validate(found.greedy_reward).model_dump()
        single = (entry["per_prompt"] for entry in (*found.rewards.values(), found.greedy_reward) if entry)
        for values in (found.prompt_digests, found.reward_per_prompt, *single):
            if values is not None and len(values) != found.num_prompts:
                raise ValueError(f"{len(values)} of {found.num_prompts} prompts have a reward or a digest")
        if found.prompt_digests and len({*range(found.num_prompts)} - {*found.unjudged}) != found.prompts_compared:
            raise ValueError(f"the indices in unjudged do not leave {found.prompts_compared} prompts with an answer")
        return found

    @classmethod
    def read(cls, path: Path) -> "Evaluation | None":
        """The evaluation in a file; None without one, and None with a warning if it is damaged."""
        if not path.is_file():
            return None
        try:
            return cls.from_dict(read_json(path))
        except ValueError:
            say(f"WARNING: {path} is damaged or not an evaluation, so it counts as not measured")
            return None

    def rows(self, *others: "Evaluation") -> list[tuple[str, str]]:
        """Name and value of each measure, as text for a table, next to `others`; the deciding measure first."""
        sampled = f"accuracy, temperature {self.temperature:g}"
        found = with_interval(self.accuracy, self.low, self.high) or "not measured: no answers"
        answers, rewards, word = [(sampled, found)], [], name_of("accuracy", self)
        if self.prompts_compared < self.num_prompts:
            answers.append(("prompts with an answer (accuracies)", f"{self.num_judged} of {self.num_prompts}"))
        if self.greedy_accuracy is not None:
            greedy = with_interval(self.greedy_accuracy, self.greedy_low, self.greedy_high)
            answers.append(("accuracy, greedy", greedy))
        for name, title in (("reward", "reward, weighted sum"), ("greedy_reward", "reward, greedy")):
            if (one := self.measure(name)) is not None:
                rewards.append((title, with_interval(*one[:3])))
        for name, entry in self.rewards.items() if len(self.rewards) > 1 else ():
            rewards.append((f"reward {name}", with_interval(entry["mean"], entry["low"], entry["high"])))
        of = "" if word == "accuracy" else f", {word}"
        rest = [(f"pass@{k}{of}", f"{value:.3f}") for k, value in sorted(self.pass_at_k.items())]
        for entry in self.budgets:
            found = with_interval(entry["accuracy"], entry["low"], entry["high"]) or "no answers"
            rest.append((f"accuracy, thinking at most {entry['budget']} tokens", found))
            rest += _forced_rows(entry)
        if says_nothing(self, *others):
            answers, rest = [], []
        answers, rest = ([(name.replace("accuracy", word), value) for name, value in part] for part in (answers, rest))
        rows = [*rewards, *answers, *rest] if self.leading == "reward" else [*answers, *rewards, *rest]
        if self.closed_share is not None:
            rows.append(("thinking closed", f"{self.closed_share:.1%}"))
        if self.mean_thinking_tokens is not None:
            rows.append(("thinking tokens, closed completions", f"{self.mean_thinking_tokens:.1f}"))
        rows.append((f"truncated at {self.max_completion_length} tokens", f"{self.truncated_share:.1%}"))
        rows.append(("tokens per completion", f"{self.mean_tokens:.1f}"))
        if self.unscored:
            rows.append(("could not be judged, counted as wrong", str(self.unscored)))
        if self.reward_unscored:
            rows.append(("without a reward, excluded from its mean", str(self.reward_unscored)))
        return rows

    def describe(self) -> str:
        """The main measures on one line, for a run's output; `rows` has all of them."""
        parts = []
        if self.accuracy is not None:
            parts.append(f"{name_of('accuracy', self)} {with_interval(self.accuracy, self.low, self.high)}")
        if self.greedy_accuracy is not None:
            parts.append(f"greedy {self.greedy_accuracy:.3f}")
        if says_nothing(self) or (self.leading == "reward" and self.reward == self.accuracy):
            parts = []
        if self.reward is not None and (self.leading == "reward" or self.reward != self.accuracy):
            greedy = [f"greedy {self.greedy_reward['mean']:.3f}"] if self.greedy_reward else []
            rewards = [f"reward {with_interval(self.reward, self.reward_low, self.reward_high)}", *greedy]
            parts = [*rewards, *parts] if self.leading == "reward" else [*parts, *rewards]
        if not says_nothing(self):
            parts += [f"pass@{k} {value:.3f}" for k, value in sorted(self.pass_at_k.items())]
            budgets = [(one["budget"], one["accuracy"]) for one in self.budgets if one["accuracy"] is not None]
            parts += [f"{accuracy:.3f} at {budget} tokens of thinking" for budget, accuracy in budgets]
        if self.mean_thinking_tokens is not None:
            parts.append(f"thinking {self.mean_thinking_tokens:.0f} tokens")
        parts.append(f"{self.truncated_share:.0%} truncated")
        return f"Evaluation {self.label}: {', '.join(parts)}; {self.num_prompts:,} held-out prompts"

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


def shared_measures(*sides: Evaluation | None) -> tuple[str, ...]:
    """Those of MEASURES that every evaluation has, the deciding one first: the reward if it leads in any of them."""
    measured = [side for side in sides if side is not None]
    first = "reward" if any(side.leading == "reward" for side in measured) else "accuracy"
    known = ACCURACIES if rewards_differ(*measured) else MEASURES
    found = [name for name in known if measured and all(side.measure(name) for side in measured)]
    return tuple(sorted(found, key=lambda name: first not in name))


def rewards_differ(*sides: Evaluation) -> bool:
    """Whether a reward was edited between the evaluations, so that only accuracies compare."""
    return len({side.sources for side in sides} - {""}) > 1


def name_of(measure: str, *sides: Evaluation | None) -> str:
    """A measure in words: an accuracy is called "exact match" where no reward of the run judged it."""
    if measure not in MEASURES:
        return measure  # a reward's name
    word = EXACT if any(side is not None and side.judged_by == EXACT for side in sides) else "accuracy"
    return measure.replace("accuracy", word).replace("_", " ")


def says_nothing(*sides: Evaluation | None) -> bool:
    """Whether exact match is 0 in all evaluations and a reward is not: the completions answer in another form."""
    measured = [side for side in sides if side is not None]
    shares = [(one.accuracy, one.greedy_accuracy, *(entry["accuracy"] for entry in one.budgets)) for one in measured]
    is_zero = not any(map(any, shares)) and any(side.reward for side in measured)
    return is_zero and all(side.judged_by == EXACT for side in measured)


@dataclass(frozen=True)
class Comparison:
    """`after - before` with 95 % intervals; None where one of the two was not measured.

    Attributes:
        leading: the measure that decides, "accuracy" or "reward". word: for the accuracy: that, "exact match", or empty
            where it says nothing.
        difference, low, high: in accuracy at the sampling temperature.
        greedy_difference, greedy_low, greedy_high: in the deciding measure at temperature 0.
        paired: compared prompt by prompt, on the prompts that both measured.
        num_prompts: their number; unpaired, that of the smaller evaluation. For accuracies, those with an answer.
        apart: whether the own intervals of the deciding measure do not overlap.
        reward_difference, reward_low, reward_high: in the weighted sum of the rewards.
        made_differently: descriptions of settings whose difference makes the means incomparable.
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
    reward_difference: float | None = None
    reward_low: float | None = None
    reward_high: float | None = None
    made_differently: tuple[str, ...] = ()
    leading: str = "accuracy"
    word: str = "accuracy"

    @property
    def sampled(self) -> str:
        """The difference at the sampling temperature as text; empty without one."""
        return signed(self.difference, self.low, self.high)

    @property
    def greedy(self) -> str:
        """The difference in the deciding measure at temperature 0 as text; empty without one."""
        return signed(self.greedy_difference, self.greedy_low, self.greedy_high)

    @property
    def reward(self) -> str:
        """The difference in the mean reward as text; empty without one."""
        return signed(self.reward_difference, self.reward_low, self.reward_high)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        how = f"on {'the same' if self.paired else 'different'} {self.num_prompts} prompts"
        parts = [f"{self.word} {self.sampled}"] if self.sampled and self.word else []
        if self.reward and (self.leading == "reward" or self.reward != self.sampled):  # equal if it is the accuracy
            parts.insert(0 if self.leading == "reward" else 1, f"reward {self.reward}")
        if not parts:
            return "nothing to compare: at least one evaluation has neither an accuracy nor a reward"
        parts[0] = f"{parts[0]} {how}"
        parts += [f"greedy {self.greedy}"] if self.greedy else []
        parts += [f"but made differently: {', '.join(self.made_differently)}"] if self.made_differently else []
        return "; ".join(parts)


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """The difference between two evaluations, with intervals; paired on the prompts that both measured."""
    leading = next(iter(shared_measures(before, after)), "accuracy").removeprefix("greedy_")
    found = {name: difference(before, after, name) for name in ("accuracy", f"greedy_{leading}", "reward")}
    sampled, greedy, reward = (_closed(None if one is None else one.estimate) for one in found.values())
    apart = _are_apart(before.measure(leading), after.measure(leading))
    lead = found[leading] or found[f"greedy_{leading}"]
    paired, num_prompts = (False, 0) if lead is None else (lead.paired, lead.num_prompts)
    settings = tuple(setting_differences(before, after))
    word = "" if says_nothing(before, after) else name_of("accuracy", before, after)
    return Comparison(*sampled, *greedy, paired, num_prompts, apart, *reward, settings, leading, word)


class Difference(NamedTuple):
    """`after - before` of a measure. If paired, everything is of the `num_prompts` prompts that both measured; else the
    two means are each evaluation's own, and `num_prompts` is that of the smaller one."""

    estimate: Estimate
    before: float
    after: float
    num_prompts: int
    paired: bool


def difference(before: Evaluation, after: Evaluation, name: str) -> Difference | None:
    """`after - before` of `Evaluation.measure(name)`, paired if possible; None if one was not measured."""
    old, new = before.measure(name), after.measure(name)
    if old is None or new is None or (name not in ACCURACIES and rewards_differ(before, after)):
        return None
    if both := list(pair_means(before, after, name).values()):
        first, second = [a for a, _ in both], [b for _, b in both]
        of_all = 1 if name == "greedy_reward" else math.lcm(before.num_samples, after.num_samples)
        is_share, num = name in ACCURACIES, len(both)
        estimate = paired_difference(first, second) if is_share else paired_mean_difference(first, second, of_all)
        return Difference(estimate, math.fsum(first) / num, math.fsum(second) / num, num, True)
    sizes = [one.prompts_compared if name in ACCURACIES else one.num_prompts for one in (before, after)]
    return Difference(unpaired_difference(_open(old), _open(new)), old.value, new.value, min(sizes), False)


def pair_means(before: Evaluation, after: Evaluation, name: str) -> dict[Any, tuple[float, float]]:
    """Both means of each prompt that both measured, by prompt; empty if they share less than half of the smaller one's:
    all prompts then say more. Evaluations without a digest of each prompt share all or none."""
    whole = before.prompt_digests is None or after.prompt_digests is None
    old, new = (_means_by_prompt(one, name, whole) for one in (before, after))
    shared = [key for key in old if key in new]
    if 2 * len(shared) < min(len(old), len(new)):
        return {}
    return {key: (a, b) for key in shared if (a := old[key]) is not None and (b := new[key]) is not None}


def _means_by_prompt(one: Evaluation, name: str, whole: bool) -> dict[Any, float | None]:
    """The measure's mean of each prompt, by its digest and number of earlier ones; `whole`: by the digest of all."""
    measured = one.measure(name)
    if measured is None or measured.per_prompt is None:
        return {}
    digests: list[Any] = [(one.prompts_digest, len(measured.per_prompt))] * len(measured.per_prompt)
    if not whole:
        left_out = set(one.unjudged if name in ACCURACIES else ())
        digests = [digest for place, digest in enumerate(one.prompt_digests or ()) if place not in left_out]
    return dict(zip(number_repeats(digests), measured.per_prompt, strict=True))


def number_repeats(values: Iterable[Any]) -> list[tuple[Any, int]]:
    """Each value with the number of equal ones before it: the first of two equal prompts pairs with the first."""
    seen: defaultdict[Any, count[int]] = defaultdict(count)
    return [(value, next(seen[value])) for value in values]


def digest_prompt(prompt: str) -> str:
    """A digest of a rendered prompt: 12 hexadecimal digits."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def setting_differences(before: Evaluation, after: Evaluation) -> list[str]:
    """Descriptions of settings whose difference makes the means of two evaluations incomparable; empty for none."""
    settings = {"temperature": "temperature", "max_completion_length": "completion limit"}
    pairs = [(word, getattr(before, name), getattr(after, name)) for name, word in settings.items()]
    return [f"{word} {old:g} and {new:g}" for word, old, new in pairs if old != new]


def _are_apart(before: Measured | None, after: Measured | None) -> bool | None:
    if before is None or after is None or None in (before.low, before.high, after.low, after.high):
        return None
    (_, low, high), (_, new_low, new_high) = _open(before), _open(after)
    return high < new_low or new_high < low


def _average(values: list[list[float | None]], num_samples: int) -> Measured | None:
    """The mean over prompts of the scored values; None without any."""
    scored = [[value for value in one if value is not None] for one in values]
    means = [math.fsum(one) / len(one) if one else None for one in scored]
    known = [mean for mean in means if mean is not None]
    if not known:
        return None
    estimate = mean_of_prompts(known, num_samples)
    return Measured(estimate.value, *_closed(estimate)[1:], means)


def mean_reward(values: list[list[float | None]], num_samples: int) -> dict[str, Any]:
    """An entry of `Evaluation.rewards` from the values of each prompt's completions; empty if nothing was scored."""
    found = _average(values, num_samples)
    return {} if found is None else dict(zip(_RewardMean.model_fields, found, strict=True))


def _closed(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    """The estimate with None for open interval ends, because JSON has no infinity; three Nones without an estimate."""
    if estimate is None:
        return None, None, None
    low, high = (end if math.isfinite(end) else None for end in estimate[1:])
    return estimate.value, low, high


def _open(found: Measured) -> Estimate:
    low, high = found.low, found.high
    return Estimate(found.value, -math.inf if low is None else low, math.inf if high is None else high)


def _forced_rows(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """How often a budget closed the thinking, and the accuracy of both groups; old evaluations have only the share."""
    at = f"at {entry['budget']}"
    rows = [(f"closed by the budget {at}", f"{entry['forced_share']:.1%}")]
    for side, name in (("forced", f"accuracy {at}, closed by the budget"), ("unforced", f"accuracy {at}, the others")):
        found = with_interval(*(entry.get(f"{side}_{key}") for key in ("accuracy", "low", "high")))
        rows += [(name, found)] if found else []
    return rows


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """A value with its interval as text; empty without one."""
    if value is None:
        return ""
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def signed(value: float | None, low: float | None, high: float | None) -> str:
    """A difference with its interval as text; empty without one.

    >>> signed(0.12, 0.05, 0.2), signed(0.12, None, None), signed(None, None, None)
    ('+0.120 [+0.050, +0.200]', '+0.120', '')
    """
    if value is None:
        return ""
    return f"{value:+.3f}" if low is None or high is None else f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"


CLOSED_BY_THE_BUDGET = "closed by the budget"  # the model was still thinking when its budget ran out


@dataclass
class SamplePair:
    """One rendered held-out prompt, its right answer (None without one), and its samples by title."""

    prompt: str
    gold: Any = None
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)


def pair_samples(**evaluations: Evaluation | None) -> list[SamplePair]:
    """The samples of evaluations, grouped by prompt: `pair_samples(before=before, after=after)`.

    If a prompt occurs twice, first occurrences are paired with first ones and second with second.
    """
    pairs: dict[tuple[str, int], SamplePair] = {}
    for title, evaluation in evaluations.items():
        samples = evaluation.samples if evaluation is not None else []
        for key, sample in zip(number_repeats(one["prompt"] for one in samples), samples, strict=True):
            pair = pairs.setdefault(key, SamplePair(key[0]))
            pair.gold = sample.get("gold") if pair.gold is None else pair.gold
            pair.samples[title] = sample
    return list(pairs.values())


def describe_sample(sample: dict[str, Any]) -> str:
    """A text with a sample's length and how it ended.

    >>> describe_sample({"tokens": 9, "thinking_tokens": 5, "ended": False})
    '9 tokens, 5 of them thinking, truncated'
    >>> describe_sample({"tokens": 9, "thinking_tokens": 5, "ended": True, "forced": True})
    '9 tokens, 5 of them thinking, closed by the budget'
    """
    notes = [f"{sample['tokens']} tokens"]
    if sample["thinking_tokens"] is not None:
        notes.append(f"{sample['thinking_tokens']} of them thinking")
    if sample.get("forced"):  # absent in evaluations older than thinking budgets
        notes.append(CLOSED_BY_THE_BUDGET)
    if not sample["ended"]:
        notes.append("truncated")
    return ", ".join(notes)


def is_thinking(sample: dict[str, Any]) -> bool:
    """Whether the completion contains thinking, even empty: text before `</think>`, or just that tag."""
    return bool(sample["thinking"] or sample["closed"])
