"""Writes sums.jsonl, the rows of tools_calculator.yaml: sums that a tiny model cannot do, each with a demonstration.

A demonstration is a list of messages: the call, its result and the answer; or only an estimate, which is no answer.
"""

import json
import random
from pathlib import Path
from typing import Any

from rloo_kit.tasks.families import Addition, draw_problems

CALLS = 0.4  # share of the demonstrations that call the tool; the others estimate


def main() -> None:
    rng = random.Random("worked-0")
    sums = Addition(1000, 99999, max_rows=50_000)  # 48213+7719=
    with open(Path(__file__).with_name("sums.jsonl"), "w", encoding="utf-8") as file:
        for a, b in draw_problems(sums, 12_000, 0, "sums"):
            row = {"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": demonstrate(a, b, rng)}
            file.write(json.dumps(row) + "\n")


def demonstrate(a: int, b: int, rng: random.Random) -> list[dict[str, Any]]:
    if rng.random() >= CALLS:
        return [_say(f"about {round(a + b, -3)}")]
    call = {"function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return [_say("", tool_calls=[call]), {"role": "tool", "content": str(a + b)}, _say(str(a + b))]


def _say(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": "", **keys}


if __name__ == "__main__":
    main()
