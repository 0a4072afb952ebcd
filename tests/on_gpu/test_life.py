"""A 4-bit run from load to release: steps, a checkpoint, the run resumed, inference, the adapter merged, memory back.

What the memory of the GPU is after each stage, and the most that it was within, is in the result.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cells
import pytest

from tests.on_gpu import scores
from tests.on_gpu.conftest import id_reward
from tests.on_gpu.test_log_probs import difference, is_close

SIZES = ("0.6b", "4b")
QUANTISED_NATS = 0.05  # mean between two backends on 4-bit weights: their kernels round in other places
KEPT_GIB = 0.5  # Unsloth's buffers for dequantised weights and checkpoints stay
FOUR_BIT = "model.load_in_4bit=true"


@pytest.fixture
def stage(memory: Any) -> Callable[[str], Any]:
    """`with stage("load"):` reports seconds, peak and what is held afterwards."""

    @contextmanager
    def measured(name: str) -> Iterator[None]:
        with memory.measure() as found:
            yield
        cells.report(stages={name: found})

    return measured


def adapter_weights(policy: Any) -> dict[str, Any]:
    return {
        name: value.detach().clone() for name, value in policy.model.named_parameters() if ".default.weight" in name
    }


def logps_of(policy: Any) -> Any:
    """(N,) in evaluation mode, each sequence by itself."""
    import torch

    groups = scores.one_by_one(scores.make_groups(policy.model.device))
    with policy.inference_mode(), torch.no_grad():
        return scores.log_probs(policy, [[one] for one in groups], "padded").cpu()


def check_steps(result: Any, steps: int) -> None:
    assert result.steps == steps and result.stopped is None
    rows = [row for row in result.metrics if "grad_norm" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["val/ratio"] == 1.0 and row["clip_ratio/region_mean"] == 0.0 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    cells.report(step_seconds=[round(row["step_time"], 2) for row in rows])


def check_model(policy: Any, interpreted: bool) -> None:
    """Every matrix of every layer in 4 bit, an adapter on each in float32."""
    import torch
    from bitsandbytes.nn import Linear4bit

    layers = policy.model.config.num_hidden_layers
    four_bit = sum(isinstance(module, Linear4bit) for module in policy.model.modules())
    weights = adapter_weights(policy)
    assert four_bit == (0 if interpreted else 7 * layers)
    assert len(weights) == 2 * 7 * layers and {value.dtype for value in weights.values()} == {torch.float32}
    cells.report(policy=policy.describe(), linear_4bit=four_bit)


@pytest.mark.parametrize("size", SIZES)
def test_a_run_from_load_to_release(
    size: str, interpreted: bool, memory: Any, stage: Any, checkpoint: Any, make_run: Any, load: Any, train: Any
) -> None:
    """The run of a small GPU: 4-bit kernels, fused LoRA, bf16 and offloaded checkpoints need the GPU."""
    from rloo_kit import generate_completions, release_memory

    model = checkpoint(size)
    release_memory(verbose=False)
    held_before = memory.held_gib
    cells.report(held_before_gib=round(held_before, 3), context_gib=round(memory.context_gib, 3))
    with stage("load"):
        policy = load(make_run(model, FOUR_BIT))
    check_model(policy, interpreted)
    before = adapter_weights(policy)
    with stage("two steps"):
        result = train(make_run(model, FOUR_BIT, "rloo.max_steps=2", "rloo.save_steps=1"), policy, id_reward)
    check_steps(result, steps=2)
    after = adapter_weights(policy)
    assert any((after[name] != before[name]).any() for name in after)
    assert {path.name for path in (result.folder / "checkpoints").iterdir()} >= {"checkpoint-1", "checkpoint-2"}
    gone = weakref.ref(policy.model)
    del policy, before
    gc.collect()
    assert gone() is None, "the policy is still alive after its last name is gone"

    run = make_run(model, FOUR_BIT, "rloo.max_steps=4", "rloo.save_steps=1")
    with stage("loaded again"):
        policy = load(run)
    with stage("resumed for two steps"):
        result = train(run, policy, id_reward, resume=True)
    check_steps(result, steps=4)
    with stage("inference"):
        tokens = 4 if cells.rehearsing() else 32
        texts = [generate_completions(policy, ["1+2=", "12+345="], max_completion_length=tokens) for _ in range(2)]
    assert [one.ids for one in texts[0]] == [one.ids for one in texts[1]] and all(one.ids for one in texts[0])

    expected = logps_of(policy)
    adapter, trained = result.adapter_folder, adapter_weights(policy)
    del policy, result, texts
    release_memory(verbose=False)
    with stage("the adapter loaded"):
        policy = load(make_run(model, FOUR_BIT, f"model.adapter={adapter}"))
    loaded = adapter_weights(policy)
    assert all((loaded[name] == trained[name]).all() for name in trained)
    off = difference(logps_of(policy), expected)
    cells.report(nats_after_loading=off)
    assert off["max"] < 0.02
    del policy, loaded, trained, after
    release_memory(verbose=False)
    memory.settle()
    left = memory.held_gib - held_before
    cells.report(left_after_release_gib=round(left, 3))
    assert left < KEPT_GIB


@pytest.mark.parametrize("size", SIZES)
def test_the_adapter_merges(
    size: str, gpu: Any, interpreted: bool, stage: Any, checkpoint: Any, make_run: Any, load: Any, tmp_path: Path
) -> None:
    """Merged into 16 bits, in plain transformers, the model is base and adapter; in 4 bit both backends agree."""
    from rloo_kit import release_memory, save_adapter

    model = checkpoint(size)
    policy = load(make_run(model, FOUR_BIT))
    scores.move_adapter(policy)
    adapter = save_adapter(policy, tmp_path / "adapter")
    four_bit = logps_of(policy)
    with stage("merge"):
        merge(policy, model, adapter, tmp_path / "merged", gpu.backend)
    del policy
    release_memory(verbose=False)
    dtype = "float32" if cells.rehearsing() else "bfloat16"
    base = scores.without_unsloth(model, adapter, tmp_path / "base.pt", f"model.dtype={dtype}")["logps"]
    merged = scores.without_unsloth(tmp_path / "merged", None, tmp_path / "merged.pt", f"model.dtype={dtype}")["logps"]
    cells.report(nats_merged=difference(merged, base))
    assert is_close(difference(merged, base))
    moved = difference(
        base, scores.without_unsloth(model, None, tmp_path / "plain.pt", f"model.dtype={dtype}")["logps"]
    )
    cells.report(nats_that_the_adapter_moves=moved)
    assert not is_close(moved), "the adapter changes nothing, so a merge that forgot it would pass"
    if not interpreted:
        other = scores.without_unsloth(model, adapter, tmp_path / "four_bit.pt", FOUR_BIT, f"model.dtype={dtype}")
        between = difference(four_bit, other["logps"])
        cells.report(nats_between_backends_in_4bit=between)
        assert between["mean"] < QUANTISED_NATS


def merge(policy: Any, model: Path, adapter: Path, folder: Path, backend: str) -> None:
    """Write base and adapter as one checkpoint in 16 bit: by Unsloth's own call, or by PEFT on the base in 16 bit."""
    if backend == "unsloth":
        policy.model.save_pretrained_merged(str(folder), policy.tokenizer, save_method="merged_16bit")
        return
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
