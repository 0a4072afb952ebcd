"""The options of the loop as keywords of `RLOOConfig`: what is refused there, and that a file's keys arrive."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import choices
from rloo_kit.config.section import declared
from rloo_kit.errors import BackendError, ConfigError
from rloo_kit.loop import options
from rloo_kit.loop.arguments import training_arguments
from rloo_kit.loop.options import RLOOConfig, check_options
from tests.loop.conftest import by_ids

MINIMAL: dict[str, Any] = {
    "model": {"name": "some/model"},
    "data": {"source": "some/set"},
    "rewards": [{"name": "answer_reward"}],
    "rloo": {"max_steps": 1},
}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nucleus": ({"top_p": 0.95}, "top_p is 0.95: tokens would be sampled from a filtered distribution"),
    "top k": ({"top_k": 50}, "Set top_k=0; .* lower temperature, .* or set accept_truncated_sampling=true"),
    "accepted, but hidden": (
        {"generation_kwargs": {"top_p": 0.9}, "accept_truncated_sampling": True},
        "or top_p=0.9 with accept_truncated_sampling=true",
    ),
    "of another kind": (
        {"generation_kwargs": {"no_repeat_ngram_size": 3}, "accept_truncated_sampling": True},
        "has no_repeat_ngram_size=3",
    ),
    "min p": ({"min_p": 0.1}, "Set min_p=null"),
    "repetition": ({"repetition_penalty": 1.2}, "Set repetition_penalty=1.0"),
    "hidden filter": ({"generation_kwargs": {"top_p": 0.9}}, "generation_kwargs has top_p=0.9"),
    "hidden in JSON": ({"generation_kwargs": '{"no_repeat_ngram_size": 3}'}, "has no_repeat_ngram_size=3"),
    "greedy": ({"generation_kwargs": {"do_sample": False}}, "generation_kwargs has do_sample=False"),
    "beams": ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs has num_beams=4"),
    "no early end": ({"generation_kwargs": {"min_new_tokens": 9}}, "generation_kwargs has min_new_tokens=9"),
    "two temperatures": ({"generation_kwargs": {"temperature": 0.6}}, "set temperature=0.6 instead"),
    "a length": ({"generation_kwargs": {"max_new_tokens": 3}}, "max_new_tokens=3.*Set max_completion_length=3"),
    "a whole length": ({"generation_kwargs": {"max_length": 9}}, "max_length=9.*Set max_completion_length instead"),
    "stops": ({"generation_kwargs": {"stop_strings": ["x"]}}, "stop_strings=.*Set tokenizer.eos_token instead"),
    "a seed": ({"generation_kwargs": {"seed": 1}}, "seed=1.*Set seed=1 instead"),
    "a seed of each request": ({"generation_kwargs": {"seed": 1}, "use_vllm": True}, "Set seed=1 instead"),
    "two samples": ({"generation_kwargs": {"n": 2}, "rollout_engine": "vllm"}, "n=2.*Set num_generations=2"),
    "not vLLM's name": ({"generation_kwargs": {"max_new_tokens": 3}, "use_vllm": True}, "max_completion_length=3"),
    "its cache": ({"generation_kwargs": {"cache_implementation": "static"}}, "each engine has its own KV cache"),
    "stops of vLLM": ({"generation_kwargs": {"stop_token_ids": [3]}, "use_vllm": True}, "Set tokenizer.eos_token"),
    "for vLLM alone": ({"generation_kwargs": {"priority": 1}, "rollout_engine": "vllm"}, "priority=1.*Remove it"),
    "of the server": ({"generation_kwargs": {"allowed_token_ids": [1]}, "use_vllm": True}, "filtered distribution"),
    "a form": ({"vllm_structured_outputs_regex": "a+", "use_vllm": True}, "filtered distribution.*Remove it"),
    "a time": (
        {"generation_kwargs": {"max_time": 1.0}},
        "max_time=1.0, which the kit's engines do not read. Remove it",
    ),
    "delta": ({"delta": 1.1}, "it must be above 1 \\+ epsilon = 1.2"),
    "ratio": ({"kl_form": "per_token", "ratio_form": "sum"}, "set ratio_form=per_token"),
    "scales": (
        {"scale_rewards": "group", "normalize_advantages": True},
        "set scale_rewards=none or normalize_advantages=false",
    ),
    "a scale": ({"scale_rewards": "batch"}, "scale_rewards is 'batch'; it takes 'none', 'group'"),
    "mean of a ratio": (
        {"token_mean": "completion", "ratio_form": "sum"},
        "token_mean is completion.* set ratio_form=per_token \\(or null\\), or token_mean=none",
    ),
    "mean of a mean": ({"token_mean": "batch", "ratio_form": "length_normalized"}, "ratio_form is length_normalized"),
    "mean of half a step": (
        {"token_mean": "batch", "steps_per_generation": 2, "gradient_accumulation_steps": 4},
        "steps_per_generation \\(2\\) is not a multiple of gradient_accumulation_steps \\(4\\).*generation=null",
    ),
    "budget": ({"thinking_budget": 256, "max_completion_length": 256}, "= 258 tokens, more than max_completion_length"),
    "answer": ({"answer_budget": 8}, "thinking_budget is null"),
    "baseline": ({"baseline": "mean"}, "baseline is 'mean'; it takes 'leave_one_out', 'group_mean', 'none'"),
    "ties": ({"baseline": "none", "resample_rounds": 2}, "set resample_rounds=0, or baseline=group_mean"),
    "memory": ({"memory": "tiny"}, "memory is 'tiny'; it takes 'fast', 'balanced', 'low'"),
    "engine": ({"rollout_engine": "sglang"}, "rollout_engine is 'sglang'; it takes 'auto', 'native', 'gene"),
    "rewards": ({"normalize_rewards": "always"}, "normalize_rewards is 'always'; it takes true or false or 'running'"),
    "cap": ({"sampler_correction_cap": 0.0}, "sampler_correction_cap is 0.0; it must be at least 1"),
    "floor": ({"sampler_correction_floor": 1.0}, "sampler_correction_floor is 1.0; it must be below 1"),
    "floor of a cap": (
        {"sampler_correction": "sequence", "sampler_correction_floor": 0.5},
        "set sampler_correction=sequence_mask or",
    ),
    "a reward for no end": ({"missing_eos_penalty": -1.0}, "missing_eos_penalty is -1.0.*above 0"),
    "failures": ({"max_reward_failure_share": 1.5}, "max_reward_failure_share is 1.5.*at most 1"),
    "a group": ({"num_generations": 3}, "groups of 3 .num_generations"),
    "a mistyped name": ({"num_generation": 4}, "'num_generation'.*num_generations"),
    "skips": ({"max_skipped_steps": 0}, "max_skipped_steps is 0; it must be at least 1"),
    "tokens": ({"tokens_per_pass": 0}, "tokens_per_pass is 0; it must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_the_loop_would_get_wrong_is_refused(tmp_path, case):
    """Stock TRL samples with top_p 0.95 and scores the whole distribution: another policy's gradient, and no word."""
    keywords, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        RLOOConfig(str(tmp_path), **keywords)


