"""Packed rows on a card: one call for varying lengths without Unsloth, Unsloth's shared prompts with gradients.

Written without a card at hand, so never run yet.
"""

from typing import Any

import pytest


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_varying_lengths_in_one_call_equal_the_buckets(heads: tuple[int, int]) -> None:
    """The kernel's causal window, its boundaries and its grouped heads: values and all three gradients in bfloat16."""
    import torch

    from rloo_kit import packed_attention
    from rloo_kit.packing import Group, lay_out, plan_attention

    if not torch.cuda.is_available() or packed_attention._varlen_attention is None:
        pytest.skip("no CUDA card, or a torch without variable-length attention")
    lengths = ((40, (70, 0, 300)), (1, (3,)), (20, (1, 130)))
    ids = lambda length: torch.zeros(length, dtype=torch.long, device="cuda")  # noqa: E731
    laid = lay_out([Group(ids(prompt), [ids(one) for one in several]) for prompt, several in lengths], "shared")
    plan, tokens = plan_attention(laid), laid.input_ids.numel()
    torch.manual_seed(0)
    counts = (heads[0], heads[1], heads[1])
    states = [torch.randn(tokens, count, 64, device="cuda", dtype=torch.bfloat16) for count in counts]
    weights = torch.randn(tokens, heads[0], 64, device="cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float32):  # float32 goes through the buckets
        leaves = [value.to(dtype).requires_grad_() for value in states]
        out = packed_attention.attend_by_plan(*leaves, plan)
        results.append([out, *torch.autograd.grad((out.float() * weights).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_the_scorer_packs_on_the_card(card: Any, make_run: Any, qwen3_folder: Any) -> None:
    """Shared prompts agree with single sequences in values and gradients, or the reason says what does not."""
    from rloo_kit import load_policy, release_memory
    from rloo_kit.scoring import Scorer

    policy = load_policy(make_run(qwen3_folder, "model.load_in_4bit=true"))
    scorer = Scorer(policy.model, 1.0, pad_id=policy.tokenizer.pad_token_id)
    assert scorer.layout in ("shared", "repeated"), scorer.reason
    del policy
    release_memory(verbose=False)
