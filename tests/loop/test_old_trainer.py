"""The arguments and datasets of TRL's RLOOTrainer up to 0.21. The whole old trainer runs in `test_drop_in.py`."""

import copy
import warnings
from typing import Any

import pytest
from datasets import Dataset

import rewards
from rloo_kit.config.old_names import TRAINER_NAMES
from rloo_kit.errors import ConfigError
from rloo_kit.loop.old_trainer import prepare_old_dataset, translate_trainer_arguments
from rloo_kit.rewarding.guard import guard

# RLOOTrainer.__init__ of TRL 0.20, and `tokenizer` of 0.9 to 0.11.
OLD_ARGUMENTS = """
config processing_class tokenizer policy ref_policy reward_model train_dataset data_collator eval_dataset optimizers
callbacks
"""
STILL_THERE = {"processing_class", "train_dataset", "eval_dataset", "optimizers", "callbacks"}


def translate(**given: Any) -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = translate_trainer_arguments(given)
    return values, [str(warning.message) for warning in caught]


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def test_the_full_old_argument_list():
    """An argument that is missing from the table stops old code with `unexpected keyword argument 'policy'`."""
    assert set(OLD_ARGUMENTS.split()) - STILL_THERE == set(TRAINER_NAMES)
    values, messages = translate(
        config="args", tokenizer="tokenizer", policy="a/b", ref_policy="a/b", reward_model=reward, train_dataset=[1],
        data_collator=object(), eval_dataset=[2], optimizers=(None, None), callbacks=[],
    )  # fmt: skip
    assert values == {
        "args": "args", "processing_class": "tokenizer", "model": "a/b", "reward_funcs": [reward], "train_dataset": [1],
        "eval_dataset": [2], "optimizers": (None, None), "callbacks": [],
    }  # fmt: skip
    said = {name: [message for message in messages if f"RLOOTrainer's {name}" in message] for name in TRAINER_NAMES}
    assert all(len(found) == 1 for found in said.values())
    for old, new in {"config": "args", "policy": "model", "tokenizer": "processing_class"}.items():
        assert said[old][0].endswith(f"is the old TRL name of {new}=")
    assert "reference='start'" in said["ref_policy"][0] and "tokenized in the loop" in said["data_collator"][0]


def test_todays_arguments_pass_without_a_word():
    """A drop-in that warns of current code is not one."""
    given = {"model": "a/b", "reward_funcs": [reward], "args": None, "processing_class": "t", "ref_policy": None}
    values, messages = translate(**given)
    assert not messages and values == {name: given[name] for name in given if name != "ref_policy"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model": "a", "policy": "b", "reward_funcs": reward},
            "got policy= and model=, which are the same; keep model=",
        ),
        ({"model": "a", "reward_funcs": reward, "reward_model": reward}, "keep reward_funcs="),
        ({"reward_funcs": reward}, "RLOOTrainer needs model=: a model or its name"),
        ({"model": "a"}, "RLOOTrainer needs reward_funcs=: a reward function"),
    ],
)
def test_refusals(given, message):
    """Two names for one thing, or none: said before a model is loaded."""
    with pytest.raises(ConfigError) as caught:
        translate(**given)
    assert message in str(caught.value)


def test_the_old_positional_order_is_recognised():
    """`RLOOTrainer(config, tokenizer, policy, ...)` put the config where the model goes: `no attribute 'config'`."""

    class Config:
        per_device_train_batch_size, learning_rate = 1, 1e-6

    with pytest.raises(ConfigError, match="first argument is a config, as it was in old TRL; .*Name the arguments"):
        translate(model=Config(), reward_funcs="tokenizer", args="policy")


def test_a_reference_with_other_weights_is_refused(make_tiny_model):
    """TRL 0.22 ignored `ref_policy` with a warning: the KL was measured against another model than the one given."""
    policy = make_tiny_model()
    _, messages = translate(policy=policy, ref_policy=copy.deepcopy(policy), reward_model=reward)
    assert sum("ref_policy" in message for message in messages) == 1
    other = copy.deepcopy(policy)
    other.model.norm.weight.data[0] += 1e-3
    for pair in ((policy, other), (policy, make_tiny_model(hidden_size=64)), ("a/b", "a/c"), (policy, "a/c")):
        with pytest.raises(ConfigError, match="ref_policy has other weights than policy"):
            translate(policy=pair[0], ref_policy=pair[1], reward_model=reward)


