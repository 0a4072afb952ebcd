"""Sampling filters in the kit's own engines: what is drawn, and with which log-probability."""

import pytest
import torch

from rloo_kit.rollout.native import draw
from rloo_kit.rollout.types import Filters, Limits
from tests.rollout.models import FILTERS, PROMPTS, check_kept, engine_for, kept_logps


def sharp(make_tiny_model):
    """A model whose distributions are far from uniform, so that each filter leaves some tokens and takes others."""
    model = make_tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(30.0)
    return model


@pytest.mark.parametrize("engine", ["native", "generate"])
@pytest.mark.parametrize("case", FILTERS)
def test_what_is_drawn_is_what_the_filters_leave(case, engine, make_tiny_model):
    """A log-probability of the whole distribution under a filtered draw would hide the gap that is to be corrected."""
    model, filters, temperature = sharp(make_tiny_model), FILTERS[case], 0.8
    found = engine_for(model, engine, temperature, filters=filters).sample(PROMPTS * 2, Limits(8))
    check_kept(model, PROMPTS * 2, found, filters, temperature)


def test_frequencies_are_those_of_the_renormalised_rest():
    """Weights that are cut and not divided by their sum would favour whatever comes last."""
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    filters = Filters(top_k=3)
    tokens, logps = draw(logits.expand(40_000, -1), 1.0, filters.make_cut())
    expected = kept_logps(logits, [], filters, 1.0)
    shares = torch.bincount(tokens, minlength=5) / len(tokens)
    assert torch.allclose(shares.double(), expected.exp(), atol=0.01) and shares[3:].sum() == 0
    assert torch.allclose(logps.double(), expected[tokens], atol=1e-6)
