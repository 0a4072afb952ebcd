"""`models/unsloth.py` and the kit's trainer on top of the RLOO trainer that Unsloth writes, without a GPU."""

from pathlib import Path
from typing import Any

import pytest

from tests.with_unsloth.programs import numbers

THINK_END = 260


def test_load_gives_unsloths_model_with_one_adapter(load: Any) -> None:
    """Loaded through transformers by mistake, all else works and the GPU is half as fast, unnoticed."""
    policy = load()
    model = policy.model
    assert type(model.get_base_model().model).forward.__module__.startswith("unsloth.")
    assert model._unsloth_gradient_checkpointing is True  # below 512 tokens Unsloth takes its own plain form
    assert policy.config_arguments == {"gradient_checkpointing": False}
    settings = model.peft_config["default"]
    assert list(model.peft_config) == ["default"] and (settings.r, settings.lora_alpha) == (16, 16)
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * 7 and all("lora_" in name for name in trained)
    assert policy.tags.end_id == THINK_END and policy.family == "thinking"
    assert policy.tokenizer.padding_side == "left" and policy.tokenizer.pad_token_id == 256
    assert "backend unsloth" in policy.describe()


def test_both_backends_compute_the_same(load: Any, reference: Any, tmp_path: Path) -> None:
    """Unsloth's training forward drops the mask of left-padded rows: hidden states were off by half their scale."""
    policy = load(moved=True)
    expected = reference(save(policy, tmp_path))
    found = numbers(policy)
    assert found["greedy"] == expected["greedy"] and any(found["greedy"])
    compare(found, expected, atol=2e-5, gradient_rtol=1e-4)


@pytest.mark.long
def test_fused_kernels_on_the_embedded_models_sizes(
    load: Any, reference: Any, embedded_folder: Path, tmp_path: Path
) -> None:
    """In 16 bits Unsloth fuses LoRA into its kernels, which take some sizes only; `make demo` on a GPU needs these."""
    import torch

    policy = load("model.dtype=float16", model=embedded_folder, moved=True)
    layer = policy.model.get_base_model().model.layers[0]
    assert (
        layer.mlp.forward.__name__ == "apply_lora_mlp_swiglu" and layer.self_attn.apply_qkv.__name__ == "apply_lora_qkv"
    )
    assert {value.dtype for value in policy.model.parameters() if value.requires_grad} == {torch.float32}
    expected = reference(save(policy, tmp_path), model=embedded_folder)
    compare(numbers(policy), expected, atol=0.02, gradient_rtol=0.02)


def save(policy: Any, folder: Path) -> Path:
    from rloo_kit import save_adapter

    return save_adapter(policy, folder / "adapter")


def compare(found: dict[str, Any], expected: dict[str, Any], atol: float, gradient_rtol: float) -> None:
    """`atol` in the unit of each quantity, all of order 1; gradients relative to the largest entry of their matrix."""
    assert found.keys() == expected.keys() and found["gradients"].keys() == expected["gradients"].keys()
    for key in found.keys() - {"greedy", "gradients"}:
        difference = (found[key].float() - expected[key]).abs().max()
        assert difference < atol, f"{key}: off by {difference:.2g}"
    for name, gradient in found["gradients"].items():
        difference = (gradient - expected["gradients"][name]).abs().max() / expected["gradients"][name].abs().max()
        assert difference < gradient_rtol, f"{name}: off by {difference:.2g}"


def test_inference_mode_gives_training_back(load: Any) -> None:
    """Unsloth's checkpointing has to be on again; its training mode also turned the tokenizer to the right."""
    import torch

    policy = load()
    policy.model.for_training(use_gradient_checkpointing=True)
    assert policy.tokenizer.padding_side == "left"
    with policy.inference_mode():
        assert not policy.model.training and not torch.is_grad_enabled()
    assert policy.model.training and torch.is_grad_enabled() and policy.tokenizer.padding_side == "left"
    assert policy.model.get_base_model().model.gradient_checkpointing
