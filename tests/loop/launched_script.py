"""Scripts of a few lines, as a user writes them, one after the other in the same processes, started by torchrun for
`test_launch`; each process writes what it got.

    torchrun --nproc_per_node 2 launched_script.py '{"config": ..., "out": ..., "sharding": "fsdp2", "jobs": [...]}'

`sharding` shares the weights out, which accelerate does on accelerators only: `parallel_step` says what is replaced for
it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rloo_kit as kit
from rloo_kit.collective import end_processes
from tests.loop.parallel_step import shard_on_the_cpu


def by_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def falling(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """`by_ids` in training; in evaluations, which see the run at its end, 1, 2 and from then on less than 0."""
    if trainer_state.global_step < 6:
        return by_ids(completion_ids)
    falling.calls = getattr(falling, "calls", 0) + 1  # type: ignore[attr-defined]
    return [falling.calls * (1.0 if falling.calls < 3 else -1.0)] * len(completion_ids)  # type: ignore[attr-defined]


def train(settings: dict[str, Any]) -> dict[str, Any]:
    run = kit.load_config(settings["config"], *settings["overrides"])
    policy = kit.load_policy(run)
    data = kit.load_data(run, policy.tokenizer)
    before = kit.evaluate(run, policy, data.test)
    reward = falling if settings.get("falls") else by_ids
    result = kit.train(run, policy, data, [reward], resume=settings.get("resume", False))
    after = kit.evaluate(run, policy, data.test)
    return {
        "before": before.to_dict(), "after": after.to_dict(), "steps": result.steps, "metrics": result.metrics,
        "seconds": result.seconds, "stopped": result.stopped, "sharded": policy.sharding is not None,
        "adapter_step": result.adapter_step, "in_4bit": " in 4-bit" in policy.describe(),
    }  # fmt: skip


def fail(settings: dict[str, Any]) -> dict[str, Any]:
    """The second process runs out of memory in the second step; the first one never hears of it."""
    from rloo_kit.training.live import ProgressLine

    def on_step_end(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 2 and os.environ["RANK"] == "1":
            raise MemoryError("the second GPU is full")

    ProgressLine.on_step_end = on_step_end
    return train(settings)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Pass rates, with completions that are right for every second prompt; what this process was asked for."""
    from rloo_kit.completion import Completion
    from rloo_kit.evals import difficulty

    asked: list[str] = []

    def answer(policy: Any, rows: list[Any], limits: Any, num_samples: int = 1, **_: Any) -> list[Completion]:
        prompts = [row["prompt"] for row in rows]
        asked.extend(prompts)
        texts = ["1" if int(prompt.split()[-1]) % 2 else "0" for prompt in prompts]
        ids = [policy.tokenizer(f"</think>{text}<|im_end|>")["input_ids"] for text in texts]
        return [
            Completion(ids[number], f"</think>{text}", ended=True)
            for number, text in enumerate(texts)
            for _ in range(num_samples)
        ]

    difficulty.generate_completions = answer
    run = kit.load_config(settings["config"], *settings["overrides"])
    policy = kit.load_policy(run)
    prompts = {"prompt": [f"add {number}" for number in range(7)]}
    rates = difficulty.measure_pass_rates(run, policy, prompts, ["1"] * 7, 2)
    return {"asked": asked, "rates": rates}


def main(settings: dict[str, Any]) -> None:
    kit.setup_environment()
    if settings.get("sharding"):
        shard_on_the_cpu()
    jobs = {"train": train, "fail": fail, "measure": measure}
    found = [jobs[job.get("do", "train")](settings | job) for job in settings["jobs"]]
    Path(f"{settings['out']}.{os.environ.get('RANK', 0)}").write_text(json.dumps(found, default=str))
    end_processes()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
