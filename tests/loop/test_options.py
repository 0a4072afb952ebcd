"""The options of the loop as keywords of `RLOOConfig`: what is refused there, and that a file's keys arrive."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.config.section import declared
from rloo_kit.errors import BackendError, ConfigError, RlooKitError
from rloo_kit.loop import options
from rloo_kit.loop.options import RLOOConfig, check_options, training_arguments
from tests.choices import choices
from tests.loop.conftest import by_ids

MINIMAL: dict[str, Any] = {
    "model": {"name": "some/model"},
    "data": {"source": "some/set"},
    "rewards": [{"name": "answer_reward"}],
    "rloo": {"max_steps": 1},
}


# What only `RLOOConfig` can be given, and one of each kind of check that it shares with a file (tests/config).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a filter": ({"top_k": 50}, "^top_k is 50.*Set top_k=0; .*lower temperature, .*set accept_truncated_sampling=true"),
    "a hidden filter": ({"generation_kwargs": {"top_p": 0.9}}, "has top_p=0.9.*Set top_p=0.9 instead, with accept_t"),
    "no dict": ({"generation_kwargs": "x"}, "generation_kwargs is 'x'; it is a dict"),
    "hidden in JSON": ({"generation_kwargs": '{"no_repeat_ngram_size": 3}'}, "has no_repeat_ngram_size=3"),
    "two temperatures": ({"generation_kwargs": {"temperature": 0.6}}, "Set temperature=0.6 instead"),
    "stops": ({"generation_kwargs": {"stop_strings": "x"}}, "stop_strings=.*Set tokenizer.eos_token='x' instead"),
    "a seed of each request": ({"generation_kwargs": {"seed": 1}, "use_vllm": True}, "Set seed=1 instead"),
    "a form": ({"vllm_structured_outputs_regex": "a+", "use_vllm": True}, "filtered distribution.*Remove it"),
    "a server": ({"rollout_engine": "server"}, "^rollout_engine is server, but rollout_server_url is null"),
    "a password": (
        {"rollout_engine": "server", "rollout_server_url": "http://me:pass-word@h"}, "^(?!.*pass-word).*VLLM_API_KEY"),
    "a word": ({"rollout_engine": "sglang"}, "^rollout_engine: is 'sglang'; input should be 'auto', 'native', 'gen"),
    "a bound": ({"missing_eos_penalty": -1.0}, "^missing_eos_penalty: is -1.0; input should be greater than 0"),
    "a group": ({"num_generations": 3}, "groups of 3 .num_generations"),
    "no siblings": ({"num_generations": 1}, "num_generations is 1; set it to 2 or more"),
    # At temperature 0 the log-probabilities were NaN, and the advice was on lm_head; with one token left of each
    # distribution all completions of a group are equal.
    "no temperature": ({"temperature": 0.0}, "^temperature:? is 0.0"),
    "the likeliest": ({"top_k": 1, "accept_truncated_sampling": True}, "^top_k:? is 1"),
    "a filter of TRL's": ({"min_p": 0.1, "accept_truncated_sampling": True}, "^min_p is 0.1: .*Set min_p=None"),
    "a key that is gone": ({"delta": 4.0}, "no 'delta' any more: epsilon and epsilon_high bound the ratio"),
    "a mistyped name": ({"num_generation": 4}, "'num_generation'.*num_generations"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_the_loop_would_get_wrong_is_refused(tmp_path, case):
    """Stock TRL samples with top_p 0.95 and scores the whole distribution: another policy's gradient, and no word."""
    keywords, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        RLOOConfig(str(tmp_path), **keywords)


def test_generation_kwargs_that_are_followed(tmp_path):
    """What says what holds anyway is no fault: old scripts spell the filters out as off."""
    given = {"max_new_tokens": 6, "temperature": 0.6, "top_p": 1.0, "eos_token_id": None}
    config = RLOOConfig(str(tmp_path), generation_kwargs=given, max_completion_length=6, temperature=0.6)
    assert config.generation_kwargs == given


def test_trls_own_config_is_asked_too(tmp_path):
    """A script that hands the trainer `trl.RLOOConfig(top_p=0.9)` never passes through the kit's class."""
    import trl

    check_options(trl.RLOOConfig(str(tmp_path), use_cpu=True, bf16=False))
    for fault in ("top_p is 0.9", "temperature: is 0.0"):
        name, _, value = re.split(r"(:? is )", fault)
        with pytest.raises(ConfigError, match=fault):
            check_options(trl.RLOOConfig(str(tmp_path), use_cpu=True, bf16=False, **{name: float(value)}))


