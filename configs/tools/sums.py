"""The task of tools_calculator.yaml: sums that a tiny model cannot do, and demonstrations of which few call the tool.

A demonstration is a list of messages: the call, its result and the answer; or an answer that is only a guess.
"""

import random
from typing import Any

from rloo_kit.data.tasks import Addition

CALLS = 0.4  # share of the demonstrations that call the tool; the others guess
WRONG = 0.5  # of a guess's digits


class Sums(Addition):
    """Two numbers of four or five digits, `48213+7719=`."""

    def demonstrate(self, problem: tuple[int, int], rng: random.Random, thinking: bool) -> list[dict[str, Any]]:
        if rng.random() >= CALLS:
            return [_say(self.guess(problem, rng, WRONG))]
        a, b = problem
        call = {"function": {"name": "add", "arguments": {"a": a, "b": b}}}
        return [_say("", tool_calls=[call]), {"role": "tool", "content": str(a + b)}, _say(str(a + b))]


def _say(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": "", **keys}


FAMILY = Sums(1000, 99999, max_rows=50_000)
