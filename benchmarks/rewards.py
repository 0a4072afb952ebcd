"""How many completion tokens a second each reward of `rewards/` reads; figures go to `results/rewards.json`.

    python benchmarks/rewards.py

One call has 64 completions of 4096 tokens, like a rollout of a thinking model: thinking, `</think>`, an answer, the end
token. Each reward is called for half a second, eleven times; the first repeat is discarded, and the median is reported
with the quartiles. Rewards run between two generations on one thread, so all must be far faster than sampling. Left
out: rewards that load a model (`rloo_kit.rewarding.models`), and the overhead of a worker process.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "rewards.json"
COMPLETIONS, TOKENS, CHARACTERS = 64, 4096, 4
THINK_END, END = 151668, 151645


def batch() -> dict[str, list[Any]]:
    """Completions of ordinary prose, four characters a token, each with thinking and a boxed answer."""
    sentence = "so the next digit is carried over and then added to the sum of two"
    words = sentence.split()
    completions, ids, answers = [], [], []
    for row in range(COMPLETIONS):
        answer = str(1000 + 37 * row)
        text = " ".join(words[(row + place) % len(words)] for place in range(TOKENS))
        thought = text[: CHARACTERS * (TOKENS - 32)]
        completions.append(f"{thought}</think>\n\nThe sum is \\boxed{{{answer}}}.")
        ids.append([(row * 31 + place * 7) % 50000 for place in range(TOKENS - 32)] + [THINK_END] + [16] * 30 + [END])
        answers.append(answer)
    return {"prompts": ["What is the sum?"] * COMPLETIONS, "completions": completions, "completion_ids": ids} | {
        "answer": answers
    }


def cases() -> dict[str, Callable[..., Any]]:
    """Every reward of the package; one that needs a limit gets that of the batch."""
    import rewards

    bound = {"soft_overlong_penalty": {"max_completion_length": TOKENS}}
    names = [name for name in rewards.__all__ if isinstance(getattr(rewards, name), rewards.Reward)]
    found = {}
    for name in names:
        reward = getattr(rewards, name)
        fields = type(reward).__dataclass_fields__
        found[name] = reward.with_(**{key: value for key, value in bound.get(name, {}).items() if key in fields})
    return found


def measure(reward: Callable[..., Any], columns: dict[str, list[Any]], repeats: int, seconds: float) -> list[float]:
    """Tokens a second of each repeat."""
    tokens = sum(map(len, columns["completion_ids"]))
    speeds = []
    for _ in range(repeats + 1):
        calls, started = 0, time.process_time()
        while time.process_time() - started < seconds or not calls:
            reward(**columns)
            calls += 1
        speeds.append(calls * tokens / (time.process_time() - started))
    return speeds[1:]


def main() -> int:
    """Measure every reward and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5, help="of processor time for one repeat")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    columns = batch()
    rows = []
    for name, reward in cases().items():
        speeds = measure(reward, columns, options.repeats, options.seconds)
        low, middle, high = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
        rows.append({"reward": name, "tokens_per_s": middle, "low": low, "high": high, "repeats": len(speeds)})
        print(f"{name}: {middle:,.0f} tokens/s ({low:,.0f} to {high:,.0f})", flush=True)
    shape = {"completions": COMPLETIONS, "tokens": TOKENS}
    reporting.write(reporting.header("benchmarks/rewards.py") | {"batch": shape, "rows": rows}, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
