"""TRL code of today and the published recipe: rewards, evaluation, models, adapters, and what is refused."""

import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification

import rewards
from rloo_kit import RLOOConfig, RLOOTrainer
from rloo_kit.errors import ConfigError
from rloo_kit.gradient.packing import Group
from rloo_kit.loop.options import FURTHER_ARGUMENTS
from rloo_kit.rewarding.guard import NamedReward
from tests.loop.conftest import EOS, by_ids, conversations, mixture, stream

CAUSAL = {"task_type": "CAUSAL_LM"}
TARGETS = {"target_modules": ["q_proj", "v_proj"]} | CAUSAL
PLAIN = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 2} | TARGETS | options)


def wrapped(model: Any, **options: Any) -> Any:
    return peft.get_peft_model(model, lora(**options))


# ------------------------------------------------------------------------------------- arguments, rewards, evaluation


def classifier(seed=0, name=""):
    """A reward model with random weights: one layer, one output."""
    config = Qwen3Config(
        vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, num_labels=1, pad_token_id=256,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForSequenceClassification(config)
    model.config.name_or_path = name
    return model


@pytest.fixture
def make_own(tiny_folder, tiny_tokenizer, tmp_path):
    """`make_own(model, reward, config, rows, ...)`: positions and keywords as in TRL, rows and tokenizer filled in."""
    rows = {"prompt": [f"{n}+1=<think>\n" for n in range(8)], "answer": [str(n + 1) for n in range(8)]}

    def build(*positional, trainer=RLOOTrainer, **keywords):
        keywords = {"train_dataset": Dataset.from_dict(rows), "processing_class": tiny_tokenizer} | keywords
        return trainer(*positional, **{name: value for name, value in keywords.items() if value is not None})

    return build


def test_arguments_are_taken_by_position_as_in_trl(make_own, tiny_folder, tiny_tokenizer, tmp_path, monkeypatch):
    """All arguments of TRL by position; without args TRL makes its own config, which needs an accelerator."""
    stock = next(c for c in reversed(trl.RLOOTrainer.__mro__) if c.__name__ == "RLOOTrainer")
    assert list(inspect.signature(stock).parameters)[5:] == list(FURTHER_ARGUMENTS)
    config = RLOOConfig(output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=2, **PLAIN)
    data, given = Dataset.from_dict({"prompt": list("01")}), {"train_dataset": None, "processing_class": None}
    trainer = make_own(str(tiny_folder), rewards.length_reward, config, data, None, tiny_tokenizer, **given)
    assert trainer.processing_class is tiny_tokenizer
    monkeypatch.chdir(tmp_path)  # its folder is made where the process stands
    args = make_own(str(tiny_folder), rewards.length_reward, processing_class=None).args
    assert isinstance(args, RLOOConfig) and args.output_dir == f"{tiny_folder.name}-RLOO"


def test_a_subclass_hears_which_of_its_overrides_is_not_called(make_own, make_tiny_model, tmp_path, capsys):
    """Overrides of TRL's methods that the kit replaces were ignored; a script may build `trl.RLOOConfig`."""

    class Mine(RLOOTrainer):
        asked = 0

        def _generate_and_score_completions(self, inputs):
            raise AssertionError("called")

        def _generate_single_turn(self, prompt_ids, *more):
            self.asked += len(prompt_ids)
            assert more == (None, {}), "what TRL passes to its own, which may go into generate"
            return super()._generate_single_turn(prompt_ids, *more)

    options = {"per_device_train_batch_size": 4, "max_steps": 1, "max_completion_length": 4, "beta": 0.0}
    config = trl.RLOOConfig(str(tmp_path), **options, **PLAIN)
    trainer = make_own(make_tiny_model(), rewards.length_reward, config, trainer=Mine)
    said = capsys.readouterr().out
    assert "WARNING: Mine._generate_and_score_completions is not called" in said
    assert said.count("WARNING") == 1 and "override _generate_single_turn" in said
    trainer.train()
    assert trainer.asked == 4 and trainer.args is config


def test_weights_of_rewards_are_those_of_one_trainer(make_own, tiny_folder, tmp_path):
    """One plain function made the weights of all others 1; one config may serve several sets of rewards."""
    config, plain = RLOOConfig(output_dir=str(tmp_path), **PLAIN), rewards.length_reward

    def weights_of(*funcs):
        return make_own(str(tiny_folder), list(funcs), config).reward_weights.tolist()

    def weighted(completions, **_):
        return [0.0] * len(completions)

    weighted.weight = 2.0
    heavy = NamedReward(plain, "heavy", 3.0)
    assert weights_of(heavy, plain, weighted) == [3.0, 1.0, 2.0] and weights_of(heavy) == [3.0]
    config.reward_weights = [0.5]
    assert weights_of(heavy) == [0.5] and config.reward_weights == [0.5]


def test_the_published_recipe_runs_as_written(make_own, tiny_folder, tiny_tokenizer, tmp_path):
    """It names `kl_coef`, `num_ppo_epochs`, `cliprange`, `rloo_k` and `reward_model=`, all of them gone from TRL."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = RLOOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=1, kl_coef=0.05, num_ppo_epochs=1,
            cliprange=0.2, rloo_k=2, token_level_kl=True, normalize_reward=True, missing_eos_penalty=1.0,
            response_length=6, **PLAIN,
        )  # fmt: skip
        trainer = make_own(
            config=config,
            policy=AutoModelForCausalLM.from_pretrained(tiny_folder),
            reward_model=rewards.thinking_reward,
            tokenizer=tiny_tokenizer,
            processing_class=None,
        )
    said = "\n".join(str(warning.message) for warning in caught)
    for today in ("beta", "num_iterations", "epsilon", "num_generations", "reward_funcs", "max_completion_length"):
        assert today in said
    assert "token_level_kl" in said and config.normalize_rewards is True
    assert (config.beta, config.num_generations, config.max_completion_length) == (0.05, 2, 6)
    trainer.train()
    assert trainer.state.global_step == 1


def test_every_reward_works_in_a_bare_trl_trainer(make_own, make_tiny_model, tmp_path):
    """A reward that needs our trainer to be called right would break in everybody else's."""
    functions = [
        rewards.thinking_reward, rewards.length_reward, rewards.answer_reward, rewards.think_format_reward,
        rewards.soft_overlong_penalty.with_(max_completion_length=20),
        rewards.thinking_budget_reward.with_(max_tokens=40),
        rewards.repetition_penalty, rewards.missing_eos_penalty,
    ]  # fmt: skip
    config = trl.RLOOConfig(str(tmp_path), per_device_train_batch_size=4, num_generations=2, beta=0.0, **PLAIN)
    trainer = make_own(make_tiny_model(), functions, config, trainer=trl.RLOOTrainer)
    rows = [trainer.train_dataset[n] for n in (0, 0, 1, 1)]
    texts = ["ok</think>1", "no", "", "</think>2"]
    ids = [[111, 107, 151668, 16, 151645], [110, 111], [], [151668, 17, 151645]]
    found = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], texts, ids)
    assert found.shape == (4, len(functions))
    assert trainer.reward_func_names == [function.__name__ for function in functions]
    assert found[:, 0].tolist() == pytest.approx([0.3, -1.0, -1.0, 0.3])
    assert found[:, 2].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_what_rewards_log_themselves(trl_train, capsys):
    """A figure of one micro-batch must be averaged over the step, and a column stay with its completions."""
    calls = []

    def reward(completion_ids, log_metric, log_extra, **_):
        calls.append(len(completion_ids))
        log_metric("judged", float(len(calls)))
        log_metric("judged", float(len(calls)) + 1)
        log_extra("first_id", [f"id{ids[0]}" for ids in completion_ids])
        return by_ids(completion_ids)

    completions = [[66, EOS], [67, EOS], [68, 69, EOS], [70, EOS]]
    run = trl_train(reward, completions, log_completions=True)
    assert [step["judged"] for step in run.steps] == [1.5, 2.5]
    table = capsys.readouterr().out
    assert "first_id" in table and all(f"id{ids[0]}" in table for ids in completions)


