"""Old TRL names, argument by argument, and the drop-in config against the TRL that is installed.

The tables hold every argument of TRL 0.9.6 (the first RLOO), 0.20 (the last of the old trainer) and 0.22 to 0.26 (the
rewrite) that is gone.
"""

import copy
import dataclasses
import inspect
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.old_names import CONFIG_NAMES, GONE_KEYS, TRAINER_NAMES, translate_config
from rloo_kit.config.run import load_config
from rloo_kit.config.schema import RLOOSection
from rloo_kit.config.yaml_files import write_value
from rloo_kit.errors import ConfigError, RlooKitError

# Each old keyword of the config with a value that is not today's default, and what has to become of it.
RENAMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "kl_coef": (0.1, {"beta": 0.1}),
    "rloo_k": (4, {"num_generations": 4}),
    "cliprange": (0.3, {"epsilon": 0.3}),
    "num_ppo_epochs": (4, {"num_iterations": 4}),
    "response_length": (53, {"max_completion_length": 53}),
    "exp_name": ("first", {"run_name": "first", "exp_name": "first"}),
    "normalize_advantage": (True, {"normalize_advantages": True}),
    "normalize_reward": (True, {"normalize_rewards": True, "reward_clip_range": (-10.0, 10.0)}),
    "num_mini_batches": (2, {"steps_per_generation": 2, "generation_batch_size": 16}),
    "total_episodes": (100, {"max_steps": 13}),
    "wandb_log_unique_prompts": (True, {"log_unique_prompts": True}),
}
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "token_level_kl": (True, "kl_form='per_token'"),
    "whiten_rewards": (True, "normalize_rewards=True"),
    "stop_token": ("eos", "end token"),
    "local_rollout_forward_batch_size": (64, "tokens_per_pass"),
    "num_sample_generations": (10, "log_completions=True"),
    "dataset_num_proc": (4, "never read it"),
    "max_prompt_length": (512, "data.max_prompt_length"),
    "reward_model_path": ("a/b", "reward_funcs="),
    "sanity_check": (True, "max_steps"),
    "non_eos_penalty": (False, "missing_eos_penalty"),
    "penalty_reward_value": (-1.0, "missing_eos_penalty"),
    **dict.fromkeys(
        ["batch_size", "local_batch_size", "micro_batch_size", "mini_batch_size", "local_mini_batch_size"],
        (2, "generation batch"),
    ),
    **dict.fromkeys(["num_total_batches", "num_updates", "world_size"], (2, "generation batch")),
    **dict.fromkeys(["sft_model_path", "base_model"], ("a/b", "model=")),
    **dict.fromkeys(["vf_coef", "cliprange_value", "gamma", "lam"], (0.9, "value function")),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "stop_token_id": (151645, "stop_token_id.*Set tokenizer.eos_token"),
    "vllm_guided_decoding_regex": ("a+", "vllm_structured_outputs_regex.*Remove it"),  # under its name of today
    "stop_token": ("period", "stop_token.*Set tokenizer.eos_token"),
    "non_eos_penalty": (True, r"non_eos_penalty.*missing_eos_penalty=1.0 \(a positive number\)"),
}


@pytest.fixture(scope="module")
def config_class() -> type:
    from rloo_kit.loop.options import RLOOConfig

    return RLOOConfig


