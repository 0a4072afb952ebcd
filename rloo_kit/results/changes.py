"""What training changed, prompt by prompt: counts over all held-out prompts, and samples for the report's browser."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rloo_kit.results.evaluation import (
    ACCURACIES,
    Evaluation,
    describe_sample,
    digest_prompt,
    is_thinking,
    number_repeats,
    pair_means,
    pair_samples,
    shared_measures,
)
from rloo_kit.results.pages import show_text
from rloo_kit.results.texts import cut_parts, longest_that_fits, plain

RIGHT = 0.5  # share of a prompt's completions from which it counts as right
ROOM = 4_000_000  # characters of completions in a page
# Kinds of prompts, regressions first: right or wrong; if the reward leads, the change of the prompt's mean reward.
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
    """The changes on the prompts that both evaluations measured; if there is only one, its results."""
    measured = [one for one in (before, after) if one is not None]
    if not measured:
        return Changes({}, [], 0)
    counts: dict[str, dict[str, int]] = {}
    kinds: dict[Any, str] = {}
    if before is not None and after is not None:
        by_reward = "reward" in shared_measures(before, after)[:1]
        leading, greedy = ("reward", "greedy reward") if by_reward else ("accuracy", "greedy")
        kinds = _kinds(before, after, leading)
        counts[greedy] = _count(_kinds(before, after, f"greedy_{leading}"))
        counts["reward" if by_reward else f"temperature {after.temperature:g}"] = _count(kinds)
    counts = {name: one for name, one in counts.items() if one}
    return Changes(counts, _prompts(before, after, kinds), max(one.num_prompts for one in measured))


def _samples(evaluation: Evaluation) -> list[dict[str, Any]]:
    return [*evaluation.samples, *evaluation.more_samples]


def _kinds(before: Evaluation, after: Evaluation, name: str) -> dict[tuple[str, int], str]:
    """The kind of each prompt that both measured, by its digest and the number of earlier ones."""
    both = pair_means(before, after, name)
    if before.prompt_digests is None or after.prompt_digests is None:  # by place then: the samples name the prompts
        judged = [one["prompt"] for one in _samples(after) if name not in ACCURACIES or one["correct"] is not None]
        names = dict(enumerate(number_repeats(map(digest_prompt, judged))))
        both = {names.get(key[1], key): pair for key, pair in both.items()}
    if name in ACCURACIES:
        kinds = "still wrong", "fixed", "broken", "still right"
        return {key: kinds[2 * (old >= RIGHT) + (new >= RIGHT)] for key, (old, new) in both.items()}
    moved = {key: "fell" if new < old else "rose" if new > old else "the same" for key, (old, new) in both.items()}
    return {key: f"reward {how}" for key, how in moved.items()}


def _count(kinds: dict[Any, str]) -> dict[str, int]:
    found = Counter(kinds.values())
    return {kind: found[kind] for kind in KINDS if kind in found}


def _prompts(
    before: Evaluation | None, after: Evaluation | None, kinds: dict[tuple[str, int], str]
) -> list[dict[str, Any]]:
    sides = {name: one for name, one in (("before", before), ("after", after)) if one is not None}
    pairs = pair_samples(**{name: _All(_samples(one)) for name, one in sides.items()})  # type: ignore[arg-type]
    texts = [[sample[part] for part in ("thinking", "answer")] for pair in pairs for sample in pair.samples.values()]
    limit = longest_that_fits((sum(map(len, parts)) for parts in texts), ROOM)
    found = []
    for key, pair in zip(number_repeats(digest_prompt(pair.prompt) for pair in pairs), pairs, strict=True):
        last = list(pair.samples.values())[-1]
        kind = kinds.get(key) or {True: "right", False: "wrong"}.get(last["correct"])
        entry: dict[str, Any] = {"prompt": plain(pair.prompt), "kind": kind}
        if pair.gold is not None:
            entry["gold"] = show_text(pair.gold)
        for name, sample in pair.samples.items():
            thinking, answer = map(show_text, cut_parts([sample["thinking"], sample["answer"]], limit))
            entry[name] = {"answer": answer, "correct": sample["correct"], "notes": describe_sample(sample)}
            if sample["correct"] is None and sample.get("reward") is not None:
                entry[name]["notes"] = f"reward {sample['reward']:.3g}, {entry[name]['notes']}"
            if is_thinking(sample):
                entry[name]["thinking"] = thinking
        found.append(entry)
    order = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(found, key=lambda entry: order.get(entry["kind"], len(order)))


@dataclass
class _All:
    """An evaluation in the form that `pair_samples` reads, with all its stored samples."""

    samples: list[dict[str, Any]]