@pytest.mark.parametrize("chat", [False, True], ids=["text", "conversations"])
def test_a_reward_model_scores_what_was_written(chat, trl_train, tiny_tokenizer):
    """A reward model that is padded on the wrong side, or trained along, scores something else from step to step."""
    judge, other = classifier(name="some/judge"), copy.deepcopy(tiny_tokenizer)
    other.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    before = copy.deepcopy(judge.state_dict())
    arguments = {"reward_processing_classes": [other, None]} | ({"train_dataset": conversations()} if chat else {})
    run = trl_train([judge, by_ids], arguments=arguments)
    assert run.kept == set() and run.trainer.reward_func_names == ["judge", "by_ids"]
    assert all(before[name].equal(value) for name, value in judge.state_dict().items())
    assert all(parameter.grad is None for parameter in judge.parameters())
    for row in run.rows:
        text = row["prompt"] + row["completion"] if not chat else None
        text = text or f"[user]{row['prompt'][0]['content']}[assistant]{row['completion'][0]['content']}"
        with torch.no_grad():
            expected = judge(**other(text, return_tensors="pt", add_special_tokens=False)).logits.item()
        assert row["rewards"]["judge"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("generations", [None, 1])
def test_evaluation_during_training(generations, trl_train):
    """Evaluated prompts must not be trained on; `eval_reward` is a mean over prompts, not over batches."""
    judged, values = [], []

    def reward(prompts, completion_ids, **_):
        judged.extend(prompt for prompt in prompts if prompt.endswith("+5="))
        values.append(by_ids(completion_ids))
        return values[-1]

    held_out = [Dataset.from_dict({"prompt": [f"{n}+5=" for n in range(number)]}) for number in (3, 5)]
    run = trl_train(
        reward, arguments={"eval_dataset": held_out[0]}, eval_strategy="steps", eval_steps=2,
        num_generations_eval=generations, per_device_eval_batch_size=8, eval_on_start=True,
    )  # fmt: skip
    assert run.kept == set() and all(row["prompt"].endswith("+1=") for row in run.rows) and len(run.rows) == 8
    evaluations = [logs for logs in run.trainer.state.log_history if "eval_loss" in logs]
    assert [logs["step"] for logs in evaluations] == [0, 2]
    for logs in evaluations:
        assert 0 <= logs["eval_reward"] <= 1 and logs["eval_completions/mean_length"] > 0
        assert logs["eval_loss"] == pytest.approx(0.0, abs=1e-5) and "eval_kl" in logs
    assert {one: judged.count(one) for one in judged} == {f"{n}+5=": 2 * (generations or 4) for n in range(3)}
    if generations is None:
        for data, sizes in ((held_out[1], [8, 8, 4]), (stream(4), [8, 8])):
            values.clear()
            found = run.trainer.evaluate(data)
            expected = sum(map(sum, values)) / sum(sizes)
            assert [len(batch) for batch in values] == sizes
            assert found["eval_reward"] == pytest.approx(expected, rel=1e-5)
            assert found["eval_rewards/reward/mean"] == pytest.approx(expected, rel=1e-5)
        run.trainer.args.per_device_eval_batch_size = 3
        with pytest.raises(ValueError, match="per_device_eval_batch_size"):  # with "no" nothing else checks it
            run.trainer.evaluate(held_out[0])


# -------------------------------------------------------------------------------------------------- models and adapters


@pytest.mark.slow
def test_tokenizers_and_end_tokens(trl_train, make_tiny_model, tiny_tokenizer):
    """A model's name alone, two end tokens, the end token as padding, and prompts padded on the right."""
    plain = trl_train(arguments={"processing_class": None}, model_init_kwargs={"dtype": "bfloat16"}, beta=0.1)
    for model in (plain.trainer.model, plain.trainer.ref_model):
        assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert plain.kept == set() and plain.steps[0]["kl"] == pytest.approx(0.0, abs=1e-6) and plain.steps[1]["kl"] != 0.0

    model = make_tiny_model()
    model.generation_config.eos_token_id = [256, 99]
    completions = [[70, 99], [71, 256], [72, EOS], [73, 74, 75, 76, 77, 78]]
    run = trl_train(completions=completions, arguments={"model": model}, beta=0.0, mask_truncated_completions=True)
    assert [row["truncated"] for row in run.rows[:4]] == [False, False, False, True]
    assert run.kept == set() and run.steps[0]["completions/clipped_ratio"] == 0.25

    plain, tokenizer = trl_train(), copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = "right"
    right = trl_train(arguments={"processing_class": tokenizer})
    assert [row["completion_ids"] for row in right.rows] == [row["completion_ids"] for row in plain.rows]
    tokenizer.pad_token = None
    run = trl_train(arguments={"processing_class": tokenizer})
    assert run.kept == set() and tokenizer.pad_token_id == EOS and run.trainer.model.config.pad_token_id == EOS


def test_an_adapter_on_fused_experts(trl_train):
    """Experts lie in one matrix, which an adapter names by its parameter; their auxiliary loss is there by default."""
    target = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    adapter = peft.LoraConfig(r=2, target_modules=[], target_parameters=target)
    run = trl_train(arguments={"model": mixture(), "peft_config": adapter}, beta=0.1)
    trained = {name for name, value in run.trainer.model.named_parameters() if value.requires_grad}
    assert run.moved == trained and any("experts" in name for name in trained)
    assert all(step["sampling/logp_difference_max"] < 1e-4 and "aux_loss" in step for step in run.steps)


MOVED = {"init_lora_weights": False}
EMBEDDINGS = {"target_modules": ["embed_tokens", "q_proj"]}
# An adapter, and whether it is a wrapped model that the trainer gets, or a config.
ADAPTERS = {
    "plain": (lora(), False),
    "plain, not at zero": (lora(**MOVED), True),
    "all linear": (lora(target_modules="all-linear"), True),
    "rank-stabilised": (lora(use_rslora=True, lora_dropout=0.1), True),
    "embeddings, not at zero": (lora(**EMBEDDINGS, **MOVED), True),
    "DoRA, not at zero": (lora(use_dora=True, **MOVED), False),
    "head saved, not at zero": (lora(modules_to_save=["lm_head"], **MOVED), True),
    "some tokens, not at zero": (lora(trainable_token_indices=[10, 16], **MOVED), True),
    "pissa": (lora(init_lora_weights="pissa"), False),
    "pissa, wrapped": (lora(init_lora_weights="pissa"), True),
    "embeddings saved": (lora(modules_to_save=["embed_tokens"]), False),
    "olora": (lora(init_lora_weights="olora"), True),
}
SLOW = ("embeddings saved", "olora")


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in ADAPTERS])
def test_adapters(kind, trl_train, make_tiny_model):
    """All that PEFT declares as trained moves, the base not at all, and the KL is measured against the start."""
    model, (config, is_wrapped) = make_tiny_model(tie_word_embeddings=False), ADAPTERS[kind]
    base, config = copy.deepcopy(model.state_dict()), copy.deepcopy(config)
    arguments = {"model": peft.get_peft_model(model, config)} if is_wrapped else {"model": model, "peft_config": config}
    ids, started = torch.arange(60, 80), []

    def look(trainer):
        with torch.no_grad():
            started.append(trainer.model.eval()(input_ids=ids[None]).logits[0, 9:-1].log_softmax(-1))

    run = trl_train(arguments=arguments, beta=0.1, before=look)
    parameters = dict(run.trainer.model.named_parameters())
    assert run.moved == {name for name, value in parameters.items() if value.requires_grad} and run.moved
    assert not any(value.requires_grad for name, value in parameters.items() if ".ref" in name)
    assert run.steps[0]["kl"] == pytest.approx(0.0, abs=1e-5) and run.steps[1]["kl"] != 0.0
    assert all(step["sampling/logp_difference_max"] < 1e-4 for step in run.steps)
    reference = run.trainer.rloo.scorer.score_reference(run.trainer.model, [Group(ids[:10], [ids[10:]])])
    assert torch.allclose(reference, started[0].gather(1, ids[10:, None]).squeeze(1), atol=1e-4)
    if kind.startswith(("pissa", "olora")):
        with torch.no_grad():
            whole = make_tiny_model(tie_word_embeddings=False)(input_ids=ids[None]).logits[0, 9:-1].log_softmax(-1)
        assert torch.allclose(started[0], whole, atol=1e-4), "a part of the base that was moved out twice"
        assert run.trainer.model.peft_config["default"].init_lora_weights == kind[:5], "how to load the adapter"
        return
    now = {name.replace(".base_layer", ""): value for name, value in parameters.items()}
    for name, value in base.items():
        assert value.equal(now.get(f"base_model.model.{name}", value)), f"{name} of the base has moved"


