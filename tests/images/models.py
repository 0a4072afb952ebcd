"""Tiny random checkpoints of the vision models that the kit reads, in their own classes, and images of noise."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.conftest import make_tiny_tokenizer

KINDS = {"qwen3_vl": "Qwen3VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_5": "Qwen3_5", "gemma3": "Gemma3"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
GEMMA = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
TEXT = {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_hidden_layers": 2, "eos_token_id": 258, "pad_token_id": 256, "bos_token_id": None,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TOWER = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
DELTA = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({"rope_parameters": ROPE}, {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}),
    "qwen2_5_vl": ({"rope_parameters": ROPE}, {"window_size": 32, "fullatt_block_indexes": [1]}),
    "qwen3_5": (
        DELTA | {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        {"num_position_embeddings": 64},
    ),
    "gemma3": ({"sliding_window": 64, "query_pre_attn_scalar": 16}, {}),
}  # fmt: skip


def make(kind: str, folder: Path) -> Path:
    """The folder of a checkpoint, with its tokenizer and image processor."""
    is_gemma = kind == "gemma3"
    tokenizer, named = make_tiny_tokenizer(), GEMMA if is_gemma else QWEN
    tokenizer.add_tokens(named, special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("PLACE", named[1] if is_gemma else "".join(named[i] for i in (2, 0, 3)))
    keys = ["image_token_id", "boi_token_index", "eoi_token_index"]
    keys = keys if is_gemma else ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
    ids: dict[str, Any] = dict(zip(keys, tokenizer.convert_tokens_to_ids(named), strict=True))
    text, tower = SIZES[kind]
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, size={"shortest_edge": 256, "longest_edge": 4096}
    )
    if is_gemma:
        tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        tower |= {"image_size": 32, "patch_size": 8, "vision_use_head": False}
        ids |= {"mm_tokens_per_image": 4}
        processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, do_pan_and_scan=False)
    else:
        tower = TOWER | tower
    config = getattr(transformers, f"{KINDS[kind]}Config")(
        text_config=TEXT | text, vision_config=tower, tie_word_embeddings=True, **ids
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{KINDS[kind]}ForConditionalGeneration")(config)
        for value in model.parameters():
            if value.dim() > 1:
                torch.nn.init.normal_(value, std=0.1)
    model.generation_config.update(eos_token_id=258, pad_token_id=256)
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return folder


def noise(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    """An image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


class Processor(Qwen3VLProcessor):
    """transformers' processor, without its video half, which torchvision is needed for."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


def make_processor(folder: Path) -> Any:
    """The processor of a checkpoint of Qwen3-VL."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return Processor(images, tokenizer, None, chat_template=tokenizer.chat_template)
