"""A stand-in in plain torch for TRL's Triton head, so that stock TRL runs without an accelerator.

It keeps what determines time and memory: the tile sizes of TRL 1.15 (read from TRL, and written with every result), a
projection by tiles with online-logsumexp statistics in the forward pass, and the tile's logits recomputed in the
backward pass. The Triton kernel folds a tile in one sweep, one program a token; this one folds it by blocks of rows
that stay in the cache, because a plain `log_softmax` of the whole tile would make stock slower and larger than it is.
Left out: softcapping, a gradient for the head, and the outputs that the RLOO trainer does not request.

Shapes: N scored tokens, H hidden size, V vocabulary.
"""

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import torch

BLOCK_ELEMENTS = 2**17  # logits folded at once: 512 KiB in float32, one core's L2 cache


def tile_sizes() -> dict[str, int]:
    """TRL's own: tokens and vocabulary columns of one tile, read from its sources, whose import needs Triton."""
    root = Path(importlib.util.find_spec("trl").origin).parent
    constants = {
        "tile_tokens": ("kernels/chunked_logprob.py", "TOKEN_CHUNK_SIZE"),
        "tile_columns": ("trainer/utils.py", "_CHUNKED_LOGPROB_CHUNK_SIZE"),
    }
    return {
        name: int(re.search(rf"^{constant} = (\d+)$", (root / file).read_text(encoding="utf-8"), re.M)[1])
        for name, (file, constant) in constants.items()
    }


class StandIn(torch.autograd.Function):
    """Called by TRL in place of its `ChunkedLogProbFunction`, with the same arguments and the same five outputs."""

    token_chunk = 4096  # set by `installed` to TRL's own

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=()):
        if softcap is not None or weight.requires_grad or (bias is not None and bias.requires_grad):
            raise NotImplementedError("the stand-in scores plain, frozen heads only")
        ctx.set_materialize_grads(False)
        entropy_wanted = "entropy" in outputs
        tokens, factor = hidden.size(0), scale / temperature
        top = hidden.new_full((tokens,), -torch.inf, dtype=torch.float32)
        sums, weighted, target = (torch.zeros_like(top) for _ in range(3))
        for rows, columns, tile in _tiles(hidden, weight, bias, chunk_size):
            for block, logits in _blocks(rows, tile):
                _fold(logits.mul_(factor), top[block], sums[block], weighted[block] if entropy_wanted else None)
                here = (targets[block] >= columns.start) & (targets[block] < columns.stop)
                column = (targets[block] - columns.start).clamp(0, logits.size(1) - 1)
                target[block] = torch.where(here, logits.gather(1, column[:, None]).squeeze(1), target[block])
        log_norm = top + sums.log()
        entropy = log_norm - weighted / sums if entropy_wanted else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_norm)
        ctx.chunk_size, ctx.factor = chunk_size, factor
        return target - log_norm, entropy, None, None, None

    @staticmethod
    def backward(ctx, grad_logps, grad_entropy, *_):
        hidden, weight, bias, targets, log_norm = ctx.saved_tensors
        if grad_entropy is not None:
            raise NotImplementedError("the entropy is for the log only")
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        upstream = grad_logps.float() * ctx.factor
        for rows, columns, tile in _tiles(hidden, weight, bias, ctx.chunk_size):
            for block, logits in _blocks(rows, tile):
                logits.mul_(ctx.factor).sub_(log_norm[block, None]).exp_().mul_(-upstream[block, None])
                here = (targets[block] >= columns.start) & (targets[block] < columns.stop)
                column = (targets[block] - columns.start).clamp(0, logits.size(1) - 1)
                logits.scatter_add_(1, column[:, None], (upstream[block] * here)[:, None])
            grad_hidden[rows].addmm_(tile.float(), weight[columns].float())
        return grad_hidden.to(hidden.dtype), *[None] * 8


def _tiles(hidden, weight, bias, columns_at_once) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows, columns and the projected tile, in one reused buffer, as in TRL."""
    tokens, vocabulary, chunk = hidden.size(0), weight.size(0), StandIn.token_chunk
    buffer = hidden.new_empty((min(tokens, chunk), columns_at_once if vocabulary > columns_at_once else vocabulary))
    for start in range(0, tokens, chunk):
        rows = slice(start, min(start + chunk, tokens))
        for first in range(0, vocabulary, columns_at_once):
            columns = slice(first, min(first + columns_at_once, vocabulary))
            width = columns.stop - columns.start
            flat = buffer.view(-1)[: (rows.stop - rows.start) * width]
            tile = flat.view(rows.stop - rows.start, width)
            torch.mm(hidden[rows], weight[columns].t(), out=tile)
            if bias is not None:
                tile.add_(bias[columns])
            yield rows, columns, tile


def _blocks(rows: slice, tile: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    size = max(1, BLOCK_ELEMENTS // tile.size(1))
    for start in range(0, tile.size(0), size):
        block = tile[start : start + size]
        yield slice(rows.start + start, rows.start + start + block.size(0)), block


def _fold(logits, top, sums, weighted) -> None:
    """Add one block of logits to the running maximum, the sum of exponentials and, if wanted, their weighted sum."""
    new_top = torch.maximum(top, logits.amax(dim=1))
    shrink = (top - new_top).exp_()
    exponentials = (logits - new_top[:, None]).exp_()
    sums.mul_(shrink).add_(exponentials.sum(dim=1))
    if weighted is not None:
        weighted.mul_(shrink).add_(exponentials.mul_(logits).sum(dim=1))
    top.copy_(new_top)


@contextlib.contextmanager
def installed() -> Iterator[dict[str, int]]:
    """Inside the block, TRL scores through the stand-in; yields the tile sizes that it uses."""
    from trl.trainer import utils

    sizes = tile_sizes()
    before, chunk_before = utils._ChunkedLogProbFunction, StandIn.token_chunk
    utils._ChunkedLogProbFunction, StandIn.token_chunk = StandIn, sizes["tile_tokens"]
    try:
        yield sizes
    finally:
        utils._ChunkedLogProbFunction, StandIn.token_chunk = before, chunk_before
