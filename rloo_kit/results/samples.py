"""Completions for people: split into thinking and answer, of one step for a terminal, selected for the report.

The id of the closing tag, not the text, decides whether a completion closed its thinking. No model or tokenizer.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from rloo_kit.data.answers import GYM_REWARD, REWARDS_WITH_ANSWERS
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.results.evaluation import CLOSED_BY_THE_BUDGET
from rloo_kit.results.pages import show_text
from rloo_kit.runs.files import is_number, read_rows
from rloo_kit.runs.find import find_run
from rloo_kit.runs.rollouts import read_step, step_files
from rloo_kit.seams import FRAMED_IMAGE, IMAGE_REFERENCE
from rloo_kit.system.console import picture_controls, plain_prompt, render_text
from rloo_kit.think_tags import THINK_END, THINK_START, opens_thinking

ROOM = 4_000_000  # characters of completions in a page
PICTURES = "images.jsonl"  # in a run's folder: small pictures of the images in its prompts, by digest
MOST_PICTURES, PICTURE_ROOM = 100, 1_000_000  # in a page, with characters in all
REFERENCE = re.compile(IMAGE_REFERENCE)
FRAMED = re.compile(FRAMED_IMAGE)
Segments = list[list[Any]]  # texts, each with whether the budget forced it


def bare_prompt(prompt: Any) -> str:
    """A prompt without chat markup, from a rendered text or from a list of messages in TRL's format; its images are
    references."""
    if isinstance(prompt, list):
        turns = (f"{turn.get('role')}: {join_parts(turn.get('content'))}" for turn in prompt if isinstance(turn, dict))
        text = "\n".join(turns)
    else:
        text = plain_prompt(str(prompt))
    return show_text(FRAMED.sub(r"\1", text))


def plain(prompt: Any) -> str:
    """`bare_prompt` in which an image is a short mark.

    >>> plain("<|vision_start|><|image:ae0d9f86998aa4|><|vision_end|>1+1=")
    '[image ae0d9f]1+1='
    """
    return REFERENCE.sub(lambda found: f"[image {found[1][:6]}]", bare_prompt(prompt))


def join_parts(content: Any) -> str:
    """The text of a message, whose content may be parts: texts and references to images."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text", part.get("image", ""))) for part in parts)


def read_pictures(folder: Path, *prompts: Iterable[str]) -> dict[str, str]:
    """Pictures of the images in lists of prompts as data URIs, by digest, of each list's first prompts first: as many
    as a page holds."""
    in_turn = "".join(text or "" for pair in itertools.zip_longest(*prompts) for text in pair)
    known = {row["image"]: row["uri"] for row in read_rows(folder / PICTURES)} if REFERENCE.search(in_turn) else {}
    found, room = dict[str, str](), PICTURE_ROOM
    for digest in dict.fromkeys(REFERENCE.findall(in_turn)):
        room -= len(known.get(digest, ""))
        if digest in known and len(found) < MOST_PICTURES and room >= 0:
            found[digest] = known[digest]
    return found


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


def fit_page(completions: Sequence[Sequence[str]]) -> tuple[list[list[str]], int | None]:
    """The texts of completions, printable, and cut so that all fit into a page; to how many characters each was cut,
    None if none was."""
    lengths = [sum(map(len, parts)) for parts in completions]
    limit = longest_that_fits(lengths, ROOM)
    cut = [list(map(show_text, cut_parts(parts, limit))) for parts in completions]
    return cut, limit if any(length > limit for length in lengths) else None


def _bare(thinking: str) -> str:
    return thinking.strip().removeprefix(THINK_START).strip()


ORDERS = ("first", "best", "worst", "longest")
OF_TOOLS = ("tool_calls", "tool_failures", "cut_by")  # only in runs with tools
KEPT = ("closed", "forced", "truncated", "completion_tokens", "thinking_tokens", "reward", "advantage", "rewards")


@dataclass(frozen=True)
class PickedCompletions:
    """Some completions of one step (`describe_completion` of each)."""

    folder: Path
    step: int
    completions: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"folder": str(self.folder), "step": self.step, "completions": self.completions}

    def __rich__(self) -> Group:
        parts = [Text(f"{self.folder}, step {self.step}", style="bold")]
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
    rows, steps = read_step(folder, step), list(step_files(folder))
    if not steps:
        raise RunNotFoundError(f"{folder} has no completions yet; try again after the first step")
    if not rows:
        raise RunNotFoundError(f"{folder} has no rollout of step {step}; it has steps {steps[0]} to {steps[-1]}")
    ordered = rows
    if order == "longest":
        ordered = sorted(rows, key=lambda row: -row["completion_tokens"])
    elif order != "first":
        scored = [row for row in rows if row["reward"] is not None]
        ordered = sorted(scored, key=lambda row: row["reward"], reverse=order == "best")
    picked = [describe_completion(row, max_chars) for row in ordered[:num]]
    return PickedCompletions(folder, rows[0]["step"], picked)


