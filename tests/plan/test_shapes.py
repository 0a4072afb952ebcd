"""Shapes against real models: SmolLM3 and Qwen3.5, whose layers are of two kinds, and the models known by name."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config, plan_vram
from rloo_kit.plan import parts
from rloo_kit.plan.parts import Workload
from rloo_kit.plan.planner import find_machine, read_workload
from rloo_kit.plan.shapes import EMBEDDED, EMBEDDED_ROWS, ModelShape, find_shape, shape_of_config
from rloo_kit.plan.speed import GPUS, token_step_bytes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}  # fmt: skip
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_DELTA = (*ALL, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


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
    if kind == "smollm3":
        return of.SmolLM3ForCausalLM(of.SmolLM3Config(**SIZES | {"pad_token_id": None} | changes))
    return of.Qwen3_5ForCausalLM(of.Qwen3_5TextConfig(**SIZES | DELTA | changes))


def cache_bytes(cache: Any) -> int:
    """Of keys and values, and of the states of layers without them."""
    total = 0
    for layer in cache.layers:
        states = [layer.keys, layer.values] if hasattr(layer, "keys") else []
        for held in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            states += held.values()
        total += sum(state.nbytes for state in states)
    return total


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("smollm3", False), ("qwen3_5", True)])
def test_weights_are_those_of_the_model(kind: str, tied: bool) -> None:
    """`plan` had no shape for either. Qwen3.5's gates, convolutions and four input matrices are easily forgotten."""
    model = make_model(kind, tie_word_embeddings=tied)
    shape = shape_of_config(model.config.to_dict())
    assert shape.tied == tied and shape.num_weights == model.num_parameters()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert shape.table_weights == sum(size for name, size in sizes.items() if "embed" in name or "lm_head" in name)
    vectors = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 1 or "conv1d" in name)
    assert shape.vector_weights == vectors and shape.body_weights == shape.num_weights - vectors - shape.table_weights


@pytest.mark.parametrize(("kind", "half"), [("qwen3", True), ("smollm3", False), ("qwen3_5", True)])
def test_the_cache_is_that_of_a_forward_pass(kind: str, half: bool) -> None:
    """Four of Qwen3.5's five layers here have a state per row, in float32 whatever the weights, and no cache per
    token."""
    import torch

    model = make_model(kind).to(torch.bfloat16 if half else torch.float32)
    width = 2 if half else 4
    work = work_of(shape_of_config(model.config.to_dict()), weight_bytes=width, compute_bytes=width, prompt_tokens=64)
    work = replace(work, completion_tokens=64)
    with torch.no_grad():
        filled = model(torch.randint(0, 320, (3, 128)), use_cache=True).past_key_values
    assert parts.cache_bytes(work, 3) == cache_bytes(filled)
    assert (parts.state_bytes(work) > 0) == (kind == "qwen3_5") == (work.shape.num_attention == 1)
    assert parts.row_bytes(work) == parts.cache_bytes(work, 1)
    assert parts.least_pool_bytes(work) == 128 * parts.cache_bytes_per_token(work) + parts.state_bytes(work)
    a_row = token_step_bytes(work, 3, GPUS[0]) - token_step_bytes(work, 2, GPUS[0])
    assert a_row - 2 * parts.state_bytes(work) == pytest.approx((0.4 * 64 + 32) * parts.cache_bytes_per_token(work))


