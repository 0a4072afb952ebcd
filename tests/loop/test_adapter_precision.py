"""Adapters keep float32 master weights: a learning rate of 1e-6 moves them, and does not move stock TRL's."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.loop.test_equality_with_stock import _lora, _make, _torch_head, reward_by_length

RATE = 1e-6  # TRL's default


@pytest.mark.parametrize(("dtype", "moves"), [(torch.bfloat16, False), (torch.float32, True)], ids=["bf16", "float32"])
def test_adam_moves_a_lora_layer_at_trls_learning_rate(dtype: torch.dtype, moves: bool) -> None:
    """Between 0.0625 and 0.125 bf16 has steps of 2^-11, which is 488 times the learning rate: the sum rounds back to
    where it was, a hundred steps long, while the loss is printed and the run looks alive."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(16, 16)), LoraConfig(r=4, target_modules=["0"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = torch.empty_like(parameter).uniform_(0.0625, 0.125).to(dtype)
    before = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    for _ in range(100):
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [not torch.equal(parameter, old) for parameter, old in zip(trained, before, strict=True)]
    assert moved == [moves] * len(trained)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_4bit_policy_moves_in_our_trainer_and_not_in_trls(
    monkeypatch: Any, make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Any
) -> None:
    """TRL casts the adapter of a quantised model to bf16 (rloo_trainer.py, "When using QLoRA"). Two real steps of both
    trainers on one 4-bit model: what TRL trains is where it was, but for values next to zero."""
    import trl
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl.trainer import utils

    from rloo_kit.loop.options import RLOOConfig
    from rloo_kit.loop.trainer import RLOOTrainer

    class StandIn:
        apply = staticmethod(_torch_head)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", StandIn)
    make_tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "model")
    options = {"lr_scheduler_type": "constant", "max_steps": 2, "weight_decay": 0.0, "beta": 0.0, "learning_rate": RATE}
    shares = {}
    for trainer_class, config_class in ((trl.RLOOTrainer, trl.RLOOConfig), (RLOOTrainer, RLOOConfig)):
        quantised = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model",
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            dtype=torch.float32,
        )
        model = _lora(prepare_model_for_kbit_training(quantised, use_gradient_checkpointing=False))
        folder = tmp_path / trainer_class.__module__
        trainer = _make(trainer_class, config_class, model, tiny_tokenizer, folder, [reward_by_length], **options)
        trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad and ".ref." not in n}
        before = {name: parameter.detach().clone() for name, parameter in trained.items()}
        trainer.train()
        moved = sum((parameter != before[name]).sum().item() for name, parameter in trained.items())
        dtypes = {parameter.dtype for parameter in trained.values()}
        shares[trainer_class.__module__] = (moved / sum(p.numel() for p in trained.values()), dtypes)
    (stock, stock_dtypes), (ours, our_dtypes) = shares.values()
    assert stock_dtypes == {torch.bfloat16} and our_dtypes == {torch.float32}
    assert stock < 0.02 and ours > 0.98, (stock, ours)
