"""Packed rows on a GPU: torch's attention for varying lengths, in one call, against the buckets that do without it.

Written without a GPU at hand; rehearsed on the CPU, where both sides are the buckets.
"""

from typing import Any

import cells
import pytest


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_varying_lengths_in_one_call_equal_the_buckets(heads: tuple[int, int], gpu: Any, memory: Any) -> None:
    """The kernel's causal window, its boundaries and its grouped heads: values and all three gradients in bfloat16."""
    import torch

    from rloo_kit.gradient import packing
    from rloo_kit.gradient.packing import Group, lay_out, plan_attention

    device = memory.device
    lengths = ((40, (70, 0, 300)), (1, (3,)), (20, (1, 130)))
    ids = lambda length: torch.zeros(length, dtype=torch.long, device=device)  # noqa: E731
    laid = lay_out([Group(ids(prompt), [ids(one) for one in several]) for prompt, several in lengths], "shared")
    plan, tokens = plan_attention(laid), laid.input_ids.numel()
    torch.manual_seed(0)
    counts = (heads[0], heads[1], heads[1])
    states = [torch.randn(tokens, count, 64, device=device, dtype=torch.bfloat16) for count in counts]
    if not cells.rehearsing() and not packing._takes_one_call(states[0]):
        pytest.skip("this torch or this GPU has no attention for varying lengths: the buckets serve")
    weights = torch.randn(tokens, heads[0], 64, device=device)
    results = []
    for dtype in (torch.bfloat16, torch.float32):  # float32 goes through the buckets
        leaves = [value.to(dtype).requires_grad_() for value in states]
        out = packing.attend_by_plan(*leaves, plan)
        results.append([out, *torch.autograd.grad((out.float() * weights).sum(), leaves)])
    errors = [
        ((found.float() - expected).norm() / expected.norm()).item() for found, expected in zip(*results, strict=True)
    ]
    cells.report(**{f"heads_{heads[0]}_{heads[1]}": dict(zip(("out", "query", "key", "value"), errors, strict=True))})
    assert max(errors) < 0.02
