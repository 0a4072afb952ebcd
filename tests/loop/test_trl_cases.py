"""TRL code of today and the published recipe of yesterday: arguments, rewards, reward models, evaluation.

The same steps and runs as TRL's: `test_equality_with_stock.py`; models and adapters: `test_trl_adapters.py`; what is
refused: `test_trl_refusals.py`.
"""

import copy
import inspect
import warnings

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForSequenceClassification

import rewards
from rloo_kit import RLOOConfig, RLOOTrainer
from rloo_kit.loop.options import FURTHER_ARGUMENTS
from rloo_kit.rewarding.guard import NamedReward
from tests.loop.conftest import EOS, by_ids, conversations, stream


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


# -------------------------------------------------------------------------------------------------------------- rewards


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


# ----------------------------------------------------------------------------------------------- evaluation and the log


def held_out(number):
    return Dataset.from_dict({"prompt": [f"{n}+5=" for n in range(number)]})


@pytest.mark.parametrize("generations", [None, 1, 2])
def test_evaluation_during_training(generations, trl_train):
    """Evaluated prompts that got into the training window would be trained on; one completion has no baseline."""
    judged = []

    def reward(prompts, completion_ids, **_):
        judged.extend(prompt for prompt in prompts if prompt.endswith("+5="))
        return by_ids(completion_ids)

    run = trl_train(
        reward, arguments={"eval_dataset": held_out(3)}, eval_strategy="steps", eval_steps=2, max_steps=4,
        num_generations_eval=generations, per_device_eval_batch_size=4, eval_on_start=True,
    )  # fmt: skip
    assert run.kept == set() and all(row["prompt"].endswith("+1=") for row in run.rows) and len(run.rows) == 16
    evaluations = [logs for logs in run.trainer.state.log_history if "eval_loss" in logs]
    assert [logs["step"] for logs in evaluations] == [0, 2, 4]
    for logs in evaluations:
        assert 0 <= logs["eval_reward"] <= 1 and logs["eval_completions/mean_length"] > 0
        assert logs["eval_loss"] == pytest.approx(0.0, abs=1e-5) and "eval_kl" in logs
    assert {prompt: judged.count(prompt) for prompt in judged} == dict.fromkeys(
        [f"{n}+5=" for n in range(3)], 3 * (generations or 4)
    )


def test_an_evaluation_counts_each_completion_once(trl_train):
    """A mean of batches' means: one of five prompts, alone in the last batch, was a third of `eval_reward`, which picks
    the best checkpoint. By hand another set may be given, a stream too."""
    values = []

    def reward(completion_ids, **_):
        values.append(by_ids(completion_ids))
        return values[-1]

    run = trl_train(reward, per_device_eval_batch_size=8)
    for data, sizes in ((held_out(5), [8, 8, 4]), (stream(4), [8, 8])):
        values.clear()
        found = run.trainer.evaluate(data)
        assert [len(batch) for batch in values] == sizes
        expected = sum(map(sum, values)) / sum(sizes)
        assert found["eval_reward"] == pytest.approx(expected, rel=1e-5)
        assert found["eval_rewards/reward/mean"] == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_by_hand_of_half_groups_is_refused(trl_train):
    """With `eval_strategy="no"` nothing checks the batch of `evaluate()` before rewards are grouped."""
    run = trl_train(per_device_eval_batch_size=3)
    with pytest.raises(ValueError, match="per_device_eval_batch_size"):
        run.trainer.evaluate(Dataset.from_dict({"prompt": list("012")}))


def test_trls_own_config(trl_train, tmp_path):
    """A script that builds `trl.RLOOConfig` and changes only the trainer's import."""
    import trl

    config = trl.RLOOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=2, learning_rate=0.1, num_generations=2,
        per_device_train_batch_size=4, logging_steps=1, max_completion_length=6, save_strategy="no",
    )  # fmt: skip
    run = trl_train(arguments={"args": config})
    assert run.kept == set() and len(run.steps) == 2 and run.trainer.args is config


@pytest.mark.slow
def test_a_compiled_model(trl_train):
    """`torch_compile` wraps the model; scores must go through the wrapper, or nothing is compiled (8 s on a CPU)."""
    from torch._dynamo.utils import counters

    counters.clear()
    run = trl_train(torch_compile=True, torch_compile_backend="eager")
    assert run.kept == set() and all(step["sampling/logp_difference_max"] < 1e-4 for step in run.steps)
    assert counters["stats"]["unique_graphs"] > 0


# ------------------------------------------------------------------------------------------------------------ arguments


PLAIN = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


@pytest.fixture
def prompts():
    return Dataset.from_dict(
        {"prompt": [f"{n}+1=<think>\n" for n in range(8)], "answer": [str(n + 1) for n in range(8)]}
    )


def test_arguments_are_taken_by_position_as_in_trl(tiny_folder, tiny_tokenizer, prompts, tmp_path):
    """`RLOOTrainer(model, reward, args, dataset, None, tokenizer)` is valid TRL code."""
    import trl

    stock = next(c for c in reversed(trl.RLOOTrainer.__mro__) if c.__name__ == "RLOOTrainer")
    assert list(inspect.signature(stock).parameters)[5:] == list(FURTHER_ARGUMENTS)
    config = RLOOConfig(output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=2, **PLAIN)
    trainer = RLOOTrainer(str(tiny_folder), rewards.length_reward, config, prompts, None, tiny_tokenizer)
    assert trainer.processing_class is tiny_tokenizer


