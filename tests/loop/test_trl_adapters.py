"""Models and adapters that the trainer is given: what moves, what stays, and what the KL is measured against.

Whole runs against TRL's own trainer: `test_equality_with_stock.py`; what is refused: `test_trl_refusals.py`.
"""

import copy

import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    FourierFTConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rloo_kit.errors import ConfigError
from rloo_kit.gradient.packing import Group
from tests.loop.conftest import EOS


def lora(**options):
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options)


def given(model, config, wrapped):
    """The trainer's arguments for an adapter: the model that has it, or its config."""
    return {"model": get_peft_model(model, config)} if wrapped else {"model": model, "peft_config": config}


def parameters_of(run):
    return dict(run.trainer.model.named_parameters())


# --------------------------------------------------------------------------------------------------------------- models


def test_from_a_folder_with_its_own_tokenizer(trl_train, tiny_folder):
    """The shortest call of all: a model's name. The reference has to be loaded in the same precision as the policy."""
    run = trl_train(arguments={"processing_class": None}, model_init_kwargs={"dtype": "bfloat16"}, beta=0.1)
    assert run.kept == set()
    assert {value.dtype for value in run.trainer.model.parameters()} == {torch.bfloat16}
    assert {value.dtype for value in run.trainer.ref_model.parameters()} == {torch.bfloat16}
    assert run.steps[0]["kl"] == pytest.approx(0.0, abs=1e-6) and run.steps[1]["kl"] != 0.0


def test_every_end_token_of_the_model_ends_a_completion(trl_train, make_tiny_model):
    """Qwen3 declares two; a completion that ended with the second counted as cut off, and was masked or charged."""
    model = make_tiny_model()
    model.generation_config.eos_token_id = [256, 99]
    completions = [[70, 99], [71, 256], [72, EOS], [73, 74, 75, 76, 77, 78]]
    run = trl_train(completions=completions, arguments={"model": model}, beta=0.0, mask_truncated_completions=True)
    assert [row["truncated"] for row in run.rows[:4]] == [False, False, False, True]
    assert run.kept == set() and run.steps[0]["completions/clipped_ratio"] == 0.25


def test_a_tokenizer_that_pads_on_the_right_or_not_at_all(trl_train, tiny_tokenizer):
    """TRL takes the end token for padding then; prompts padded on the right were continued behind their padding."""
    plain = trl_train()
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = "right"
    right = trl_train(arguments={"processing_class": tokenizer})
    assert [row["completion_ids"] for row in right.rows] == [row["completion_ids"] for row in plain.rows]
    tokenizer.pad_token = None
    run = trl_train(arguments={"processing_class": tokenizer})
    assert run.kept == set() and tokenizer.pad_token_id == EOS and run.trainer.model.config.pad_token_id == EOS


def test_an_adapter_on_fused_experts(trl_train):
    """Experts lie in one matrix, which an adapter names by its parameter; their auxiliary loss is there by default."""
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, bos_token_id=None, eos_token_id=EOS, pad_token_id=256,
            moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip
    target = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    adapter = LoraConfig(r=2, target_modules=[], target_parameters=target)
    run = trl_train(arguments={"model": model, "peft_config": adapter}, beta=0.1)
    trained = {name for name, value in parameters_of(run).items() if value.requires_grad}
    assert run.moved == trained and any("experts" in name for name in trained)
    assert all(step["sampling/logp_difference_max"] < 1e-4 and "aux_loss" in step for step in run.steps)


# ------------------------------------------------------------------------------------------------------------- adapters


TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
LORA = {
    "plain": {},
    "all linear": {"target_modules": "all-linear"},
    "one layer": {"layers_to_transform": [0]},
    "DoRA": {"use_dora": True},
    "rank-stabilised": {"use_rslora": True, "lora_dropout": 0.1},
    "head saved": {"modules_to_save": ["lm_head"]},
    "embeddings saved": {"modules_to_save": ["embed_tokens"]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "some tokens": {"trainable_token_indices": [10, 16]},
}
MOVED_ALREADY = ["plain", "embeddings", "DoRA", "head saved", "some tokens"]
ADAPTERS = {
    **{name: lora(**options) for name, options in LORA.items()},
    **{f"{name}, not at zero": lora(init_lora_weights=False, **LORA[name]) for name in MOVED_ALREADY},
    **{init: lora(init_lora_weights=init) for init in ("pissa", "olora")},
    "AdaLoRA": AdaLoraConfig(total_step=9, **TARGETS),
    "BOFT": BOFTConfig(boft_block_size=4, boft_dropout=0.5, init_weights=False, **TARGETS),
    "FourierFT": FourierFTConfig(n_frequency=20, **TARGETS),
    "IA3": IA3Config(feedforward_modules=[], init_ia3_weights=False, **TARGETS),
    "LoHa": LoHaConfig(r=2, init_weights=False, module_dropout=0.5, **TARGETS),
    "LoKr": LoKrConfig(r=2, init_weights=False, rank_dropout=0.5, **TARGETS),
    "OFT": OFTConfig(oft_block_size=4, r=0, use_cayley_neumann=False, **TARGETS),
    "VeRA": VeraConfig(r=4, **TARGETS),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["config", "model"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(kind, wrapped, trl_train, make_tiny_model):
    """All that PEFT declares as trained moves, the base not at all; the policy samples as it scores, without dropout;
    and the KL is measured against the start, whatever the start is. PiSSA moves a part of the base into the adapter:
    switched off, what is left is no model that anybody started from. FourierFT does not start as the identity. Of an
    adapter that has been trained TRL copies modules only: its matrices of embeddings, bare parameters, were another
    adapter's. A trained copy of the head that nothing scores with would never move."""
    model, config = make_tiny_model(tie_word_embeddings=False), copy.deepcopy(ADAPTERS[kind])
    base, arguments = copy.deepcopy(model.state_dict()), given(model, config, wrapped)
    if wrapped and kind == "AdaLoRA":
        with pytest.raises(ConfigError, match="peft_config"):
            trl_train(arguments=arguments)
        return
    ids, started = torch.arange(60, 80), []

    def look(trainer):
        with torch.no_grad():
            started.append(trainer.model.eval()(input_ids=ids[None]).logits[0, 9:-1].log_softmax(-1))

    run = trl_train(arguments=arguments, beta=0.1, before=look)
    parameters = parameters_of(run)
    assert run.moved == {name for name, value in parameters.items() if value.requires_grad} and run.moved
    assert not any(value.requires_grad for name, value in parameters.items() if ".ref" in name)
    assert run.steps[0]["kl"] == pytest.approx(0.0, abs=1e-5) and run.steps[1]["kl"] != 0.0
    assert all(step["sampling/logp_difference_max"] < 1e-4 for step in run.steps)
    reference = run.trainer.rloo.scorer.score_reference(run.trainer.model, [Group(ids[:10], [ids[10:]])])
    assert torch.allclose(reference, started[0].gather(1, ids[10:, None]).squeeze(1), atol=1e-4)
    if kind in ("pissa", "olora"):
        with torch.no_grad():
            whole = make_tiny_model(tie_word_embeddings=False)(input_ids=ids[None]).logits[0, 9:-1].log_softmax(-1)
        assert torch.allclose(started[0], whole, atol=1e-4), "a part of the base that was moved out twice"
        assert run.trainer.model.peft_config["default"].init_lora_weights == kind, "it says how to load the adapter"
        return
    now = {name.replace(".base_layer", ""): value for name, value in parameters.items()}
    for name, value in base.items():
        assert value.equal(now.get(f"base_model.model.{name}", value)), f"{name} of the base has moved"


def test_a_fresh_adapter_is_its_own_reference(trl_train, make_tiny_model):
    """A copy of an adapter that changes nothing is memory, and a reference pass of the first step time."""
    embeddings = lora(**LORA["embeddings"])
    untied = make_tiny_model(tie_word_embeddings=False)
    for model in (untied, get_peft_model(copy.deepcopy(untied), embeddings)):
        arguments = {"model": model} | ({} if hasattr(model, "peft_type") else {"peft_config": embeddings})
        states = []
        run = trl_train(
            arguments=arguments, beta=0.1, before=lambda t, states=states: states.append(t.rloo.scorer.is_reference())
        )
        assert states == [True] and not run.trainer.rloo.scorer.is_reference()
        assert list(run.trainer.model.peft_config) == ["default"]


def test_biases_are_trained_where_nothing_is_measured_against_the_start(trl_train, make_tiny_model):
    """`bias="lora_only"` trains parameters of the base, which no adapter holds: PEFT keeps one adapter with biases, and
    without its copy the KL would be measured from somewhere else."""
    for init in (False, True):  # from the identity too: PEFT switches matrices off, the trained biases stay
        adapter = lora(bias="lora_only", init_lora_weights=init)
        with pytest.raises(ConfigError, match="bias='none'"):
            trl_train(arguments={"model": make_tiny_model(), "peft_config": adapter}, beta=0.1)
    model = make_tiny_model(attention_bias=True)
    run = trl_train(arguments={"model": model, "peft_config": adapter}, beta=0.0)
    biases = {name for name in run.moved if "lora_" not in name}
    assert biases and all(name.endswith(("q_proj.base_layer.bias", "v_proj.base_layer.bias")) for name in biases)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_trainers_in_turn_on_one_model(beta, trl_train, make_tiny_model):
    """The third one met the copy of the second; the first, trained on, took the second's start for its own and scored
    at the second's temperature."""
    arguments = {"model": get_peft_model(make_tiny_model(), lora(init_lora_weights=False))}
    runs = []
    for temperature in (1.0, 0.5, 0.7):
        runs.append(trl_train(arguments=arguments, beta=beta, temperature=temperature))
        assert runs[-1].moved and runs[-1].steps[0]["kl"] == pytest.approx(0.0, abs=1e-6) if beta else runs[-1].moved
    first = runs[0].trainer
    if beta:
        with pytest.raises(ConfigError, match="later trainer"):
            first.train()
        return
    first.train()
    steps = [logs for logs in first.state.log_history if "loss" in logs]
    assert all(step["sampling/logp_difference_max"] < 1e-5 for step in steps)


def test_a_resumed_run_has_the_reference_that_it_started_from(trl_train, make_tiny_model, tmp_path):
    """Random matrices are drawn again on a resume: the copy has to come from the checkpoint."""

    def resume(trainer):
        plain = trainer.train
        trainer.train = lambda: plain(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))

    options = {"beta": 0.1, "save_strategy": "steps", "save_steps": 1}
    found = []
    for seed, more in ((0, {"max_steps": 1}), (1, {"max_steps": 2, "before": resume})):
        torch.manual_seed(seed)
        arguments = {"model": get_peft_model(make_tiny_model(), lora(init_lora_weights=False))}
        if not seed:
            arguments = {"model": make_tiny_model(), "peft_config": lora(init_lora_weights=False)}
        run = trl_train(arguments=arguments, **options, **more)
        found.append({name: value for name, value in parameters_of(run).items() if ".ref" in name})
    assert found[0] and all(value.equal(found[1][name]) for name, value in found[0].items())