def test_a_message_names_the_settings_that_its_reader_has(make_trainer, monkeypatch):
    """`use_vllm=True` without vLLM advised `rollout.engine`, a key of a run's file, which RLOOConfig does not have."""
    monkeypatch.setattr("rloo_kit.vllm.in_process.is_importable", lambda name: False)
    with pytest.raises(BackendError, match="rollout_engine is vllm, .* set rollout_engine=auto"):
        make_trainer([by_ids], use_vllm=True, per_device_train_batch_size=4)


def test_every_key_of_a_file_arrives(tmp_path):
    """A key that the file takes and the loop never sees is a setting that does nothing."""
    chosen: dict[str, Any] = {
        "kl_form": "length_normalized", "ratio_form": "per_token", "baseline": "group_mean",
        "scale_rewards": "group", "token_mean": "batch",
        "normalize_rewards": True, "sampler_correction": "token_mask", "memory": "balanced", "tokens_per_pass": 4096,
        "thinking_budget": 64, "answer_budget": 32, "thinking_close": "sentence",
    }  # fmt: skip
    server = {"server_url": "https://node1:8000", "server_adapters": "/shared/adapters"}
    run = RunConfig.model_validate(
        MINIMAL
        | {"rloo": {"max_steps": 1} | chosen, "run": {"name": "this", "max_reward_failure_share": 0.25}}
        | {"rollout": {"engine": "generate", "rows": 5, "resample_rounds": 2, "difficulty_samples": 4} | server}
    )
    model = SimpleNamespace(device=SimpleNamespace(type="cpu"), config=SimpleNamespace(to_dict=dict))
    policy: Any = SimpleNamespace(model=model, config_arguments={})  # a model that cannot be planned for
    config = RLOOConfig(**training_arguments(run, policy, tmp_path))
    chosen |= {"max_reward_failure_share": 0.25, "rollout_engine": "generate", "rollout_rows": 5, "resample_rounds": 2}
    chosen |= {"rollout_server_url": "https://node1:8000", "rollout_server_adapters": "/shared/adapters"}
    assert {name: getattr(config, name) for name in chosen} == chosen


def test_both_sides_have_the_same_defaults_and_choices(tmp_path):
    """`RLOOConfig` and a file that says nothing are the same run, but for what the table in docs/config.md names."""
    run, config = RunConfig.model_validate(MINIMAL), RLOOConfig(str(tmp_path))
    for name, entry in options._OWN.items():
        assert getattr(config, name) == entry.default
        ours = getattr(getattr(run, entry.section.prefix[:-1]), entry.key)
        assert ours == (entry.default if declared(entry.field, "trl") is None else entry.field.default)
        for choice in choices(name):
            extra: dict[str, Any] = {"kl_form": "length_normalized"} if name == "ratio_form" else {}
            url = {"server_url": "http://localhost:8000"} if choice == "server" else {}
            rollout = {f"rollout_{key}": value for key, value in url.items()}
            assert getattr(RLOOConfig(str(tmp_path), **extra, **rollout, **{name: choice}), name) == choice
            section = entry.section.prefix[:-1]
            RunConfig.model_validate(MINIMAL | {section: MINIMAL.get(section, {}) | extra | url | {entry.key: choice}})


@pytest.mark.parametrize("budget", [{}, {"thinking_budget": 4}])
def test_a_reward_may_ask_for_what_a_budget_tells(budget, make_trainer):
    """Without a budget no reward gets `thinking_forced`."""

    def asks(completion_ids, thinking_forced, **columns):
        return [0.0] * len(completion_ids)

    if budget:
        assert make_trainer(asks, **budget).reward_funcs[0].reward is asks
    else:
        with pytest.raises(RlooKitError, match="thinking_forced"):
            make_trainer(asks)


def test_values_are_read_as_a_files_are(tmp_path):
    """`parse_yaml_file` hands 1e-1 over as text, and true was a count of 1."""
    config = RLOOConfig(str(tmp_path), tokens_per_pass="4096", max_reward_failure_share="1e-1")
    assert (config.tokens_per_pass, config.max_reward_failure_share) == (4096, 0.1)
    wrong = {"tokens_per_pass": True, "rollout_rows": 1.5, "missing_eos_penalty": float("nan"), "baseline": None}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"^{name}: is .*; input should be .*"):
            RLOOConfig(str(tmp_path), **{name: value})


def test_copies_with_a_change(tmp_path):
    """Sweeps write `dataclasses.replace(config, ...)`; the copy has the rest of the options and is checked too."""
    config = RLOOConfig(str(tmp_path), kl_form="per_token", thinking_budget=9)
    again = dataclasses.replace(config, thinking_budget=8, generation_batch_size=None)  # TRL computed it
    assert (again.kl_form, again.thinking_budget) == ("per_token", 8)
    with pytest.raises(ConfigError, match="set ratio_form=per_token"):
        dataclasses.replace(config, ratio_form="sum", generation_batch_size=None)