def test_a_function_of_texts_still_gets_texts(tiny_tokenizer):
    """The old trainer called `reward_model(texts)` with prompt and completion together, without special tokens."""
    seen: list[list[str]] = []

    def count(texts: list[str]) -> list[int]:
        seen.append(texts)
        return [len(text) for text in texts]

    values, _ = translate(model="a", reward_model=count, processing_class=tiny_tokenizer)
    (adapted,) = values["reward_funcs"]
    prompts = ["<|im_start|>user\nhi<|im_end|>\n", [{"role": "user", "content": "so"}]]
    completions = [" you", [{"role": "assistant", "content": "!"}]]
    scores = guard(adapted)(prompts=prompts, completions=completions, completion_ids=[[1], [2]], trainer_state=None)
    assert seen == [["user\nhi\n you", "so!"]] and scores == [12.0, 3.0]
    assert all(isinstance(score, float) for score in scores) and adapted.__name__ == "count"


def test_a_function_of_texts_may_have_options_and_is_judged_by_the_guard():
    """Its options kept it from being recognised, and a dict that it returned was trained on its keys."""

    def count(texts: list[str], scale: float = 2.0) -> Any:
        return dict.fromkeys(texts, scale)

    values, _ = translate(model="a", reward_model=count, train_dataset=Dataset.from_dict({"prompt": ["a"]}))
    guarded = guard(values["reward_funcs"][0], columns=["prompt"])
    assert guarded(prompts=["a"], completions=["b"], completion_ids=[[1]]) == [None]
    assert "reward 'count' failed" in guarded.failures[0] and "it returned dict" in guarded.failures[0]


def test_a_function_of_a_column_is_no_function_of_texts():
    """A reward of today's convention that reads one column alone was handed the texts of all completions."""

    def by_answer(answer: list[str]) -> list[float]:
        return [float(gold) for gold in answer]

    data = Dataset.from_dict({"prompt": ["a"], "answer": ["4"]})
    for given in (data, {"train": data}):
        values, _ = translate(model="a", reward_model=by_answer, train_dataset=given)
        assert values["reward_funcs"] == [by_answer]
    assert guard(by_answer, columns=["prompt", "answer"])(completions=["b"], answer=["4"]) == [4.0]


def test_rewards_of_todays_convention_stay_as_they_are(tiny_model):
    """The published recipe passes a function of today's convention as `reward_model=`."""

    def only_completions(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    class Judge:
        def get_rewards(self, prompts: list[str], completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

    judge = Judge()
    for given in (reward, only_completions, rewards.thinking_reward, judge, "some/checkpoint", tiny_model):
        values, _ = translate(model="a", reward_model=given)
        assert values["reward_funcs"] == [given]
    assert values["reward_processing_classes"] == [None]
    values, _ = translate(model="a", reward_model=[tiny_model, tiny_model], tokenizer="policy's")
    assert values["reward_processing_classes"] == ["policy's"] * 2, "a checkpoint scored the policy's own token ids"


def test_tokenized_data_sets_are_decoded(tiny_tokenizer):
    """Old scripts tokenized the prompts themselves; today's trainer looks for a column `prompt` and finds none."""
    text = "<|im_start|>user\n2+2?<|im_end|>\n<think>\n"
    ids = tiny_tokenizer.encode(text)
    pad = [tiny_tokenizer.pad_token_id] * 2
    rows = {"input_ids": [ids, pad + ids], "lengths": [len(ids)] * 2, "answer": ["4", "5"]}
    for columns in (rows, rows | {"attention_mask": [[1] * len(ids), [0, 0] + [1] * len(ids)]}):
        with pytest.warns(FutureWarning, match="has input_ids and no prompt, as old TRL wanted it"):
            prepared = prepare_old_dataset(Dataset.from_dict(columns), tiny_tokenizer)
        assert prepared[:] == {"answer": ["4", "5"], "prompt": [text, text]}
        assert tiny_tokenizer.encode(prepared[0]["prompt"]) == ids


def test_data_sets_of_today_are_left_alone(tiny_tokenizer):
    """A prompt next to ids wins; a streamed dataset without known columns is not read ahead."""
    today = Dataset.from_dict({"prompt": ["a"], "input_ids": [[1]]})
    assert prepare_old_dataset(today, tiny_tokenizer) is today and prepare_old_dataset(None, None) is None
    assert prepare_old_dataset({"test": today}, None) == {"test": today}
    with pytest.raises(ConfigError, match="RLOOTrainer needs processing_class="):
        prepare_old_dataset(Dataset.from_dict({"input_ids": [[1]]}), None)
