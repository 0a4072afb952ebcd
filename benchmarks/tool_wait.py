"""What it saves to continue the completions whose tools have answered, instead of waiting for all of them.

    python benchmarks/tool_wait.py [--out benchmarks/results/tool_wait.json]

One engine (native), one model (the embedded one), the same prompts, random numbers and tools' delays. Both sides sample
the same tokens, in turn in one process. Waiting for all is what a loop of rounds does: sample every turn, call the
tools, sample the next turns.
"""

import random
import time
from concurrent.futures import wait
from contextlib import nullcontext
from typing import Any
from unittest import mock

from reporting import ROOT, header, settle, target_of, write

PAIRS, PROMPTS, COPIES, TURNS = 5, 8, 8, 3
DELAYS = {  # seconds of a call, by row and turn
    "none": lambda rng: 0.0,
    "a search: 50 to 150 ms": lambda rng: rng.uniform(0.05, 0.15),
    "one call in ten takes 1 s": lambda rng: 1.0 if rng.random() < 0.1 else 0.01,
}


def main() -> None:
    settle()
    import torch

    import rloo_kit as kit
    from rloo_kit.rollout.choice import build_engine
    from rloo_kit.rollout.completions import find_end_ids
    from rloo_kit.rollout.engine import Call
    from rloo_kit.rollout.types import Limits
    from tests.episodes import Echo

    kit.setup_environment()
    run = kit.load_config(ROOT / "configs" / "arithmetic_thinking.yaml")
    policy = kit.load_policy(run)
    prompts = policy.tokenizer(list(kit.load_data(run, policy.tokenizer).train["prompt"][:PROMPTS]))["input_ids"]
    prompts = [ids for ids in prompts for _ in range(COPIES)]
    engine = build_engine(
        policy.model, "native", temperature=1.0, end_ids=find_end_ids(policy), pad_id=policy.tokenizer.pad_token_id
    )

    def come_back_together(call: Any, wait_s: float | None = 0.0) -> list[Any]:
        """`Call.come_back` of a loop of rounds."""
        if wait_s is not None or not call.away:
            return []
        wait(call.away)
        done = sorted(call.away.items(), key=lambda one: one[1].number)
        call.away.clear()
        return [state for reply, state in done if call._resume(state, reply)]

    def sample(delay: Any, waits: bool) -> tuple[float, list[list[int]]]:
        rng = random.Random(0)
        delays = [delay(rng) for _ in prompts]
        torch.manual_seed(0)
        together = mock.patch.object(Call, "come_back", come_back_together)
        with together if waits else nullcontext():
            started = time.perf_counter()
            found = engine.sample(prompts, Limits(160), dialogue=Echo(delays.__getitem__, TURNS - 1))
            return time.perf_counter() - started, found.completion_ids

    rows = []
    sample(DELAYS["none"], waits=False)  # the first call of a process is slower
    for name, delay in DELAYS.items():
        pairs = []
        for _ in range(PAIRS):
            (ready_s, ready), (all_s, together) = sample(delay, waits=False), sample(delay, waits=True)
            assert ready == together, "both sides have to sample the same tokens"
            pairs.append((ready_s, all_s))
        ratios = sorted(all_s / ready_s for ready_s, all_s in pairs)
        rows.append({
            "delay": name,
            "ready_s": round(sorted(pair[0] for pair in pairs)[PAIRS // 2], 3),
            "all_s": round(sorted(pair[1] for pair in pairs)[PAIRS // 2], 3),
            "ratio": round(ratios[PAIRS // 2], 3), "ratio_low": round(ratios[0], 3), "ratio_high": round(ratios[-1], 3),
        })  # fmt: skip
        print(rows[-1], flush=True)
    shape = {"completions": len(prompts), "turns": TURNS, "pairs": PAIRS}
    write({**header("benchmarks/tool_wait.py"), **shape, "rows": rows}, target_of("tool_wait.json"))


if __name__ == "__main__":
    main()