def build(config_class: type, tmp_path: Path, **keywords: Any) -> tuple[Any, list[str]]:
    """A config and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = config_class(str(tmp_path), **keywords)
    return config, [str(w.message) for w in caught if w.category is FutureWarning]


def test_every_old_keyword_is_renamed_dropped_or_refused(config_class: type, tmp_path: Path) -> None:
    """`kl_coef=0.1` was accepted and dropped by a recipe's wrapper: the run had the default penalty, half as large."""
    assert set(CONFIG_NAMES) == set(RENAMED) | set(WITHOUT_EFFECT) | set(REFUSED)
    for old, (value, expected) in RENAMED.items():
        config, messages = build(config_class, tmp_path, **{old: value})
        assert {name: getattr(config, name) for name in expected} == expected
        assert len(messages) == 1 and old in messages[0] and str(CONFIG_NAMES[old].new) in messages[0]
    plain = build(config_class, tmp_path)[0].to_dict()
    for old, (value, equivalent) in WITHOUT_EFFECT.items():
        config, messages = build(config_class, tmp_path, **{old: value})
        assert len(messages) == 1 and old in messages[0] and "no effect" in messages[0] and equivalent in messages[0]
        assert config.to_dict() == plain
    for old, (value, message) in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            build(config_class, tmp_path, **{old: value})


def test_the_old_clip_range_was_one_number(config_class: type, tmp_path: Path) -> None:
    """`reward_clip_range=10.0` reached `clamp(*10.0)` and died in the first step, after the model had loaded."""
    config, messages = build(config_class, tmp_path, normalize_reward=True, reward_clip_range=5.0)
    assert config.reward_clip_range == (-5.0, 5.0) and config.normalize_rewards and len(messages) == 2
    config, messages = build(config_class, tmp_path, reward_clip_range=5.0)
    assert config.reward_clip_range is None and "no effect without normalize_reward" in messages[0]
    assert "reward_clip_range=(-5.0, 5.0)" in messages[0]
    config, messages = build(config_class, tmp_path, reward_clip_range=(-1.0, 2.0))
    assert config.reward_clip_range == (-1.0, 2.0) and not messages


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"total_episodes": 1000, "gradient_accumulation_steps": 2}, 125),
        ({"total_episodes": 1001, "gradient_accumulation_steps": 2}, 126),
        ({"total_episodes": 1000, "num_mini_batches": 2, "num_ppo_epochs": 3}, 750),
        ({"total_episodes": 1000, "steps_per_generation": 2, "num_iterations": 3}, 750),
        ({"total_episodes": 1000, "per_device_train_batch_size": None}, 125),
    ],
)
def test_episodes_become_the_optimizer_steps_that_the_old_loop_made(given: dict[str, Any], steps: int) -> None:
    """An episode was one completion, a batch of them was used `num_ppo_epochs` times in `num_mini_batches` steps."""
    given = {"per_device_train_batch_size": 4} | given
    assert translate_config(given)[0]["max_steps"] == steps
    assert abs(translate_config(given, processes=2)[0]["max_steps"] - steps / 2) <= 3


def test_old_and_new_name_together(config_class: type, tmp_path: Path) -> None:
    """Which of both won depended on the order of two lines in TRL; None counts as not given."""
    with pytest.raises(ConfigError, match="kl_coef.*beta=0.1.*beta=0.2.*remove kl_coef"):
        config_class(str(tmp_path), kl_coef=0.1, beta=0.2)
    assert build(config_class, tmp_path, kl_coef=0.2, beta=0.2)[0].beta == 0.2
    config, messages = build(config_class, tmp_path, **dict.fromkeys(CONFIG_NAMES))
    assert not messages and config.num_generations == 2
    for old in ("rloo_k", "total_episodes", "num_mini_batches"):  # computed with before any other check sees them
        for value in ("4", 2.5, -1, True):
            with pytest.raises(ConfigError, match=f"{old} is .*a whole number"):
                config_class(str(tmp_path), **{old: value})


def test_current_keywords_mean_what_they_mean_in_trl(config_class: type, tmp_path: Path) -> None:
    """A drop-in whose defaults differ is another experiment after a changed import."""
    import trl

    from rloo_kit.loop.options import OPTIONS

    stock = trl.RLOOConfig(str(tmp_path), use_cpu=True, bf16=False)
    ours, messages = build(config_class, tmp_path)
    own = {f.name for f in dataclasses.fields(ours)} - {f.name for f in dataclasses.fields(stock)} - set(CONFIG_NAMES)
    assert own == set(OPTIONS) - {f.name for f in dataclasses.fields(stock)}
    assert (
        list(inspect.signature(config_class).parameters)[:2] == list(inspect.signature(trl.RLOOConfig).parameters)[:2]
    )
    with pytest.raises(TypeError, match="output_dir twice"):
        config_class(str(tmp_path), output_dir="x")
    difference = {name for name, value in stock.to_dict().items() if ours.to_dict()[name] != value}
    assert difference <= {"logging_dir"} and not messages and isinstance(ours, trl.RLOOConfig)


