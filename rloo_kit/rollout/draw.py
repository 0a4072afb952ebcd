"""Drawing tokens from logits (R, V), without a read back to the host."""

import torch

from rloo_kit.rollout.types import Cut

BLOCK_ENTRIES = 128  # vocabulary entries per block of the two-level draw


def draw(
    logits: torch.Tensor,
    temperature: float,
    cut: Cut | None = None,
    uniform: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled tokens and their log-probabilities.

    Args:
        logits: (R, V), any floating type.
        temperature: 0 takes the likeliest token; else the logits are divided by it, in float32.
        cut: then filters the logits, see `Filters.make_cut`.
        uniform: (R, 1) float64, one random number for each row; None draws them.

    Returns:
        tokens (R,) and log-probabilities (R,) in float32, in nats; zeros at temperature 0. A row whose logits contain
        NaN or +infinity has a NaN log-probability and an arbitrary token.
    """
    if temperature == 0:
        return logits.argmax(dim=-1), logits.new_zeros(logits.size(0), dtype=torch.float32)
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    if cut is not None:
        scaled = cut(scaled.clone())
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    tokens, total = _invert(scaled.exp(), uniform)
    return tokens.squeeze(1), (scaled.gather(1, tokens).double() - total.log()).float().squeeze(1)


def _invert(weights: torch.Tensor, uniform: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (R, 1) from one uniform number per row, and the sums of the weights (R, 1) in float64."""
    rows, vocabulary = weights.shape
    if uniform is None:
        uniform = torch.rand(rows, 1, dtype=torch.float64, device=weights.device)
    if vocabulary <= 4 * BLOCK_ENTRIES:
        sums = weights.cumsum(1, dtype=torch.float64)
        return _pick(sums, uniform * sums[:, -1:]), sums[:, -1:]
    if missing := -vocabulary % BLOCK_ENTRIES:
        weights = torch.nn.functional.pad(weights, (0, missing))
    blocks = weights.view(rows, -1, BLOCK_ENTRIES)  # (R, N, W)
    sums = blocks.sum(2).cumsum(1, dtype=torch.float64)  # (R, N)
    total = sums[:, -1:]
    target = uniform * total
    block = _pick(sums, target)  # (R, 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK_ENTRIES)).squeeze(1).cumsum(1, dtype=torch.float64)
    share = (target - before) / (sums.gather(1, block) - before)  # of the block; its two sums differ by rounding
    token = block * BLOCK_ENTRIES + _pick(inside, share * inside[:, -1:])
    return token.clamp_(max=vocabulary - 1), total


def _pick(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first entry whose cumulative sum exceeds the target, so an entry of probability 0 is never drawn."""
    return torch.searchsorted(sums, target, right=True).clamp_(max=sums.size(1) - 1)
