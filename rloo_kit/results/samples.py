"""Completions for people: split into thinking and answer, of one step for a terminal, selected for the report.

The id of the closing tag, not the text, decides whether a completion closed its thinking. No model or tokenizer.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from rloo_kit.data.answers import GYM_REWARD, REWARDS_WITH_ANSWERS
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.results.evaluation import CLOSED_BY_THE_BUDGET
from rloo_kit.results.pages import show_text
from rloo_kit.runs.files import is_number
from rloo_kit.runs.find import find_run
from rloo_kit.runs.rollouts import read_rollouts, read_step
from rloo_kit.system.console import picture_controls, plain_prompt, render_text
from rloo_kit.think_tags import THINK_END, THINK_START, opens_thinking

Segments = list[list[Any]]  # texts, each with whether the budget forced it


def plain(prompt: Any) -> str:
    """A prompt without chat markup, from a rendered text or from a list of messages in TRL's format."""
    if isinstance(prompt, list):
        turns = (f"{turn.get('role')}: {turn.get('content')}" for turn in prompt if isinstance(turn, dict))
        return show_text("\n".join(turns))
    return show_text(plain_prompt(str(prompt)))


def split_completion(row: Mapping[str, Any]) -> tuple[Segments, str]:
    """The thinking in segments, and the answer, of a rollout's row."""
    text, start, span = row["completion"], row.get("answer_start"), row.get("forced_chars")
    text = text if isinstance(text, str) else str(text[-1]["content"])  # TRL stores a message if the prompt is one
    if start is None:
        opened = opens_thinking(str(row["prompt"])) or text.lstrip().startswith(THINK_START)
        return ([[_bare(text), False]], "") if opened else ([], text.strip())
    thinking, answer = text[:start].removesuffix(THINK_END), text[start:].strip()
    if span is None:
        return [[_bare(thinking), False]], answer
    first, last = (min(max(end, 0), start) for end in span)
    parts = [[_bare(text[:first]), False], [text[first:last].strip(), True], [text[last:start].strip(), False]]
    return [part for part in parts if part[0]], answer


def describe_call(call: Mapping[str, Any]) -> str:
    """A call as code.

    >>> describe_call({"function": {"name": "add", "arguments": {"a": 1, "unit": "m"}}})
    'add(a=1, unit="m")'
    """
    called = call["function"]
    values = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in called["arguments"].items())
    return f"{called['name']}({', '.join(values)})"


