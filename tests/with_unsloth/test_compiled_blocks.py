"""Which calls reach Unsloth's compiled blocks: its own wrapper around each block, with a counter for the compiler."""

from typing import Any

import pytest


def test_the_layout_check_compiles_nothing(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training in packed rows never needs what Unsloth compiles at a block's first padded row in training mode."""
    import torch
    from unsloth.models import _block_compile

    from rloo_kit.gradient.packing import Group
    from rloo_kit.gradient.scorer import Scorer

    compiled: list[Any] = []

    def compile_block(block: Any, **_: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            compiled.append(block)
            return block(*args, **keywords)

        return call

    policy = load(moved=True)
    layer = type(policy.model.get_base_model().model.layers[0])
    monkeypatch.setattr(layer, "forward", layer.forward)  # put back afterwards
    monkeypatch.setenv("UNSLOTH_COMPILE_DISABLE", "0")
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        gpu.setattr(torch, "compile", compile_block)
        assert _block_compile.patch_block_compile(policy.model) == [layer.__name__]
    policy.model.train()
    scorer = Scorer(policy.model, 1.0, pad_id=256)
    assert scorer.layouts == ("repeated",) and not compiled  # shared prompts need a GPU
    groups = [Group(torch.arange(3), [torch.arange(5), torch.arange(2)])]
    scorer.score(policy.model, groups).logps.sum().backward()
    assert not compiled
    padded = Scorer(policy.model, 1.0, pad_id=256, layout="padded")
    padded.score(policy.model, groups).logps.sum().backward()
    assert compiled  # rows that are padded train in compiled blocks
