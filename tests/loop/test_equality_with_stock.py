"""Our loop against stock TRL, on the same prompts, completions and rewards: advantages, loss and LoRA gradients.

Stock TRL scores through a Triton kernel that needs an accelerator. Inside these tests it gets a pure-torch stand-in
for that kernel and nothing else; its trainer, its padding and its loss are its own.
"""

from importlib.util import find_spec

import pytest
import torch
from datasets import Dataset

from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.trainer import RLOOTrainer

RELATIVE = 1e-5
COMPLETIONS = [
    [72, 260, 70, 258], [72, 73, 74, 75, 76, 77], [260, 258], [65, 66, 67, 260, 68, 258],
    [90, 258], [91, 92, 93], [94, 95, 96, 97, 98, 258], [99, 260, 258],
]  # fmt: skip


def _torch_head(hidden, weight, bias, labels, temperature, _chunk, _softcap, scale, outputs):
    """The contract of TRL's fused head in plain torch: log-probabilities, and the entropy without a gradient."""
    logits = (torch.nn.functional.linear(hidden, weight, bias) * scale / temperature).float()
    logps = logits.log_softmax(dim=-1)
    entropy = -(logps.exp() * logps).sum(dim=-1).detach() if "entropy" in outputs else None
    return logps.gather(1, labels[:, None]).squeeze(1), entropy, None, None, None


@pytest.fixture
def stock_head(monkeypatch):
    from trl.trainer import utils

    class StandIn:
        apply = staticmethod(_torch_head)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", StandIn)


def reward_by_length(completions, completion_ids, **_):
    """Anything that differs from completion to completion."""
    return [len(ids) / 3 - 0.7 * ids[0] / 90 for ids in completion_ids]


def reward_sometimes(completion_ids, **_):
    """None where the first id is odd: the term is dropped there."""
    return [None if ids[0] % 2 else 0.25 for ids in completion_ids]


def reward_unless_72(completion_ids, **_):
    """None for two of the first group's completions, which are then not scored at all."""
    return [None if ids[0] == 72 else float(len(ids)) for ids in completion_ids]


def _make(trainer_class, config_class, model, tokenizer, folder, rewards, **options):
    prompts = ["What is 1+1?", "Hi", "A much longer prompt than the others", "x"]
    config = config_class(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, shuffle_dataset=False,
        max_completion_length=6, per_device_train_batch_size=8, num_generations=4,
        **{"gradient_checkpointing": False, "learning_rate": 1e-2} | options,
    )  # fmt: skip
    trainer = trainer_class(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    trainer._generate_single_turn = lambda prompt_ids, *_: [list(ids) for ids in COMPLETIONS[: len(prompt_ids)]]
    return trainer


def _lora(model, trained=True):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    if trained:  # B is zero in a fresh adapter: KL and most gradients would be zero too
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return wrapped


def _batch_loss_gradients(trainer, drift=None):
    inputs = [{"prompt": trainer.train_dataset[row]["prompt"]} for row in (0, 2) for _ in range(4)]
    trainer.model.train()
    batch = trainer._generate_and_score_completions(inputs)
    if drift:
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B.default" in name:
                    parameter.add_(drift * torch.sin(torch.arange(parameter.numel()).view_as(parameter) * 1.7))
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None and ".ref." not in name
    }
    return batch["advantages"], loss.detach(), gradients


def _relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


CASES = {
    "plain": ([reward_by_length], {}),
    "no KL": ([reward_by_length], {"beta": 0.0}),
    "weights and None": ([reward_by_length, reward_sometimes], {"reward_weights": [0.5, 2.0]}),
    "unscored samples": ([reward_unless_72], {}),
    "clipped rewards": ([reward_by_length], {"reward_clip_range": (-0.2, 0.6)}),
    "normalised advantages": ([reward_by_length], {"normalize_advantages": True}),
    "truncated masked": ([reward_by_length], {"mask_truncated_completions": True}),
    "temperature": ([reward_by_length], {"temperature": 0.7}),
    "off-policy": ([reward_by_length], {"num_iterations": 2, "epsilon": 0.05, "epsilon_high": 0.1}),
}


def without_masked(stock_loss, advantages):
    """TRL's loss without its terms of masked completions. One without a token has a ratio of 1 at any weights, so TRL
    adds minus its advantage: a number without a gradient. Here, left out of the loss, its term is 0."""
    masked = torch.tensor([ids[-1] not in (256, 258) for ids in COMPLETIONS])
    assert masked.sum() == 2 and advantages[masked].sum().abs() > 0.05, "else the two losses are equal"
    return stock_loss + advantages[masked].sum() / len(COMPLETIONS)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_stock_trl(case, stock_head, make_tiny_model, tiny_tokenizer, tmp_path):
    """A subclass that drifts from what it stands in for would train something else under the same name."""
    import trl

    rewards, options = CASES[case]
    results = []
    for trainer_class, config_class in ((trl.RLOOTrainer, trl.RLOOConfig), (RLOOTrainer, RLOOConfig)):
        model = _lora(make_tiny_model())
        trainer = _make(trainer_class, config_class, model, tiny_tokenizer, tmp_path, list(rewards), **options)
        # the adapter is not fresh, so both take its starting copy as the reference; move the policy away from it
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_A.default" in name:
                    parameter.mul_(1.5)
        results.append(_batch_loss_gradients(trainer, drift=0.2 if case == "off-policy" else None))
    (stock_advantages, stock_loss, stock_gradients), (advantages, loss, gradients) = results
    assert stock_advantages.abs().max() > 0.05, "the case carries no signal"
    assert _relative(advantages, stock_advantages) < RELATIVE
    if case == "truncated masked":
        stock_loss = without_masked(stock_loss, stock_advantages)
    assert abs(loss - stock_loss) <= RELATIVE * max(1.0, abs(stock_loss))
    assert gradients.keys() == stock_gradients.keys()
    assert gradients
    together = [torch.cat([grads[name].flatten() for name in sorted(grads)]) for grads in (gradients, stock_gradients)]
    assert together[1].norm() > 1e-3, "the case has no gradient"
    assert _relative(*together) < RELATIVE


