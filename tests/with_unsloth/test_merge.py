"""What a user does with the adapter afterwards: merges it, loads it elsewhere, asks it something."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.with_unsloth import programs


@pytest.fixture(scope="module")
def base(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a checkpoint in bfloat16, as those on the hub are; merged weights are written in the base's type."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("base") / "in_16_bits"
    shutil.copytree(model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: value.to(torch.bfloat16) for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


@pytest.fixture(scope="module")
def policy(load: Any, base: Path) -> Any:
    """An adapter that changes much, so that leaving it out shows behind the rounding of 16 bits."""
    import torch

    policy = load(model=base, moved=True)
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            if "lora_B" in name:
                value.mul_(10)
    return policy


@pytest.fixture(scope="module")
def adapter(policy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rloo_kit import save_adapter

    return save_adapter(policy, tmp_path_factory.mktemp("adapter"))


def test_merged_weights_are_the_policy_in_plain_transformers(
    policy: Any, adapter: Path, base: Path, in_transformers: Any, tmp_path: Path
) -> None:
    """A merged checkpoint is what goes to a server; one that is the base, or has the adapter twice, answers fluently.

    Merged by PEFT as references/related-methods.md says it (in 32 bits here), and by Unsloth's
    `save_pretrained_merged`, in the 16 bits of the base.
    """
    by_unsloth = tmp_path / "merged_16bit"
    policy.model.save_pretrained_merged(str(by_unsloth), policy.tokenizer, save_method="merged_16bit")
    policy.model.eval()
    mine = programs.logits(policy.model, policy.tokenizer)
    with policy.model.disable_adapter():
        before = programs.logits(policy.model, policy.tokenizer)
    found = in_transformers("merged", base, adapter, str(by_unsloth))
    moved = (mine - before).abs().max()
    off = {name: ((found[name] - mine).abs().max() / moved).item() for name in ("adapter", "by peft", "by unsloth")}
    print(f"the adapter moves logits by {moved:.2g}; off, in shares of that: {off}")
    assert moved > 0.3
    assert off["adapter"] < 1e-4 and off["by peft"] < 1e-4
    assert found["by unsloth, dtype"] == "torch.bfloat16" and off["by unsloth"] < 0.05
