"""Selects the rollouts for a report: whole groups of some steps, and the most informative of the others.

Makes one pass over the files, with one step in memory at a time.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rloo_kit.data.answers import GYM_REWARD, REWARDS_WITH_ANSWERS
from rloo_kit.health.series import is_number
from rloo_kit.results.pages import show_text
from rloo_kit.results.texts import cut_parts, find_end_id, longest_that_fits, plain, split_row

WHOLE = 1000  # rollouts in whole groups
STEPS = 10  # minimum number of steps, if there are that many
EACH = 100  # rollouts from the other steps for each of MARKS
ROOM = 4_000_000  # characters of completions in a page
LONGEST = 40_000  # characters of a completion that are considered
MARKS = ("regressed", "truncated", "worst", "best", "longest")


@dataclass
class RolloutSample:
    """Attributes:
    rows: for the page's script, in run order. prompts: texts that the rows refer to by index.
    rewards: names. total: rollouts of the run. limit: length to which the longest were cut; None if none were.
    steps: those with whole groups.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)
    total: int = 0
    limit: int | None = None
    steps: list[int] = field(default_factory=list)

    def describe(self) -> str:
        """The selection rule in one or two sentences."""
        if len(self.rows) == self.total:
            text = f"All {self.total:,} rollouts."
        else:
            text = (
                f"{len(self.rows):,} of {self.total:,} rollouts: whole groups from {len(self.steps)} steps (the first, "
                f"the last, evenly spaced ones between), and from the rest up to {EACH} each of the worst regressions, "
                "the last truncated ones, the lowest and highest advantages, and the longest. All are in "
                "rollouts.jsonl."
            )
        return text + (
            f" Completions are cut to {self.limit:,} characters, without their middle." if self.limit else ""
        )


def sample_rollouts(rows: Iterable[dict[str, Any]], last_step: int) -> RolloutSample:
    """Select from a run's rollouts, in the order of `runs.rollouts.read_rollouts`.

    Args:
        last_step: of the run; the shown steps are spread evenly from the first step to it.
    """
    found, heaps = RolloutSample(), {name: _Top(EACH) for name in MARKS}
    plan: _Plan | None = None
    kept: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []  # the previous step's, while it may be the last
    earned: dict[int, float] = {}  # each prompt's most recent mean reward
    end_id: int | None = None
    number = 0
    typed = {"step": int, "completion_ids": list, "completion_tokens": int, "rewards": dict}
    whole = (  # not damaged by an editor or a full disk
        row for row in rows if "prompt" in row and all(isinstance(row.get(name), kind) for name, kind in typed.items())
    )
    for step, batch in groupby(whole, key=lambda row: row["step"]):
        records = []
        for row in batch:
            end_id = find_end_id(row) if end_id is None else end_id
            records.append(_record(row, number, end_id))
            number += 1
        found.total += len(records)
        groups = _groups(records)
        for group in groups:
            _compare(group, earned)
        plan = plan or _Plan(step, last_step, records, len(groups))
        for record in rest:
            _offer(record, heaps)
        rest = []
        if plan.takes(step):
            shown = plan.pick(groups)
            found.steps.append(step)
            kept += [record for group in shown for record in group]
            taken = {record["number"] for group in shown for record in group}
            others = [record for record in records if record["number"] not in taken]
            for record in others:
                _offer(record, heaps)
        else:
            rest = records
    if rest and plan is not None:  # the run ended between two planned steps: show its last step
        shown = plan.pick(_groups(rest))
        taken = {record["number"] for group in shown for record in group}
        for record in rest:
            if record["number"] not in taken:
                _offer(record, heaps)
        found.steps.append(rest[0]["step"])
        kept += [record for group in shown for record in group]
    by_number = {record["number"]: record | {"whole": True} for record in kept}
    for name in MARKS:
        for record in heaps[name].items():
            by_number.setdefault(record["number"], record)
    _finish(found, [by_number[place] for place in sorted(by_number)])
    return found


