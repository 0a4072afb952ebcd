"""Unsloth's CUDA graphs of decoding steps: asked for in the kit's rollouts, and nothing of them left for training.

Without a GPU no step is captured. The buffers that the graphs would read are allocated and filled, by the same code.
"""

from typing import Any

import pytest


def test_a_rollout_decodes_in_graphs_and_frees_them(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit's rollouts launched each kernel by itself; the graphs' buffers hold a batch's cache until freed."""
    import torch
    from unsloth.models import _decode_graphs as graphs

    from rloo_kit.rollout.choice import build_engine
    from rloo_kit.rollout.completions import find_end_ids
    from rloo_kit.rollout.types import Limits

    steps: list[tuple[int, list[int]]] = []  # rows of each decoding step, and the sizes for which a layer keeps buffers
    plain = graphs.decode_step

    def decode_step(model: Any, *args: Any) -> Any:
        kept = vars(model.model.layers[0].self_attn).get("_unsloth_graph_buffers", {})
        steps.append((args[3].shape[0], sorted(rows for rows, *_ in kept)))
        return plain(model, *args)

    monkeypatch.setattr(graphs, "_DEFAULT_OK", True)  # as on a CUDA GPU
    monkeypatch.setattr(graphs, "decode_step", decode_step)
    policy = load(moved=True)
    policy.model.train()
    engine = build_engine(
        policy.model,
        "generate",
        backend=policy.backend,
        temperature=1.0,
        end_ids=find_end_ids(policy),
        pad_id=256,
        rows=3,
    )

    def sample() -> Any:
        torch.manual_seed(0)
        return engine.sample([policy.tokenizer("ab")["input_ids"]] * 8, Limits(6))  # 3, 3 and 2 rows

    found = sample()
    assert {rows for rows, _ in steps} == {3, 2} and any(kept for _, kept in steps) and not graphs.enabled()
    assert all(kept in ([], [rows]) for rows, kept in steps)
    assert [rows for rows, kept in steps if not kept] == [3, 2], "batches of as many rows share buffers and graphs"
    kept = {name for module in policy.model.modules() for name in vars(module)}
    assert not kept & {"_unsloth_graph_buffers", "paged_attention", "temp_QA", "attention"} and policy.model.training
    steps.clear()
    monkeypatch.setenv("UNSLOTH_DECODE_CUDA_GRAPHS", "0")
    without = sample()
    assert not steps
    assert (found.completion_ids, found.sampler_logps) == (without.completion_ids, without.sampler_logps)
