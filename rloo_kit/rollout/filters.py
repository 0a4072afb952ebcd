"""Truncated sampling: top-p, top-k, min-p and the repetition penalty, with transformers' code."""

from collections.abc import Callable

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rloo_kit.rollout.types import Filters

Cut = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_cut(filters: Filters) -> Cut | None:
    """A function of the ids so far (R, L) and the logits (R, V) divided by the temperature. It returns logits that are
    -inf for excluded tokens, in the order of `generate`, and may change its input in place. None without filters."""
    if not filters.active:
        return None
    steps = LogitsProcessorList()
    if filters.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(filters.repetition_penalty))
    if filters.top_k > 0:
        steps.append(TopKLogitsWarper(filters.top_k))
    if filters.top_p < 1.0:
        steps.append(TopPLogitsWarper(filters.top_p))
    if filters.min_p > 0.0:
        steps.append(MinPLogitsWarper(filters.min_p))
    return steps
