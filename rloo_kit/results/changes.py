"""What training changed, prompt by prompt: counts over all held-out prompts, and samples for the report's browser."""

from dataclasses import dataclass
from typing import Any

from rloo_kit.results.evaluation import Evaluation, describe_sample, is_thinking, pair_samples
from rloo_kit.results.pages import show_text
from rloo_kit.results.texts import cut_parts, longest_that_fits, plain

RIGHT = 0.5  # share of a prompt's completions from which it counts as right
ROOM = 4_000_000  # characters of completions in a page
# Kinds of prompts, regressions first. With answers: right or wrong. Without: the change of the mean reward.
KINDS = (
    "broken",
    "still wrong",
    "fixed",
    "still right",
    "reward fell",
    "reward rose",
    "reward the same",
    "wrong",
    "right",
)


@dataclass
class Changes:
    """Attributes:
    counts: prompts of each kind, by measure ("greedy", "temperature 1").
    prompts: prompts with samples, for the page's script, regressions first.
    total: held-out prompts of the evaluations.
    """

    counts: dict[str, dict[str, int]]
    prompts: list[dict[str, Any]]
    total: int


def find_changes(before: Evaluation | None, after: Evaluation | None) -> Changes:
    """The changes between two evaluations of the same prompts; if there is only one, its results."""
    measured = [one for one in (before, after) if one is not None]
    if not measured:
        return Changes({}, [], 0)
    counts: dict[str, dict[str, int]] = {}
    kinds: list[str | None] | None = None
    if before is not None and after is not None and before.prompts_digest == after.prompts_digest:
        sampled = _kinds(before.per_prompt, after.per_prompt)
        counts["greedy"] = _count(_kinds(before.greedy_per_prompt, after.greedy_per_prompt))
        counts[f"temperature {after.temperature:g}"] = _count(sampled)
        if not sampled:
            kinds = _reward_kinds(before.reward_per_prompt, after.reward_per_prompt)
            counts["reward"] = _count(kinds)
        elif len(sampled) == after.num_prompts:
            kinds = list(sampled)
        else:  # only prompts with an answer have a share of right completions
            rest = iter(sampled)
            flags = [one["correct"] is not None for one in _samples(after)]
            kinds = [next(rest) if flag else None for flag in flags]
    return Changes(
        {name: one for name, one in counts.items() if one}, _prompts(before, after, kinds), measured[-1].num_prompts
    )


def _samples(evaluation: Evaluation) -> list[dict[str, Any]]:
    return [*evaluation.samples, *evaluation.more_samples]


def _kinds(before: list[float] | None, after: list[float] | None) -> list[str]:
    if before is None or after is None or len(before) != len(after):
        return []
    names = {
        (False, False): "still wrong",
        (False, True): "fixed",
        (True, False): "broken",
        (True, True): "still right",
    }
    return [names[old >= RIGHT, new >= RIGHT] for old, new in zip(before, after, strict=True)]


def _reward_kinds(before: list[float | None] | None, after: list[float | None] | None) -> list[str | None]:
    if before is None or after is None or len(before) != len(after):
        return []
    return [
        None if old is None or new is None else f"reward {'fell' if new < old else 'rose' if new > old else 'the same'}"
        for old, new in zip(before, after, strict=True)
    ]


def _count(kinds: list[Any]) -> dict[str, int]:
    return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}


def _prompts(
    before: Evaluation | None, after: Evaluation | None, kinds: list[str | None] | None
) -> list[dict[str, Any]]:
    sides = {name: one for name, one in (("before", before), ("after", after)) if one is not None}
    pairs = pair_samples(**{name: _All(_samples(one)) for name, one in sides.items()})  # type: ignore[arg-type]
    texts = [[sample[part] for part in ("thinking", "answer")] for pair in pairs for sample in pair.samples.values()]
    limit = longest_that_fits((sum(map(len, parts)) for parts in texts), ROOM)
    found = []
    for place, pair in enumerate(pairs):
        last = list(pair.samples.values())[-1]
        kind = kinds[place] if kinds and place < len(kinds) else {True: "right", False: "wrong"}.get(last["correct"])
        entry: dict[str, Any] = {"prompt": plain(pair.prompt), "kind": kind}
        if pair.gold is not None:
            entry["gold"] = show_text(pair.gold)
        for name, sample in pair.samples.items():
            thinking, answer = map(show_text, cut_parts([sample["thinking"], sample["answer"]], limit))
            entry[name] = {"answer": answer, "correct": sample["correct"], "notes": describe_sample(sample)}
            if is_thinking(sample):
                entry[name]["thinking"] = thinking
        found.append(entry)
    order = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(found, key=lambda entry: order.get(entry["kind"], len(order)))


@dataclass
class _All:
    """An evaluation in the form that `pair_samples` reads, with all its stored samples."""

    samples: list[dict[str, Any]]