def test_where_there_is_no_accelerator_the_cpu_is_chosen(config_class: type, tmp_path: Path) -> None:
    """Stock TRL needs `use_cpu=True, bf16=False` on a laptop, and stops with a message about bf16 instead."""
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert (config_class(str(tmp_path)).use_cpu, config_class(str(tmp_path)).bf16) == (True, False)
    asked = config_class(str(tmp_path), use_cpu=True, bf16=True)
    assert asked.bf16 is True


def test_command_line_flags_old_and_new(config_class: type, tmp_path: Path) -> None:
    """The old example scripts are started with flags, `--rloo_k 4 --kl_coef 0.03`, not with keywords."""
    from transformers import HfArgumentParser

    flags = ["--output_dir", str(tmp_path), "--rloo_k", "4", "--kl_coef", "0.03", "--total_episodes", "80"]
    flags += ["--missing_eos_penalty", "1.0", "--kl_form", "per_token", "--learning_rate", "3e-6"]
    parser = HfArgumentParser(config_class)
    with pytest.warns(FutureWarning, match="rloo_k is an old TRL name of num_generations"):
        (config,) = parser.parse_args_into_dataclasses([*flags, "--rollout_rows", "5", "--normalize_rewards"])
    assert (config.num_generations, config.beta, config.max_steps, config.learning_rate) == (4, 0.03, 10, 3e-6)
    assert (config.missing_eos_penalty, config.kl_form, config.rollout_rows) == (1.0, "per_token", 5)
    assert config.normalize_rewards is True
    assert "completions generated at once; None: set by the memory plan" in " ".join(parser.format_help().split())
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses([*flags, "--ratio_form", "token"])


def test_choices_of_the_file_are_choices_of_transformers() -> None:
    """A scheduler's or optimiser's name that is gone fails when the first step is taken."""
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    for key, known in (("lr_scheduler_type", SchedulerType), ("optim", OptimizerNames)):
        offered = typing.get_args(RLOOSection.model_fields[key].annotation)
        assert len(offered) > 3 and set(offered) <= {choice.value for choice in known}


