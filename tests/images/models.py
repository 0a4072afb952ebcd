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

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# fmt: off
QWEN = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
QWEN |= {f"vision_{side}_token_id": f"<|vision_{side}|>" for side in ("start", "end")}
GEMMA = {"image_token_id": "<image_soft_token>"}
GEMMA |= {f"{one}oi_token_index": f"<{side}_of_image>" for one, side in (("b", "start"), ("e", "end"))}
TEXT = {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_hidden_layers": 2, "eos_token_id": 258, "pad_token_id": 256, "bos_token_id": None,
    "initializer_range": 0.1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
DELTA = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
TOWER = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "initializer_range": 0.1,
}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # by type: class, sizes of its text and its tower
    "qwen3_vl": ("Qwen3VL", {}, {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}),
    "qwen2_5_vl": ("Qwen2_5_VL", {}, {"window_size": 32, "fullatt_block_indexes": [1]}),
    "qwen3_5": ("Qwen3_5", DELTA | {"linear_value_head_dim": 8}, {"num_position_embeddings": 64}),
    "gemma3": ("Gemma3", {"sliding_window": 64, "query_pre_attn_scalar": 16}, {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 8, "vision_use_head": False,
    }),
}
# fmt: on


def make(kind: str, folder: Path) -> Path:
    """The folder of a checkpoint, with its tokenizer and image processor."""
    (name, text, tower), named, tokenizer = KINDS[kind], QWEN, make_tiny_tokenizer()
    place, more = "<|vision_start|><|image_pad|><|vision_end|>", {}
    processor: Any = Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096})
    if kind == "gemma3":
        named, place, more = GEMMA, "<start_of_image>", {"mm_tokens_per_image": 4}
        processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, do_pan_and_scan=False)
    else:
        text, tower = text | {"rope_parameters": ROPE}, TOWER | tower
    tokenizer.add_tokens(list(named.values()), special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("PLACE", place)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in named.items()}
    sizes = {"text_config": TEXT | text, "vision_config": tower, "tie_word_embeddings": True} | ids | more
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(getattr(transformers, f"{name}Config")(**sizes))
    if kind == "gemma3":
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)  # zeros
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return folder


def noise(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


class Processor(Qwen3VLProcessor):
    """transformers' processor, without its video half, which torchvision is needed for."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


def make_processor(folder: Path) -> Any:
    """The processor of a checkpoint of Qwen3-VL."""
    images, tokenizer = (one.from_pretrained(folder) for one in (Qwen2VLImageProcessorPil, transformers.AutoTokenizer))
    return Processor(images, tokenizer, None, chat_template=tokenizer.chat_template)
