"""The arithmetic of memory against real models: what is called exact is counted, what is an estimate is bounded."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config
from rloo_kit.config.resume import OLD_TARGETS as PROJECTIONS
from rloo_kit.plan import parts
from rloo_kit.plan.load import find_machine, read_load
from rloo_kit.plan.parts import GIB, Load
from rloo_kit.plan.peaks import rollout_bytes, rollout_gib, training_bytes, training_gib
from rloo_kit.plan.shapes import EMBEDDED, EMBEDDED_ROWS, PUBLISHED, ModelShape, shape_of_config

SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2}
SMALL |= {"head_dim": 64, "vocab_size": 320}


def load_of(shape: ModelShape, **changes: Any) -> Load:
    """A run on a GPU: LoRA r = 16 in 4-bit with 8-bit Adam, Unsloth's checkpointing, one sequence a pass."""
    given = Load(
        shape=shape, four_bit=True, weight_bytes=2, compute_bytes=2, lora_rank=16, lora_targets=tuple(PROJECTIONS),
        optim="adamw_8bit", checkpointing="offloaded", fused=True, tokens_per_pass=1, whole_groups=False,
        reference="none", prompt_tokens=0, completion_tokens=4096, num_generations=8, completions=8,
        on_cuda=True,
    )  # fmt: skip
    return replace(given, **changes)


def make_model(**changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SMALL | {"num_hidden_layers": 2, "tie_word_embeddings": True} | changes))


def test_the_published_sizes_are_those_of_the_reports() -> None:
    """A wrong width in the table makes a plan that is wrong everywhere. Source: the Qwen3 report."""
    reported = {"0.6b": 0.6, "1.7b": 1.7, "4b": 4.0, "8b": 8.2, "14b": 14.8, "32b": 32.8}
    bodies = {"0.6b": 0.44, "1.7b": 1.4, "4b": 3.6, "8b": 6.95, "14b": 13.2, "32b": 31.2}
    for size, shape in PUBLISHED.items():
        assert shape.num_weights / 1e9 == pytest.approx(reported[size], rel=0.02), size
        assert shape.body_weights / 1e9 == pytest.approx(bodies[size], rel=0.02), size
        assert shape.tied == (size in ("0.6b", "1.7b", "4b"))


def test_qwen3_4b_in_4_bit() -> None:
    """The figures that the configs were chosen by, computed by hand: weights, adapter with its optimizer, peaks of
    rollouts of K = 8 at full length, and of training one sequence at a time (Unsloth's kernels below, transformers'
    around it)."""
    load = load_of(PUBLISHED["4b"])
    assert parts.body_bytes(load) / GIB == pytest.approx(1.75, abs=0.005)
    assert parts.table_bytes(load) / GIB == pytest.approx(0.72, abs=0.005)
    assert parts.cache_bytes_per_token(load) == 144 * 1024
    trained = parts.trained_weights(load)
    assert trained == 33_030_144
    whole = 4 * trained + parts.gradient_bytes(load) + parts.optimizer_bytes(load)
    assert whole / GIB == pytest.approx(0.31, abs=0.005), "float32 masters and gradients, 8-bit moments"
    for tokens, rollout in ((4096, 8.2), (8192, 12.7), (16384, 21.7)):
        long = replace(load, completion_tokens=tokens)
        copied = parts.decoding_bytes(long, 8) / GIB  # the copy that attention makes: not in the figures by hand
        assert rollout_gib(long, 8) - copied == pytest.approx(rollout, rel=0.025)
    for tokens, training in ((4096, 4.9), (16384, 7.3)):
        long = replace(load, completion_tokens=tokens)
        fused, plain = training_gib(long), training_gib(replace(long, fused=False))
        assert 0.88 * training < fused < training < 1.06 * plain and plain < 1.1 * training