def test_fresh_adapter_needs_no_copy_as_reference(stock_head, make_tiny_model, tiny_tokenizer, tmp_path):
    """TRL copies every adapter as "ref"; for an untrained one the base model is the same reference, and free."""
    import trl

    results = []
    for trainer_class, config_class in ((trl.RLOOTrainer, trl.RLOOConfig), (RLOOTrainer, RLOOConfig)):
        model = _lora(make_tiny_model(), trained=False)
        trainer = _make(trainer_class, config_class, model, tiny_tokenizer, tmp_path, [reward_by_length], beta=0.3)
        results.append((_batch_loss_gradients(trainer), set(trainer.model.peft_config)))
    (stock, stock_adapters), (ours, our_adapters) = results
    assert stock_adapters == {"default", "ref"}
    assert our_adapters == {"default"}
    assert _relative(ours[0], stock[0]) < RELATIVE


def test_on_policy_ratio_is_exactly_one(make_tiny_model, tiny_tokenizer, tmp_path):
    """Phantom clipping: two passes over one policy differ by rounding; summed over a thought it leaves the range."""
    trainer = _make(RLOOTrainer, RLOOConfig, _lora(make_tiny_model()), tiny_tokenizer, tmp_path, [reward_by_length])
    advantages, loss, _ = _batch_loss_gradients(trainer)
    metrics = trainer._metrics["train"]
    assert metrics["val/ratio"] == [1.0]
    assert metrics["val/ratio_var"] == [0.0]
    assert metrics["clip_ratio/region_mean"] == [0.0]
    assert loss.item() == pytest.approx(-advantages.mean().item(), abs=1e-6)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_4bit_policy_moves_in_our_trainer_and_not_in_trls(stock_head, make_tiny_model, tiny_tokenizer, tmp_path):
    """TRL casts the adapter of a quantised model to bf16, where 0.01 + 1e-6 is 0.01: its default
    learning rate. After two real steps of each trainer TRL's has only moved values next to zero."""
    import trl
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "model")
    options = {"lr_scheduler_type": "constant", "max_steps": 2, "weight_decay": 0.0, "beta": 0.0, "learning_rate": 1e-6}
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


def _mixture():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    ends = {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=264, num_key_value_heads=2, head_dim=8, **sizes, **experts, **ends)
    )


def _scaled():
    from transformers import Cohere2Config, Cohere2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256, "logit_scale": 4.0}
    torch.manual_seed(0)
    return Cohere2ForCausalLM(Cohere2Config(vocab_size=264, num_key_value_heads=2, sliding_window=8, **sizes, **ends))


MODELS = {
    "mixture": (_mixture, {}),
    "mixture, its own coefficient": (_mixture, {"router_aux_loss_coef": 0.1, "temperature": 0.7}),
    "mixture without": (_mixture, {"router_aux_loss_coef": 0.0}),
    "mixture, truncated masked": (_mixture, {"mask_truncated_completions": True}),
    "mixture, checkpointed": (_mixture, {"gradient_checkpointing": True}),
    "mixture, padded": (_mixture, {}),
    "scaled logits": (_scaled, {}),
}


@pytest.mark.parametrize("case", MODELS)
def test_other_models_equal_stock_trl(case, stock_head, tiny_tokenizer, tmp_path):
    """The balance of the experts is that of a micro-batch's tokens, each prompt once for each of its completions; and
    scaled logits are scored as they are sampled. All weights are trained, the router's too."""
    import trl

    build, options = MODELS[case]
    results = []
    options = {"beta": 0.0} | options
    for trainer_class, config_class in ((trl.RLOOTrainer, trl.RLOOConfig), (RLOOTrainer, RLOOConfig)):
        trainer = _make(trainer_class, config_class, build(), tiny_tokenizer, tmp_path, [reward_by_length], **options)
        if case.endswith("padded") and trainer_class is RLOOTrainer:
            trainer.rloo.scorer.scorer.layout = "padded"
        results.append((*_batch_loss_gradients(trainer), trainer._metrics["train"].get("aux_loss")))
    (stock_advantages, stock_loss, stock_gradients, stock_aux), (_, loss, gradients, aux) = results
    if case == "mixture, truncated masked":
        stock_loss = without_masked(stock_loss, stock_advantages)
    assert abs(loss - stock_loss) <= RELATIVE * max(1.0, abs(stock_loss))
    assert (aux is None) == (stock_aux is None) == (case in ("mixture without", "scaled logits"))
    if aux is not None:
        assert aux == pytest.approx(stock_aux, rel=1e-5) and aux[0] > 1
    assert gradients.keys() == stock_gradients.keys()
    for name, gradient in gradients.items():
        assert _relative(gradient, stock_gradients[name]) < 1e-4 or gradient.norm() < 1e-6, name
    together = [torch.cat([grads[name].flatten() for name in sorted(grads)]) for grads in (gradients, stock_gradients)]
    assert together[1].norm() > 1e-3 and _relative(*together) < RELATIVE
