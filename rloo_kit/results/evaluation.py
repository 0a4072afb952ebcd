"""Evaluation results as numbers, text and tables. No model, no torch.

They are stored in `before.json` and `after.json`, so that a report can be rebuilt on any machine.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter
from rich.table import Table

from rloo_kit.data.answers import EXACT
from rloo_kit.results.intervals import Measured, Scores, mean_of_completions
from rloo_kit.runs.files import read_json
from rloo_kit.system.console import render_text
from rloo_kit.system.processes import say

Number = Annotated[int, Field(ge=0, lt=2**53)]
Size = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
MEASURES = ("accuracy", "greedy_accuracy", "win_rate", "reward", "greedy_reward")
ACCURACIES, SHARES = MEASURES[:2], MEASURES[:3]
THINKING = "thinking_tokens"
# Titles and forms of `Evaluation.tools`.
TOOLS = {"turns": ("turns per completion", ".2f"), "call_frequency": ("tool calls per completion", ".2f")}
TOOLS["failure_frequency"] = "calls on which a tool failed", ".1%"
TOOLS["invalid_frequency"] = "calls of no tool, or with wrong arguments", ".1%"


def leading_measure(has_accuracy: bool, judged_by: str | None, judge_weight: float, has_reward: bool) -> str:
    """The deciding measure: "accuracy" where a reward of the run with a weight compares answers, else "reward" if there
    is one."""
    return "reward" if has_reward and (not has_accuracy or judged_by == EXACT or not judge_weight) else "accuracy"


@dataclass(frozen=True)
class Budget:
    """What a thinking budget of so many `tokens` leads to: the share of completions whose thinking it closed, and the
    accuracy of all completions, of these and of the others; None without answers."""

    tokens: Number
    forced_share: Share
    accuracy: Measured | None = None
    forced: Measured | None = None
    unforced: Measured | None = None


class _Sample(BaseModel):
    """One completion with its prompt; lengths in tokens, `correct` None if no reward of the run judged it; with tools
    `turns`, its messages, of which thinking and answer are the last."""

    prompt: str
    thinking: str
    answer: str
    correct: bool | None
    ended: bool
    closed: bool
    tokens: Number
    thinking_tokens: Number | None
    turns: list[dict[str, Any]] = []


@dataclass
class Evaluation:
    """The result of `evaluate`. Shares are in [0, 1]; None means that there was nothing to measure.

    Attributes:
        num_prompts, num_samples, temperature, max_completion_length, thinking_budget: how it was measured; the last is
            the run's, None without one.
        measures: means over prompts by name, without those that were not measured. "accuracy": the share of right
            completions, over the prompts with a reference answer; "reward": the weighted sum of the run's rewards,
            like that metric; "greedy_accuracy" and "greedy_reward" (if the reward leads): at temperature 0;
            "rewards/NAME": each reward's own, without its weight; "thinking_tokens": of all completions, those in full
            that never close their thinking (THINKING).
            "win_rate": the share of comparisons that `judge` decided for the policy, a tie counted half.
        judged_by: the run's reward that judged the answers, or EXACT; None without an accuracy. judge_weight: its
            weight; with 0 the accuracy is shown and decides nothing.
        judge: against whom, and who compared; "" without. judge_digest: of its url, rubric, template and options.
        judge_agreement: share of answers on which both orders agree.
        pass_at_k: k -> probability that one of k completions is right.
        closed_share: completions that contain `</think>`; None for a model that does not think.
        forced_share: completions whose thinking the budget closed; None without one.
        truncated_share: completions that reached the limit.
        mean_tokens: over all completions, without tools' results.
        tools: means in a run with tools, else empty, named as in training: call_frequency and turns (per completion),
            failure_frequency and invalid_frequency (shares of the calls).
        budgets: one per thinking budget.
        samples: the first completion of the first ten prompts, each a `_Sample` with gold, forced
            and reward (the weighted sum); more_samples: of later prompts, for the report.
        unscored: completions that the answer reward could not judge; they count as wrong.
        reward_unscored: completions without a weighted sum, because a reward failed on them or none applied.
        prompts_digest: equal for evaluations of the same prompts. prompt_digests: of each prompt, to pair two
            evaluations that share only some; None during training.
        sources: digest of the users' rewards as they were; edited ones are not compared. Empty without any.
    """

    label: str
    num_prompts: Number
    num_samples: Number
    temperature: Size
    max_completion_length: Number
    measures: dict[str, Measured] = field(default_factory=dict)
    judged_by: str | None = None
    judge_weight: float = 1.0
    judge: str = ""
    judge_digest: str = ""
    judge_agreement: Share | None = None
    pass_at_k: dict[int, Share] = field(default_factory=dict)
    thinking_budget: Number | None = None
    closed_share: Share | None = None
    forced_share: Share | None = None
    truncated_share: Share = 0.0
    mean_tokens: Size = 0.0
    tools: dict[str, Size] = field(default_factory=dict)
    budgets: list[Budget] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    more_samples: list[dict[str, Any]] = field(default_factory=list)
    unscored: Number = 0
    reward_unscored: Number = 0
    seconds: Size = 0.0
    prompts_digest: str = ""
    prompt_digests: list[str] | None = None
    sources: str = ""

    @property
    def leading(self) -> str:
        """The measure that decides: "accuracy", "reward", or "win_rate" where no reward of the run compares answers."""
        if "win_rate" in self.measures and (self.judged_by in (None, EXACT) or not self.judge_weight):
            return "win_rate"
        has_accuracy, has_reward = "accuracy" in self.measures, "reward" in self.measures
        return leading_measure(has_accuracy, self.judged_by, self.judge_weight, has_reward)

    @property
    def rewards(self) -> dict[str, Measured]:
        """Each reward's own mean, by its name."""
        prefix = "rewards/"
        return {name.removeprefix(prefix): one for name, one in self.measures.items() if name.startswith(prefix)}

    @property
    def mean_thinking_tokens(self) -> float | None:
        """Tokens of thinking of a completion; None for a model that does not think."""
        return self.value(THINKING)

    @property
    def all_samples(self) -> list[dict[str, Any]]:
        """The samples, those for the report included."""
        return [*self.samples, *self.more_samples]

    def measure(self, name: str) -> Measured | None:
        """One of MEASURES, THINKING, or one reward by name; None if it was not measured."""
        return self.measures.get(name if name in (*MEASURES, THINKING) else f"rewards/{name}")

    def value(self, name: str) -> float | None:
        """The mean of a measure; None if it was not measured."""
        found = self.measure(name)
        return None if found is None else found.value

    def ends(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Value, low and high of a measure; three Nones if it was not measured."""
        found = self.measure(name)
        return (None, None, None) if found is None else found.ends

    def take_rewards(self, total: Scores, single: dict[str, Scores]) -> None:
        """Fill in the mean rewards: `total` has the weighted sum for each completion of each prompt, None if it is not
        scored; `single` the same of each reward by name."""
        self.reward_unscored = sum(value is None for values in total for value in values)
        for sample, values in zip(self.all_samples, total, strict=False):
            sample["reward"] = values[0]
        for name, scores in {"reward": total, **{f"rewards/{name}": one for name, one in single.items()}}.items():
            if (found := mean_of_completions(scores, self.num_samples)) is not None:
                self.measures[name] = found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` restores an equal object."""
        found = asdict(self) | {"pass_at_k": {str(k): value for k, value in self.pass_at_k.items()}}
        return {name: value for name, value in found.items() if value or name != "tools"}

    def summary(self) -> dict[str, Any]:
        """The figures of `show --json`, each measure with the ends of its interval."""
        kept = ("num_prompts", "judged_by", "closed_share", "truncated_share", "tools")
        shown = {name: getattr(self, name) for name in kept} | {"thinking_tokens": self.mean_thinking_tokens}
        return {name: list(self.ends(name)) for name in shared_measures(self)} | shown

    @classmethod
    def from_dict(cls, values: Any) -> "Evaluation":
        """The evaluation from `to_dict`, such as `before.json`; raises ValueError for anything else."""
        found: Evaluation = TypeAdapter(cls).validate_python(values)
        TypeAdapter(list[_Sample]).validate_python(found.all_samples)
        for one in (found.prompt_digests, *(measured.per_prompt for measured in found.measures.values())):
            if one is not None and len(one) != found.num_prompts:
                raise ValueError(f"{len(one)} of {found.num_prompts} prompts have a value or a digest")
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
        found, word = self.measures, name_of("accuracy", self)
        sampled = str(found.get("accuracy", "not measured: no answers"))
        answers = [(f"{word}, temperature {self.temperature:g}", sampled)]
        if "accuracy" in found and found["accuracy"].count < self.num_prompts:
            count = f"{found['accuracy'].count} of {self.num_prompts}"
            answers.append(("prompts with an answer (accuracies)", count))
        if "greedy_accuracy" in found:
            answers.append((f"{word}, greedy", str(found["greedy_accuracy"])))
        titles = {"reward": "reward, weighted sum", "greedy_reward": "reward, greedy"}
        titles |= {f"rewards/{name}": f"reward {name}" for name in self.rewards if len(self.rewards) > 1}
        rewards = [(title, str(found[name])) for name, title in titles.items() if name in found]
        of = "" if word == "accuracy" else f", {word}"
        rest = [(f"pass@{k}{of}", f"{value:.3f}") for k, value in sorted(self.pass_at_k.items())]
        for budget in self.budgets:
            rest.append((f"{word}, thinking at most {budget.tokens} tokens", str(budget.accuracy or "no answers")))
            rest.append((f"closed by the budget at {budget.tokens}", f"{budget.forced_share:.1%}"))
            for side, who in ((budget.forced, "closed by the budget"), (budget.unforced, "the others")):
                rest += [(f"{word} at {budget.tokens}, {who}", str(side))] if side is not None else []
        if says_nothing(self, *others):
            answers, rest = [], []
        if "win_rate" in found:
            rewards.insert(0, (f"win rate {self.judge}", str(found["win_rate"])))
        if self.judge_agreement is not None:
            rest.append(("the judge agrees in both orders", f"{self.judge_agreement:.1%}"))
        by_answers = self.leading == "accuracy"
        rows = [*answers, *rewards, *rest] if by_answers else [*rewards, *answers, *rest]
        closed = {"thinking closed": self.closed_share}
        closed[f"closed by the budget of {self.thinking_budget}"] = self.forced_share
        rows += [(title, f"{share:.1%}") for title, share in closed.items() if share is not None]
        if (thinking := self.measure(THINKING)) is not None:
            rows.append(("thinking tokens", f"{thinking:.1f}"))
        rows.append((f"truncated at {self.max_completion_length} tokens", f"{self.truncated_share:.1%}"))
        rows.append(("tokens per completion", f"{self.mean_tokens:.1f}"))
        rows += [(title, f"{self.tools[name]:{form}}") for name, (title, form) in TOOLS.items() if name in self.tools]
        unscored = {"could not be judged, counted as wrong": self.unscored}
        unscored["without a reward, excluded from its mean"] = self.reward_unscored
        return rows + [(title, str(number)) for title, number in unscored.items() if number]

    def describe(self) -> str:
        """The main measures on one line, for a run's output; `rows` has all of them."""
        is_silent, by_reward = says_nothing(self), self.leading == "reward"
        repeats = self.value("reward") == self.value("accuracy")
        answers = [] if is_silent or (by_reward and repeats) else self._brief("accuracy")
        rewards = self._brief("reward") if by_reward or not repeats else []
        parts = [*rewards, *answers] if by_reward else [*answers, *rewards]
        parts = [*self._brief("win_rate"), *parts]
        if not is_silent:
            parts += [f"pass@{k} {value:.3f}" for k, value in sorted(self.pass_at_k.items())]
            budgets = [(one.tokens, one.accuracy.value) for one in self.budgets if one.accuracy is not None]
            parts += [f"{accuracy:.3f} at {tokens} tokens of thinking" for tokens, accuracy in budgets]
        if self.mean_thinking_tokens is not None:
            budget = "" if self.thinking_budget is None else f" of at most {self.thinking_budget}"
            parts.append(f"thinking {self.mean_thinking_tokens:.0f}{budget} tokens")
        parts.append(f"{self.truncated_share:.0%} truncated")
        parts += [f"{value:.2f} tool calls" for name, value in self.tools.items() if name == "call_frequency"]
        return f"Evaluation {self.label}: {', '.join(parts)}; {self.num_prompts:,} held-out prompts"

    def _brief(self, name: str) -> list[str]:
        """A measure, and without its interval the same at temperature 0."""
        found, greedy = self.measures.get(name), self.value(f"greedy_{name}")
        parts = [] if found is None else [f"{name_of(name, self)} {found}"]
        return parts if greedy is None else [*parts, f"greedy {greedy:.3f}"]

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


def named_sides(before: Evaluation | None, after: Evaluation | None) -> dict[str, Evaluation]:
    """Those that were measured, by "before" and "after"."""
    return {name: side for name, side in (("before", before), ("after", after)) if side is not None}


def shared_measures(*sides: Evaluation | None) -> tuple[str, ...]:
    """Those of MEASURES that every evaluation has, the deciding one first: the reward if it leads in any of them."""
    measured = [side for side in sides if side is not None]
    leads = {side.leading for side in measured}
    first = next((name for name in ("win_rate", "reward") if name in leads), "accuracy")
    known = SHARES if rewards_differ(*measured) else MEASURES
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
    accuracies = [side.measure(name) for side in measured for name in ACCURACIES]
    accuracies += [one.accuracy for side in measured for one in side.budgets]
    is_zero = not any(one is not None and one.value for one in accuracies)
    return is_zero and any(side.value("reward") for side in measured) and all(s.judged_by == EXACT for s in measured)


def setting_differences(before: Evaluation, after: Evaluation) -> list[str]:
    """Descriptions of settings whose difference makes the means of two evaluations incomparable; empty for none."""
    settings = {"temperature": "temperature", "max_completion_length": "completion limit"}
    settings |= {"thinking_budget": "thinking budget"}
    pairs = [(word, getattr(before, name), getattr(after, name)) for name, word in settings.items()]
    judges = []
    if before.judge and after.judge and (before.judge, before.judge_digest) != (after.judge, after.judge_digest):
        how = " (another url, rubric, template or options)" if before.judge == after.judge else ""
        judges = [f"judge {before.judge} and {after.judge}{how}"]
    numbers = [(word, *("none" if one is None else f"{one:g}" for one in both)) for word, *both in pairs]
    return [f"{word} {old} and {new}" for word, old, new in numbers if old != new] + judges


def merge_rows(*sides: Evaluation) -> list[tuple[str, ...]]:
    """`Evaluation.rows` of all sides as one table; "-" for what one does not have."""
    columns = [dict(one.rows(*sides)) for one in sides]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, "-") for column in columns)) for name in names]


def number_repeats(values: Iterable[Any]) -> list[tuple[Any, int]]:
    """Each value with the number of equal ones before it: the first of two equal prompts pairs with the first."""
    seen: defaultdict[Any, count[int]] = defaultdict(count)
    return [(value, next(seen[value])) for value in values]


def digest_prompt(prompt: str) -> str:
    """A digest of a rendered prompt: 12 hexadecimal digits."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


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
