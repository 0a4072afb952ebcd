"""The figures of a run, recomputed from its files in plain Python. Imports nothing of the kit.

Rewards, exact match and lengths come from the completions in `rollouts/`, `before.json` and `after.json`;
the formulas of the intervals are written here a second time.
"""

import gzip
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Z = statistics.NormalDist().inv_cdf(0.975)
COMPARES = ("answer_reward", "math_answer_reward", "reasoning_gym_score")  # rewards that compare answers


class Estimate(NamedTuple):
    """A mean or a difference with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(share: float, count: int) -> Estimate:
    """Wilson 1927, written as the two roots of (p - share)^2 = Z^2 p (1 - p) / count."""
    a, b, c = 1 + Z * Z / count, -(2 * share + Z * Z / count), share * share
    root = math.sqrt(max(b * b - 4 * a * c, 0.0))
    return Estimate(share, max((-b - root) / (2 * a), 0.0), min((-b + root) / (2 * a), 1.0))


def padded(values: Sequence[float], low: float, high: float) -> Estimate:
    """The normal interval after adding a prompt at each end of the range (Agresti and Coull 1998, Bonett and Price
    2012), within the range."""
    more = [*values, low, high]
    half = Z * statistics.pstdev(more) / math.sqrt(len(more))
    middle, mean = statistics.fmean(more), statistics.fmean(values)
    return Estimate(mean, min(mean, max(middle - half, low)), max(mean, min(middle + half, high)))


def range_of(values: Sequence[float]) -> tuple[float, float]:
    """The range assumed of a reward: to each side of 0 that has values, to 1, 0.1, 0.01, ..., the last that holds them;
    to the values if some are beyond 1."""
    ends = [max(0.0, *(side * value for value in values)) for side in (-1, 1)]
    if max(ends) <= 1:
        for place, largest in enumerate(ends):
            unit = 1.0 if largest else 0.0
            while unit > 1e-9 and largest <= unit / 10 * (1 + 1e-8):
                unit /= 10
            ends[place] = unit
    return -ends[0], ends[1]


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt: a share if all are 0 or 1."""
    if {*values} <= {0.0, 1.0}:
        return wilson(statistics.fmean(values), len(values))
    return padded(values, *range_of(values))


def change_of(old: Sequence[float], new: Sequence[float]) -> Estimate:
    """The mean of `new - old`, prompt by prompt."""
    low, high = (0.0, 1.0) if {*old, *new} <= {0.0, 1.0} else range_of([*old, *new])
    return padded([b - a for a, b in zip(old, new, strict=True)], low - high, high - low)


@dataclass(frozen=True)
class Completion:
    """One completion: its text with the tag, and what the run's files say about it."""

    prompt: str
    text: str
    gold: Any
    closed: bool
    ended: bool
    tokens: int
    thinking_tokens: int | None

    @property
    def thought(self) -> int:
        """Tokens of thinking: all of a completion that never closes it."""
        return self.tokens if self.thinking_tokens is None else self.thinking_tokens


def exactly(text: str, gold: Any) -> float:
    """1.0 if what follows the thinking is the gold answer: the same text or the same number."""
    given, gold = text.rpartition("</think>")[2].strip(), str(gold).strip()
    numbers = [_number(one) for one in (given, gold)]
    return float(given == gold or (numbers[0] is not None and numbers[0] == numbers[1]))


def _number(text: str) -> Fraction | None:
    text = text.strip("*`$ ").removesuffix(".").replace(",", "")
    return Fraction(text) if re.fullmatch(r"[+-]?\d+(\.\d*)?", text) else None


def _answer_reward(one: Completion, thinks: bool) -> float:
    return exactly(one.text, one.gold) if one.closed or not thinks else 0.0


def _thinking_reward(one: Completion, thinks: bool) -> float:
    if not one.closed:
        return -1.0
    length = one.thinking_tokens or 0
    band = 0.3 if length < 10 else 0.7 if length < 30 else 1.0
    return band + (0.1 if band > 0.5 and "?" in one.text.partition("</think>")[0] else 0.0)


OF_THE_KIT = {"answer_reward": _answer_reward, "thinking_reward": _thinking_reward}


@dataclass
class Side:
    """The recomputed measures of an evaluation.

    Attributes:
        per_prompt: one value for each prompt: "accuracy", "reward", each reward's name; "greedy_accuracy" and
            "greedy_reward" as stored, because greedy completions are not kept; "thinking_tokens".
        closed, truncated: shares; closed is None for a model that does not think. tokens: mean length.
    """

    count: int
    per_prompt: dict[str, list[float]]
    closed: float | None
    truncated: float
    tokens: float
    completions: list[Completion] = field(default_factory=list, repr=False)

    def measure(self, name: str) -> Estimate | None:
        """A measure with its interval; None if it was not measured."""
        values = self.per_prompt.get(name)
        return None if values is None else mean_of(values)