def list_steps(turns: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What precedes the last turn of an episode, from its messages: texts with their kind, "thinking", "text", "call",
    "result" or "reply" (of an environment). Empty without messages."""
    steps = []
    for message in turns[:-1]:
        content = str(message.get("content") or "").strip()
        if message.get("role") == "assistant":
            steps += [("thinking", str(message.get("reasoning_content") or "").strip()), ("text", content)]
            steps += [("call", describe_call(call)) for call in message.get("tool_calls") or ()]
        else:
            steps.append(("result" if message.get("role") == "tool" else "reply", content or "(empty)"))
    return [step for step in steps if step[1]]


def longest_that_fits(lengths: Iterable[int], room: int) -> int:
    """The largest common length limit under which all texts fit into `room` characters.

    >>> longest_that_fits([10, 20, 300], room=90), longest_that_fits([10, 20], room=90)
    (60, 90)
    """
    rest, ordered = room, sorted(lengths)
    for place, length in enumerate(ordered):
        if length * (len(ordered) - place) > rest:
            return rest // (len(ordered) - place)
        rest -= length
    return room


def cut_middle(text: str, limit: int) -> str:
    """A long text without its middle: at most `limit` characters, plus a note in place of the rest.

    >>> cut_middle("abcdefgh", 4)
    'ab\\n[... 4 characters left out ...]\\ngh'
    """
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]}\n[... {len(text) - limit:,} characters left out ...]\n{text[len(text) - tail :]}"


def cut_parts(parts: Sequence[str], limit: int) -> list[str]:
    """Several texts of one completion, cut to `limit` characters in all; the last one, the answer, is cut last."""
    kept: list[str] = []
    for part in reversed(parts):
        kept.append(cut_middle(part, limit) if limit > 0 else ("[...]" if part else ""))
        limit -= len(part)
    return kept[::-1]


def _bare(thinking: str) -> str:
    return thinking.strip().removeprefix(THINK_START).strip()


ORDERS = ("first", "best", "worst", "longest")
NEEDED: dict[str, Any] = {  # of a row, with the types of its values
    "step": int, "group": int, "prompt": object, "completion": str | list, "completion_tokens": int,
    "thinking_tokens": int | None, "closed": bool, "forced": bool, "truncated": bool,
    "reward": int | float | None, "advantage": int | float | None, "rewards": dict,
}  # fmt: skip
OF_TOOLS = ("tool_calls", "tool_failures", "cut_by")  # only in runs with tools
KEPT = ("closed", "forced", "truncated", "completion_tokens", "thinking_tokens", "reward", "advantage", "rewards")


@dataclass(frozen=True)
class PickedCompletions:
    """Some completions of one step (`describe_completion` of each), and shares and means over all of them, by name."""

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
        for completion in self.completions:
            parts += [Text(""), Text(plain(completion["prompt"]), style="bold")]
            texts = [*completion["steps"], ("thinking", completion["thinking"]), ("text", completion["answer"])]
            for kind, text in ((kind, text) for kind, text in texts if text):
                text = text if kind in ("thinking", "text") else f"{kind} {text}"
                parts.append(Text(picture_controls(text), style="dim" if kind == "thinking" else ""))
            notes = ["not scored" if completion["reward"] is None else f"reward {completion['reward']:.3g}"]
            notes += [f"advantage {completion['advantage']:+.2f}"] if completion["advantage"] is not None else []
            notes.append(f"{completion['completion_tokens']} tokens")
            notes += [CLOSED_BY_THE_BUDGET] * bool(completion["forced"]) + ["truncated"] * completion["truncated"]
            gold = completion["columns"].get("answer")
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
    ordered = rows
    if order == "longest":
        ordered = sorted(rows, key=lambda row: -row["completion_tokens"])
    elif order != "first":
        scored = [row for row in rows if row["reward"] is not None]
        ordered = sorted(scored, key=lambda row: row["reward"], reverse=order == "best")
    picked = [describe_completion(row, max_chars) for row in ordered[:num]]
    return PickedCompletions(folder, rows[0]["step"], _shares(rows), picked)


def is_whole(row: dict[str, Any]) -> bool:
    """Whether a row has every field that is shown, so was not damaged by an editor or a full disk."""
    typed = all(name in row and isinstance(row[name], kind) for name, kind in NEEDED.items())
    return typed and not (row["closed"] and row["thinking_tokens"] is None)


def describe_completion(row: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """A row as prompt, steps, thinking, answer and its figures; a text of more than `max_chars` loses its middle."""
    segments, answer = split_completion(row)
    thinking = "\n".join(text for text, _ in segments)
    parts = {"thinking": cut_middle(thinking, max_chars) or None, "answer": cut_middle(answer, max_chars) or None}
    steps = [(kind, cut_middle(text, max_chars)) for kind, text in list_steps(row.get("turns") or ())]
    start = {"prompt": cut_middle(str(row["prompt"]).strip(), max_chars), "steps": steps}
    kept = {key: row[key] for key in (*KEPT, *OF_TOOLS) if key in row}
    return start | parts | kept | {"columns": row.get("columns", {})}


def _shares(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    groups: defaultdict[int, set[Any]] = defaultdict(set)
    for row in rows:
        groups[row["group"]].add(row["reward"])

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return {
        "num_completions": len(rows),
        "closed_share": mean(row["closed"] and not row["forced"] for row in rows),
        "forced_share": mean(row["forced"] for row in rows),
        "truncated_share": mean(row["truncated"] for row in rows),
        "groups_with_signal_share": mean(len(rewards - {None}) > 1 for rewards in groups.values()),
        "mean_tokens": mean(row["completion_tokens"] for row in rows),
        "mean_thinking_tokens": mean(row["thinking_tokens"] for row in rows if row["closed"]),
        "mean_reward": mean(row["reward"] for row in rows),
    }


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
    """The rows for the page's script, in run order, the prompts that they refer to by index, the names of the rewards,
    the run's number of rollouts, the length to which the longest were cut (None: none), the steps with whole groups."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)
    total: int = 0
    limit: int | None = None
    steps: list[int] = field(default_factory=list)

    def describe(self) -> str:
        """The selection rule in one or two sentences."""
        text = f"All {self.total:,} rollouts."
        if len(self.rows) < self.total:
            text = (
                f"{len(self.rows):,} of {self.total:,} rollouts: whole groups from {len(self.steps)} steps (the first, "
                f"the last, evenly spaced ones between), and from the rest up to {EACH} each of the worst regressions, "
                "the last truncated ones, the lowest and highest advantages, and the longest. All are in the "
                "run's folder."
            )
        cut = f" Completions are cut to {self.limit:,} characters, without their middle." if self.limit else ""
        return text + cut


def sample_rollouts(rows: Iterable[dict[str, Any]], last_step: int) -> RolloutSample:
    """Select from a run's rollouts, in the order of `read_rollouts`; the shown steps are spread evenly up to the run's
    last one."""
    found, due, each = RolloutSample(), None, 1
    kept: list[dict[str, Any]] = []
    top: dict[str, list[dict[str, Any]]] = {name: [] for name in TELLING}
    earned: dict[int, float] = {}  # each prompt's most recent mean reward
    for step, groups, is_last in _read_steps(rows):
        found.total += (size := sum(map(len, groups)))
        for group in groups:  # mark completions below the mean of their prompt's last group, if this one's mean fell
            scored = [record["reward"] for record in group if record["reward"] is not None]
            key, mean = hash(group[0]["prompt"]), sum(scored) / len(scored) if scored else 0.0
            for record in group if scored and mean < earned.get(key, mean) else ():
                record["was"] = earned[key]
                record["regressed"] = record["reward"] is not None and record["reward"] < earned[key]
            earned |= {key: mean} if scored else {}
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
    """Each step with its completions grouped by prompt, and whether it is the last."""
    number = itertools.count()
    batches = itertools.groupby(filter(is_whole, rows), key=lambda row: row["step"])
    steps = ((step, [_record(row, next(number)) for row in batch]) for step, batch in batches)
    for (step, records), (_, following) in itertools.pairwise(itertools.chain(steps, [(0, [])])):
        groups = itertools.groupby(records, key=lambda record: record["group"])
        yield step, [list(group) for _, group in groups], not following


def _record(row: dict[str, Any], number: int) -> dict[str, Any]:
    """The fields of a row that the page needs, without its ids."""
    segments, answer = split_completion(row)
    found = list_steps(row.get("turns") or ())
    texts = [*(text for _, text in found), *(text for text, _ in segments), answer]
    rewards = {name: value for name, value in row["rewards"].items() if is_number(value)}
    judged = next((rewards[name] for name in (GYM_REWARD, *REWARDS_WITH_ANSWERS) if name in rewards), None)
    return {
        "number": number, "step": row["step"], "group": row["group"], "prompt": plain(row["prompt"]),
        "texts": cut_parts(texts, LONGEST), "kinds": [kind for kind, _ in found],
        "flags": [forced for _, forced in segments], "tokens": row["completion_tokens"],
        "calls": row.get("tool_calls"), "failed": bool(row.get("tool_failures")),
        "thinking_tokens": row["thinking_tokens"] if row["closed"] else None, "truncated": row["truncated"],
        "forced": row["forced"], "wrong": judged is not None and judged < 1, "reward": row["reward"],
        "advantage": row["advantage"], "rewards": rewards,
        "gold": row.get("columns", {}).get("answer"), "was": None, "regressed": False,
    }  # fmt: skip


def _finish(found: RolloutSample, records: list[dict[str, Any]]) -> None:
    """Cut the texts to fit the page, and store prompts and reward names once."""
    found.rewards = list(dict.fromkeys(name for record in records for name in record["rewards"]))
    places: dict[str, int] = {}
    lengths = [sum(map(len, one["texts"])) for one in records]
    limit = longest_that_fits(lengths, ROOM)
    found.limit = limit if any(length > limit for length in lengths) else None
    for record in records:
        *parts, answer = map(show_text, cut_parts(record["texts"], limit))
        kinds, flags = record["kinds"], record["flags"]
        marks = [name for name in ("wrong", "regressed", "truncated", "forced", "failed", "whole") if record.get(name)]
        row: dict[str, Any] = {
            "step": record["step"], "group": record["group"],
            "prompt": places.setdefault(record["prompt"], len(places)),
            "thinking": [[text, forced] for text, forced in zip(parts[len(kinds) :], flags, strict=True)],
            "answer": answer, "tokens": record["tokens"], "reward": _round(record["reward"]),
            "advantage": _round(record["advantage"]), "marks": marks,
            "rewards": [_round(record["rewards"].get(name)) for name in found.rewards],
        }  # fmt: skip
        row |= {"steps": list(zip(kinds, parts, strict=False))} if kinds else {}
        for name in ("thinking_tokens", "was", "gold", "calls"):
            if record[name] is not None:
                row[name] = _round(record[name]) if name == "was" else show_text(record[name])
        found.rows.append(row)
    found.prompts = list(places)
    found.rewards = [show_text(name) for name in found.rewards]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
