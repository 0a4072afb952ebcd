"""Selects the rollouts for a report: whole groups of some steps, and the most informative of the others.

Makes one pass over the files, with two steps in memory at a time.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rloo_kit.data.answers import GYM_REWARD, REWARDS_WITH_ANSWERS
from rloo_kit.health.series import is_number
from rloo_kit.results.pages import show_text
from rloo_kit.results.texts import cut_parts, find_end_id, longest_that_fits, plain, split_row

WHOLE = 1000  # rollouts in whole groups
STEPS = 10  # minimum number of steps, if there are that many
EACH = 100  # rollouts from the other steps for each of TELLING
ROOM = 4_000_000  # characters of completions in a page
LONGEST = 40_000  # characters of a completion that are considered
TELLING: dict[str, Callable[[dict[str, Any]], float | None]] = {  # the greatest are kept; None: never
    "regressed": lambda one: one["was"] - one["reward"] if one["regressed"] else None,
    "truncated": lambda one: one["step"] if one["truncated"] else None,
    "worst": lambda one: -(one["advantage"] or 0.0),
    "best": lambda one: one["advantage"] or 0.0,
    "longest": lambda one: one["tokens"],
}


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
                "the last truncated ones, the lowest and highest advantages, and the longest. All are in the "
                "run's folder."
            )
        return text + (
            f" Completions are cut to {self.limit:,} characters, without their middle." if self.limit else ""
        )


def sample_rollouts(rows: Iterable[dict[str, Any]], last_step: int) -> RolloutSample:
    """Select from a run's rollouts, in the order of `runs.rollouts.read_rollouts`.

    Args:
        last_step: of the run; the shown steps are spread evenly from the first step to it.
    """
    found, due, each = RolloutSample(), None, 1
    kept: list[dict[str, Any]] = []
    top: dict[str, list[dict[str, Any]]] = {name: [] for name in TELLING}
    earned: dict[int, float] = {}  # each prompt's most recent mean reward
    for step, groups, is_last in _read_steps(rows):
        found.total += (size := sum(map(len, groups)))
        for group in groups:
            _compare(group, earned)
        if due is None:  # every step has about as many rollouts as the first
            ahead = max(last_step - step, 0)
            count = min(max(WHOLE // size, STEPS), ahead + 1)
            each = max(len(groups) * (WHOLE // count) // size, 1)
            due = sorted({step + round(place * ahead / max(count - 1, 1)) for place in range(count)})
        is_due = is_last or (bool(due) and due[0] <= step)  # a planned step without rollouts: the next that has some
        due = [one for one in due if one > step]
        shown = min(each, len(groups)) if is_due else 0
        whole = [place * len(groups) // shown for place in range(shown)]  # evenly spaced
        if is_due:
            found.steps.append(step)
        kept += [record | {"whole": True} for place in whole for record in groups[place]]
        others = [record for place, group in enumerate(groups) if place not in whole for record in group]
        for name, value in TELLING.items():
            able = [record for record in reversed(others) if value(record) is not None]  # of equals the newest
            top[name] = sorted(able + top[name], key=value, reverse=True)[:EACH]  # type: ignore[arg-type]
    by_number = {record["number"]: record for records in (*top.values(), kept) for record in records}
    _finish(found, [by_number[number] for number in sorted(by_number)])
    return found


def _read_steps(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, list[list[dict[str, Any]]], bool]]:
    """Each step with its completions grouped by prompt, and whether it is the last. Groups are numbered from 1; older
    rows have no group: adjacent rows with the same prompt form one."""
    typed = {"step": int, "completion_ids": list, "completion_tokens": int, "rewards": dict}
    whole = (  # not damaged by an editor or a full disk
        row for row in rows if "prompt" in row and all(isinstance(row.get(name), kind) for name, kind in typed.items())
    )
    end_id, number = None, itertools.count()
    before: tuple[int, list[list[dict[str, Any]]]] | None = None
    for step, batch in itertools.groupby(whole, key=lambda row: row["step"]):
        records = []
        for row in batch:
            end_id = find_end_id(row) if end_id is None else end_id
            records.append(_record(row, next(number), end_id))
        groups = [list(group) for _, group in itertools.groupby(records, key=lambda one: (one["group"], one["prompt"]))]
        for place, group in enumerate(groups, 1):
            for record in group:
                record["group"] = record["group"] if isinstance(record["group"], int) else place
        if before is not None:
            yield *before, False
        before = step, groups
    if before is not None:
        yield *before, True


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
