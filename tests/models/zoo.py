"""Tiny random models of thirty classes of transformers, as checkpoints that the kit loads.

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
LATENT = {  # attention with compressed keys
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MAMBA2 = {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
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
    "GraniteMoeHybrid": {
        **MAMBA2, "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_expand": 2,
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
    },  # fmt: skip
    "Bamba": {**MAMBA2, "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_expand": 2},
    "FalconH1": {**MAMBA2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "tie_word_embeddings": False},
    "NemotronH": {
        "hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 1, "chunk_size": 16, "attention_head_dim": 16,
    },  # fmt: skip
    "Jamba": {
        "num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 8, "use_mamba_kernels": False,
    },  # fmt: skip
    "Qwen3Next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 48},
    "Qwen3_5Moe": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 48},
    "OlmoHybrid": {},
    "KimiLinear": {
        **LATENT, **LOCAL_EXPERTS, "moe_intermediate_size": 48, "layer_types": ALTERNATE, "linear_num_heads": 4,
        "linear_head_dim": 16,
    },  # fmt: skip
    "Mistral": WINDOW,
    "Phi": {"num_key_value_heads": 4},
    "Gemma2": WINDOW,
    "Olmo3": WINDOW,
    "Glm4": {},
    "DeepseekV3": {
        **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "q_lora_rank": 16,
        "first_k_dense_replace": 1,
    },  # fmt: skip
    "HunYuanDenseV1": {},
    "SeedOss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "Exaone4": WINDOW,
    "Granite": {},
}  # fmt: skip
IN_CI = list(ZOO)[:10]
MULTIMODAL = ("Gemma3", "Qwen3_5", "Qwen3_5Moe")  # the text model of their checkpoints
# Layers that are not full attention, and so never packed.
OTHER_LAYERS = {
    "Gemma3": "sliding_attention", "Qwen3_5": "linear_attention", "Lfm2": "conv", "GptOss": "sliding_attention",
    "MiniMax": "linear_attention", "GraniteMoeHybrid": "linear_attention", "Bamba": "linear_attention",
    "FalconH1": "hybrid", "NemotronH": "linear_attention", "Jamba": "linear_attention",
    "Qwen3Next": "linear_attention", "Qwen3_5Moe": "linear_attention", "OlmoHybrid": "linear_attention",
    "KimiLinear": "linear_attention", "Gemma2": "sliding_attention", "Olmo3": "sliding_attention",
    "Exaone4": "sliding_attention",
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