def test_a_fresh_adapter_is_its_own_reference(trl_train, make_tiny_model):
    """A copy of an adapter that changes nothing is memory, and a reference pass of the first step time."""
    states, model = [], peft.get_peft_model(make_tiny_model(tie_word_embeddings=False), lora(**EMBEDDINGS))
    before = lambda trainer: states.append(trainer.rloo.scorer.is_reference())  # noqa: E731
    run = trl_train(arguments={"model": model}, beta=0.1, before=before)
    assert states == [True] and not run.trainer.rloo.scorer.is_reference()
    assert list(run.trainer.model.peft_config) == ["default"]


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_trainers_in_turn_on_one_model(beta, trl_train, make_tiny_model):
    """The third one met the copy of the second; the first scored at the second's temperature."""
    arguments, runs = {"model": wrapped(make_tiny_model(), **MOVED)}, []
    for temperature in (1.0, 0.5, 0.7):
        runs.append(trl_train(arguments=arguments, beta=beta, temperature=temperature))
        assert runs[-1].moved and (not beta or runs[-1].steps[0]["kl"] == pytest.approx(0.0, abs=1e-6))
    first = runs[0].trainer
    if beta:
        with pytest.raises(ConfigError, match="later trainer"):
            first.train()
        return
    first.train()
    steps = [logs for logs in first.state.log_history if "loss" in logs]
    assert all(step["sampling/logp_difference_max"] < 1e-5 for step in steps)