def test_a_trainer_without_args_runs_on_the_cpu(tiny_folder, tiny_tokenizer, prompts, tmp_path, monkeypatch):
    """TRL then makes its own config, which asks for bf16 and raises without an accelerator."""
    monkeypatch.chdir(tmp_path)  # its folder is made where the process stands
    trainer = RLOOTrainer(str(tiny_folder), rewards.length_reward, train_dataset=prompts)
    assert isinstance(trainer.args, RLOOConfig)
    assert trainer.args.output_dir == f"{tiny_folder.name}-RLOO"


def test_a_subclass_hears_which_of_its_overrides_is_not_called(
    make_tiny_model, tiny_tokenizer, prompts, tmp_path, capsys
):
    """Trainers are extended by overriding TRL's methods; overrides of those the kit replaces were silently ignored."""

    class Mine(RLOOTrainer):
        asked = 0

        def _generate_and_score_completions(self, inputs):
            raise AssertionError("called")

        def _generate_single_turn(self, prompt_ids, *more):
            self.asked += len(prompt_ids)
            return super()._generate_single_turn(prompt_ids, *more)

    options = {"per_device_train_batch_size": 4, "max_steps": 1, "max_completion_length": 4, "beta": 0.0}
    config = RLOOConfig(str(tmp_path), **options, **PLAIN)
    trainer = Mine(make_tiny_model(), rewards.length_reward, config, prompts, processing_class=tiny_tokenizer)
    said = capsys.readouterr().out
    assert "WARNING: Mine._generate_and_score_completions is not called" in said
    assert said.count("WARNING") == 1 and "override _generate_single_turn" in said
    trainer.train()
    assert trainer.asked == 4


def test_weights_of_rewards_are_those_of_one_trainer(tiny_folder, tiny_tokenizer, prompts, tmp_path):
    """One plain function in the list made the weights of all others 1. One config for several sets of rewards: the
    first set's weights were applied to the second, or did not "match the number of reward functions"."""
    config, plain = RLOOConfig(output_dir=str(tmp_path), **PLAIN), rewards.length_reward

    def weights_of(*funcs):
        trainer = RLOOTrainer(str(tiny_folder), list(funcs), config, prompts, processing_class=tiny_tokenizer)
        return trainer.reward_weights.tolist()

    def weighted(completions, **_):
        return [0.0] * len(completions)

    weighted.weight = 2.0
    heavy = NamedReward(plain, "heavy", 3.0)
    assert weights_of(plain, plain) == [1.0, 1.0]
    assert weights_of(heavy, plain, weighted) == [3.0, 1.0, 2.0] and weights_of(heavy) == [3.0]
    config.reward_weights = [0.5]
    assert weights_of(heavy) == [0.5] and config.reward_weights == [0.5]


def test_the_published_recipe_runs_as_written(tiny_folder, tiny_tokenizer, prompts, tmp_path):
    """It names `kl_coef`, `num_ppo_epochs`, `cliprange`, `rloo_k` and `reward_model=`, all of them gone from TRL."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = RLOOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=1, kl_coef=0.05, num_ppo_epochs=1,
            cliprange=0.2, rloo_k=2, token_level_kl=True, normalize_reward=True, missing_eos_penalty=1.0,
            response_length=6, **PLAIN,
        )  # fmt: skip
        trainer = RLOOTrainer(
            config=config,
            policy=AutoModelForCausalLM.from_pretrained(tiny_folder),
            reward_model=rewards.thinking_reward,
            tokenizer=tiny_tokenizer,
            train_dataset=prompts,
        )
    said = "\n".join(str(warning.message) for warning in caught)
    for today in ("beta", "num_iterations", "epsilon", "num_generations", "reward_funcs", "max_completion_length"):
        assert today in said
    assert "token_level_kl" in said
    assert (config.beta, config.num_generations, config.max_completion_length) == (0.05, 2, 6)
    assert config.normalize_rewards is True
    trainer.train()
    assert trainer.state.global_step == 1


def test_every_reward_works_in_a_bare_trl_trainer(make_tiny_model, tiny_tokenizer, prompts, tmp_path):
    """A reward that needs our trainer to be called right would break in everybody else's."""
    import trl

    functions = [
        rewards.thinking_reward, rewards.length_reward, rewards.answer_reward, rewards.think_format_reward,
        rewards.soft_overlong_penalty.with_(max_completion_length=20),
        rewards.thinking_budget_reward.with_(max_tokens=40),
        rewards.repetition_penalty, rewards.missing_eos_penalty,
    ]  # fmt: skip
    trainer = trl.RLOOTrainer(
        model=make_tiny_model(),
        reward_funcs=functions,
        args=trl.RLOOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, beta=0.0, **PLAIN
        ),
        train_dataset=prompts,
        processing_class=tiny_tokenizer,
    )
    rows = [prompts[0], prompts[0], prompts[1], prompts[1]]
    texts = ["ok</think>1", "no", "", "</think>2"]
    ids = [[111, 107, 151668, 16, 151645], [110, 111], [], [151668, 17, 151645]]
    found = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], texts, ids)
    assert found.shape == (4, len(functions))
    assert trainer.reward_func_names == [function.__name__ for function in functions]
    assert found[:, 0].tolist() == pytest.approx([0.3, -1.0, -1.0, 0.3])
    assert found[:, 2].tolist() == [1.0, 0.0, 0.0, 1.0]
