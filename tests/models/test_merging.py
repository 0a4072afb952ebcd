"""Why vLLM gets the adapter and never a merged base: what merging and unmerging do to a 4-bit base."""

from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

SYNCS = 26  # an optimizer step each


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_each_sync_by_merging_requantises_a_4bit_base(tmp_path):
    """TRL's vLLM path merges the adapter into the base and unmerges it at each step. In 4 bits hardly anything of the
    adapter reaches the sampler, and the policy that is trained becomes another one, without a word."""
    from bitsandbytes.functional import dequantize_4bit

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four_bit, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(std=0.01)

    def weights() -> torch.Tensor:
        held = layer.base_layer.weight
        return dequantize_4bit(held.data, held.quant_state).float().clone()

    start, delta = weights(), layer.get_delta_weight("default").detach()
    model.merge_adapter()
    lost = float((weights() - start - delta).norm() / delta.norm())
    model.unmerge_adapter()
    for _ in range(SYNCS - 1):
        model.merge_adapter()
        model.unmerge_adapter()
    moved = float((weights() - start).norm() / start.norm())
    print(f"the merged delta is off by {lost:.2f} of itself; {SYNCS} syncs move the base by {moved:.2f} of its norm")
    assert lost > 0.5 and moved > 0.2