def test_biases_are_trained_where_nothing_is_measured_against_the_start(trl_train, make_tiny_model):
    """`bias="lora_only"` trains parameters of the base, which no adapter holds: their start is copied too."""
    for init in (False, True):  # from the identity too: PEFT switches matrices off, the trained biases stay
        adapter = lora(bias="lora_only", init_lora_weights=init)
        with pytest.raises(ConfigError, match="bias='none'"):
            trl_train(arguments={"model": make_tiny_model(), "peft_config": adapter}, beta=0.1)
    model = make_tiny_model(attention_bias=True)
    run = trl_train(arguments={"model": model, "peft_config": adapter}, beta=0.0)
    biases = {name for name in run.moved if "lora_" not in name}
    assert biases and all(name.endswith(("q_proj.base_layer.bias", "v_proj.base_layer.bias")) for name in biases)


def test_a_resumed_run_has_the_reference_that_it_started_from(trl_train, make_tiny_model, tmp_path):
    """Random matrices are drawn again on a resume: the copy has to come from the checkpoint."""

    def resume(trainer):
        plain = trainer.train
        trainer.train = lambda: plain(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))

    options = {"beta": 0.1, "save_strategy": "steps", "save_steps": 1}
    found = []
    for seed, more in ((0, {"max_steps": 1}), (1, {"max_steps": 2, "before": resume})):
        torch.manual_seed(seed)
        arguments = {"model": peft.get_peft_model(make_tiny_model(), lora(init_lora_weights=False))}
        if not seed:
            arguments = {"model": make_tiny_model(), "peft_config": lora(init_lora_weights=False)}
        run = trl_train(arguments=arguments, **options, **more)
        found.append({name: value for name, value in run.trainer.model.named_parameters() if ".ref" in name})
    assert found[0] and all(value.equal(found[1][name]) for name, value in found[0].items())


