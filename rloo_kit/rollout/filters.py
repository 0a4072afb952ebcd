"""Sampling from a part of the distribution: top-p, top-k, min-p and the repetition penalty, by transformers' code."""

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
    """What takes ids so far (R, L) and logits (R, V), divided by the temperature, to logits that are -inf for what is
    never drawn, in the order of `generate`; None where nothing is filtered. It may change the logits in place."""
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
