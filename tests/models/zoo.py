"""Tiny random models of a dozen classes of transformers, as checkpoints that the kit loads.

All have 264 rows, as the tests' byte-level tokenizer, and weights large enough that a leak between sequences shows.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

BASE: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": 258, "pad_token_id": 256, "initializer_range": 0.15, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
ALTERNATE = ["linear_attention", "full_attention"] * 2
WINDOW = {"sliding_window": 8}

# Class: the options of its configuration that differ from BASE.
ZOO: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Llama": {},
    "SmolLM3": {"no_rope_layer_interval": 4},
    "Phi3": {"sliding_window": None},
    "Gemma3": WINDOW,
    "Qwen3_5": DELTA,
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "GptOss": {**LOCAL_EXPERTS, **WINDOW},
    "MiniMax": {**LOCAL_EXPERTS, "layer_types": ALTERNATE, "block_size": 16},
    "Gemma2": WINDOW,
}  # fmt: skip
MULTIMODAL = ("Gemma3", "Qwen3_5")  # the text model of their checkpoints
# Layers that are not full attention, and so never packed.
OTHER_LAYERS = {
    "Gemma3": "sliding_attention", "Qwen3_5": "linear_attention", "Lfm2": "conv", "GptOss": "sliding_attention",
    "MiniMax": "linear_attention",
}  # fmt: skip


def make_model(kind: str, **config: Any) -> Any:
    """A random model of a class in ZOO, in float32, the same at each call; keywords change its configuration."""
    text = "Text" if kind in MULTIMODAL else ""
    settings = getattr(transformers, f"{kind}{text}Config")(**BASE | ZOO[kind] | config)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(settings).eval()


def save_model(kind: str, tokenizer: Any, folder: Path) -> Path:
    """The model with a tokenizer as a checkpoint."""
    make_model(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_multimodal(text: dict[str, Any], tokenizer: Any, folder: Path) -> Any:
    """A Qwen3.5 with a vision tower as a checkpoint; returns the whole model."""
    sight = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    sight |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=sight, tie_word_embeddings=True)
    torch.manual_seed(0)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return whole
