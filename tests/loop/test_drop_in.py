"""TRL code of today, the published recipe of yesterday, and our rewards in a bare TRL trainer."""

import inspect
import warnings

import pytest
from datasets import Dataset

import rewards
from rloo_kit import RLOOConfig, RLOOTrainer
from rloo_kit.loop.arguments import FURTHER_ARGUMENTS
from rloo_kit.rewarding.guard import NamedReward

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


def test_weights_count_next_to_a_reward_without_one(tiny_folder, tiny_tokenizer, prompts, tmp_path):
    """One plain function in the list silently made the weights of all others 1."""

    def weighted(completions, **_):
        return [0.0] * len(completions)

    weighted.weight = 3.0
    config = RLOOConfig(output_dir=str(tmp_path), **PLAIN)
    trainer = RLOOTrainer(
        str(tiny_folder), [weighted, rewards.length_reward], config, prompts, processing_class=tiny_tokenizer
    )
    assert trainer.reward_weights.tolist() == [3.0, 1.0]


def test_weights_do_not_pass_to_the_next_trainer_of_a_config(tiny_folder, tiny_tokenizer, prompts, tmp_path):
    """One config for several sets of rewards: the first set's weights were applied to the second, or "must match the
    number of reward functions" was raised where none had been given."""
    config = RLOOConfig(output_dir=str(tmp_path), **PLAIN)
    heavy = NamedReward(rewards.length_reward, "heavy", 3.0)

    def weights_of(*funcs):
        return RLOOTrainer(
            str(tiny_folder), list(funcs), config, prompts, processing_class=tiny_tokenizer
        ).reward_weights.tolist()

    assert weights_of(rewards.length_reward, rewards.length_reward) == [1.0, 1.0]
    assert weights_of(heavy, rewards.length_reward) == [3.0, 1.0] and weights_of(heavy) == [3.0]
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
