"""The task of tools_calculator.yaml: sums that a tiny model cannot do, and demonstrations of which few call the tool.

A demonstration is a list of messages: the call, its result and the answer; or only an estimate, which is no answer.
"""

import random
from typing import Any

from rloo_kit.data.tasks import Addition

CALLS = 0.4  # share of the demonstrations that call the tool; the others estimate


class Sums(Addition):
    """Two numbers of four or five digits, `48213+7719=`."""

    alphabet = f"{Addition.alphabet}about "

    def demonstrate(self, problem: tuple[int, int], rng: random.Random, thinking: bool) -> list[dict[str, Any]]:
        a, b = problem
        if rng.random() >= CALLS:
            return [_say(f"about {round(a + b, -3)}")]
        call = {"function": {"name": "add", "arguments": {"a": a, "b": b}}}
        return [_say("", tool_calls=[call]), {"role": "tool", "content": str(a + b)}, _say(str(a + b))]


def _say(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": "", **keys}


FAMILY = Sums(1000, 99999, max_rows=50_000)
