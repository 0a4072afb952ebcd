"""Packed rows through Unsloth's own forward: its block-diagonal form with gradients, its shared prompts forward.

The backward pass of shared prompts is compiled FlexAttention and takes a GPU (`tests/on_gpu`).
"""

from typing import Any

import pytest

LENGTHS = ((4, (6, 0, 3)), (1, (5,)), (2, (1, 9)))


@pytest.fixture(scope="module")
def policy(load: Any) -> Any:
    """An adapter whose B matrices are not zero, with the checkpointing that Unsloth sets up."""
    policy = load(moved=True)
    policy.model.train()
    return policy


@pytest.fixture(scope="module")
def groups(unsloth: Any) -> Any:
    import torch

    from rloo_kit.gradient.packing import Group

    generator = torch.Generator().manual_seed(3)
    return [
        Group(*(torch.randint(0, 256, (prompt,), generator=generator),
                [torch.randint(0, 256, (length,), generator=generator) for length in lengths]))
        for prompt, lengths in LENGTHS
    ]  # fmt: skip


def scores_and_gradients(policy: Any, passes: list[Any], layout: str) -> tuple[Any, dict[str, Any]]:
    import torch

    from rloo_kit.gradient.scorer import Scorer

    scorer = Scorer(policy.model, 1.0, pad_id=256, layout=layout)
    policy.model.zero_grad()
    logps = torch.cat([scorer.score(policy.model, groups).logps for groups in passes])
    (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
    return logps.detach(), {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("long", [False, True], ids=["short", "from 512 tokens on"])
def test_packed_rows_have_the_gradients_of_single_sequences(policy: Any, groups: Any, load: Any, long: bool) -> None:
    """`packed_seq_lengths` has to reach the recompute of Unsloth's checkpoints, which from 512 tokens on is its own for
    all models, and would keep float32 as bfloat16 unless its variable says no."""
    import os

    import torch

    from rloo_kit.gradient.packing import Group

    if long:
        policy = load("model.max_seq_length=512", moved=True)
        policy.model.train()
    try:
        if long:
            assert policy.model._unsloth_gradient_checkpointing == "unsloth"
            assert torch.utils.checkpoint.CheckpointFunction.__name__ == "UnslothCheckpointFunction"
            assert os.environ["UNSLOTH_OFFLOAD_FP32"] == "exact"
        singles = [[Group(group.prompt, [one])] for group in groups for one in group.completions if len(one)]
        expected, wanted = scores_and_gradients(policy, singles, "padded")
        found, gradients = scores_and_gradients(policy, [groups], "repeated")
    finally:
        if long:
            load()  # gives torch its own back
    assert torch.utils.checkpoint.CheckpointFunction.__name__ == "CheckpointFunction"
    assert (found - expected).abs().max() < 1e-5
    assert gradients.keys() == wanted.keys() and gradients
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() < 2e-6 * wanted[name].norm(), name


def test_shared_prompts_score_as_single_sequences(policy: Any, groups: Any) -> None:
    """Forward only: which token belongs to which prompt and completion is the kit's to say."""
    import torch

    from rloo_kit.gradient.scorer import Scorer

    with torch.no_grad():
        expected = Scorer(policy.model, 1.0, 256, layout="padded").score(policy.model, groups).logps
        found = Scorer(policy.model, 1.0, 256, layout="shared").score(policy.model, groups).logps
    assert (found - expected).abs().max() < 1e-5


def test_the_check_runs_through_the_checkpoints(policy: Any) -> None:
    """Each layer once forward and once in the backward pass; without a GPU the next layout is taken."""
    import torch

    from rloo_kit.gradient.scorer import Scorer

    with policy.inference_mode():
        pass
    calls: list[tuple[bool, int]] = []
    layer = policy.model.get_base_model().model.layers[0]
    hook = layer.mlp.register_forward_pre_hook(
        lambda _module, args: calls.append((torch._C._current_graph_task_id() != -1, args[0].shape[1]))
    )
    try:
        scorer = Scorer(policy.model, 1.0, pad_id=256)
    finally:
        hook.remove()
    assert scorer.layouts == ("repeated",)
    assert "repeated rows agree" in scorer.reason and "shared rows:" in scorer.reason
    again = [tokens for is_backward, tokens in calls if is_backward]
    assert len(again) == 4  # three single sequences, and the row; shared prompts fail before
    assert policy.model._unsloth_gradient_checkpointing is True
    assert policy.model.get_base_model().model.gradient_checkpointing
