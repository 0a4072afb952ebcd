"""Fingerprints of what the Unsloth path stands in for or leans on, each by its name.

When one fails, read what moved, see whether `rloo_kit/models/unsloth.py`, `interpreter.py` or the trainer have to
move with it, let the other tests of this folder pass, and then write down the new fingerprint:
`python -m pytest tests/with_unsloth/test_fingerprints.py -s` prints those that differ.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.contracts.test_upstream import LEANED_ON as TRL_LEANED_ON
from tests.contracts.test_upstream import STOOD_IN_FOR as TRL_STOOD_IN_FOR
from tests.contracts.test_upstream import fingerprint
from tests.skill.calls import check_names
from tests.skill.pages import find_blocks, read_pages

# In Unsloth's copy of TRL's trainer these are not as in TRL; the other methods of that contract are.
GENERATED = {"_prepare_inputs": "2a1bd87c01bc", "__init__": "668afe55eb38"}
# Its own, module:name. In order: the model, packed rows, generation with its graphs, compiled blocks, loading and
# modes, checkpoints, vLLM, the trainer.
UNSLOTH = {
    "unsloth.models.llama:LlamaModel_fast_forward": "977699d33a4f",
    "unsloth.models.llama:_is_left_padded": "0dc806da5784",
    "unsloth.models.llama:CausalLM_fast_forward": "1e0c22cd3843",
    "unsloth.models.llama:PeftModel_fast_forward": "e09306235006",
    "unsloth.models.llama:LlamaDecoderLayer_fast_forward": "6c635bdcf240",
    "unsloth.models.qwen3:Qwen3Attention_fast_forward": "6fe895990253",
    "unsloth.utils.packing:get_packed_info_from_kwargs": "f4b64aebab0a",
    "unsloth.utils.packing:build_sdpa_packed_attention_mask": "37e1f4a656bd",
    "unsloth.utils.attention_dispatch:_run_attention": "7a3a9541be95",
    "unsloth.utils.prefix_grouper_kernel:build_seg_info_multigroup": "7106a7482889",
    "unsloth.models.llama:unsloth_fast_generate": "a10f2364cda8",
    "unsloth.models.llama:_fast_prepare_inputs_for_generation": "43e9c55abde0",
    "unsloth.models.llama:_LlamaModel_fast_forward_inference": "f064657f0fc4",
    "unsloth.models.qwen3:Qwen3Attention_fast_forward_inference": "37418bc73277",
    "unsloth.models._decode_graphs:enabled": "590c5be33514",
    "unsloth.models._decode_graphs:alloc_decode_buffers": "d90276daebaa",
    "unsloth.models._decode_graphs:release_for_training": "718a5e42804d",
    "unsloth.models._block_compile:_enabled": "15d5519d6e1e",
    "unsloth.models._block_compile:_wrap": "03f4d214a7a0",
    "unsloth.models.loader:FastLanguageModel.from_pretrained": "91719835197b",
    "unsloth.models.llama:FastLlamaModel.get_peft_model": "9a31f9c22788",
    "unsloth.models.llama:FastLlamaModel.patch_peft_model": "3e6761a09f49",
    "unsloth.models.llama:FastLlamaModel.for_training": "64f455a2a41b",
    "unsloth.models.llama:FastLlamaModel.for_inference": "0b769b129418",
    "unsloth.models._utils:apply_unsloth_gradient_checkpointing": "625ab570838c",
    "unsloth_zoo.gradient_checkpointing:unsloth_checkpoint": "b4b77e5d3729",
    "unsloth.models.rl:PatchFastRL": "d3b437b6a2ae",
    "unsloth_zoo.vllm_utils:load_vllm": "fee6689fc81b",
    "unsloth_zoo.vllm_utils:_merged_rollout_mode": "8deab1bd1d9a",
    "unsloth_zoo.vllm_utils:load_lora": "c7b2e017337f",
    "unsloth_zoo.vllm_utils:_build_lora_request": "2791e0ec8858",
    "UnslothRLOOTrainer:UnslothRLOOConfig.__init__": "3feb969b3300",
    "UnslothRLOOTrainer:_UnslothRLOOTrainer.__init__": "7fcf8b167fae",
    "UnslothRLOOTrainer:prepare_for_training_mode": "4ae6d6d84411",
}
# What the kit takes from the libraries below on this path.
BELOW = {
    "trl.trainer.utils:add_fused_lm_head": "e99a1161fdc0",
    "trl.trainer.utils:pad": "ed2b0f1c87c2",
    "trl.trainer.utils:use_adapter": "6b68bfedabe2",
    "trl.trainer.utils:disable_dropout_in_model": "416d2cfe0ddb",
    "trl.models.utils:disable_gradient_checkpointing": "8845c2c7b91d",
    "transformers:Trainer._load_from_checkpoint": "ee5bf93f96af",
    "transformers:Trainer._maybe_log_save_evaluate": "c3945a2525b7",
    "transformers:Trainer._save_checkpoint": "3f08503719cd",
    "transformers:Trainer.create_optimizer": "a45ee2b21635",
    "transformers.generation:GenerationMixin._sample": "2fdd168ae016",
    "transformers.generation:GenerationMixin._prepare_special_tokens": "ff732ace7e30",
    "peft:PeftModel.from_pretrained": "3c08103d4355",
    "peft:PeftModel.save_pretrained": "cb4e3bdea9bb",
    "peft.tuners.lora.model:LoraModel._create_and_replace": "56b437db24be",
}


def find(name: str) -> Any:
    module, _, path = name.partition(":")
    found = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def check(name: str, function: Any, expected: str) -> None:
    found = fingerprint(function)
    if found != expected:
        print(f'    "{name}": "{found}",')
    assert found == expected, f"{name} changed: {found}, written down {expected}"


@pytest.mark.parametrize("name", [*TRL_STOOD_IN_FOR, *TRL_LEANED_ON])
def test_the_generated_trainers_method_is_the_one_that_was_read(name: str, unsloth: Any) -> None:
    """Unsloth rewrites TRL's methods by their text: a new release of either changes what the kit's trainer calls."""
    import trl

    assert trl.RLOOTrainer.__name__ == "UnslothRLOOTrainer"
    check(name, getattr(trl.RLOOTrainer, name), (TRL_STOOD_IN_FOR | TRL_LEANED_ON | GENERATED)[name])


@pytest.mark.parametrize("name", [*UNSLOTH, *BELOW])
def test_what_is_leaned_on_is_what_was_read(name: str, unsloth: Any) -> None:
    """The mask of left-padded rows went away in a release between two others; nothing failed, gradients were wrong."""
    check(name, find(name), (UNSLOTH | BELOW)[name])


def assigned(function: Any, owner: str) -> Iterator[str]:
    """The attributes of `owner` that a function assigns."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        for target in getattr(node, "targets", ()):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == owner:
                yield target.attr


