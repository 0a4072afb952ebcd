"""Classes for which Unsloth has no forward of its own: it loads them through its FastModel, with transformers' code."""

from pathlib import Path
from typing import Any

import pytest

from tests.with_unsloth.test_packed_rows import scores_and_gradients

SIZES = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "eos_token_id": 258, "pad_token_id": 256, "bos_token_id": None,
}  # fmt: skip
# Layers that carry a state along the row, which packed rows would pass from one sequence to the next.
CLASSES = {
    "Qwen3_5TextConfig": {
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_without_unsloths_forward(
    name: str, load: Any, tiny_tokenizer: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Padded rows equal single sequences, what is sampled is what is scored; names were printed letter by letter."""
    import torch
    import transformers

    from rloo_kit.errors import BackendError
    from rloo_kit.gradient.packing import Group
    from rloo_kit.gradient.scorer import Scorer
    from rloo_kit.models.backends import packed_keywords
    from rloo_kit.rollout.choice import build_engine, resolve_engine
    from rloo_kit.rollout.completions import find_end_ids
    from rloo_kit.rollout.types import Limits

    for module in ("loader", "vision"):  # without bfloat16 it loads Qwen3.5 in float16, though float32 is asked
        monkeypatch.setattr(f"unsloth.models.{module}.is_bfloat16_supported", lambda: True)
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES, **CLASSES[name])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    policy = load(model=tmp_path, moved=True)
    assert "differently" not in capsys.readouterr().out
    assert packed_keywords(policy.model.get_base_model()) is None
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (length,), generator=draw) for length in (4, 1, 2)]
    engine = build_engine(
        policy.model, "auto", backend=policy.backend, temperature=1.0, end_ids=find_end_ids(policy), pad_id=256
    )
    assert engine.name == "generate" and "layers that do not attend to all tokens" in engine.reason
    with pytest.raises(BackendError, match="rollout.engine is native, but .* rollout.engine=generate"):
        resolve_engine("native", policy.backend, policy.model)
    found = engine.sample([prompt.tolist() for prompt in prompts], Limits(9))
    groups = [Group(one, [torch.tensor(ids)]) for one, ids in zip(prompts, found.completion_ids, strict=True)]
    policy.model.train()
    assert Scorer(policy.model, 1.0, pad_id=256).layouts == ("padded",)
    expected, wanted = scores_and_gradients(policy, [[group] for group in groups], "padded")
    logps, gradients = scores_and_gradients(policy, [groups], "padded")
    sampled = torch.tensor([logp for row in found.sampler_logps for logp in row])
    assert (logps - sampled).abs().max() < 1e-4 and (logps - expected).abs().max() < 1e-5
    size = torch.cat([value.flatten() for value in wanted.values()]).norm()
    assert torch.cat([(gradients[name] - value).flatten() for name, value in wanted.items()]).norm() < 1e-5 * size


def test_the_text_model_of_a_multimodal_checkpoint(load: Any, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: Any):
    """Qwen3.5 is published with a vision tower, which FastLanguageModel loads too, and adapters reached it. To continue
    one ended in an AttributeError: Unsloth's function for that knows the classes with a forward of its own."""
    import torch

    from rloo_kit.models.policy import save_adapter
    from tests.models.zoo import save_multimodal

    for module in ("loader", "vision"):
        monkeypatch.setattr(f"unsloth.models.{module}.is_bfloat16_supported", lambda: True)
    whole = save_multimodal(SIZES | CLASSES["Qwen3_5TextConfig"], tiny_tokenizer, tmp_path)
    policy = load(model=tmp_path)
    assert policy.describe().startswith("Qwen3_5ForCausalLM") and "no adapter on" not in policy.describe()
    assert not [name for name, _ in policy.model.named_modules() if "visual" in name]
    ids = torch.tensor([[5, 6, 7, 8]])
    with policy.inference_mode():
        assert (policy.model(ids).logits - whole(ids).logits).abs().max() < 1e-5
    save_adapter(policy, tmp_path / "adapter")
    assert load(f"model.adapter={tmp_path / 'adapter'}", model=tmp_path).model.peft_config
