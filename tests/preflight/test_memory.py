"""Measuring a plan: that what is measured is a run's own code at its longest, and that the figures move with it."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rloo_kit import load_config, load_policy, plan_vram
from rloo_kit._stack import load_stack
from rloo_kit.errors import BackendError
from rloo_kit.loop.memory import MemoryPeak
from rloo_kit.models.checkpoint import write_shards
from rloo_kit.plan.result import Machine
from rloo_kit.plan.shapes import DeltaNet, ModelShape, find_shape, shape_of_config
from rloo_kit.preflight import stand_ins
from rloo_kit.preflight.memory import (
    load_of,
    measure_rollout,
    measure_steps,
    measure_training,
    rows_of_a_pass,
)
from rloo_kit.preflight.plan import measure_plan
from rloo_kit.preflight.stand_ins import fill_cache
from rloo_kit.rollout.kv_cache import SlotCache
from rloo_kit.system.memory import resident_gib

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WORDS = [
    "data.max_prompt_length=16", "rloo.max_completion_length=112", "model.max_seq_length=128", "rollout.rows=4",
    "rloo.num_generations=4", "rloo.per_device_train_batch_size=8", "rloo.gradient_accumulation_steps=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def libraries() -> None:
    """Loaded before anything is measured: they take more than what is."""
    load_stack()


@pytest.fixture
def run(tiny_folder: Path) -> Any:
    return load_config(CONFIGS / "arithmetic_thinking.yaml", *WORDS, f"model.name={tiny_folder}", "model.family=auto")


@pytest.fixture
def policy(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RLOO_KIT_BACKEND", "transformers")
    return load_policy(run, check=False)


@pytest.fixture
def calls(policy: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of the ids that the model's backbone was called with."""
    backbone = policy.model.get_base_model().model
    plain, seen = backbone.forward, []

    def counted(*args: Any, **named: Any) -> Any:
        ids = args[0] if args else named["input_ids"]
        seen.append(tuple(ids.shape))
        return plain(*args, **named)

    monkeypatch.setattr(backbone, "forward", counted)
    return seen


def test_a_peak_is_seen_though_it_is_gone():
    """Memory that is held for a moment is what an out-of-memory error is made of; a look afterwards misses it."""
    with MemoryPeak() as peak:
        before = resident_gib()  # what other tests left was given back on entering
        torch.ones(2**27).sum()  # half a GiB
    assert peak.gib - before == pytest.approx(0.5, abs=0.1) and resident_gib() - before < 0.1
    with MemoryPeak() as after:
        pass
    assert after.gib < peak.gib - 0.3


def test_a_peak_without_the_kernels_help(monkeypatch):
    """Some containers do not let a process reset its own peak."""

    def refuse(self: Path, *_args: Any, **_named: Any) -> None:
        raise PermissionError(str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    with MemoryPeak() as peak:
        before = resident_gib()
        held = torch.ones(2**27)
        for _ in range(5):
            held.add_(1)
        del held
    assert peak.gib - before == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_rows_are_decoded_at_their_end(run, policy, calls, monkeypatch, engine):
    """A measurement that prefills whole rows measures the prefill; one that decodes from the start takes hours."""
    held: list[int] = []
    if engine == "native":
        begin = SlotCache.begin

        def noted(self: Any, positions: list[int], device: Any) -> Any:
            held.append(max(positions))
            return begin(self, positions, device)

        monkeypatch.setattr(SlotCache, "begin", noted)
    run.rollout.engine = engine
    assert measure_rollout(policy, run, rows=3, tokens=100).gib > 0
    assert all(width <= 4 for _, width in calls), "whole rows were prefilled"
    if engine == "native":
        assert held[-64:] == list(range(35, 99))
    else:
        assert calls[-64:] == [(3, 1)] * 64
    with pytest.raises(BackendError, match="more than the 64"):
        measure_rollout(policy, run, rows=3, tokens=64)
    with pytest.raises(BackendError, match="and the model has"):
        measure_rollout(policy, run, rows=3, tokens=10**6)
    run.rollout.engine = "vllm"
    with pytest.raises(BackendError, match="rollout.engine=vllm.*gpu_memory_utilization.*rollout.engine=native"):
        measure_rollout(policy, run, rows=3, tokens=100)


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_training_is_measured_in_its_largest_pass(run, policy, calls, beta):
    """With a KL penalty a pass is a whole group; a measurement of single sequences says that it fits. Two steps, for
    the optimizer's state; the adapter "ref" and the gradients are gone afterwards."""
    run.rloo.beta, run.rloo.tokens_per_pass = beta, 300
    load = load_of(run, policy)
    generations, rows = rows_of_a_pass(load)
    assert (generations, rows) == ((4, 4) if beta else (3, 3))
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters() if value.requires_grad}
    calls.clear()
    assert measure_training(policy, run).gib > 0
    largest = max(height * width for height, width in calls)
    group = 16 + generations * 112  # the prompt once for all
    assert largest == (group if beta else 16 + 2 * 112)
    moved = [
        name for name, value in policy.model.named_parameters() if name in before and not value.equal(before[name])
    ]
    assert moved and not policy.model.training
    assert all(value.grad is None for value in policy.model.parameters())
    assert list(policy.model.peft_config) == ["default"]


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_steps_are_measured_as_a_run_takes_them(run, policy, calls, engine):
    """Rollout and gradient fit one by one, and not with the optimizer's state in place: found out after three hours."""
    run.rollout.engine, run.rloo.tokens_per_pass = engine, 300
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters() if value.requires_grad}
    calls.clear()
    rollout, training = measure_steps(policy, run, rows=5, decoded=7)
    assert rollout.gib > 0 and training.gib > 0 and rollout.seconds > 0 and training.seconds > 0
    kinds = ["decoded" if width == 1 else "scored" for _, width in calls if width == 1 or width > 100]
    order = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    assert order == ["decoded", "scored", "decoded", "scored"]
    assert engine == "native" or calls.count((5, 1)) == 2 * 7  # native decodes past the backbone
    now = dict(policy.model.named_parameters())
    assert any(not now[name].equal(value) for name, value in before.items())
    assert list(policy.model.peft_config) == ["default"]


