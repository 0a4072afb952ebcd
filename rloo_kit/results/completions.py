"""Completions of one step of a run, split into thinking and answer, for a terminal and as JSON. No model or tokenizer.

The id of the closing tag, not the text, decides whether a completion closed its thinking. A text that also spells the
tag in ordinary tokens cannot be split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.results.evaluation import CLOSED_BY_THE_BUDGET
from rloo_kit.results.texts import cut_middle, find_end_id, plain, split_row
from rloo_kit.runs.find import find_run
from rloo_kit.runs.rollouts import read_rollouts, read_step
from rloo_kit.system.console import picture_controls, render_text

ORDERS = ("first", "best", "worst", "longest")
NEEDED: dict[str, Any] = {  # of a row, with the types of its values
    "step": int, "prompt": object, "completion": str | list, "completion_ids": list, "completion_tokens": int,
    "thinking_tokens": int | None, "closed": bool, "truncated": bool, "reward": int | float | None, "advantage": object,
    "rewards": object,
}  # fmt: skip
KEPT = ("closed", "forced", "truncated", "completion_tokens", "thinking_tokens", "reward", "advantage", "rewards")


@dataclass(frozen=True)
class PickedCompletions:
    """Some completions of one step, and shares and means over all of them.

    Attributes:
        folder: the run's. step: as in `metrics.jsonl`. shares: by name. completions: `describe_completion` of each.
    """

    folder: Path
    step: int
    shares: dict[str, Any]
    completions: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"folder": str(self.folder), "step": self.step} | self.shares | {"completions": self.completions}

    def __rich__(self) -> Group:
        shown = {name.replace("_", " "): value for name, value in self.shares.items() if value is not None}
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
        parts: list[Any] = [Text(f"{self.folder}, step {self.step}", style="bold"), Text(numbers)]
        for one in self.completions:
            parts += [Text(""), Text(plain(one["prompt"]), style="bold")]
            parts += [Text(picture_controls(one["thinking"]), style="dim")] if one["thinking"] else []
            answer = one["text"] if "text" in one else one["answer"]
            parts += [Text(picture_controls(answer))] if answer else []
            notes = ["not scored" if one["reward"] is None else f"reward {one['reward']:.3g}"]
            notes += [f"advantage {one['advantage']:+.2f}"] if isinstance(one["advantage"], float) else []
            notes.append(f"{one['completion_tokens']} tokens")
            notes += [CLOSED_BY_THE_BUDGET] * bool(one["forced"]) + ["truncated"] * one["truncated"]
            gold = one["columns"].get("answer") if isinstance(one["columns"], dict) else None
            notes += [] if gold is None else [f"right answer {gold}"]
            parts.append(Text(", ".join(notes), style="italic"))
        return Group(*parts)

    def __str__(self) -> str:
        return render_text(self)


def pick_completions(
    source: str | Path, step: int | None = None, num: int = 4, order: str = "first", max_chars: int = 1500
) -> PickedCompletions:
    """Completions of one step of a run.

    Args:
        source: the run's folder, or its YAML file. step: from 1; None: the last one. num: completions at most.
        order: one of ORDERS: as sampled, by reward, or by length. max_chars: limit of a text; the middle is cut.

    Raises:
        ConfigError: no such order. RunNotFoundError: no run, or no completions of that step.
    """
    if order not in ORDERS:
        raise ConfigError(f"--order {order!r} is unknown; use one of {', '.join(ORDERS)}")
    folder = Path(find_run(source).folder)
    rows = [row for row in read_step(folder, step) if is_whole(row)]
    if not rows:
        last = read_step(folder)
        if not last:
            raise RunNotFoundError(f"{folder} has no completions yet; try again after the first step")
        first = next((row["step"] for row in read_rollouts(folder) if "step" in row), None)
        asked = last[0]["step"] if step is None else step
        raise RunNotFoundError(f"{folder} has no rollout of step {asked}; it has steps {first} to {last[0]['step']}")
    end_id = next((found for row in rows if (found := find_end_id(row)) is not None), None)
    ordered = rows
    if order == "longest":
        ordered = sorted(rows, key=lambda row: -row["completion_tokens"])
    elif order != "first":
        scored = [row for row in rows if row["reward"] is not None]
        ordered = sorted(scored, key=lambda row: row["reward"], reverse=order == "best")
    picked = [describe_completion(row, end_id, max_chars) for row in ordered[:num]]
    return PickedCompletions(folder, rows[0]["step"], _shares(rows), picked)


def is_whole(row: dict[str, Any]) -> bool:
    """Whether a row has every field that is shown, so was not damaged by an editor or a full disk."""
    typed = all(name in row and isinstance(row[name], kind) for name, kind in NEEDED.items())
    return typed and (not row["closed"] or 0 <= (row["thinking_tokens"] or 0) < len(row["completion_ids"]))


def describe_completion(row: dict[str, Any], end_id: int | None, max_chars: int) -> dict[str, Any]:
    """A row in readable form: prompt, thinking, answer (`text` if they cannot be separated) and its figures.

    Args:
        end_id: the id of `</think>`, for rows of older runs. max_chars: length above which a text loses its middle.
    """
    segments, answer, is_split = split_row(row, end_id)
    thinking = "\n".join(text for text, _ in segments)
    parts: dict[str, Any] = {"thinking": None, "answer": None}
    if is_split:
        parts = {"thinking": cut_middle(thinking, max_chars) or None, "answer": cut_middle(answer, max_chars) or None}
    else:
        parts["text"] = cut_middle(answer.strip(), max_chars)
    row = {"forced": False} | row  # absent in runs older than thinking budgets
    start = {"prompt": cut_middle(str(row["prompt"]).strip(), max_chars)}
    return start | parts | {key: row[key] for key in KEPT} | {"columns": row.get("columns", {})}


def _shares(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    count = len(rows)
    scored = [row["reward"] for row in rows if row["reward"] is not None]
    thinking = [row["thinking_tokens"] for row in rows if row["closed"]]
    groups: dict[str, set[Any]] = {}
    for row in rows:
        groups.setdefault(str(row.get("group", row["prompt"])), set()).add(row["reward"])
    return {
        "num_completions": count,
        "closed_share": sum(row["closed"] and not row.get("forced") for row in rows) / count,
        "forced_share": sum(bool(row.get("forced")) for row in rows) / count,
        "truncated_share": sum(row["truncated"] for row in rows) / count,
        "groups_with_signal_share": sum(len(rewards - {None}) > 1 for rewards in groups.values()) / len(groups),
        "mean_tokens": sum(row["completion_tokens"] for row in rows) / count,
        "mean_thinking_tokens": sum(thinking) / len(thinking) if thinking else None,
        "mean_reward": sum(scored) / len(scored) if scored else None,
    }