class Recomputed:
    """A run, read from its folder.

    Args:
        folder: the run's. rewards_file: the source of the rewards that are not the kit's.
    """

    def __init__(self, folder: Path, rewards_file: Path) -> None:
        self.folder = folder
        self.config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        self.rewards = [(entry["name"].rpartition(":")[2], entry["weight"]) for entry in self.config["rewards"]]
        names: dict[str, Any] = {}
        exec(rewards_file.read_text(encoding="utf-8"), names)
        self._functions = names
        self.thinks = self.config["model"]["name"].endswith("thinking")
        self.compares_answers = any(entry["name"] in COMPARES for entry in self.config["rewards"])
        self.metrics = _read_rows(folder / "metrics.jsonl")
        self.rollouts = [row for file in sorted(folder.glob("rollouts/*.gz")) for row in _read_rows(file)]
        self.during = _read_rows(folder / "evaluations.jsonl")
        self.status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        self.stored = {when: json.loads((folder / f"{when}.json").read_text()) for when in ("before", "after")}
        self.sides = {when: self._side(found) for when, found in self.stored.items()}
        self.steps = self._step_by_step()

    def score(self, name: str, one: Completion) -> float:
        """What a reward gives to a completion."""
        if name in OF_THE_KIT:
            return OF_THE_KIT[name](one, self.thinks)
        columns = {} if one.gold is None else {"answer": [one.gold]}
        return float(self._functions[name](completions=[one.text], **columns)[0])

    def total(self, one: Completion) -> float:
        """The weighted sum of the rewards."""
        return math.fsum(weight * self.score(name, one) for name, weight in self.rewards)

    def _side(self, found: dict[str, Any]) -> Side:
        completions = [_of_sample(one) for one in [*found["samples"], *found["more_samples"]]]
        per_prompt = {"reward": [self.total(one) for one in completions]}
        per_prompt |= {name: [self.score(name, one) for one in completions] for name, _ in self.rewards}
        if all(isinstance(one.gold, str) for one in completions):
            per_prompt["accuracy"] = [_answer_reward(one, self.thinks) for one in completions]
        greedy = {name: found["measures"].get(name) for name in ("greedy_accuracy", "greedy_reward")}
        per_prompt |= {name: entry["per_prompt"] for name, entry in greedy.items() if entry is not None}
        if self.thinks:
            per_prompt["thinking_tokens"] = [float(one.thought) for one in completions]
        return Side(
            count=len(completions),
            per_prompt=per_prompt,
            closed=statistics.fmean(one.closed for one in completions) if self.thinks else None,
            truncated=statistics.fmean(not one.ended for one in completions),
            tokens=statistics.fmean(one.tokens for one in completions),
            completions=completions,
        )

    def change(self, name: str, old: str = "before", new: str = "after") -> Estimate | None:
        """The change of a measure between two sides."""
        both = [self.sides[when].per_prompt.get(name) for when in (old, new)]
        return None if None in both else change_of(*both)  # type: ignore[arg-type]

    @property
    def leads(self) -> str:
        """The measure that decides: exact match only where a reward compares answers."""
        return "accuracy" if self.compares_answers and "accuracy" in self.sides["after"].per_prompt else "reward"

    def _step_by_step(self) -> list[dict[str, float]]:
        """Metrics of each step from its rollouts, under the names of `metrics.jsonl`."""
        steps, episode, tokens = [], 0, 0
        for step, rows in groupby(self.rollouts, key=lambda row: row["step"]):
            batch = list(rows)
            completions = [_of_rollout(row) for row in batch]
            totals = [self.total(one) for one in completions]
            groups = [
                list(group) for _, group in groupby(zip(batch, totals, strict=True), key=lambda pair: pair[0]["group"])
            ]
            episode += len(batch)
            tokens += sum(row["prompt_tokens"] + row["completion_tokens"] for row in batch)
            ended = [one.tokens for one in completions if one.ended]
            found: dict[str, float] = {"step": step, "episode": episode, "num_tokens": tokens}
            found |= {"reward": statistics.fmean(totals), "reward_std": statistics.stdev(totals)}
            for name, _ in self.rewards:
                values = [self.score(name, one) for one in completions]
                found[f"rewards/{name}/mean"] = statistics.fmean(values)
                found[f"rewards/{name}/std"] = statistics.stdev(values)
            tied = [all(math.isclose(total, group[0][1], abs_tol=1e-6) for _, total in group) for group in groups]
            found["frac_reward_zero_std"] = found["frac_score_zero_std"] = statistics.fmean(tied)
            lengths = [one.tokens for one in completions]
            found |= {"completions/mean_length": statistics.fmean(lengths), "completions/min_length": min(lengths),
                      "completions/max_length": max(lengths), "tokens": sum(lengths)}  # fmt: skip
            found["completions/clipped_ratio"] = statistics.fmean(not one.ended for one in completions)
            found["completions/mean_terminated_length"] = statistics.fmean(ended) if ended else 0.0
            if self.thinks:
                found["thinking/mean_length"] = statistics.fmean(one.thought for one in completions)
                found["thinking/closed_ratio"] = statistics.fmean(one.closed for one in completions)
            for group in groups:
                total = sum(one for _, one in group)
                for row, one in group:
                    row["advantage_again"] = one - (total - one) / (len(group) - 1)
                    row["reward_again"] = one
            steps.append(found)
        return steps


def _read_rows(path: Path) -> list[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    if not path.is_file():
        return []
    with opened(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _of_sample(one: dict[str, Any]) -> Completion:
    text = f"{one['thinking']}</think>{one['answer']}" if one["closed"] else one["thinking"] or one["answer"]
    return Completion(
        one["prompt"], text, one["gold"], one["closed"], one["ended"], one["tokens"], one["thinking_tokens"]
    )


def _of_rollout(row: dict[str, Any]) -> Completion:
    return Completion(
        row["prompt"], row["completion"], row["columns"].get("answer"), row["closed"], not row["truncated"],
        len(row["completion_ids"]), row["thinking_tokens"],
    )  # fmt: skip