class _Plan:
    """The steps to show, and the number of groups from each."""

    def __init__(self, first: int, last: int, records: list[dict[str, Any]], groups: int) -> None:
        size = max(len(records), 1)
        last = max(last, first)
        count = min(max(WHOLE // size, STEPS), last - first + 1)
        self.groups = max(groups * (WHOLE // count) // size, 1)
        self.due = sorted({first + round(place * (last - first) / max(count - 1, 1)) for place in range(count)})

    def takes(self, step: int) -> bool:
        """Whether to show a step; a planned one without rollouts is replaced by the next that has some."""
        is_due = bool(self.due) and self.due[0] <= step
        self.due = [one for one in self.due if one > step]
        return is_due

    def pick(self, groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """Groups of a step, evenly spaced."""
        count = min(self.groups, len(groups))
        return [groups[place * len(groups) // count] for place in range(count)]


class _Top:
    """The `most` records with the greatest keys."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._heap: list[tuple[float, int, dict[str, Any]]] = []

    def offer(self, key: float, record: dict[str, Any]) -> None:
        entry = (key, record["number"], record)
        if len(self._heap) < self.most:
            heapq.heappush(self._heap, entry)
        elif entry[:2] > self._heap[0][:2]:
            heapq.heapreplace(self._heap, entry)

    def items(self) -> Iterator[dict[str, Any]]:
        return (record for _, _, record in self._heap)


def _offer(record: dict[str, Any], heaps: dict[str, _Top]) -> None:
    advantage = record["advantage"] or 0.0
    if record["regressed"]:
        heaps["regressed"].offer(record["was"] - record["reward"], record)
    if record["truncated"]:
        heaps["truncated"].offer(record["step"], record)
    heaps["worst"].offer(-advantage, record)
    heaps["best"].offer(advantage, record)
    heaps["longest"].offer(record["tokens"], record)


def _record(row: dict[str, Any], number: int, end_id: int | None) -> dict[str, Any]:
    """The fields of a row that the page needs, without its ids."""
    segments, answer, is_split = split_row(row, end_id)
    *parts, answer = cut_parts([*(text for text, _ in segments), answer], LONGEST)
    thinking = [[text, forced] for text, (_, forced) in zip(parts, segments, strict=True)]
    rewards = {name: value for name, value in row["rewards"].items() if is_number(value)}
    judged = next((rewards[name] for name in (GYM_REWARD, *REWARDS_WITH_ANSWERS) if name in rewards), None)
    columns: dict[str, Any] = row["columns"] if isinstance(row.get("columns"), dict) else {}
    return {
        "number": number, "step": row["step"], "group": row.get("group"), "prompt": plain(row["prompt"]),
        "thinking": thinking, "answer": answer, "split": is_split, "tokens": row["completion_tokens"],
        "thinking_tokens": row.get("thinking_tokens") if row.get("closed") else None,
        "truncated": bool(row.get("truncated")), "forced": bool(row.get("forced")),
        "wrong": judged is not None and judged < 1,
        "reward": row["reward"] if is_number(row.get("reward")) else None,
        "advantage": row["advantage"] if is_number(row.get("advantage")) else None, "rewards": rewards,
        "gold": columns.get("answer"), "was": None, "regressed": False,
    }  # fmt: skip


def _groups(records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The completions grouped by prompt, numbered from 1. Older rows have no group: adjacent rows with the same prompt
    form one."""
    found = [list(group) for _, group in groupby(records, key=lambda one: (one["group"], one["prompt"]))]
    for place, group in enumerate(found, 1):
        for record in group:
            record["group"] = place if not isinstance(record["group"], int) else record["group"]
    return found


def _compare(group: list[dict[str, Any]], earned: dict[int, float]) -> None:
    """Mark completions that earned less than the mean of their prompt's previous group, if this group's mean fell."""
    scored = [record["reward"] for record in group if record["reward"] is not None]
    if not scored:
        return
    key, mean = hash(group[0]["prompt"]), sum(scored) / len(scored)
    before = earned.get(key)
    if before is not None and mean < before:
        for record in group:
            record["was"] = before
            record["regressed"] = record["reward"] is not None and record["reward"] < before
    earned[key] = mean


def _finish(found: RolloutSample, records: list[dict[str, Any]]) -> None:
    """Cut the texts to fit the page, and store prompts and reward names once."""
    found.rewards = list(dict.fromkeys(name for record in records for name in record["rewards"]))
    places: dict[str, int] = {}
    lengths = [sum(len(text) for text, _ in record["thinking"]) + len(record["answer"]) for record in records]
    limit = longest_that_fits(lengths, ROOM)
    found.limit = limit if any(length > limit for length in lengths) else None
    for record in records:
        *parts, answer = cut_parts([*(text for text, _ in record["thinking"]), record["answer"]], limit)
        flags = [forced for _, forced in record["thinking"]]
        marks = [name for name in ("wrong", "regressed", "truncated", "forced", "whole") if record.get(name)]
        row: dict[str, Any] = {
            "step": record["step"], "group": record["group"],
            "prompt": places.setdefault(record["prompt"], len(places)),
            "thinking": [[show_text(text), forced] for text, forced in zip(parts, flags, strict=True)],
            "answer": show_text(answer), "tokens": record["tokens"], "reward": _round(record["reward"]),
            "advantage": _round(record["advantage"]), "marks": marks,
            "rewards": [_round(record["rewards"].get(name)) for name in found.rewards],
        }  # fmt: skip
        for name in ("thinking_tokens", "was", "gold"):
            if record[name] is not None:
                row[name] = _round(record[name]) if name == "was" else show_text(record[name])
        if not record["split"]:
            row["marks"].append("unsplit")
        found.rows.append(row)
    found.prompts = list(places)
    found.rewards = [show_text(name) for name in found.rewards]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
