#!/usr/bin/env python3
"""Completions of a run with thinking and answer apart, and the shares that closed their thinking and were cut off.

FOLDER is a run's folder, outputs/NAME. Reads the completions of one step, from rollouts.jsonl or an older part of it,
rollouts-STEP.jsonl.gz, however many there are: the id of the closing tag, not the text, decides whether a
completion closed its thinking; `forced` says that it was closed by the budget, because the model had not. Prints one
JSON object on stdout. A text that spells the tag in ordinary tokens besides cannot be split by it: then `thinking` and
`answer` are null and `text` has it whole.

Exit codes: 0 done;
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from _common import CODES, NOTHING_YET, fail, open_run, show

NEEDED: dict[str, Any] = {  # of a row, with the types of its values
    "step": int, "prompt": object, "completion": str, "completion_ids": list, "completion_tokens": int,
    "thinking_tokens": int | None, "closed": bool, "truncated": bool, "reward": int | float | None, "advantage": object,
    "rewards": object,
}  # fmt: skip

OPENING, TAG = "<think>", "</think>"
ORDERS = ("first", "best", "worst", "longest")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__ + CODES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run's folder, outputs/NAME")
    parser.add_argument("--step", type=int, help="step whose rollout is shown (default: the last one)")
    parser.add_argument("--num", type=int, default=4, help="completions shown (default 4)")
    parser.add_argument("--order", choices=ORDERS, default="first", help="which ones: by reward or by length")
    parser.add_argument(
        "--max-chars", type=int, default=1500, help="characters of a text (default 1500; the middle goes)"
    )
    options = parser.parse_args(arguments)
    if options.num < 0 or options.max_chars < 10:
        parser.error("--num has to be 0 or more, --max-chars 10 or more")
    folder = open_run(options.folder).folder
    from rloo_kit.runs.rollouts import read_rollouts, read_step

    rows = [row for row in read_step(folder, options.step) if is_whole(row)]
    if not rows:
        last = read_step(folder)
        if not last:
            fail(NOTHING_YET, f"{options.folder} has no completions yet: ask again after the first step")
        first = next((row["step"] for row in read_rollouts(folder) if "step" in row), None)
        asked = last[0]["step"] if options.step is None else options.step
        fail(NOTHING_YET, f"no rollout has step {asked}; those that are kept go from {first} to {last[0]['step']}")
    end_id = find_tag_id(rows)
    shown = sort(rows, options.order)[: options.num]
    show(
        {"folder": str(options.folder), "step": rows[0]["step"], "think_end_id": end_id}
        | describe(rows)
        | {"completions": [describe_one(row, end_id, options.max_chars) for row in shown]}
    )
    return 0


def is_whole(row: dict[str, Any]) -> bool:
    """Whether a row has what is shown of it; one that an editor or a full disk damaged has not."""
    typed = all(name in row and isinstance(row[name], kind) for name, kind in NEEDED.items())
    return typed and (not row["closed"] or 0 <= (row["thinking_tokens"] or 0) < len(row["completion_ids"]))


def find_tag_id(rows: list[dict[str, Any]]) -> int | None:
    """The id of the closing tag: what stands behind the thinking of a completion that closed it; None if none did."""
    closed = next((row for row in rows if row["closed"]), None)
    return closed["completion_ids"][closed["thinking_tokens"] or 0] if closed else None


def describe(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares and means over a rollout."""
    count = len(rows)
    scored = [row["reward"] for row in rows if row["reward"] is not None]
    thinking = [row["thinking_tokens"] for row in rows if row["closed"]]
    groups: dict[str, set[Any]] = {}
    for row in rows:
        groups.setdefault(str(row["prompt"]), set()).add(row["reward"])
    return {
        "num_completions": count,
        "closed_share": sum(row["closed"] for row in rows) / count,
        "forced_share": sum(bool(row.get("forced")) for row in rows) / count,
        "truncated_share": sum(row["truncated"] for row in rows) / count,
        "tied_groups_share": sum(len(rewards) == 1 for rewards in groups.values()) / len(groups),
        "mean_tokens": sum(row["completion_tokens"] for row in rows) / count,
        "mean_thinking_tokens": sum(thinking) / len(thinking) if thinking else None,
        "mean_reward": sum(scored) / len(scored) if scored else None,
    }


def sort(rows: list[dict[str, Any]], order: str) -> list[dict[str, Any]]:
    if order == "longest":
        return sorted(rows, key=lambda row: -row["completion_tokens"])
    if order == "first":
        return rows
    scored = [row for row in rows if row["reward"] is not None]
    return sorted(scored, key=lambda row: row["reward"], reverse=order == "best")


def describe_one(row: dict[str, Any], end_id: int | None, limit: int) -> dict[str, Any]:
    text, closings = row["completion"], row["completion_ids"].count(end_id) if end_id is not None else 0
    parts: dict[str, Any] = {"thinking": None, "answer": None}
    if text.count(TAG) != closings:
        parts["text"] = shorten(text, limit)
    elif row["closed"]:
        thinking, _, answer = text.rpartition(TAG)  # at the last one, as answer_reward does
        parts = {"thinking": shorten(thinking, limit), "answer": shorten(answer, limit)}
    else:
        opened = str(row["prompt"]).rstrip().endswith(OPENING) or text.lstrip().startswith(OPENING)
        parts["thinking" if opened else "answer"] = shorten(text, limit)
    kept = ("closed", "forced", "truncated", "completion_tokens", "thinking_tokens", "reward", "advantage", "rewards")
    start = {"prompt": shorten(str(row["prompt"]), limit)}
    row = {"forced": False} | row  # runs of before there were budgets do not say
    return start | parts | {key: row[key] for key in kept} | {"columns": row.get("columns", {})}


def shorten(text: str, limit: int) -> str:
    text = text.strip()
    return text if len(text) <= limit else f"{text[: limit // 2]} [...] {text[-limit // 2 :]}"


if __name__ == "__main__":
    sys.exit(main())