def describe_completion(row: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """A row as prompt, steps, thinking, answer and its figures; a text of more than `max_chars` loses its middle."""
    segments, answer = split_completion(row)
    thinking = "\n".join(text for text, _ in segments)
    parts = {"thinking": cut_middle(thinking, max_chars) or None, "answer": cut_middle(answer, max_chars) or None}
    steps = [(kind, cut_middle(text, max_chars)) for kind, text in list_steps(row.get("turns") or ())]
    start = {"prompt": cut_middle(str(row["prompt"]).strip(), max_chars), "steps": steps}
    kept = {key: row[key] for key in (*KEPT, *OF_TOOLS) if key in row}
    return start | parts | kept | {"columns": row.get("columns", {})}


MOST_ROLLOUTS = 1000  # in a page
STEPS = 10  # minimum number of steps, if there are that many


@dataclass
class RolloutSample:
    """The rows for the page's script, in run order, the prompts that they refer to by index, the names of the rewards,
    the length to which the longest were cut (None: none), and which rollouts these are."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)
    limit: int | None = None
    rule: str = ""

    def describe(self) -> str:
        """The selection rule in one or two sentences."""
        cut = f" Completions are cut to {self.limit:,} characters, without their middle." if self.limit else ""
        return self.rule + cut


def sample_rollouts(folder: Path) -> RolloutSample:
    """A run's rollouts: all of a short run; else whole groups of evenly spaced steps, the first and the last among
    them."""
    found, steps = RolloutSample(), list(step_files(folder))
    if not steps:
        return found
    count = max(MOST_ROLLOUTS // max(len(read_step(folder, steps[0])), 1), STEPS)  # every step has about as many
    chosen = steps
    if len(steps) > count:
        chosen = [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]
    is_whole = chosen == steps
    for step in chosen:
        rows = read_step(folder, step)
        groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["group"])]
        shown = min(max(MOST_ROLLOUTS // len(chosen) * len(groups) // max(len(rows), 1), 1), len(groups))
        is_whole = is_whole and shown == len(groups)
        evenly = (groups[place * len(groups) // shown] for place in range(shown))
        found.rows += [_page_row(row) for group in evenly for row in group]
    found.rule = f"All {len(found.rows):,} rollouts."
    if not is_whole:
        found.rule = f"{len(found.rows):,} rollouts: whole groups from {len(chosen)} of {len(steps):,} steps."
        found.rule += " All are in the run's folder."
    _cut_texts(found)
    return found


def _page_row(row: dict[str, Any]) -> dict[str, Any]:
    """A rollout as the page's script reads it, with whole texts, the prompt and the rewards by name."""
    thinking, answer = split_completion(row)
    rewards = {name: _round(value) for name, value in row["rewards"].items() if is_number(value)}
    judged = next((rewards[name] for name in (GYM_REWARD, *REWARDS_WITH_ANSWERS) if name in rewards), None)
    marks = {"wrong": judged is not None and judged < 1, "truncated": row["truncated"], "forced": row["forced"]}
    marks["failed"] = bool(row.get("tool_failures"))
    found: dict[str, Any] = {name: row[name] for name in ("step", "group")}
    found |= {"prompt": bare_prompt(row["prompt"]), "steps": list_steps(row.get("turns") or ())}
    found |= {"thinking": thinking, "answer": answer, "tokens": row["completion_tokens"], "rewards": rewards}
    found |= {name: _round(row[name]) for name in ("reward", "advantage")}
    found["marks"] = [name for name, is_set in marks.items() if is_set]
    facts = {"thinking_tokens": row["thinking_tokens"] if row["closed"] else None, "calls": row.get("tool_calls")}
    facts["gold"] = row.get("columns", {}).get("answer")
    return found | {name: show_text(value) for name, value in facts.items() if value is not None}


def _cut_texts(found: RolloutSample) -> None:
    """Cut the texts to fit the page, and store prompts and reward names once."""
    names = list(dict.fromkeys(name for row in found.rows for name in row["rewards"]))
    places: dict[str, int] = {}
    whole = [
        [*(text for _, text in row["steps"]), *(text for text, _ in row["thinking"]), row["answer"]]
        for row in found.rows
    ]
    texts, found.limit = fit_page(whole)
    for row, (*shown, answer) in zip(found.rows, texts, strict=True):
        count = len(row["steps"])
        row["steps"] = [(kind, text) for (kind, _), text in zip(row["steps"], shown[:count], strict=True)]
        row["thinking"] = [(text, forced) for (_, forced), text in zip(row["thinking"], shown[count:], strict=True)]
        row["answer"], row["prompt"] = answer, places.setdefault(row["prompt"], len(places))
        row["rewards"] = [row["rewards"].get(name) for name in names]
    found.prompts, found.rewards = list(places), [show_text(name) for name in names]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
