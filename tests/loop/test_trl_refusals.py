"""What the trainer refuses before the first step, each with its fix. See `test_trl_cases.py`.

All of these ended in a traceback in the middle of a step, or like a run: steps, a log, a saved model, and weights that
had not changed, or changed by another policy's gradient.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PolyConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)

from rloo_kit.errors import ConfigError
from tests.loop.conftest import by_ids, stream

ONE_PROMPT = Dataset.from_dict({"prompt": ["0+1="]})
CAUSAL = {"task_type": "CAUSAL_LM"}
SERVER = {"rollout_engine": "server", "rollout_server_url": "http://localhost:9", "beta": 0.0}


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"]} | CAUSAL | options)


def wrapped(model: Any, **options: Any) -> Any:
    return get_peft_model(model, lora(**options))


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
    return PeftModel.from_pretrained(model, str(folder))


def bare(_model: Any, _folder: Path) -> dict[str, Any]:
    return {}


# Arguments of the trainer, as a function of a bare model and a folder, and options; what has to be in the error. What
# the options of the config refuse by themselves: `test_options.py`.
ARGUMENTS: dict[str, tuple[Callable[[Any, Path], dict[str, Any]], dict[str, Any], str]] = {
    "weights for other rewards": (
        bare, {"reward_weights": [1.0, 1.0, 1.0]}, r"\(3\) must match number of reward functions \(1\)"),
    "no weight": (bare, {"reward_weights": [0.0]}, "reward_weights"),
    "no step": (bare, {"max_steps": 0}, "raise max_steps"),
    "nothing to follow": (bare, {"sync_ref_model": True}, "sync_ref_model=False"),
    "half a group": (
        bare, {"per_device_train_batch_size": 6},
        r"6 completions a pass \(per_device_train_batch_size\) .* whole groups of \d \(num_generations\)"),
    "a batch that is searched": (
        bare, {"auto_find_batch_size": True}, "auto_find_batch_size=False and lower per_device_train_batch_size"),
    "two rules for a batch": (
        bare, {"generation_batch_size": 8, "steps_per_generation": 2}, "generation_batch_size.*steps_per_generation"),
    "no data": (lambda m, _: {"train_dataset": None}, {}, "train_dataset"),
    "a list": (lambda m, _: {"train_dataset": [{"prompt": "0"}]}, {}, "train_dataset"),
    "fewer prompts than a batch": (
        lambda m, _: {"train_dataset": ONE_PROMPT}, {"per_device_train_batch_size": 8}, "per_device_train_batch_size"),
    # of a stream: before the model is loaded
    "epochs of a stream": (
        lambda m, _: {"train_dataset": stream(5), "model": "no/such-model"}, {"max_steps": -1},
        "max_steps is not set.*set max_steps="),
    "resampling from a stream": (
        lambda m, _: {"train_dataset": stream(5), "model": "no/such-model"}, {"resample_rounds": 2},
        "resample_rounds is 2.*set resample_rounds=0, or load the data whole"),
    "a stream that fills no rollout": (
        lambda m, _: {"train_dataset": stream(1)}, {"per_device_train_batch_size": 8},
        "has 1 prompt, but a rollout needs 2.*lower per_device_train_batch_size"),
    "a reference that cannot follow": (
        lambda m, _: {"model": m, "peft_config": lora()}, {"beta": 0.1, "sync_ref_model": True}, "sync_ref_model=Fals"),
    "two active": (lambda m, _: {"model": several(m, "default", "other")}, {}, "default, other: merge"),
    "another active": (lambda m, _: {"model": several(m, "other")}, {}, "adapters are other: merge"),
    "another name": (
        lambda m, _: {"model": get_peft_model(m, lora(), adapter_name="mine")}, {}, "adapters are mine: merge"),
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
    "no reward": (lambda m, _: {"reward_funcs": []}, {}, "reward_funcs"),
    "PiSSA on a server": (
        lambda m, _: {"model": m, "peft_config": lora(init_lora_weights="pissa")}, SERVER, "pissa.*rollout_engine=gen"),
    "tokens on a server": (
        lambda m, _: {"model": m, "peft_config": lora(trainable_token_indices=[70])}, SERVER,
        "rows of the embedding.*rollout_engine=generate"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_cannot_work(case: str, trl_train: Any, make_tiny_model: Any, tmp_path: Path) -> None:
    """Of two active adapters, one was dropped in the first reference pass, in the middle of a step."""
    make, options, said = ARGUMENTS[case]
    arguments = make(make_tiny_model(tie_word_embeddings=False), tmp_path / "adapter")
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=said):
        trl_train(by_ids, arguments=arguments, **{"beta": 0.0} | options)


KINDS = {
    "prompt tuning": PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "prefix tuning": PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "p-tuning": PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, **CAUSAL),
    "aLoRA": lora(alora_invocation_tokens=[28]),
    "Poly": PolyConfig(r=2, target_modules=["q_proj", "v_proj"], **CAUSAL),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_cannot_be_scored(kind: str, trl_train: Any, make_tiny_model: Any) -> None:
    """They act through PEFT's own forward: a traceback, or tokens sampled from the model without them."""
    config = copy.deepcopy(KINDS[kind])
    for model, new in ((make_tiny_model(), config), (get_peft_model(make_tiny_model(), copy.deepcopy(config)), None)):
        with pytest.raises(ConfigError, match="use a plain LoraConfig"):
            trl_train(arguments={"model": model, "peft_config": new})


def test_a_cell_with_peft_config_that_is_run_again(trl_train: Any, make_tiny_model: Any) -> None:
    """PEFT resets the layers that the second config names and leaves the others of the first, trained, in the model."""
    model = make_tiny_model()
    for _ in range(2):
        run = trl_train(arguments={"model": model, "peft_config": lora()}, beta=0.1)
        assert run.moved and run.steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    ia3 = IA3Config(target_modules=["q_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=False, **CAUSAL)
    for config in (lora(target_modules=["q_proj"]), ia3):
        with pytest.raises(ConfigError, match="load it again"):
            trl_train(arguments={"model": model, "peft_config": config}, beta=0.0)