def test_the_constructor_changes_the_settings_that_are_set_back(unsloth: Any) -> None:
    """A further one would change a run behind its file, and `keep_arguments` would not know."""
    import trl

    from rloo_kit.models.unsloth import CONSTRUCTOR_CHANGES

    found = set(assigned(trl.RLOOTrainer.__init__, "args"))
    # No fields of the config: the first is for accelerate, the second of other trainers, the last stops DataParallel.
    assert found == {*CONSTRUCTOR_CHANGES, "mixed_precision", "max_seq_length", "_n_gpu"}
    assert set(assigned(trl.RLOOTrainer.__init__, "processing_class")) == {"padding_side"}


def test_vllm_sleeps_by_the_variables_that_are_set(unsloth: Any) -> None:
    """Unsloth has its trainer put vLLM to sleep for GRPO files alone; for RLOO the kit does."""
    import trl

    from rloo_kit.models.unsloth import MERGED_VARIABLE, SHARE_VARIABLE
    from rloo_kit.system.environment import STANDBY_VARIABLE

    assert "vllm_enable_sleep_mode=True" not in inspect.getsource(inspect.getmodule(trl.RLOOTrainer))
    assert "'vllm_engine'" in inspect.getsource(trl.RLOOTrainer.__init__.__globals__["_UnslothRLOOTrainer"].__init__)
    source = inspect.getsource(import_module("unsloth_zoo.vllm_utils"))
    assert all(f'"{name}"' in source for name in (STANDBY_VARIABLE, SHARE_VARIABLE, MERGED_VARIABLE))
    assert f'"{STANDBY_VARIABLE}"' in inspect.getsource(import_module("unsloth_zoo"))
    taken = inspect.signature(find("unsloth_zoo.vllm_utils:load_vllm")).parameters
    wanted = {"gpu_memory_utilization", "max_num_seqs", "float8_kv_cache", "enforce_eager", "unsloth_vllm_standby"}
    assert wanted <= set(taken) and "max_lora_rank" in taken


@pytest.mark.parametrize(("value", "mode"), [(None, "all"), ("", "all"), ("0", None)])
def test_unsloth_merges_adapters_unless_the_variable_is_0(
    value: str | None, mode: str | None, monkeypatch: Any
) -> None:
    """Unset, it merges the adapters of 16-bit models on an NVIDIA GPU: `_vllm_arguments` sets it to 0."""
    from rloo_kit.models.unsloth import MERGED_VARIABLE

    zoo = import_module("unsloth_zoo.vllm_utils")
    monkeypatch.setattr(zoo, "_merged_rollout_auto_platform", lambda: None)  # as on a GPU with vLLM
    monkeypatch.setenv(MERGED_VARIABLE, value or "")
    if value is None:
        monkeypatch.delenv(MERGED_VARIABLE)
    assert zoo._merged_rollout_mode() == mode


def test_the_calls_of_the_pages_are_taken(unsloth: Any) -> None:
    """Published recipes import names that Unsloth has renamed since (`is_bf16_supported`)."""
    checked: set[str] = set()
    for name, text in read_pages():
        faults, found = check_names(find_blocks(name, text, "python"), ("unsloth",))
        assert faults == []
        checked |= found
    assert {"FastLanguageModel.from_pretrained", "FastLanguageModel.get_peft_model"} <= checked
