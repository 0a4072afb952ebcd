"""The completions that evaluations kept, prompt by prompt: what a report and a notebook both show."""

import re
from dataclasses import dataclass, field
from typing import Any

from rloo_kit.results.evaluation import Evaluation

# A model may write control characters; pages and terminals get the symbols that picture them.
_PICTURED = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
CLOSED_BY_THE_BUDGET = "closed by the budget"  # the model was still thinking when its budget was spent
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


@dataclass
class SamplePair:
    """One held-out prompt: as rendered, its right answer (None without one), and its samples by title."""

    prompt: str
    gold: Any = None
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)


def pair_samples(**evaluations: Evaluation | None) -> list[SamplePair]:
    """The samples of evaluations, those of the same prompt together: `pair_samples(before=before, after=after)`.

    A prompt that occurs twice is paired with its first and its second occurrence.
    """
    pairs: dict[tuple[str, int], SamplePair] = {}
    for title, evaluation in evaluations.items():
        seen: dict[str, int] = {}
        for sample in evaluation.samples if evaluation is not None else ():
            prompt = sample["prompt"]
            seen[prompt] = seen.get(prompt, 0) + 1
            pair = pairs.setdefault((prompt, seen[prompt]), SamplePair(prompt))
            pair.gold = sample.get("gold") if pair.gold is None else pair.gold
            pair.samples[title] = sample
    return list(pairs.values())


def describe_sample(sample: dict[str, Any]) -> str:
    """Length and how it ended, in words.

    >>> describe_sample({"tokens": 9, "thinking_tokens": 5, "ended": False})
    '9 tokens, 5 of them thinking, truncated'
    >>> describe_sample({"tokens": 9, "thinking_tokens": 5, "ended": True, "forced": True})
    '9 tokens, 5 of them thinking, closed by the budget'
    """
    notes = [f"{sample['tokens']} tokens"]
    if sample["thinking_tokens"] is not None:
        notes.append(f"{sample['thinking_tokens']} of them thinking")
    if sample.get("forced"):  # evaluations written before there were budgets have no such entry
        notes.append(CLOSED_BY_THE_BUDGET)
    if not sample["ended"]:
        notes.append("truncated")
    return ", ".join(notes)


def is_thinking(sample: dict[str, Any]) -> bool:
    """Whether the completion holds thinking, even an empty one: text before `</think>`, or that tag alone."""
    return bool(sample["thinking"] or sample["closed"])


def plain_prompt(prompt: str) -> str:
    """The readable text of a rendered ChatML prompt; any other prompt as it is.

    >>> plain_prompt("<|im_start|>user\\n12+30=<|im_end|>\\n<|im_start|>assistant\\n<think>\\n")
    '12+30='
    """
    messages = _MESSAGE.findall(prompt)
    if [role for role, _ in messages] == ["user"]:
        return str(messages[0][1]).strip()
    return "\n".join(f"{role}: {text.strip()}" for role, text in messages) or prompt.strip()


def picture_controls(text: str) -> str:
    """Text without control characters: each is shown by its symbol.

    >>> picture_controls("a\\x1b[31m")
    'a␛[31m'
    """
    return text.translate(_PICTURED)
