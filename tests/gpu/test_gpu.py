"""The path of a card: 4-bit through Unsloth, RLOO steps, the adapter saved and loaded, the memory given back."""

import gc
import importlib.util
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def id_reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """The share of even ids: random weights never write `</think>`, and equal rewards make every gradient zero."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def scores() -> Any:
    """`scores(policy)` of `scores.py`."""
    spec = importlib.util.spec_from_file_location("gpu_scores", HERE / "scores.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.scores


def scores_by_transformers(model: Path, adapter: Path, out: Path) -> Any:
    import torch

    environment = {name: value for name, value in os.environ.items() if "UNSLOTH" not in name}
    environment |= {"RLOO_KIT_BACKEND": "transformers"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "scores.py"), str(model), str(adapter), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(out)


def adapter_weights(policy: Any) -> dict[str, Any]:
    return {
        name: value.detach().clone() for name, value in policy.model.named_parameters() if ".default.weight" in name
    }


def train(run: Any, policy: Any, *rewards: Any) -> Any:
    """The kit's `train` with the run's own rewards and these."""
    import rloo_kit

    data = rloo_kit.load_data(run, policy.tokenizer)
    return rloo_kit.train(run, policy, data, [*rloo_kit.build_rewards(run, policy.tokenizer), *rewards])


def check_steps(result: Any, steps: int) -> list[dict[str, Any]]:
    assert result.steps == steps and result.stopped is None
    rows = [row for row in result.metrics if "grad_norm" in row]
    assert len(rows) == steps
    assert all(row["val/ratio"] == 1.0 and row["clip_ratio/region_mean"] == 0.0 for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)
    return rows


def test_qwen3_in_4bit_from_load_to_release(
    qwen3_folder: Path, make_run: Any, record: Any, scores: Any, tmp_path: Path
) -> None:
    """The run of an 8 GB card in small: 4-bit kernels, fused LoRA, bf16 and offloaded checkpoints need the card."""
    import torch
    from bitsandbytes.nn import Linear4bit

    from rloo_kit import load_policy, release_memory

    release_memory(verbose=False)
    held_before = torch.cuda.memory_allocated()
    with record.measure("qwen3_0_6b_4bit_load"):
        run = make_run(qwen3_folder, "model.load_in_4bit=true")
        policy = load_policy(run)
    assert policy.backend == "unsloth" and policy.tags.end_id == 151668 and policy.family == "thinking"
    assert sum(isinstance(module, Linear4bit) for module in policy.model.modules()) == 7 * 28
    assert policy.model._unsloth_gradient_checkpointing == "unsloth"
    before = adapter_weights(policy)
    assert len(before) == 2 * 7 * 28 and {value.dtype for value in before.values()} == {torch.float32}

    with record.measure("qwen3_0_6b_4bit_three_steps_8_completions_of_64_tokens"):
        result = train(run, policy, id_reward)
    rows = check_steps(result, steps=3)
    record.measured["qwen3_0_6b_4bit_step_seconds"] = [round(row["step_time"], 2) for row in rows]
    after = adapter_weights(policy)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    expected, adapter = scores(policy), result.adapter_folder

    model = weakref.ref(policy.model)
    del policy, before, result
    gc.collect()
    assert model() is None, "the policy is still alive after its last name is gone"
    again = load_policy(make_run(qwen3_folder, "model.load_in_4bit=true", f"model.adapter={adapter}"))
    loaded = adapter_weights(again)
    assert all(torch.equal(loaded[name], after[name]) for name in after)
    torch.testing.assert_close(scores(again), expected, rtol=0, atol=0.02)

    other = scores_by_transformers(qwen3_folder, adapter, tmp_path / "scores.pt").to(expected.device)
    difference = (other - expected).abs()
    record.measured["nats_a_token_between_backends"] = {
        "mean": round(difference[expected != 0].mean().item(), 4),
        "max": round(difference.max().item(), 4),
    }
    assert difference[expected != 0].mean() < 0.05

    del again, loaded, after, expected, other, difference
    release_memory(verbose=False)
    left_gib = (torch.cuda.memory_allocated() - held_before) / 2**30
    record.measured["gib_left_after_release"] = round(left_gib, 3)
    assert left_gib < 0.5  # Unsloth keeps buffers for dequantised weights and checkpoints


def test_embedded_model_learns_on_the_card(card: Any, make_run: Any, record: Any) -> None:
    """Unsloth's kernels refuse some sizes; the embedded model's were chosen so that `make demo` runs through them."""
    from rloo_kit import evaluate, load_data, load_policy

    steps = 20
    run = make_run(
        "embedded/thinking", "model.max_seq_length=512", "data.num_prompts=2000", "data.test_size=300",
        f"rloo.max_steps={steps}", "rloo.per_device_train_batch_size=128", "rloo.num_generations=8",
        "rloo.max_completion_length=48", "rloo.learning_rate=2e-3", "rloo.lr_scheduler_type=constant", "rloo.beta=0.0",
        "eval.batch_size=300", reward="answer_reward",
    )  # fmt: skip
    with record.measure("embedded_build_and_load"):
        policy = load_policy(run)
    assert policy.backend == "unsloth"
    test = load_data(run, policy.tokenizer).test
    with record.measure("embedded_evaluation_of_300_prompts"):
        before = evaluate(run, policy, test)
    assert before.closed_share > 0.5
    with record.measure(f"embedded_{steps}_steps_128_completions_of_48_tokens"):
        rows = check_steps(train(run, policy), steps)
    after = evaluate(run, policy, test)
    record.measured["embedded_step_seconds"] = [round(row["step_time"], 2) for row in rows]
    record.measured["embedded_accuracy"] = {"before": round(before.accuracy, 3), "after": round(after.accuracy, 3)}
    assert after.accuracy > before.accuracy