def test_the_adapter_is_that_of_peft() -> None:
    """And the reference, where it is a copy of it."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = shape_of_config(model.config.to_dict())
    load = load_of(shape, lora_rank=4, lora_targets=("q_proj", "down_proj"), reference="adapter")
    assert parts.trained_weights(load) == trained
    assert parts.gradient_bytes(load) == parts.reference_bytes(load) == 4 * trained
    assert parts.optimizer_bytes(replace(load, optim="adamw_torch_fused")) == 8 * trained
    assert parts.optimizer_bytes(load) == pytest.approx(2 * trained, rel=0.04)
    whole = replace(load, lora_rank=None, reference="model", four_bit=False, weight_bytes=4)
    assert parts.trained_weights(whole) == shape.num_weights
    assert parts.reference_bytes(whole) == 4 * shape.num_weights


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules=PROJECTIONS, task_type="CAUSAL_LM"))


def make_groups(length: int) -> list[Any]:
    """A prompt of four tokens with two completions."""
    import torch

    from rloo_kit.gradient.packing import Group

    return [Group(torch.randint(0, 320, (4,)), [torch.randint(0, 320, (length,)) for _ in range(2)])]


def count_saved_bytes(layers: int, half: bool) -> float:
    """Bytes that a packed pass saves for its backward pass, parameters apart, for each of its tokens."""
    import torch

    from rloo_kit.gradient.scorer import Scorer

    model = with_lora(make_model(num_hidden_layers=layers).to(torch.bfloat16 if half else torch.float32))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    groups = make_groups(190)
    mixed = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
    scorer = Scorer(model, 1.0, 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed:
        scorer.score(model, groups)
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(size for place, size in found.items() if place not in own) / scorer.tokens(groups)


@pytest.mark.parametrize("half", [False, True])
def test_what_a_layer_saves_is_what_torch_saves(half: bool) -> None:
    """An unchecked estimate drifts from the code: a cast more in the adapter, and a pass no longer fits."""
    pytest.importorskip("rloo_kit.gradient.scorer")
    one_layer = count_saved_bytes(2, half) - count_saved_bytes(1, half)
    shape = shape_of_config(make_model().config.to_dict())
    width = 2 if half else 4
    load = load_of(shape, four_bit=False, weight_bytes=width, compute_bytes=width, fused=False, checkpointing="off")
    assert parts.saved_bytes_per_token(load) == pytest.approx(one_layer, rel=0.05)


def measure_peak(model: Any, checkpointing: bool, length: int, layout: str = "shared") -> float:
    """Bytes that are alive at once at the peak of a pass, forward and backward, the model's own apart; two completions
    of `length` tokens and a prompt of four."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from rloo_kit.gradient.scorer import Scorer

    class Peak(TorchDispatchMode):
        def __init__(self, own: set[int]):
            super().__init__()
            self.own, self.live, self.most = own, {}, 0

        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = call(*args, **(kwargs or {}))
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.own:
                    storage = tensor.untyped_storage()
                    reference = StorageWeakRef(storage)
                    self.live[reference.cdata] = reference, storage.nbytes()
            self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
            self.most = max(self.most, sum(size for _, size in self.live.values()))
            return made

    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    scorer, groups = Scorer(model.train(), 1.0, 0), make_groups(length)
    assert scorer.layout == layout
    peak = Peak({parameter.untyped_storage().data_ptr() for parameter in model.parameters()})
    with peak:
        scorer.score(model, groups).logps.sum().backward()
    return peak.most


@pytest.mark.parametrize(("checkpointing", "most"), [(False, 1.2), (True, 1.6)])
def test_the_peak_of_a_pass_is_not_above_the_plan(checkpointing: bool, most: float) -> None:
    """What a pass holds besides what is saved (gradients on their way, the head's tiles) is an estimate: from above."""
    model, length = with_lora(make_model(num_hidden_layers=4)), 300
    peak = measure_peak(model, checkpointing, length)
    load = load_of(
        shape_of_config(model.config.to_dict()), four_bit=False, weight_bytes=4, compute_bytes=4, fused=False,
        on_cuda=False, checkpointing="on" if checkpointing else "off", tokens_per_pass=2 * length + 4, prompt_tokens=4,
        completion_tokens=length,
    )  # fmt: skip
    planned = parts.activation_bytes(load) + parts.head_bytes(load) + parts.gradient_bytes(load)
    assert peak < planned < most * peak