def test_neutral_values_and_temperature_are_taken(tmp_path):
    """Old scripts spell the filters out as off; and temperature is scored as it is sampled."""
    config = RLOOConfig(
        str(tmp_path), top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, temperature=0.6,
        generation_kwargs={"temperature": 0.6, "top_p": 1.0, "use_cache": True}, normalize_rewards="running",
    )  # fmt: skip
    assert config.temperature == 0.6 and config.normalize_rewards == "running"


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({"max_new_tokens": 6, "max_tokens": 6, "num_return_sequences": 1}, {"max_completion_length": 6}),
        ({"eos_token_id": None, "output_scores": True, "pad_token_id": 3}, {}),
        ({"n": 1, "temperature": 0.7}, {"use_vllm": True, "temperature": 0.7}),
    ],
    ids=str,
)
def test_generation_kwargs_that_are_followed(given, more, tmp_path):
    """What says what holds anyway is no fault."""
    assert RLOOConfig(str(tmp_path), generation_kwargs=given, **more).generation_kwargs == given


def test_trls_own_config_is_asked_too(tmp_path):
    """A script that hands the trainer `trl.RLOOConfig(top_p=0.9)` never passes through the kit's class."""
    import trl

    check_options(trl.RLOOConfig(str(tmp_path), use_cpu=True, bf16=False))
    for fault in ("top_p is 0.9", "temperature is 0.0"):
        name, _, value = fault.partition(" is ")
        with pytest.raises(ConfigError, match=fault):
            check_options(trl.RLOOConfig(str(tmp_path), use_cpu=True, bf16=False, **{name: float(value)}))


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0.0}, {"temperature": -1.0}, {"max_completion_length": 0}, {"top_k": 1}, {"min_p": 1.0}],
    ids=str,
)
def test_sampling_that_can_teach_nothing(given, tmp_path):
    """At temperature 0 the log-probabilities were NaN, and the advice was on lm_head; with one token left of each
    distribution all completions of a group are equal."""
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=f"^{name} is {value}"):
        RLOOConfig(str(tmp_path), accept_truncated_sampling=True, **given)


def test_a_message_names_the_settings_that_its_reader_has(make_trainer, monkeypatch):
    """`use_vllm=True` without vLLM advised `rollout.engine`, a key of a run's file, which RLOOConfig does not have."""
    monkeypatch.setattr("rloo_kit.models.vllm.is_importable", lambda name: False)
    options = {"use_vllm": True, "per_device_train_batch_size": 4}
    with pytest.raises(BackendError, match="rollout_engine is vllm, .* set rollout_engine=auto"):
        make_trainer([by_ids], **options)
    trainer = make_trainer([by_ids], rollout_engine="native", per_device_train_batch_size=4)
    assert "rollout: native, rollout_engine asks for it" in trainer.describe()
    trainer.args.is_from_file = True  # as `train(run, ...)` sets it
    assert "rollout: native, rollout.engine asks for it" in trainer.describe()


