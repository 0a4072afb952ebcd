"""Attention of a packed row: each sequence sees itself and nothing else, with the model's code left as it is.

transformers looks its attention up by the name in the model's config. `install` registers one function under a name of
its own and sets it: a call without the keyword `packing` goes on to SDPA as before (generation, padded rows), a call
with `packing=AttentionPlan` gathers queries, keys and values into causal buckets and scatters what comes out. The
keyword travels through the layers like any other, so gradient checkpointing hands it on when it recomputes.

No T x T mask is ever built. On CUDA in 16 bits the sequences go through one call for varying lengths instead of
buckets (not measured here). Left out: sliding windows, attention sinks, decoding with a cache, models whose layers do
not hand keywords on (`scoring.py` finds out and takes another layout).

Shapes: T tokens of the row, A query heads, G key-value heads, D head size, S sequences, L tokens of a bucket.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rloo_kit.gradient.packing import AttentionPlan, Layout, plan_attention

try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attention
except ImportError:
    _varlen_attention = None

NAME = "rloo_packed"
PLAIN = "sdpa"  # what a call without a plan does, and the only setting that `install` replaces
KERNEL_OPTIONS = {"scale", "window_size", "enable_gqa"}  # of torch's attention for varying lengths; younger than it is
KERNEL_CARD = (8, 0)  # compute capability from which it runs (Ampere)


def install(model: torch.nn.Module) -> None:
    """Let the model's attention take `packing=`; a model that has it already is left alone.

    Raises: ValueError, with the reason, if its attention is not looked up by name or is set to something but SDPA.
    """
    found = model.config._attn_implementation
    if found == NAME:
        return
    if found != PLAIN:
        raise ValueError(f"its attention is {found!r}, and only {PLAIN!r} is replaced")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError("its attention is not looked up through transformers' interface")
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def keywords(laid: Layout, _layout: str) -> dict[str, Any]:
    """What a model that went through `install` is to be called with beside a packed layout's ids.

    Every model of transformers takes a mask of four dimensions for one that is made already, and hands it on as it is;
    nobody reads this one, which is empty. Without it the model builds T x T.
    """
    return {
        "position_ids": laid.position_ids,
        "attention_mask": torch.empty(1, 1, 1, 0, device=laid.input_ids.device),
        "packing": plan_attention(laid),
    }


@contextmanager
def plain_attention(model: torch.nn.Module) -> Iterator[None]:
    """The model under its own attention's name, for code that decides by that name (continuous batching)."""
    installed = model.config._attn_implementation == NAME
    if installed:
        model.set_attn_implementation(PLAIN)
    try:
        yield
    finally:
        if installed:
            model.set_attn_implementation(NAME)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' convention: query (B, A, T, D), key and value (B, G, T, D) in, (B, T, A, D) out."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("sliding_window") is not None:
        raise ValueError("packed rows attend in full; this layer has a sliding window")
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # (T, heads, D)
    return attend_by_plan(*rows, packing, kwargs.get("scaling"), kwargs.get("dropout", 0.0))[None], None


def attend_by_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention within each sequence of the plan: (T, A, D), (T, G, D), (T, G, D) in, (T, A, D) out."""
    if dropout == 0.0 and _takes_one_call(query):
        return _attend_in_one_call(query, key, value, plan, scaling)
    out = []
    for bucket in plan.buckets:
        parts = [
            states.index_select(0, bucket.index).view(bucket.rows, bucket.length, *states.shape[1:]).transpose(1, 2)
            for states in (query, key, value)
        ]
        attended = torch.nn.functional.scaled_dot_product_attention(
            *parts, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=query.size(1) != key.size(1)
        )  # (S, A, L, D)
        out.append(attended.transpose(1, 2).reshape(-1, *query.shape[1:]))
    return (out[0] if len(out) == 1 else torch.cat(out)).index_select(0, plan.inverse)


def _takes_one_call(query: torch.Tensor) -> bool:
    """Whether torch and the card have the kernel for varying lengths; buckets do without it."""
    if _varlen_attention is None or not query.is_cuda or query.dtype.itemsize != 2:
        return False
    return _knows_options(_varlen_attention) and torch.cuda.get_device_capability(query.device) >= KERNEL_CARD


@functools.cache
def _knows_options(kernel: Any) -> bool:
    return inspect.signature(kernel).parameters.keys() >= KERNEL_OPTIONS


def _attend_in_one_call(query, key, value, plan: AttentionPlan, scaling: float | None) -> torch.Tensor:
    """The same with the sequences end to end, none filled up. Not measured: it takes a card."""
    parts = [states.index_select(0, plan.flat_index) for states in (query, key, value)]  # (F, heads, D)
    bounds = (plan.boundaries, plan.boundaries, plan.longest, plan.longest)
    attended = _varlen_attention(
        *parts, *bounds, scale=scaling, window_size=(-1, 0), enable_gqa=query.size(1) != key.size(1)
    )  # a window of (-1, 0) is causal
    return attended.index_select(0, plan.flat_inverse)
