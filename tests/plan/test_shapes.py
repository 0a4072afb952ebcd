"""Shapes against real models, and the models known by name."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config
from rloo_kit.plan import parts
from rloo_kit.plan.parts import Workload
from rloo_kit.plan.planner import find_machine, read_workload
from rloo_kit.plan.shapes import EMBEDDED, ModelShape, find_shape, shape_of_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def work_of(shape: ModelShape, **changes: Any) -> Workload:
    """A run on a GPU: LoRA r = 16 in 4-bit with 8-bit Adam, Unsloth's checkpointing, one sequence a pass."""
    given = Workload(
        shape=shape, four_bit=True, weight_bytes=2, compute_bytes=2, lora_rank=16, lora_targets=ALL,
        optim="adamw_8bit", checkpointing="offloaded", fused=True, tokens_per_pass=1, whole_groups=False,
        reference="none", prompt_tokens=0, completion_tokens=4096, num_generations=8, completions=8,
        on_cuda=True,
    )  # fmt: skip
    return replace(given, **changes)


def make_model(kind: str, **changes: Any) -> Any:
    import transformers as of

    if kind == "qwen3":
        return of.Qwen3ForCausalLM(of.Qwen3Config(**SIZES | {"head_dim": 32} | changes))
    return of.SmolLM3ForCausalLM(of.SmolLM3Config(**SIZES | {"pad_token_id": None} | changes))


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("smollm3", False)])
def test_weights_and_cache_are_those_of_the_model(kind: str, tied: bool) -> None:
    """Of each part; a wrong head, norm or bias changes them."""
    import torch

    model = make_model(kind, tie_word_embeddings=tied)
    shape = shape_of_config(model.config.to_dict())
    assert shape.tied == tied and shape.num_weights == model.num_parameters()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert shape.table_weights == sum(size for name, size in sizes.items() if "embed" in name or "lm_head" in name)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert shape.vector_weights == vectors and shape.body_weights == shape.num_weights - vectors - shape.table_weights
    work = work_of(shape, weight_bytes=4, compute_bytes=4, prompt_tokens=64, completion_tokens=64)
    with torch.no_grad():
        filled = model(torch.randint(0, 320, (3, 128)), use_cache=True).past_key_values
    assert parts.cache_bytes(work, 3) == sum(layer.keys.nbytes + layer.values.nbytes for layer in filled.layers)
    assert parts.row_bytes(work) == parts.cache_bytes(work, 1) == parts.least_pool_bytes(work)


def weigh_in_4_bit(model: Any, folder: Any) -> tuple[dict[str, Any], int]:
    """The model loaded in NF4: its configuration, and the bytes of all of its tensors."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model.save_pretrained(folder)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantisation = BitsAndBytesConfig(load_in_4bit=True, **nf4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantisation)
    tensors = {}
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        own = [parameter.data]
        if state is not None:
            own += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        tensors |= {tensor.data_ptr(): tensor.nbytes for tensor in own}
    return model.config.to_dict(), sum(tensors.values())


def test_weights_in_4_bit_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    """The scales of the blocks and their own quantisation add 3 % to half a byte a weight."""
    config, size = weigh_in_4_bit(make_model("qwen3", hidden_size=256, tie_word_embeddings=False), tmp_path)
    work = work_of(shape_of_config(config))
    assert work.shape.is_quantised
    assert parts.body_bytes(work) + parts.table_bytes(work) == size


def test_the_adapter_is_that_of_peft(tmp_path: Path) -> None:
    """Without a list every linear layer of the blocks is adapted, a list as written."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model("smollm3"), LoraConfig(r=4, target_modules=list(ALL), task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = shape_of_config(model.config.to_dict())
    assert parts.trained_weights(work_of(shape, lora_rank=4)) == trained
    assert parts.trained_weights(work_of(shape, lora_rank=None)) == shape.num_weights
    model.config.save_pretrained(tmp_path)
    run = load_config(CONFIGS / "qwen3_4b_thinking_12gb.yaml", model={"name": str(tmp_path), "load_in_4bit": False})
    vars(run.model.lora)["target_modules"] = None
    assert sorted(read_workload(run, find_machine(12)).lora_targets) == sorted(ALL)
    vars(run.model.lora)["target_modules"] = ["o_proj"]
    assert read_workload(run, find_machine(12)).lora_targets == ("o_proj",)


def count_saved_bytes(layers: int, half: bool) -> float:
    """Bytes per token that a padded pass of the backbone saves for its backward pass, parameters apart."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = make_model("qwen3", hidden_size=256, intermediate_size=512, num_hidden_layers=layers)
    model = get_peft_model(model.train(), LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if half and not parameter.requires_grad else torch.float32)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    mixed = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed:
        model.get_base_model().model(input_ids=torch.randint(0, 300, (2, 128)), attention_mask=torch.ones(2, 128))
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(size for place, size in found.items() if place not in own) / (2 * 128)


@pytest.mark.parametrize("half", [True, False])
def test_what_a_layer_saves_is_as_planned(half: bool) -> None:
    """A pass that "fits" must not run out of memory. Within 3 % below and a fifth above."""
    saved = count_saved_bytes(2, half) - count_saved_bytes(1, half)
    shape = shape_of_config(make_model("qwen3", hidden_size=256, intermediate_size=512).config.to_dict())
    width = 2 if half else 4
    work = work_of(shape, weight_bytes=width, compute_bytes=width, fused=False)
    assert 0.97 * saved < parts.saved_bytes_per_token(work) < 1.2 * saved


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("unsloth/Qwen3.5-2B", 1_881_825_088),
        ("Qwen/Qwen3.5-4B-Base", 4_205_751_296),
        ("Qwen/Qwen3.5-27B", 26_895_998_464),
        ("HuggingFaceTB/SmolLM3-3B", 3_075_098_624),
    ],
)
def test_known_names_have_the_published_number_of_weights(name: str, weights: int) -> None:
    """Counts of the text models, from their checkpoints; a wrong width, head or tied table changes them."""
    found = find_shape(load_config(CONFIGS / "qwen3_4b_thinking_12gb.yaml", model={"name": name}))
    low, high = (0.98, 1.06) if found.is_hybrid else (1, 1)
    assert low * weights <= found.num_weights <= high * weights
    assert found.is_quantised == name.endswith("4bit")


def test_numbers_that_are_held_twice_agree() -> None:
    """The arithmetic may not import torch, so it holds some numbers of modules that do."""
    from rloo_kit.demo import cold_start

    for plan in cold_start.PLANS.values():
        config = cold_start.model_config(plan, cold_start.ROWS).to_dict()
        assert replace(shape_of_config(config), source=EMBEDDED.source) == EMBEDDED