def test_every_key_of_a_file_arrives(tmp_path):
    """A key that the file takes and the loop never sees is a setting that does nothing."""
    chosen: dict[str, Any] = {
        "kl_form": "length_normalized", "ratio_form": "per_token", "delta": 4.0, "baseline": "group_mean",
        "scale_rewards": "group", "token_mean": "batch", "baseline_includes_masked": False,
        "normalize_rewards": "running", "sampler_correction": "token_mask",
        "sampler_correction_cap": 5.0, "sampler_correction_floor": 0.5, "memory": "balanced", "tokens_per_pass": 4096,
        "thinking_budget": 64, "answer_budget": 32, "thinking_close": "sentence",
    }  # fmt: skip
    server = {"server_url": "https://node1:8000", "server_adapters": "/shared/adapters"}
    run = RunConfig.model_validate(
        MINIMAL
        | {"rloo": {"max_steps": 1} | chosen, "run": {"name": "this", "max_skipped_steps": 7}}
        | {"rollout": {"engine": "generate", "rows": 5, "resample_rounds": 2, "difficulty_samples": 4} | server}
    )
    model = SimpleNamespace(device=SimpleNamespace(type="cpu"), config=SimpleNamespace(to_dict=dict))
    policy: Any = SimpleNamespace(model=model, config_arguments={})  # a model that cannot be planned for
    config = RLOOConfig(**training_arguments(run, policy, tmp_path))
    chosen |= {"max_skipped_steps": 7, "rollout_engine": "generate", "rollout_rows": 5, "resample_rounds": 2}
    own_folder = "/shared/adapters/this"  # runs share the one of the file, and each clears up its own
    chosen |= {"rollout_server_url": "https://node1:8000", "rollout_server_adapters": own_folder}
    assert {name: getattr(config, name) for name in chosen} == chosen


def test_both_sides_have_the_same_defaults_and_choices(tmp_path):
    """A notebook that builds `RLOOConfig` itself and a file that says nothing are the same run, but for what the table
    in docs/config.md names."""
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


def test_values_are_read_as_a_files_are(tmp_path):
    """`parse_yaml_file` hands 1e-1 over as text, and true was a count of 1."""
    config = RLOOConfig(str(tmp_path), tokens_per_pass="4096", max_reward_failure_share="1e-1")
    assert (config.tokens_per_pass, config.max_reward_failure_share) == (4096, 0.1)
    for wrong in ({"max_skipped_steps": True}, {"resample_rounds": 1.5}, {"delta": float("nan")}, {"baseline": None}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"^{name} is .*; it (takes|must be) .*"):
            RLOOConfig(str(tmp_path), **wrong)


def test_copies_with_a_change(tmp_path):
    """Sweeps write `dataclasses.replace(config, ...)`; the copy has the rest of the options and is checked too."""
    config = RLOOConfig(str(tmp_path), kl_form="per_token", thinking_budget=9)
    again = dataclasses.replace(config, thinking_budget=8, generation_batch_size=None)  # TRL computed it
    assert (again.kl_form, again.thinking_budget) == ("per_token", 8)
    with pytest.raises(ConfigError, match="set ratio_form=per_token"):
        dataclasses.replace(config, ratio_form="sum", generation_batch_size=None)


@pytest.mark.parametrize(
    ("flags", "found"), [([], False), (["--normalize_rewards"], True), (["--normalize_rewards", "running"], "running")]
)
def test_flags_of_scripts(tmp_path, flags, found):
    """`--normalize_rewards` was a flag without a value before it could be "running"."""
    from transformers import HfArgumentParser

    (config,) = HfArgumentParser(RLOOConfig).parse_args_into_dataclasses(["--output_dir", str(tmp_path), *flags])
    assert config.normalize_rewards is found or config.normalize_rewards == found


def test_flags_of_the_options(tmp_path, capsys):
    """Types of the schema become flags: choices, numbers that may be unset, a switch that is on by default."""
    from transformers import HfArgumentParser

    flags = ["--ratio_form", "per_token", "--rollout_rows", "5", "--no_baseline_includes_masked", "--delta", "4"]
    parser = HfArgumentParser(RLOOConfig)
    (config,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *flags])
    found = config.ratio_form, config.rollout_rows, config.baseline_includes_masked, config.delta
    assert found == ("per_token", 5, False, 4.0)
    assert "completions generated at once; None: set by the memory plan" in " ".join(parser.format_help().split())
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--ratio_form", "token"])
    assert "per_token" in capsys.readouterr().err