def test_a_checkpoint_of_the_true_shape(tiny_folder, tmp_path, monkeypatch):
    """Sizes have to be the model's own to the last tensor, else what is measured is another model's memory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = load_config(CONFIGS / "qwen3_4b_thinking_12gb.yaml", model={"name": str(tiny_folder)})
    monkeypatch.setattr(stand_ins, "write_shards", partial(write_shards, largest=20_000))  # several
    folder = stand_ins.save_random_checkpoint(run, tmp_path / "random")
    assert len(list(folder.glob("*.safetensors"))) > 2
    real = AutoModelForCausalLM.from_pretrained(tiny_folder)
    made, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    sizes = {name: value.shape for name, value in real.state_dict().items()}
    assert {name: value.shape for name, value in made.state_dict().items()} == sizes
    assert made.num_parameters() == find_shape(run).num_weights and made.dtype.itemsize == 2
    weights = made.model.layers[0].mlp.up_proj.weight.float()
    assert 0.01 < weights.std() < 0.03 and made.model.norm.weight.float().unique().tolist() == [1.0]
    assert AutoTokenizer.from_pretrained(folder)("</think>")["input_ids"] == [260]


def test_layers_without_a_cache_are_measured_too(tmp_path):
    """Qwen3.5: a random checkpoint of its shape was a Qwen3, and a rollout's cache had no place for the states."""
    from transformers import AutoModelForCausalLM

    shape = ModelShape(64, 96, 4, 4, 2, 32, 320, True, delta=DeltaNet((0, 1, 2), 2, 4, 16, 8))
    model = AutoModelForCausalLM.from_pretrained(stand_ins.save_random_model(shape, tmp_path), dtype=torch.float32)
    assert model.config.model_type == "qwen3_5_text" and model.num_parameters() == shape.num_weights
    assert replace(shape_of_config(model.config.to_dict()), has_kernels=True, source=shape.source) == shape
    with torch.no_grad():
        filled = fill_cache(model, 2, 31)
        assert filled.get_seq_length() == 30
        assert [tuple(one.recurrent_states[0].shape) for one in filled.layers[:3]] == 3 * [(2, 4, 16, 8)]
        logits = model(torch.tensor([[7], [8]]), past_key_values=filled, position_ids=torch.full((2, 1), 30)).logits
    assert filled.get_seq_length() == 31 and logits.isfinite().all()


def test_without_room_nothing_is_written(monkeypatch, tmp_path):
    """A checkpoint of 8 GB on a disk with 5 fills it, and takes other programs down with it."""
    monkeypatch.setattr(stand_ins.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 2**30))
    run = load_config(CONFIGS / "qwen3_4b_thinking_12gb.yaml")
    with pytest.raises(BackendError, match="takes 7.5 GiB, and .* has 5.0 GiB free: set TMPDIR"):
        stand_ins.save_random_checkpoint(run, tmp_path / "random")
    assert not list((tmp_path / "random").iterdir())


def test_what_is_not_here_is_not_measured(run):
    """A plan for a GPU, measured on a CPU, would be a figure for nothing; without a GPU to refuse them, gigabytes
    too many are the end of other programs."""
    plan = plan_vram(run)
    with pytest.raises(BackendError, match="measure without --gpu-gib"):
        measure_plan(run, plan_vram(run, gpu_gib=24))
    small = replace(plan, machine=Machine("the CPU", 0.5, 0.3, False))
    with pytest.raises(BackendError, match="GiB and this machine has 0.2"):
        measure_plan(run, small)


@pytest.mark.parametrize("words", [["vllm"], ["server", "rollout.server_url=http://127.0.0.1:9"]])
def test_training_is_measured_where_something_else_samples(run, tiny_folder, words):
    """`plan --measure` refused such a run, whose training may well be what does not fit; and what vLLM keeps while it
    sleeps is not there to be measured, so it must not be in the figure that is computed for it."""
    config = CONFIGS / "arithmetic_thinking.yaml"
    names = [f"model.name={tiny_folder}", "model.family=auto"]
    chosen = load_config(config, *WORDS, *names, f"rollout.engine={words[0]}", *words[1:])
    lines: list[str] = []
    (found,) = measure_plan(chosen, plan_vram(chosen), lines.append)
    assert found.what == "training" and found.error is None and found.measured_gib
    assert any("training only" in line for line in lines)
    assert found.computed_gib == pytest.approx(plan_vram(run).training_gib)


@pytest.mark.slow
def test_the_command(tiny_folder):
    """One command for the GPU at hand: random weights of the shape, the rollout, training; what was computed
    alongside, and JSON that is nothing but JSON."""
    words = [*WORDS, f"model.name={tiny_folder}", "model.family=auto"]
    command = [sys.executable, "-m", "rloo_kit.cli", "plan", str(CONFIGS / "arithmetic_thinking.yaml"), *words]
    done = subprocess.run([*command, "--measure", "--json"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parts = [(one["what"], one["rows"], one["tokens"]) for one in found["measured"]]
    assert parts == [("rollout", 4, 128), ("training", 8, 128)]
    for one in found["measured"]:
        assert one["error"] is None and 0.2 < one["measured_gib"] < 2 and one["computed_gib"] > 0.5
    assert "random weights of the shape" in done.stderr and "computed vs. measured" in done.stderr
