"""The embedded model, cold-started and trained through the GPU's backend, learns as it does on the CPU."""

import json
from pathlib import Path
from typing import Any

import cells

from tests.on_gpu.conftest import ROOT

RECORDED = ROOT / "benchmarks" / "results" / "demo_learning.json"  # the same command on a CPU
RISE, GREEDY_FALL, APART = 0.30, 0.03, 0.1  # the demo's bar; and how far from the CPU's accuracy it may end
SMALL = (
    "rloo.max_steps=1", "data.num_prompts=60", "data.test_size=4", "rloo.per_device_train_batch_size=4",
    "rloo.num_generations=2", "rloo.max_completion_length=8", "eval.max_completion_length=8", "model.dtype=float32",
)  # fmt: skip


def test_it_learns_as_on_the_cpu(gpu: Any, memory: Any, load: Any, tmp_path: Path) -> None:
    """Unsloth's kernels refuse some sizes; the embedded model's were chosen so that `make demo` runs through them."""
    import rloo_kit

    overrides = [f"run.output_dir={tmp_path}"]
    if cells.rehearsing():
        from rloo_kit.embedded.model import build

        overrides += [*SMALL, f"model.name={build('thinking', steps=2)}"]
    run = rloo_kit.load_config(ROOT / "configs" / "arithmetic_thinking.yaml", *overrides)
    with memory.measure() as loading:
        policy = load(run)
    cells.report(backend=gpu.backend, load=loading)  # each as soon as it is known: the next part may not end in time
    data = rloo_kit.load_data(run, policy.tokenizer)
    with memory.measure() as measuring:
        before = rloo_kit.evaluate(run, policy, data.test)
    cells.report(evaluation=measuring, accuracy={"before": before.accuracy}, greedy={"before": before.greedy_accuracy})
    with memory.measure() as training:
        result = rloo_kit.train(run, policy, data, rloo_kit.build_rewards(run, policy.tokenizer))
    cells.report(training=training)
    after = rloo_kit.evaluate(run, policy, data.test)
    cells.report(accuracy={"after": after.accuracy, "low": after.low, "high": after.high})
    cells.report(greedy={"after": after.greedy_accuracy})
    steps = [row for row in result.metrics if "grad_norm" in row]
    assert result.steps == len(steps) == run.rloo.max_steps
    assert all(row["val/ratio"] == 1.0 for row in steps)
    if cells.rehearsing():
        return
    on_cpu = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"][0]
    cells.report(on_cpu={name: on_cpu[name]["accuracy"] for name in ("before", "after")})
    assert after.accuracy - before.accuracy >= RISE and after.low > before.high
    assert after.greedy_accuracy >= before.greedy_accuracy - GREEDY_FALL
    assert abs(after.accuracy - on_cpu["after"]["accuracy"]) < APART