# ------------------------------------------------------------------------------------------------------ what is refused


def several(model: Any, *active: str) -> Any:
    model = wrapped(model, init_lora_weights=False)
    model.add_adapter("other", lora(init_lora_weights=False))
    model.base_model.set_adapter(list(active))
    return model


def changed(model: Any, change: Callable[[Any], Any]) -> Any:
    change(model)
    return model


def frozen(model: Any, folder: Path) -> Any:
    wrapped(copy.deepcopy(model), init_lora_weights=False).save_pretrained(folder)
    return peft.PeftModel.from_pretrained(model, str(folder))


def bare(_model: Any, _folder: Path) -> dict[str, Any]:
    return {}


SERVER = {"rollout_engine": "server", "rollout_server_url": "http://localhost:9", "beta": 0.0}

# Arguments of the trainer, as a function of a bare model and a folder, and options; what has to be in the error. What
# the options of the config refuse by themselves: `test_options.py`.
ARGUMENTS: dict[str, tuple[Callable[[Any, Path], dict[str, Any]], dict[str, Any], str]] = {
    "no weight": (bare, {"reward_weights": [0.0]}, "reward_weights"),
    "no step": (bare, {"max_steps": 0}, "raise max_steps"),
    "nothing to follow": (bare, {"sync_ref_model": True}, "sync_ref_model=False"),
    "half a group": (
        bare, {"per_device_train_batch_size": 6},
        r"6 completions a pass \(per_device_train_batch_size\) .* whole groups of \d \(num_generations\)"),
    "fewer prompts than a batch": (
        lambda m, _: {"train_dataset": Dataset.from_dict({"prompt": ["0+1="]})},
        {"per_device_train_batch_size": 8}, "per_device_train_batch_size"),
    "a stream": (  # before the model is loaded
        lambda m, _: {"train_dataset": stream(5), "model": "no/such-model"}, {}, "a stream, .*: load the data whole"),
    "a reference that cannot follow": (
        lambda m, _: {"model": m, "peft_config": lora()}, {"beta": 0.1, "sync_ref_model": True}, "sync_ref_model=Fals"),
    "two active": (lambda m, _: {"model": several(m, "default", "other")}, {}, "default, other: merge"),
    "another name": (
        lambda m, _: {"model": peft.get_peft_model(m, lora(), adapter_name="mine")}, {}, "adapters are mine: merge"),
    "transformers' own": (
        lambda m, _: {"model": changed(m, lambda one: one.add_adapter(lora()))}, {}, "get_peft_model"),
    "inside": (lambda m, _: {"model": wrapped(m).get_base_model()}, {}, "get_peft_model"),
    "an adapter on the head": (
        lambda m, _: {"model": m, "peft_config": lora(target_modules=["lm_head"])}, {}, "(?s)lm_head.*target_modules"),
    "a config next to an adapter": (lambda m, _: {"model": wrapped(m), "peft_config": lora()}, {}, "peft_config"),
    "a config of another type": (lambda m, _: {"model": m, "peft_config": {"r": 2}}, {}, "peft_config"),
    "quantised": (
        lambda m, _: {"model": changed(m, lambda one: setattr(one, "is_loaded_in_8bit", True))}, {}, "give peft_conf"),
    "an adapter's folder": (
        lambda m, folder: {"model": wrapped(m).save_pretrained(folder) or str(folder)}, {}, "AutoPeftModelForCausalLM"),
    "a frozen adapter": (lambda m, folder: {"model": frozen(m, folder)}, {}, "is_trainable=True"),
    "a disabled adapter": (
        lambda m, _: {"model": changed(wrapped(m), lambda one: one.base_model.disable_adapter_layers())}, {},
        "no parameter requires a gradient"),
    "frozen": (lambda m, _: {"model": m.requires_grad_(False)}, {}, "no parameter requires a gradient"),
    "an optimizer of other parameters": (
        lambda m, _: {"model": m, "peft_config": lora(), "optimizers": (torch.optim.AdamW(m.parameters()), None)}, {},
        "leave optimizers out"),
    "a reference without a name": (
        lambda m, _: {"model": m}, {"beta": 0.1}, "beta is 0.1 .* names none: .* set beta=0.0"),
    "TRL's continuous batching": (
        bare, {"use_transformers_continuous_batching": True},
        "use_transformers_continuous_batching .* rollout_engine=auto"),
    "no reward": (lambda m, _: {"reward_funcs": []}, {}, "reward_funcs"),
    "PiSSA on a server": (
        lambda m, _: {"model": m, "peft_config": lora(init_lora_weights="pissa")}, SERVER, "pissa.*rollout_engine=gen"),
    "tokens on a server": (
        lambda m, _: {"model": m, "peft_config": lora(trainable_token_indices=[70])}, SERVER,
        "rows of the embedding.*rollout_engine=generate"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_cannot_work(case, trl_train, make_tiny_model, tmp_path):
    """These ended in a traceback in mid-step, or in weights that had not changed, or by another policy's gradient."""
    make, options, said = ARGUMENTS[case]
    arguments = make(make_tiny_model(tie_word_embeddings=False), tmp_path / "adapter")
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=said):
        trl_train(by_ids, arguments=arguments, **{"beta": 0.0} | options)


KINDS = {
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "aLoRA": lora(alora_invocation_tokens=[28]),
    "IA3": peft.IA3Config(target_modules=["q_proj", "v_proj"], feedforward_modules=[], **CAUSAL),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_cannot_be_scored(kind, trl_train, make_tiny_model):
    """They act through PEFT's own forward: a traceback, or tokens sampled from the model without them."""
    config = copy.deepcopy(KINDS[kind])
    wrapped_already = peft.get_peft_model(make_tiny_model(), copy.deepcopy(config))
    for model, new in ((make_tiny_model(), config), (wrapped_already, None)):
        with pytest.raises(ConfigError, match="use a LoraConfig"):
            trl_train(arguments={"model": model, "peft_config": new})


def test_a_cell_with_peft_config_that_is_run_again(trl_train, make_tiny_model):
    """PEFT resets the layers that the second config names and leaves the others of the first, trained, in the model."""
    model = make_tiny_model()
    for _ in range(2):
        run = trl_train(arguments={"model": model, "peft_config": lora()}, beta=0.1)
        assert run.moved and run.steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ConfigError, match="load it again"):
        trl_train(arguments={"model": model, "peft_config": lora(target_modules=["q_proj"])}, beta=0.0)