def test_the_copy_that_decodes_is_counted(tiny_model: Any) -> None:
    """Up to a gibibyte of joined matrices was in no part of the plan; a larger model has none, nor one in 16 bit."""
    from rloo_kit.rollout.decoders import FusedDecoder

    load = load_of(shape_of_config(tiny_model.config.to_dict()), four_bit=False, fused=False, engine="native")
    in_float32 = replace(load, weight_bytes=4, compute_bytes=4)
    layers = FusedDecoder(tiny_model)._layers
    matrices = [part for layer in layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert parts.joined_bytes(in_float32) == sum(part.numel() * part.element_size() for part in matrices)
    assert parts.joined_bytes(load) == 0
    assert parts.joined_bytes(replace(in_float32, shape=PUBLISHED["0.6b"])) == 0


def test_numbers_that_are_held_twice_agree() -> None:
    """The arithmetic may not import torch, so it holds some numbers of modules that do."""
    from rloo_kit.data import byte_tokens as tokenizer
    from rloo_kit.embedded import cold_start

    assert EMBEDDED_ROWS == tokenizer.ROWS
    for plan in cold_start.PLANS.values():
        config = cold_start.model_config(plan, tokenizer.ROWS["compact"]).to_dict()
        assert replace(shape_of_config(config), source=EMBEDDED.source) == EMBEDDED


def test_each_setting_moves_its_part() -> None:
    """A setting that the plan forgets is one that it recommends in vain."""
    load = load_of(PUBLISHED["4b"], prompt_tokens=512, tokens_per_pass=8192)
    assert load.pass_tokens == 8192 and replace(load, tokens_per_pass=1).pass_tokens == 4608
    assert replace(load, whole_groups=True).pass_tokens == 8 * 4608  # Unsloth's packing repeats the prompt
    assert replace(load, whole_groups=True, fused=False).pass_tokens == 512 + 8 * 4096
    assert replace(load, tokens_per_pass=10**9).pass_tokens == 8 * 4608
    sizes = [parts.activation_bytes(replace(load, checkpointing=kind)) for kind in ("offloaded", "on", "off")]
    assert sizes == sorted(sizes) and sizes[2] > 5 * sizes[1]
    assert parts.optimizer_bytes(replace(load, optim="sgd")) == 0
    assert parts.optimizer_bytes(replace(load, optim="adafactor")) < parts.optimizer_bytes(load)
    assert parts.work_bytes(replace(load, four_bit=False)) == 0 < parts.work_bytes(load)
    assert (
        parts.cache_bytes_per_token(load)
        == 144 * 1024
        == 2 * parts.cache_bytes_per_token(replace(load, float8_cache=True))
    )
    assert parts.sampling_bytes(load, 8) < 0.1 * GIB and parts.head_bytes(load) < 0.4 * GIB


def test_a_rollout_finds_gradients_only_in_a_step_of_several() -> None:
    """The optimizer's step drops them before the next rollout. Counted there they were a sixth of a peak where all
    weights are trained (measured 1.96 GiB of 2.36 computed)."""
    config = Path(__file__).resolve().parents[2] / "configs" / "arithmetic_thinking.yaml"
    words = ["model.lora=null", "rloo.gradient_accumulation_steps=4", "rloo.per_device_train_batch_size=32"]
    one, several = (
        read_load(load_config(config, *words, *more), find_machine()) for more in ([], ["rloo.steps_per_generation=1"])
    )
    several = replace(several, completions=one.completions)
    assert rollout_bytes(several, 8) - rollout_bytes(one, 8) == parts.gradient_bytes(one) > 0
    assert training_bytes(several) == training_bytes(one)
