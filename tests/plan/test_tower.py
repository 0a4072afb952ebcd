"""The vision tower in the plan: its weights, the tokens of an image, and what images add."""

import re
from pathlib import Path

import pytest

from rloo_kit import load_config, plan_vram
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan import parts
from rloo_kit.plan.planner import find_machine, plan_engine, read_workload
from rloo_kit.plan.shapes import NAMED, shape_of_config
from rloo_kit.plan.tower import TOWERS
from tests.plan.test_shapes import SIZES

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "configs/qwen3_vl_4b_thinking.yaml"
WIDE = {"hidden_size": 48, "intermediate_size": 80, "patch_size": 16}
QWEN = {"depth": 4, "num_heads": 4, "out_hidden_size": 64, "num_position_embeddings": 36} | WIDE
CASES = {
    "Qwen3VL": QWEN | {"deepstack_visual_indexes": [0, 2]},
    "Qwen2_5_VL": QWEN,
    "Qwen2VL": {"depth": 4, "num_heads": 4, "embed_dim": 48, "hidden_size": 64},
    "Qwen3_5": QWEN,
    "Gemma3": WIDE | {"num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 256, "vision_use_head": False},
}


def of_images(size: str, *words: str) -> RunConfig:
    return load_config(IMAGES, f"model.name=Qwen/Qwen3-VL-{size}-Thinking", *words)


@pytest.mark.parametrize("kind", CASES)
def test_weights_are_those_of_the_model(kind: str) -> None:
    """A merger, a bias or the embedding of positions that is left out is a GiB of a large model."""
    import torch
    import transformers

    text, vision = SIZES | {"head_dim": 16}, CASES[kind]
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, tie_word_embeddings=True)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    shape = shape_of_config(model.config.to_dict())
    of_tower = sum(p.numel() for name, p in model.named_parameters() if "language_model" not in name)
    assert shape.tower is not None and shape.tower.num_weights == of_tower
    assert kind == "Qwen3_5" or shape.num_weights + of_tower == model.num_parameters(), "that one is planned from above"


def test_known_models_have_the_published_number_of_weights() -> None:
    """Without a download the plan has only its own table."""
    found = [NAMED[name].num_weights + TOWERS[name].num_weights for name in list(TOWERS)[:3]]
    assert found == [2_127_532_032, 4_437_815_808, 8_767_123_696]


def test_an_image_has_the_tokens_of_its_processor() -> None:
    """Fewer in the plan than in a prompt is memory that is not there."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    count = Qwen2VLImageProcessorPil().get_number_of_image_patches
    for pixels in (1024, 65536, 262_144):
        limits = {"min_pixels": 1024, "max_pixels": pixels, "patch_size": 16}
        assert count(4096, 3000, limits) <= count(4096, 4096, limits) == 4 * TOWERS["qwen3-vl-4b"].image_tokens(pixels)


def test_pixels_change_the_pass_of_the_tower_alone() -> None:
    """The cache and the training pass have prompts of data.max_prompt_length, whatever is in them."""
    small, large, more = (plan_vram(of_images("4B", f"data.max_pixels={n}"), 14.9) for n in (65536, 262144, 10**7))
    changed = {one.name for one, other in zip(small.parts, large.parts, strict=True) if one != other}
    assert changed == {"images"} and small.rows == large.rows  # a longer image than a prompt is left out
    assert small.rollout_gib < large.rollout_gib < more.rollout_gib < large.rollout_gib + 0.1, (
        "longer ones are left out"
    )


def test_a_tower_counts_only_if_it_is_loaded() -> None:
    """A text run of Qwen3.5 would lose half a GiB to a tower that stays on the disk."""
    plain, loaded = (load_config(IMAGES, "model.name=Qwen/Qwen3.5-4B", f"model.vision={on}") for on in ("null", "true"))
    names = [{part.name for part in plan_vram(run, 14.9).parts} for run in (plain, loaded)]
    assert names[1] - names[0] == {"weights: tower", "image features", "images"}
    with pytest.raises(ConfigError, match="hf download Qwen/Qwen3-4B config.json"):
        plan_vram(load_config(IMAGES, "model.name=Qwen/Qwen3-4B", "model.vision=true"), 14.9)
    assert plan_engine(of_images("4B", "rollout.engine=auto"), find_machine(24)).name == "generate"
    plan = plan_vram(of_images("4B", "rollout.engine=vllm"), 24)  # in 4 bits, by Unsloth
    assert not plan.fits and plan.vllm is not None and "rollout.engine=generate" in str(plan.vllm.obstacle)
    tried = ["model.load_in_4bit=false", "model.backend=transformers", "rollout.engine=vllm"]
    plan = plan_vram(of_images("4B", *tried), 80)
    assert plan.fits and plan.vllm is not None and plan.vllm.obstacle is None
    own = {one.name: one.rollout_gib for one in plan.parts}
    assert own["vLLM: weights"] == pytest.approx(sum(own[f"weights: {one}"] for one in ("layers", "tables", "tower")))


def test_an_adapter_of_the_tower_costs_what_it_saves() -> None:
    """Trained, the tower keeps the activations of every image of a pass."""
    frozen, trained = (
        read_workload(of_images("4B", f"model.lora.vision={on}"), find_machine(24)) for on in ("false", "true")
    )
    assert (tower := trained.shape.tower) is not None
    weights = sum(16 * (rows + columns) * count for rows, columns, count in tower.matrices)
    assert parts.trained_weights(trained) - parts.trained_weights(frozen) == weights
    assert parts.image_bytes(tower, trained) < parts.tower_activation_bytes(tower, trained)


def test_the_page_has_the_rows_of_each_size() -> None:
    """Its table is typed in by hand."""
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    for size, cells in re.findall(r"^\| VL-(\dB) \| (.+) \|$", page, re.MULTILINE):
        plans = [plan_vram(of_images(size), gb * 1e9 / 2**30) for gb in (8, 12, 16, 24)]
        found = [f"{one.rows}: {one.rollout_gib:.1f}, {one.training_gib:.1f}" if one.fits else "-" for one in plans]
        assert cells.split(" | ") == found, size