def test_old_names_in_a_file(tmp_path: Path) -> None:
    """A recipe's YAML with old names says once what each is called today, and its values arrive."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {max_seq_length: 256}\ndata: {source: embedded/addition}\nreward_model: some/model\n"
        "rloo: {kl_coef: 0.1, rloo_k: 4, cliprange: 0.3, num_ppo_epochs: 2, response_length: 64, total_episodes: 80,\n"
        "       sft_model_path: embedded/thinking, max_prompt_length: 64, exp_name: first, token_level_kl: true}\n"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = load_config(path, "rloo.beta=0.5")
    found = [str(warning.message).removeprefix(f"{path}: ") for warning in caught]
    for old, new in (
        ("rloo.kl_coef", "rloo.beta=0.1"),
        ("rloo.rloo_k", "rloo.num_generations=4"),
        ("rloo.token_level_kl", "no effect"),
        ("rloo.token_level_kl", "rloo.kl_form: per_token"),
        ("rloo.sft_model_path", "model.name=embedded/thinking"),
        ("reward_model", "rewards: [{'name': 'reward_model'"),
    ):
        assert len([line for line in found if line.startswith(f"{old} ") and new in line]) == 1, (old, found)
    assert (run.rloo.beta, run.rloo.num_generations, run.rloo.epsilon, run.rloo.num_iterations) == (0.5, 4, 0.3, 2)
    assert (run.rloo.max_completion_length, run.rloo.max_steps, run.name) == (64, 10, "first")
    assert run.data.max_prompt_length == 64 and run.rewards[0].params == {"model": "some/model"}
    with pytest.raises(ConfigError, match="rloo.kl_coef means .*=0.5.*keep rloo.beta and remove rloo.kl_coef"):
        load_config(path, "rloo.kl_coef=0.5")
    with pytest.raises(ConfigError, match="rloo.rloo_k .*=4.*rloo.num_generations=8"):
        path.write_text(path.read_text().replace("rloo_k: 4", "rloo_k: 4, num_generations: 8"))
        load_config(path)


def test_names_of_earlier_files(tmp_path: Path) -> None:
    """`run:` with all its keys commented out is None, and lost the seed and the folder that belong there."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "run:\nmodel: {name: embedded/thinking}\ndata: {source: embedded/addition}\n"
        "rewards: [{name: thinking_reward}]\nrloo: {max_steps: 1, seed: 5, output_dir: other}\n"
        "health: {nothing_learnt: stop, stop: [no_signal]}\n"
    )
    moved = pytest.warns(FutureWarning, match="rloo.seed belongs to run.seed")
    with moved, pytest.warns(FutureWarning, match="health.nothing_learnt has no effect any more: .*eval.patience"):
        run = load_config(path)
    assert (run.run.seed, run.run.output_dir, run.health.stop) == (5, "other", ["no_signal"])


@pytest.mark.parametrize("key", GONE_KEYS)
def test_a_file_that_sets_a_key_that_is_gone(key: str, tmp_path: Path) -> None:
    """A run's folder has every key of its day: with its default the run goes on, with another value it would differ."""
    file, gone, key = tmp_path / "run.yaml", GONE_KEYS[key], key.replace("sources.", "sources.0.")
    file.write_text(
        "model: {name: embedded/thinking}\ndata: {sources: [{source: embedded/addition}]}\nrloo: {max_steps: 1}\n"
        "rewards: [{name: thinking_reward}]\nreward_model: {source: pairs.csv}\n"
    )
    with pytest.warns(FutureWarning, match=f"last defaults: {key}; remove them"):
        assert load_config(file, f"{key}={write_value(gone.default)}") == load_config(file)
    with pytest.raises(ConfigError) as caught:
        load_config(file, f"{key}=7")
    assert str(caught.value) == f"{key} is 7, but there is no such key any more: {gone.instead.format(value=7)}"


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def prepare(**given: Any) -> tuple[dict[str, Any], list[str]]:
    """The arguments of `RLOOTrainer` under today's names, and what was warned of."""
    from rloo_kit.loop.options import rename_arguments

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = rename_arguments(given)
    return values, [str(warning.message) for warning in caught]


def test_the_full_old_argument_list_of_the_trainer() -> None:
    """A missing argument stops old code with `unexpected keyword argument 'policy'`; current code warns of nothing."""
    assert set(TRAINER_NAMES) == {"config", "policy", "tokenizer", "reward_model", "ref_policy", "data_collator"}
    values, messages = prepare(
        config="args", tokenizer="tokenizer", policy="a/b", ref_policy="a/b", reward_model=reward, train_dataset=[1],
        data_collator=object(), eval_dataset=[2], optimizers=(None, None), callbacks=[],
    )  # fmt: skip
    assert values == {
        "args": "args", "processing_class": "tokenizer", "model": "a/b", "reward_funcs": reward, "train_dataset": [1],
        "eval_dataset": [2], "optimizers": (None, None), "callbacks": [],
    }  # fmt: skip
    for old, entry in TRAINER_NAMES.items():
        (message,) = [one for one in messages if f"RLOOTrainer's {old}" in one]
        assert message.endswith(f"is the old TRL name of {entry.new}=" if entry.new else entry.note)
    given = {"model": "a/b", "reward_funcs": [reward], "args": None, "processing_class": "t"}
    assert prepare(**given, ref_policy=None) == (given, [])


