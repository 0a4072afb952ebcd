"""The weights that correct for another sampler, against plain Python: every form, and what is not a plain number."""

import itertools
import math
import random

import pytest
import torch

from rloo_kit.gradient.objective import correction_weights

NAN, INF = math.nan, math.inf
FORMS = ("sequence", "token", "sequence_mask", "token_mask")


def exp(value: float) -> float:
    return math.exp(value) if value < 700 else INF


def oracle(
    logps: list[float], sampled: list[float], mask: list[int], lengths: list[int], form: str, floor: float, cap: float
) -> list[float]:
    """The definition, a token at a time."""

    def weigh(ratio: float) -> float:
        if form in ("token", "sequence"):
            return min(ratio, cap)
        return ratio if floor <= ratio <= cap else 0.0

    weights: list[float] = []
    for length in lengths:
        start = len(weights)
        logs = [
            logps[i] - sampled[i] if mask[i] and not math.isnan(sampled[i]) else 0.0
            for i in range(start, start + length)
        ]
        weights += [weigh(exp(log)) for log in (logs if "token" in form else [sum(logs)] * length)]
    return weights


@pytest.mark.parametrize(("form", "floor"), list(itertools.product(FORMS, [0.0, 0.5])))
def test_every_form_is_its_formula(form, floor):
    """Rows of any length, an empty one among them, with masked tokens and tokens that were not sampled."""
    draw = random.Random(7)
    for cap in (1.0, 2.0, 5.0):
        lengths = [3, 0, 1, 6, 2]
        total = sum(lengths)
        logps = [draw.uniform(-4, 0) for _ in range(total)]
        sampled = [NAN if draw.random() < 0.2 else logp + draw.gauss(0, 0.7) for logp in logps]
        mask = [int(draw.random() < 0.8) for _ in range(total)]
        wide = [torch.tensor(values, dtype=torch.float64) for values in (logps, sampled, mask)]
        found = correction_weights(*wide, lengths, form, floor, cap)
        assert found.tolist() == pytest.approx(oracle(logps, sampled, mask, lengths, form, floor, cap))
        narrow = correction_weights(*(values.float() for values in wide), lengths, form, floor, cap)
        assert narrow.dtype == torch.float32 and torch.allclose(narrow.double(), found, rtol=1e-5)


def weigh(difference: list[float], lengths: list[int], form: str, floor: float, cap: float) -> list[float]:
    """Weights of tokens whose log-ratio is `difference`."""
    logps = torch.tensor(difference)
    zeros, ones = torch.zeros_like(logps), torch.ones_like(logps)
    return correction_weights(logps, zeros, ones, lengths, form, floor, cap).tolist()


@pytest.mark.parametrize("form", ["token_mask", "sequence_mask"])
def test_the_band_has_its_ends(form):
    """A ratio of exactly 1 on a cap of 1 was dropped by a strict comparison, and with it all that was on-policy."""
    assert weigh([0.0, 0.0], [1, 1], form, 0.0, 1.0) == [1.0, 1.0]
    half, two = math.log(0.5), math.log(2.0)
    inside = weigh([half + 1e-3, two - 1e-3], [1, 1], form, 0.5, 2.0)
    assert inside == pytest.approx([0.5 * math.exp(1e-3), 2.0 * math.exp(-1e-3)], rel=1e-5)
    assert weigh([half - 1e-3, two + 1e-3], [1, 1], form, 0.5, 2.0) == [0.0, 0.0]
    assert weigh([-30.0], [1], form, 0.0, 2.0) == pytest.approx([math.exp(-30)], rel=1e-4), "no floor drops nothing low"


@pytest.mark.parametrize("form", FORMS)
def test_values_that_overflow(form):
    """exp of 1000 nats is infinity, and infinity times a gradient of 0 is NaN: the cap or the mask comes first."""
    masked = form.endswith("_mask")
    assert weigh([1000.0, -1000.0], [1, 1], form, 0.0, 2.0) == [0.0 if masked else 2.0, 0.0]
    never = correction_weights(torch.tensor([-1.0]), torch.tensor([-INF]), torch.ones(1), [1], form, 0.0, 2.0)
    assert never.tolist() == [0.0 if masked else 2.0], "the sampler thought it impossible"
    gone = correction_weights(torch.tensor([-INF]), torch.tensor([-1.0]), torch.ones(1), [1], form, 0.5, 2.0)
    assert gone.tolist() == [0.0], "the trainer thinks it impossible"
    long = weigh([0.01] * 16_000, [16_000], form, 0.0, 2.0)  # 160 nats in all
    expected = math.exp(0.01) if "token" in form else 0.0 if masked else 2.0
    assert long == pytest.approx([expected] * 16_000)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_broken_stays_visible(form):
    """A log-probability that is NaN must reach the check for finite losses, not vanish in a mask; a masked one may."""
    logps, sampled = torch.tensor([NAN, -1.0]), torch.tensor([-1.0, -1.0])
    assert math.isnan(correction_weights(logps, sampled, torch.ones(2), [1, 1], form, 0.5, 2.0)[0])
    assert correction_weights(logps, sampled, torch.tensor([0, 1]), [1, 1], form, 0.5, 2.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("form", FORMS)
def test_no_graph_and_no_tokens(form):
    """The weights are constants; a completion may be empty."""
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert not correction_weights(logps, torch.zeros(2), torch.ones(2), [2], form, 0.0, 2.0).requires_grad
    assert correction_weights(torch.zeros(0), torch.zeros(0), torch.zeros(0), [0], form, 0.0, 2.0).shape == (0,)
