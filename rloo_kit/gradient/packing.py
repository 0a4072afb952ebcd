"""Layouts of completions for one scoring pass, and attention within each of them.

Layouts: shared, one row [prompt, c1 .. cK, next prompt, ...]; repeated, one row [prompt, c1, prompt, c2, ...]; padded,
one row per completion, padded on the right (Unsloth's training forward drops the mask of left-padded rows).

Shapes: S sequences (prompt + completion), T tokens of the layout, N scored tokens (all completion tokens).
"""

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

TAKES_GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not torch 2.11; the kernel is the same
Span = tuple[int, int]  # start and end (exclusive) in a flat row

SPARED_CALL = 32**2  # padded attention scores that cost about as much as one more call (measured, one thread)
NAME = "rloo_packed"
PLAIN = "sdpa"  # used by calls without a plan, and the only setting that `install` replaces
KERNEL_GPU = (8, 0)  # lowest compute capability of torch's variable-length attention (Ampere)
CUDNN_VARIABLE = "TORCH_CUDNN_SDPA_DEPRIORITIZED"  # torch's own


@dataclass(frozen=True)
class Group:
    """A prompt and its completions: (P,) token ids, P at least 1, and K times (C_i,), each of which may be empty."""

    prompt: torch.Tensor
    completions: list[torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """Token ids and positions of one pass, and which of its states predict the scored tokens.

    Attributes:
        input_ids, position_ids: (1, T) for a packed row, (S, L) for padded ones.
        score_positions, score_targets: (N,), flat indices whose state predicts a completion token, and that token.
        sequences: the spans that make up each sequence of a packed row, in order: (prompt, completion) where the prompt
            is shared, a single span otherwise. Empty for padded rows.
        groups: each prompt's length and those of its completions, for a packed row.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    score_positions: torch.Tensor
    score_targets: torch.Tensor
    sequences: list[list[Span]]
    groups: list[tuple[int, list[int]]]


def count_tokens(groups: Sequence[Group], layout: str) -> int:
    """Tokens that a pass over these groups computes in a layout: "shared", "repeated" or "padded"."""
    pairs = [(len(group.prompt), len(completion)) for group in groups for completion in group.completions]
    if layout == "shared":
        return sum(len(group.prompt) for group in groups if group.completions) + sum(length for _, length in pairs)
    lengths = [prompt + completion for prompt, completion in pairs]
    return sum(lengths) if layout == "repeated" else len(lengths) * max(lengths, default=0)


def lay_out(groups: Sequence[Group], layout: str, pad_id: int = 0) -> Layout:
    """The groups in a layout: "shared", "repeated" or "padded" (with `pad_id`, any id that the model knows).

    Scored tokens are in the order of the groups, their completions, and the tokens of each.
    """
    if layout == "padded":
        return _padded(groups, pad_id)
    shared = layout == "shared"
    pieces: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    predictors: list[torch.Tensor] = []
    sequences: list[list[Span]] = []
    end = 0

    def put(tokens: torch.Tensor, first_position: int) -> Span:
        nonlocal end
        pieces.append(tokens)
        positions.append(torch.arange(first_position, first_position + len(tokens), device=tokens.device))
        end += len(tokens)
        return end - len(tokens), end

    for group in groups:
        length = len(group.prompt)
        prompt: Span | None = None
        for completion in group.completions:
            if prompt is None or not shared:
                prompt = put(group.prompt, 0)
            span = put(completion, length)
            places = torch.arange(span[0] - 1, span[1] - 1, device=completion.device)
            places[:1] = prompt[1] - 1  # the first token of a completion is predicted by the prompt's last
            predictors.append(places)
            sequences.append([prompt, span] if shared else [(prompt[0], span[1])])
    return Layout(
        input_ids=torch.cat(pieces)[None],
        position_ids=torch.cat(positions)[None],
        score_positions=torch.cat(predictors),
        score_targets=torch.cat([completion for group in groups for completion in group.completions]),
        sequences=sequences,
        groups=[(len(group.prompt), list(map(len, group.completions))) for group in groups if group.completions],
    )


def _padded(groups: Sequence[Group], pad_id: int) -> Layout:
    rows = [(group.prompt, completion) for group in groups for completion in group.completions]
    input_ids = pad_sequence([torch.cat(row) for row in rows], batch_first=True, padding_value=pad_id)
    width = input_ids.size(1)
    predictors = []
    for row, (prompt, completion) in enumerate(rows):
        first = row * width + len(prompt) - 1
        predictors.append(torch.arange(first, first + len(completion), device=input_ids.device))
    return Layout(
        input_ids=input_ids,
        position_ids=torch.arange(width, device=input_ids.device).expand(len(rows), width),
        score_positions=torch.cat(predictors),
        score_targets=torch.cat([completion for _, completion in rows]),
        sequences=[],
        groups=[],
    )


def token_weights(groups: Sequence[Group], mask: torch.Tensor, layout: str) -> torch.Tensor:
    """How often each token of a layout counts in the auxiliary loss of a mixture of experts, (T,) float32, padded rows
    end to end: a prompt once per completion, padding not at all. `mask`: (N,), the completion tokens that count."""
    pieces: list[torch.Tensor] = []
    for group in groups:
        for number, completion in enumerate(group.completions):
            kept, mask = mask[: len(completion)].float(), mask[len(completion) :]
            copies = 1 if layout != "shared" else len(group.completions) if number == 0 else 0
            prompt = kept.new_full((len(group.prompt),), copies)
            pieces += [kept] if copies == 0 else [torch.cat([prompt, kept])]
    if layout == "padded":
        return pad_sequence(pieces, batch_first=True).flatten()
    return torch.cat(pieces)


@dataclass(frozen=True)
class Bucket:
    """Sequences that attend in one call: `index` (S * L,) has their tokens' indices in the packed row, L per sequence.
    A shorter one is padded with its own last token, which the causal mask hides."""

    index: torch.Tensor
    rows: int
    length: int


@dataclass(frozen=True)
class AttentionPlan:
    """How a packed row attends: tokens are gathered into buckets, attend causally there, and are scattered back.

    Attributes:
        buckets: all sequences. inverse: (T,), index of each token of the row in the buckets laid end to end.
        flat_index: (F,), the sequences end to end without padding, for variable-length attention.
        boundaries: (S + 1,) int32, where each sequence begins. longest: tokens of the longest one.
        flat_inverse: (T,), index of each token of the row in `flat_index`.
    """

    buckets: list[Bucket]
    inverse: torch.Tensor
    flat_index: torch.Tensor
    flat_inverse: torch.Tensor
    boundaries: torch.Tensor
    longest: int


def plan_attention(layout: Layout) -> AttentionPlan:
    """The plan of a packed layout. A token in several sequences (a shared prompt) takes its state from the first."""
    device = layout.input_ids.device
    tokens = layout.input_ids.numel()
    places = torch.arange(tokens, device=device)
    members = [torch.cat([places[slice(*span)] for span in spans]) for spans in layout.sequences]
    lengths = [len(member) for member in members]
    buckets, order, starts = list[Bucket](), list[int](), list[int]()
    offset = 0
    for chosen in _alike(lengths):
        length = max(lengths[row] for row in chosen)
        filled = [torch.cat([members[row], members[row][-1:].expand(length - lengths[row])]) for row in chosen]
        buckets.append(Bucket(torch.cat(filled), len(chosen), length))
        order += chosen
        starts += [offset + place * length for place in range(len(chosen))]
        offset += len(chosen) * length
    begin = [0, *accumulate(lengths)]
    return AttentionPlan(
        buckets=buckets,
        inverse=_inverse([members[row] for row in order], starts, tokens),
        flat_index=torch.cat(members),
        flat_inverse=_inverse(members, begin[:-1], tokens),
        boundaries=torch.tensor(begin, dtype=torch.int32, device=device),
        longest=max(lengths),
    )


def _inverse(members: list[torch.Tensor], starts: list[int], tokens: int) -> torch.Tensor:
    """(T,): index of each token of the row when the members are laid out at `starts`, the first if it has several."""
    inverse = torch.empty(tokens, dtype=torch.long, device=members[0].device)
    for member, start in reversed(list(zip(members, starts, strict=True))):
        inverse[member] = torch.arange(start, start + len(member), device=member.device)
    return inverse


def _alike(lengths: list[int]) -> list[list[int]]:
    """Buckets of sequences of similar length: one joins the longer ones if padding it costs less than a call.

    >>> _alike([30, 12, 10, 29])
    [[0, 3, 1, 2]]
    >>> _alike([100, 12, 10, 99])
    [[0, 3], [1, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    buckets = [[order[0]]]
    for row in order[1:]:
        longest = lengths[buckets[-1][0]]
        if longest**2 - lengths[row] ** 2 <= SPARED_CALL:
            buckets[-1].append(row)
        else:
            buckets.append([row])
    return buckets


def install(model: torch.nn.Module) -> None:
    """Make the model's attention accept `packing=`; a second call changes nothing. Raises ValueError, with the reason,
    if the attention is not looked up by name or is not SDPA."""
    attention = model.config._attn_implementation
    if attention == NAME:
        return
    if attention != PLAIN:
        raise ValueError(f"its attention is {attention!r}, and only {PLAIN!r} is replaced")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError("its attention is not looked up through transformers' interface")
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def keywords(laid: Layout, _layout: str) -> dict[str, Any]:
    """Keywords for a model patched by `install`, in addition to a packed layout's ids. transformers passes a
    four-dimensional mask on unchanged. The empty mask is never read, but without it the model builds one of T x T."""
    return {
        "position_ids": laid.position_ids,
        "attention_mask": torch.empty(1, 1, 1, 0, device=laid.input_ids.device),
        "packing": plan_attention(laid),
    }


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
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # (T, heads, D)
    return attend_by_plan(q, k, v, packing, kwargs.get("scaling"), kwargs.get("dropout", 0.0))[None], None


def attend_by_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention within each sequence of the plan: (T, A, D), (T, G, D), (T, G, D) in, (T, A, D) out. In one call
    of the variable-length kernel, which `Scorer` checks with the layout, or bucket by bucket."""
    is_grouped = query.size(1) != key.size(1)
    if dropout == 0.0 and _takes_one_call(query):
        parts = [states.index_select(0, plan.flat_index) for states in (query, key, value)]  # (F, heads, D)
        bounds = (plan.boundaries, plan.boundaries, plan.longest, plan.longest)
        options: dict[str, Any] = {"enable_gqa": is_grouped} if TAKES_GROUPED else {}
        output = varlen_attn(*parts, *bounds, scale=scaling, window_size=(-1, 0), **options)  # (-1, 0) is causal
        return output.index_select(0, plan.flat_inverse)
    out = []
    for bucket in plan.buckets:
        parts = [
            states.index_select(0, bucket.index).view(bucket.rows, bucket.length, *states.shape[1:]).transpose(1, 2)
            for states in (query, key, value)
        ]
        attended = torch.nn.functional.scaled_dot_product_attention(
            *parts, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=is_grouped
        )  # (S, A, L, D)
        out.append(attended.transpose(1, 2).reshape(-1, *query.shape[1:]))
    return (out[0] if len(out) == 1 else torch.cat(out)).index_select(0, plan.inverse)


def _takes_one_call(query: torch.Tensor) -> bool:
    """Whether the GPU has the variable-length kernel; buckets do not need it."""
    is_narrow = query.is_cuda and query.dtype.itemsize == 2
    return is_narrow and torch.cuda.get_device_capability(query.device) >= KERNEL_GPU


@contextmanager
def without_cudnn() -> Iterator[None]:
    """A block, or with `@` a function, in which SDPA leaves cuDNN out where torch 2.11 and later try it first (compute
    capability 9.x, 10.x). It builds a plan for each key length, so for each token of a rollout; on a B200 it is wrong
    below 8 key-value heads (pytorch/pytorch#193893). Rows in the variable-length kernel never use it."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and not _prefers_cudnn())
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _prefers_cudnn() -> bool:
    is_open = CUDNN_VARIABLE not in os.environ and torch.cuda.is_available()  # else the user has chosen, or no GPU
    return is_open and torch.cuda.get_device_capability()[0] in (9, 10)