def test_an_old_reward_model_scores_with_the_policys_tokenizer(
    config_class: type, make_tiny_model: Any, tmp_path: Path
) -> None:
    """Old recipes pass a loaded model; TRL would look for a tokenizer under its name, which it may not have."""
    from rloo_kit.loop.options import prepare_arguments

    model = make_tiny_model()
    given = {"model": make_tiny_model(), "args": config_class(str(tmp_path), beta=0.0), "processing_class": "t"}
    with pytest.warns(FutureWarning, match="old TRL name of reward_funcs"):
        old = prepare_arguments({**given, "reward_model": model})
        of_text = prepare_arguments({**given, "reward_model": reward})
    assert old["reward_processing_classes"] == ["t"]
    for values in (of_text, prepare_arguments({**given, "reward_funcs": model})):
        assert "reward_processing_classes" not in values


class Config:
    """Like the config that was the old trainer's first argument."""

    per_device_train_batch_size, learning_rate = 1, 1e-6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "a", "policy": "b", "reward_funcs": reward}, "got policy= and model=.*keep model="),
        ({"model": "a", "reward_funcs": reward, "reward_model": reward}, "keep reward_funcs="),
        ({"reward_funcs": reward}, "RLOOTrainer needs model=: a model or its name"),
        ({"model": "a"}, "RLOOTrainer needs reward_funcs=: a reward function"),
        ({"model": Config(), "reward_funcs": "tokenizer", "args": "policy"}, "first argument is a config.*Name the"),
        ({"policy": "a/b", "ref_policy": "a/c", "reward_model": reward}, "ref_policy has other weights than policy"),
    ],
)
def test_arguments_that_the_trainer_refuses(given: dict[str, Any], message: str) -> None:
    """Two names for one thing, none, or the old order by position: refused before a model is loaded."""
    with pytest.raises(ConfigError, match=message):
        prepare(**given)


def test_a_reference_with_other_weights_is_refused(make_tiny_model: Any) -> None:
    """TRL 0.22 ignored `ref_policy` with a warning: the KL was measured against another model than the one given."""
    policy = make_tiny_model()
    _, messages = prepare(policy=policy, ref_policy=copy.deepcopy(policy), reward_model=reward)
    assert sum("ref_policy" in message for message in messages) == 1
    other = copy.deepcopy(policy)
    other.model.norm.weight.data[0] += 1e-3
    for reference in (other, make_tiny_model(hidden_size=64), "a/c"):
        with pytest.raises(ConfigError, match="ref_policy has other weights than policy"):
            prepare(policy=policy, ref_policy=reference, reward_model=reward)


def test_functions_of_texts_and_tokenized_data_are_refused(
    config_class: type, tiny_folder: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """The old trainer's `reward_model(texts)` and `input_ids`: today's form is named before a model is loaded."""
    from datasets import Dataset

    from rloo_kit.loop.trainer import RLOOTrainer

    def count(texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    config, prompts = config_class(str(tmp_path)), Dataset.from_dict({"prompt": ["a"]})
    for function, data, message in (
        (count, prompts, "'count' cannot be called: it requires 'texts'.*did you mean 'completions'"),
        (reward, Dataset.from_dict({"input_ids": [[1]]}), "train_dataset has input_ids and no prompt.*column prompt"),
    ):
        with pytest.raises(RlooKitError, match=message), pytest.warns(FutureWarning, match="old TRL name of reward_f"):
            RLOOTrainer(str(tiny_folder), args=config, reward_model=function, train_dataset=data)
    tests = {"held out": Dataset.from_dict({"input_ids": [[1]]})}
    with pytest.raises(RlooKitError, match="eval_dataset has input_ids and no prompt"):
        RLOOTrainer(str(tiny_folder), reward, args=config, train_dataset=prompts, eval_dataset=tests)