def weigh_in_4_bit(model: Any, folder: Any, kept: list[str]) -> tuple[dict[str, Any], int]:
    """The model loaded in NF4 but for the modules `kept`: its configuration, and the bytes of all of its tensors."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model.save_pretrained(folder)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantisation = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=kept or None, **nf4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantisation)
    tensors = {}
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        own = [parameter.data]
        if state is not None:
            own += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        tensors |= {tensor.data_ptr(): tensor.nbytes for tensor in own}
    return model.config.to_dict(), sum(tensors.values())


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("qwen3", []),
        ("qwen3", ["lm_head", "model.layers.1.mlp", "model.layers.0.self_attn.q_proj"]),
        ("qwen3_5", ["lm_head", "model.layers.1.linear_attn", "model.layers.4.mlp.up_proj"]),
    ],
)
def test_weights_in_4_bit_are_those_of_bitsandbytes(tmp_path: Path, kind: str, kept: list[str]) -> None:
    """The scales of the blocks and their own quantisation add 3 % to half a byte a weight; the layers that a checkpoint
    keeps in 16 bit, as Unsloth's do, four times their size. The small matrices of the gates are quantised too,
    convolutions are not."""
    config, size = weigh_in_4_bit(make_model(kind, hidden_size=256, tie_word_embeddings=False), tmp_path, kept)
    work = work_of(shape_of_config(config))
    assert work.shape.is_quantised and work.shape.kept == tuple(kept)
    assert parts.body_bytes(work) + parts.table_bytes(work) == size


@pytest.mark.parametrize(("kind", "names"), [("smollm3", ALL), ("qwen3_5", ALL_DELTA), ("qwen3_5", ALL)])
def test_the_adapter_is_that_of_peft(kind: str, names: tuple[str, ...]) -> None:
    """The seven projections reach no delta net; without a list every linear layer of the blocks is adapted."""
    from peft import LoraConfig, get_peft_model

    targets = list(names) if names == ALL else "all-linear"
    model = get_peft_model(make_model(kind), LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = shape_of_config(model.config.to_dict())
    assert parts.trained_weights(work_of(shape, lora_rank=4, lora_targets=names)) == trained
    assert parts.trained_weights(work_of(shape, lora_rank=None)) == shape.num_weights


def test_without_a_list_every_linear_layer_is_adapted(tmp_path: Path) -> None:
    """`target_modules: null` (all linear layers of the blocks) is planned from the shape, a list as written."""
    make_model("qwen3_5").config.save_pretrained(tmp_path)
    run = load_config(CONFIGS / "qwen3_4b_thinking_12gb.yaml", model={"name": str(tmp_path), "load_in_4bit": False})
    vars(run.model.lora)["target_modules"] = None
    assert sorted(read_workload(run, find_machine(12)).lora_targets) == sorted(ALL_DELTA)
    vars(run.model.lora)["target_modules"] = ["in_proj_z"]
    assert read_workload(run, find_machine(12)).lora_targets == ("in_proj_z",)


def count_saved_bytes(layers: int, kind: str, half: bool, heads: dict[str, int]) -> float:
    """Bytes per token that a padded pass of the backbone saves for its backward pass, parameters apart."""
    import torch
    from peft import LoraConfig, get_peft_model

    kinds = ["full_attention"] + [kind] * (layers - 1)
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers, "layer_types": kinds}
    model = make_model("qwen3_5", **wide | {"head_dim": 64} | heads).to(torch.bfloat16 if half else torch.float32)
    model = get_peft_model(model.train(), LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
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


@pytest.mark.parametrize(("kind", "key_heads", "dim", "half"), [(0, 2, 64, True), (1, 4, 64, False), (1, 2, 128, True)])
def test_what_a_layer_saves_is_not_above_the_plan(kind: int, key_heads: int, dim: int, half: bool) -> None:
    """transformers' own delta net saves three times what an attention layer does: counted as attention, a pass that
    "fits" runs out of memory. The plan is on the high side, by at most a fifth."""
    heads = {"linear_num_key_heads": key_heads, "linear_key_head_dim": dim, "linear_value_head_dim": dim}
    name = ("full_attention", "linear_attention")[kind]
    saved = count_saved_bytes(2, name, half, heads) - count_saved_bytes(1, name, half, heads)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    shape = shape_of_config(make_model("qwen3_5", **sizes | heads).config.to_dict())
    width = 2 if half else 4
    work = work_of(shape, weight_bytes=width, compute_bytes=width, lora_targets=ALL_DELTA)
    assert 0.99 * saved < parts.saved_bytes_per_token(work, kind) < 1.2 * saved


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
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
        ("unsloth/DeepSeek-R1-Distill-Qwen-7B-unsloth-bnb-4bit", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8_030_261_248),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", 8_190_735_360),
    ],
)
def test_known_names_have_the_published_number_of_weights(name: str, weights: int) -> None:
    """Counts of the text models, from their checkpoints; a wrong width, head or tied table changes them."""
    found = find_shape(load_config(CONFIGS / "qwen3_4b_thinking_12gb.yaml", model={"name": name}))
    assert found.num_weights == weights and found.is_quantised == name.endswith("4bit")


def test_a_state_per_row_is_named_apart_from_the_cache() -> None:
    """Such layers are not in the native engine's cache."""
    words = {"name": "Qwen/Qwen3.5-4B", "backend": "transformers"}
    plan = plan_vram(load_config(CONFIGS / "qwen3_4b_thinking_24gb.yaml", model=words), 24)
    assert "tokens x 32 KiB + 49.5 MiB)" in " ".join(str(plan.parts).split()) and plan.engine.name == "generate"


def test_numbers_that_are_held_twice_agree() -> None:
    """The arithmetic may not import torch, so it holds some numbers of modules that do."""
    from rloo_kit.data import light_tokenizer as tokenizer
    from rloo_kit.demo import cold_start

    assert EMBEDDED_ROWS == tokenizer.ROWS
    for plan in cold_start.PLANS.values():
        config = cold_start.model_config(plan, tokenizer.ROWS["compact"]).to_dict()
        assert replace(shape_of_config(config), source=EMBEDDED.source) == EMBEDDED
